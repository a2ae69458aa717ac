# SPDX-License-Identifier: Apache-2.0
"""The six allocation APIs of a burn, behind one protocol.

`allocate` returns a `Piece` with what `release` needs. A refusal is the driver's `CudaError`, and
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_size_t, c_uint64, c_void_p
from typing import Final, Protocol

import msgspec

from allotment.burn.drivers import ArrayDescription, CudaContext

_ATTACH_GLOBAL: Final = 1
_FORMAT_FLOAT: Final = 0x20
_ROW_TEXELS: Final = 4096
_TEXEL_BYTES: Final = 16
_ROW_BYTES: Final = _ROW_TEXELS * _TEXEL_BYTES


class Piece(msgspec.Struct, frozen=True):
    """One allocation: its size, its address (None if it has none) and the handle of the driver."""

    size_bytes: int
    address: int | None
    handle: int


class Allocator(Protocol):
    """One allocation API."""

    def allocate(self, size_bytes: int) -> Piece:
        """Allocate `size_bytes`; CudaError if the driver refuses."""
        ...

    def release(self, piece: Piece) -> None:
        """Free a piece of `allocate`."""
        ...


class _Linear(msgspec.Struct, frozen=True):
    """`plain` and `managed`: an address that cuMemFree frees."""

    context: CudaContext
    entry: str
    flags: tuple[int, ...] = ()

    def allocate(self, size_bytes: int) -> Piece:
        address = c_void_p()
        self.context.driver.call(self.entry, ctypes.byref(address), size_bytes, *self.flags)
        return Piece(size_bytes=size_bytes, address=address.value or 0, handle=0)

    def release(self, piece: Piece) -> None:
        self.context.driver.call("cuMemFree", piece.address)


class _Ordered(msgspec.Struct, frozen=True):
    """`async` and `pool`: stream-ordered memory of the device's default pool, or of a new one."""

    context: CudaContext
    stream: c_void_p
    pool: c_void_p | None

    def allocate(self, size_bytes: int) -> Piece:
        driver, address = self.context.driver, c_void_p()
        if self.pool is None:
            driver.call("cuMemAllocAsync", ctypes.byref(address), size_bytes, self.stream)
        else:
            driver.call(
                "cuMemAllocFromPoolAsync",
                ctypes.byref(address),
                size_bytes,
                self.pool,
                self.stream,
            )
        driver.call("cuStreamSynchronize", self.stream)
        return Piece(size_bytes=size_bytes, address=address.value or 0, handle=0)

    def release(self, piece: Piece) -> None:
        self.context.driver.call("cuMemFreeAsync", piece.address, self.stream)
        self.context.driver.call("cuStreamSynchronize", self.stream)


class _Virtual(msgspec.Struct, frozen=True):
    """`vmm`: physical memory by cuMemCreate, mapped at an address reserved for it."""

    context: CudaContext
    granularity: int

    def allocate(self, size_bytes: int) -> Piece:
        driver, context = self.context.driver, self.context
        size = -(-size_bytes // self.granularity) * self.granularity
        handle, address = c_uint64(), c_void_p()
        properties, access = context.allocation_properties(), context.access()
        # A refusal at any step undoes the steps before it, the last one first.
        with contextlib.ExitStack() as undo:
            driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
            undo.callback(driver.call, "cuMemRelease", handle)
            driver.call("cuMemAddressReserve", ctypes.byref(address), size, 0, None, 0)
            undo.callback(driver.call, "cuMemAddressFree", address, size)
            driver.call("cuMemMap", address, size, 0, handle, 0)
            undo.callback(driver.call, "cuMemUnmap", address, size)
            driver.call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
            undo.pop_all()
        return Piece(size_bytes=size, address=address.value or 0, handle=handle.value)

    def release(self, piece: Piece) -> None:
        driver = self.context.driver
        driver.call("cuMemUnmap", piece.address, piece.size_bytes)
        driver.call("cuMemAddressFree", piece.address, piece.size_bytes)
        driver.call("cuMemRelease", piece.handle)


class _Array(msgspec.Struct, frozen=True):
    """`array`: two-dimensional arrays of four floats a texel, in rows of 64 KiB."""

    context: CudaContext

    def allocate(self, size_bytes: int) -> Piece:
        rows = max(1, size_bytes // _ROW_BYTES)
        texels = _ROW_TEXELS if size_bytes >= _ROW_BYTES else -(-size_bytes // _TEXEL_BYTES)
        description = ArrayDescription(texels, rows, 0, _FORMAT_FLOAT, 4, 0)
        handle = c_void_p()
        self.context.driver.call("cuArray3DCreate", ctypes.byref(handle), ctypes.byref(description))
        size = rows * texels * _TEXEL_BYTES
        return Piece(size_bytes=size, address=None, handle=handle.value or 0)

    def release(self, piece: Piece) -> None:
        self.context.driver.call("cuArrayDestroy", piece.handle)


def _plain(context: CudaContext) -> contextlib.nullcontext[Allocator]:
    return contextlib.nullcontext(_Linear(context, "cuMemAlloc"))


def _managed(context: CudaContext) -> contextlib.nullcontext[Allocator]:
    return contextlib.nullcontext(_Linear(context, "cuMemAllocManaged", (_ATTACH_GLOBAL,)))


@contextlib.contextmanager
def _ordered(context: CudaContext) -> Iterator[Allocator]:
    with _stream(context) as stream:
        yield _Ordered(context, stream, pool=None)


@contextlib.contextmanager
def _pooled(context: CudaContext) -> Iterator[Allocator]:
    properties, pool = context.pool_properties(), c_void_p()
    with _stream(context) as stream:
        context.driver.call("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(properties))
        try:
            yield _Ordered(context, stream, pool=pool)
        finally:
            context.driver.call("cuMemPoolDestroy", pool)


@contextlib.contextmanager
def _virtual(context: CudaContext) -> Iterator[Allocator]:
    properties, granularity = context.allocation_properties(), c_size_t()
    context.driver.call(
        "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0
    )
    yield _Virtual(context, granularity.value)


def _arrays(context: CudaContext) -> contextlib.nullcontext[Allocator]:
    return contextlib.nullcontext(_Array(context))


@contextlib.contextmanager
def _stream(context: CudaContext) -> Iterator[c_void_p]:
    stream = c_void_p()
    context.driver.call("cuStreamCreate", ctypes.byref(stream), 1)
    try:
        yield stream
    finally:
        context.driver.call("cuStreamDestroy", stream)


APIS: Final[dict[str, Callable[[CudaContext], contextlib.AbstractContextManager[Allocator]]]] = {
    "plain": _plain,
    "async": _ordered,
    "pool": _pooled,
    "vmm": _virtual,
    "managed": _managed,
    "array": _arrays,
}


def write_all(context: CudaContext, address: int, size_bytes: int) -> None:
    """Write every byte, so that managed memory is on the device."""
    context.driver.call("cuMemsetD8Async", address, 0xA5, size_bytes, None)
    context.driver.call("cuCtxSynchronize")
