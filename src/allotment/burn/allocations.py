# SPDX-License-Identifier: Apache-2.0
"""The six ways to get device memory that a burn can take, behind one protocol.

Each way answers `allocate` with a `Piece`, which remembers what is needed to give it back. A
refusal is the driver's own `CudaError`, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Final, Protocol

from allotment.burn.drivers import ArrayDescription, Context

_ATTACH_GLOBAL: Final = 1
_FORMAT_FLOAT: Final = 0x20
_ROW_TEXELS: Final = 4096
_TEXEL_BYTES: Final = 16
_ROW_BYTES: Final = _ROW_TEXELS * _TEXEL_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """One allocation: its size, its address (None when it has none) and the driver's handle."""

    size_bytes: int
    address: int | None
    handle: int


class Allocator(Protocol):
    """One way to get device memory."""

    def allocate(self, size_bytes: int) -> Piece:
        """Get `size_bytes`; CudaError when the driver refuses."""
        ...

    def release(self, piece: Piece) -> None:
        """Give back what `allocate` gave."""
        ...


@dataclass(frozen=True, slots=True)
class _Linear:
    """`plain` and `managed`: an address that cuMemFree takes back."""

    context: Context
    entry: str
    flags: tuple[int, ...] = ()

    def allocate(self, size_bytes: int) -> Piece:
        address = c_void_p()
        self.context.driver.call(self.entry, ctypes.byref(address), size_bytes, *self.flags)
        return Piece(size_bytes=size_bytes, address=address.value or 0, handle=0)

    def release(self, piece: Piece) -> None:
        self.context.driver.call("cuMemFree", piece.address)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """`async` and `pool`: stream-ordered memory of the device's own pool, or of one made here."""

    context: Context
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


@dataclass(frozen=True, slots=True)
class _Virtual:
    """`vmm`: physical memory by cuMemCreate, mapped at an address reserved for it."""

    context: Context
    granularity: int

    def allocate(self, size_bytes: int) -> Piece:
        driver, context = self.context.driver, self.context
        size = -(-size_bytes // self.granularity) * self.granularity
        handle, address = c_uint64(), c_void_p()
        properties, access = context.allocation_properties(), context.access()
        # On a refusal at any step the steps before it are undone, the last one first.
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


@dataclass(frozen=True, slots=True)
class _Array:
    """`array`: two-dimensional arrays of four floats a texel, in rows of 64 KiB."""

    context: Context

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


@contextlib.contextmanager
def _plain(context: Context) -> Iterator[Allocator]:
    yield _Linear(context, "cuMemAlloc")


@contextlib.contextmanager
def _managed(context: Context) -> Iterator[Allocator]:
    yield _Linear(context, "cuMemAllocManaged", (_ATTACH_GLOBAL,))


@contextlib.contextmanager
def _ordered(context: Context) -> Iterator[Allocator]:
    with _stream(context) as stream:
        yield _Ordered(context, stream, pool=None)


@contextlib.contextmanager
def _pooled(context: Context) -> Iterator[Allocator]:
    properties, pool = context.pool_properties(), c_void_p()
    with _stream(context) as stream:
        context.driver.call("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(properties))
        try:
            yield _Ordered(context, stream, pool=pool)
        finally:
            context.driver.call("cuMemPoolDestroy", pool)


@contextlib.contextmanager
def _virtual(context: Context) -> Iterator[Allocator]:
    properties, granularity = context.allocation_properties(), c_size_t()
    context.driver.call(
        "cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0
    )
    yield _Virtual(context, granularity.value)


@contextlib.contextmanager
def _arrays(context: Context) -> Iterator[Allocator]:
    yield _Array(context)


@contextlib.contextmanager
def _stream(context: Context) -> Iterator[c_void_p]:
    stream = c_void_p()
    context.driver.call("cuStreamCreate", ctypes.byref(stream), 1)
    try:
        yield stream
    finally:
        context.driver.call("cuStreamDestroy", stream)


APIS: Final[dict[str, Callable[[Context], contextlib.AbstractContextManager[Allocator]]]] = {
    "plain": _plain,
    "async": _ordered,
    "pool": _pooled,
    "vmm": _virtual,
    "managed": _managed,
    "array": _arrays,
}


def write_all(context: Context, address: int, size_bytes: int) -> None:
    """Write every byte, so that managed memory really lies on the device."""
    context.driver.call("cuMemsetD8Async", address, 0xA5, size_bytes, None)
    context.driver.call("cuCtxSynchronize")
