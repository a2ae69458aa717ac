# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver API by ctypes: only the entry points that a burn calls.

Entry points are found as CUDA's own runtime finds them, by `cuGetProcAddress` with the version of
the interface that the signatures here belong to (11.8), and by symbol where the driver or the
function is older than that. Every call raises `CudaError` unless the driver said success.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, Union, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from allotment.model.errors import AllotError, PrerequisiteError

LIBRARY: Final = "libcuda.so.1"
OUT_OF_MEMORY: Final = 2
NO_DEVICE: Final = 100
INVALID_DEVICE: Final = 101

_INTERFACE_VERSION: Final = 11080
_LOCATION_DEVICE: Final = 1
_ALLOCATION_PINNED: Final = 1
_ACCESS_READ_WRITE: Final = 3
_MULTIPROCESSOR_COUNT: Final = 16
_MAX_THREADS_PER_MULTIPROCESSOR: Final = 39


class MemoryLocation(Structure):
    """CUmemLocation."""

    _fields_: ClassVar = [("type", c_int), ("id", c_int)]


class AllocationProperties(Structure):
    """CUmemAllocationProp; the flags that a burn leaves at zero are one array."""

    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("metadata", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class AccessDescription(Structure):
    """CUmemAccessDesc."""

    _fields_: ClassVar = [("location", MemoryLocation), ("flags", c_int)]


class PoolProperties(Structure):
    """CUmemPoolProps."""

    _fields_: ClassVar = [
        ("allocation_type", c_int),
        ("handle_types", c_int),
        ("location", MemoryLocation),
        ("security", c_void_p),
        ("max_bytes", c_size_t),
        ("reserved", ctypes.c_ubyte * 56),
    ]


class ArrayDescription(Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_: ClassVar = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class KernelNode(Structure):
    """CUDA_KERNEL_NODE_PARAMS of interface versions before 12.0."""

    _fields_: ClassVar = [
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", POINTER(c_void_p)),
        ("extra", POINTER(c_void_p)),
    ]


class _Uuid(Union):
    _fields_: ClassVar = [("bytes", ctypes.c_ubyte * 16), ("words", c_uint64 * 2)]


@dataclass(frozen=True, slots=True)
class _Function:
    """One entry point: its symbol in the library, and the types of its arguments."""

    symbol: str
    arguments: tuple[Any, ...]
    by_symbol: bool = False
    """Not to be asked of cuGetProcAddress."""


_P = c_void_p
_OUT = POINTER(c_void_p)
_SIZE_OUT = POINTER(c_size_t)

# By the name that cuGetProcAddress knows. The symbol differs where the interface has changed.
_FUNCTIONS: Final[dict[str, _Function]] = {
    "cuInit": _Function("cuInit", (c_uint,)),
    "cuDriverGetVersion": _Function("cuDriverGetVersion", (POINTER(c_int),)),
    "cuDeviceGet": _Function("cuDeviceGet", (POINTER(c_int), c_int)),
    "cuDeviceGetCount": _Function("cuDeviceGetCount", (POINTER(c_int),)),
    "cuDeviceGetName": _Function("cuDeviceGetName", (c_char_p, c_int, c_int)),
    # cuGetProcAddress gives the second of these for the first one's name.
    "cuDeviceGetUuid": _Function("cuDeviceGetUuid", (POINTER(_Uuid), c_int), by_symbol=True),
    "cuDeviceGetUuid_v2": _Function("cuDeviceGetUuid_v2", (POINTER(_Uuid), c_int), by_symbol=True),
    "cuDeviceGetAttribute": _Function("cuDeviceGetAttribute", (POINTER(c_int), c_int, c_int)),
    "cuDeviceTotalMem": _Function("cuDeviceTotalMem_v2", (_SIZE_OUT, c_int)),
    "cuDevicePrimaryCtxRetain": _Function("cuDevicePrimaryCtxRetain", (_OUT, c_int)),
    "cuDevicePrimaryCtxRelease": _Function("cuDevicePrimaryCtxRelease_v2", (c_int,)),
    "cuCtxSetCurrent": _Function("cuCtxSetCurrent", (_P,)),
    "cuCtxSynchronize": _Function("cuCtxSynchronize", ()),
    "cuMemGetInfo": _Function("cuMemGetInfo_v2", (_SIZE_OUT, _SIZE_OUT)),
    "cuMemAlloc": _Function("cuMemAlloc_v2", (_OUT, c_size_t)),
    "cuMemAllocManaged": _Function("cuMemAllocManaged", (_OUT, c_size_t, c_uint)),
    "cuMemFree": _Function("cuMemFree_v2", (_P,)),
    "cuMemAllocAsync": _Function("cuMemAllocAsync", (_OUT, c_size_t, _P)),
    "cuMemAllocFromPoolAsync": _Function("cuMemAllocFromPoolAsync", (_OUT, c_size_t, _P, _P)),
    "cuMemFreeAsync": _Function("cuMemFreeAsync", (_P, _P)),
    "cuMemPoolCreate": _Function("cuMemPoolCreate", (_OUT, POINTER(PoolProperties))),
    "cuMemPoolDestroy": _Function("cuMemPoolDestroy", (_P,)),
    "cuMemCreate": _Function(
        "cuMemCreate", (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64)
    ),
    "cuMemRelease": _Function("cuMemRelease", (c_uint64,)),
    "cuMemGetAllocationGranularity": _Function(
        "cuMemGetAllocationGranularity", (_SIZE_OUT, POINTER(AllocationProperties), c_int)
    ),
    "cuMemAddressReserve": _Function(
        "cuMemAddressReserve", (_OUT, c_size_t, c_size_t, _P, c_uint64)
    ),
    "cuMemAddressFree": _Function("cuMemAddressFree", (_P, c_size_t)),
    "cuMemMap": _Function("cuMemMap", (_P, c_size_t, c_size_t, c_uint64, c_uint64)),
    "cuMemUnmap": _Function("cuMemUnmap", (_P, c_size_t)),
    "cuMemSetAccess": _Function(
        "cuMemSetAccess", (_P, c_size_t, POINTER(AccessDescription), c_size_t)
    ),
    "cuArray3DCreate": _Function("cuArray3DCreate_v2", (_OUT, POINTER(ArrayDescription))),
    "cuArrayDestroy": _Function("cuArrayDestroy", (_P,)),
    "cuMemsetD8Async": _Function("cuMemsetD8Async", (_P, ctypes.c_ubyte, c_size_t, _P)),
    "cuStreamCreate": _Function("cuStreamCreate", (_OUT, c_uint)),
    "cuStreamSynchronize": _Function("cuStreamSynchronize", (_P,)),
    "cuStreamDestroy": _Function("cuStreamDestroy_v2", (_P,)),
    "cuEventCreate": _Function("cuEventCreate", (_OUT, c_uint)),
    "cuEventRecord": _Function("cuEventRecord", (_P, _P)),
    "cuEventSynchronize": _Function("cuEventSynchronize", (_P,)),
    "cuEventElapsedTime": _Function("cuEventElapsedTime", (POINTER(ctypes.c_float), _P, _P)),
    "cuEventDestroy": _Function("cuEventDestroy_v2", (_P,)),
    "cuModuleLoadData": _Function("cuModuleLoadData", (_OUT, c_char_p)),
    "cuModuleGetFunction": _Function("cuModuleGetFunction", (_OUT, _P, c_char_p)),
    "cuModuleUnload": _Function("cuModuleUnload", (_P,)),
    "cuLaunchKernel": _Function(
        "cuLaunchKernel",
        (_P, *([c_uint] * 7), _P, POINTER(c_void_p), POINTER(c_void_p)),
    ),
    "cuGraphCreate": _Function("cuGraphCreate", (_OUT, c_uint)),
    "cuGraphAddKernelNode": _Function(
        "cuGraphAddKernelNode", (_OUT, _P, _OUT, c_size_t, POINTER(KernelNode))
    ),
    "cuGraphInstantiateWithFlags": _Function("cuGraphInstantiateWithFlags", (_OUT, _P, c_uint64)),
    "cuGraphLaunch": _Function("cuGraphLaunch", (_P, _P)),
    "cuGraphExecDestroy": _Function("cuGraphExecDestroy", (_P,)),
    "cuGraphDestroy": _Function("cuGraphDestroy", (_P,)),
}


class CudaError(AllotError):
    """The driver refused a call: `code` and `name` are its CUresult, `call` the entry point."""

    def __init__(self, *, code: int, name: str, call: str) -> None:
        """Keep the driver's answer."""
        super().__init__(f"{call}: {name} ({code})")
        self.code = code
        self.name = name
        self.call = call

    @property
    def is_missing_device(self) -> bool:
        """Tell whether this means that there is no such device here."""
        return self.code == NO_DEVICE or (self.call, self.code) == ("cuDeviceGet", INVALID_DEVICE)


class Driver:
    """A loaded `libcuda.so.1`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Use a library that is loaded already."""
        self._library = library
        self._found: dict[str, Any] = {}
        self._get_proc_address = self._lookup()

    @classmethod
    def load(cls, library: str = LIBRARY) -> Driver:
        """Load the driver's library; OSError with the loader's reason when that fails."""
        return cls(ctypes.CDLL(library))

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes converts by signature
        """Call an entry point; CudaError unless it succeeded."""
        function = self._found.get(name) or self._find(name)
        code: int = function(*arguments)
        if code:
            raise CudaError(code=code, name=self.error_name(code), call=name)

    def offers(self, name: str) -> bool:
        """Tell whether this driver has an entry point."""
        try:
            self._find(name)
        except PrerequisiteError:
            return False
        return True

    def device_count(self) -> int:
        """Tell how many devices there are; 0 where the driver cannot say."""
        count = c_int()
        try:
            self.call("cuDeviceGetCount", ctypes.byref(count))
        except CudaError:
            return 0
        return count.value

    def error_name(self, code: int) -> str:
        """Give the driver's name of a CUresult, or one with the number in it."""
        text = c_char_p()
        get_name = self._library.cuGetErrorName
        get_name.argtypes = [c_int, POINTER(c_char_p)]
        if get_name(code, ctypes.byref(text)) or text.value is None:
            return f"CUDA_ERROR_{code}"
        return text.value.decode("ascii", "replace")

    def _lookup(self) -> Any:  # noqa: ANN401 - a ctypes function
        lookup = getattr(self._library, "cuGetProcAddress", None)
        if lookup is not None:
            lookup.argtypes = [c_char_p, _OUT, c_int, c_uint64]
        return lookup

    def _find(self, name: str) -> Any:  # noqa: ANN401 - a ctypes function
        described = _FUNCTIONS[name]
        address = c_void_p()
        function: Any
        # A driver older than 11.3 has no cuGetProcAddress; a name that it does not know is looked
        # for by symbol, so that the error is the loader's.
        if (
            not described.by_symbol
            and self._get_proc_address is not None
            and not self._get_proc_address(
                name.encode(), ctypes.byref(address), _INTERFACE_VERSION, 0
            )
            and address.value
        ):
            function = ctypes.CFUNCTYPE(c_int, *described.arguments)(address.value)
        else:
            try:
                function = getattr(self._library, described.symbol)
            except AttributeError:
                message = f"this driver has no {described.symbol}"
                raise PrerequisiteError(
                    message, hint="choose another --api, or a newer driver"
                ) from None
            function.argtypes = list(described.arguments)
            function.restype = c_int
        self._found[name] = function
        return function


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What cuMemGetInfo said, in bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Context:
    """A device with its primary context, current on the calling thread."""

    driver: Driver
    ordinal: int
    device: int
    uuid: str
    name: str
    total_bytes: int

    @classmethod
    def open(cls, driver: Driver, ordinal: int) -> Context:
        """Initialise the driver and retain the primary context of device `ordinal`."""
        driver.call("cuInit", 0)
        device = c_int()
        driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        text = ctypes.create_string_buffer(128)
        driver.call("cuDeviceGetName", text, len(text), device)
        total = c_size_t()
        driver.call("cuDeviceTotalMem", ctypes.byref(total), device)
        context = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        driver.call("cuCtxSetCurrent", context)
        return cls(
            driver=driver,
            ordinal=ordinal,
            device=device.value,
            uuid=_uuid_of(driver, device),
            name=text.value.decode("utf-8", "replace"),
            total_bytes=total.value,
        )

    def close(self) -> None:
        """Give the primary context back."""
        self.driver.call("cuDevicePrimaryCtxRelease", self.device)

    def multiprocessors(self) -> int:
        """Tell how many multiprocessors this process has; a client of MPS may have a part."""
        return self._attribute(_MULTIPROCESSOR_COUNT)

    def blocks_that_fill_it(self, threads: int) -> int:
        """Tell how many blocks of `threads` threads run at once when all multiprocessors do."""
        most_threads = self._attribute(_MAX_THREADS_PER_MULTIPROCESSOR)
        return self.multiprocessors() * max(1, most_threads // threads)

    def _attribute(self, number: int) -> int:
        value = c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    def memory(self) -> MemoryInfo:
        """Ask cuMemGetInfo."""
        free, total = c_size_t(), c_size_t()
        self.driver.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free_bytes=free.value, total_bytes=total.value)

    def allocation_properties(self) -> AllocationProperties:
        """Describe memory that lies on this device, for cuMemCreate."""
        properties = AllocationProperties()
        properties.type = _ALLOCATION_PINNED
        properties.location = MemoryLocation(_LOCATION_DEVICE, self.device)
        return properties

    def pool_properties(self) -> PoolProperties:
        """Describe a pool whose memory lies on this device."""
        properties = PoolProperties()
        properties.allocation_type = _ALLOCATION_PINNED
        properties.location = MemoryLocation(_LOCATION_DEVICE, self.device)
        return properties

    def access(self) -> AccessDescription:
        """Describe reading and writing by this device."""
        return AccessDescription(MemoryLocation(_LOCATION_DEVICE, self.device), _ACCESS_READ_WRITE)


def _uuid_of(driver: Driver, device: c_int) -> str:
    """Name a device as NVML and `allot ps` do: `GPU-...`, or `MIG-...` for a slice.

    Of a slice the first form of the call tells its GPU's name, and the second, from driver 470 on,
    its own (cuda.h 11.4).
    """
    own, of_gpu = _Uuid(), _Uuid()
    driver.call("cuDeviceGetUuid", ctypes.byref(of_gpu), device)
    if not driver.offers("cuDeviceGetUuid_v2"):
        return _uuid_text("GPU", bytes(of_gpu.bytes))
    driver.call("cuDeviceGetUuid_v2", ctypes.byref(own), device)
    is_slice = bytes(own.bytes) != bytes(of_gpu.bytes)
    return _uuid_text("MIG" if is_slice else "GPU", bytes(own.bytes))


def _uuid_text(kind: str, raw: bytes) -> str:
    digits = raw.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"{kind}-" + "-".join(parts)
