# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver API by ctypes: only the functions that a burn calls.

Functions are resolved like in CUDA's runtime: by `cuGetProcAddress` with the interface version of
the signatures here (11.8), or by symbol if the driver or the function is older. A failed call
raises `CudaError`.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, ClassVar, Final

import msgspec

from allotment.model.errors import AllotError, PrerequisiteError
from allotment.model.formats import format_uuid

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
    """CUmemAllocationProp; flags that a burn leaves at zero are one array."""

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


_P = c_void_p
_Uuid = ctypes.c_ubyte * 16
_OUT = POINTER(c_void_p)
_SIZE_OUT = POINTER(c_size_t)

# Types of the arguments, by the name for cuGetProcAddress.
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (POINTER(_Uuid), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem": (_SIZE_OUT, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuDevicePrimaryCtxRelease": (c_int,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo": (_SIZE_OUT, _SIZE_OUT),
    "cuMemAlloc": (_OUT, c_size_t),
    "cuMemAllocManaged": (_OUT, c_size_t, c_uint),
    "cuMemFree": (_P,),
    "cuMemAllocAsync": (_OUT, c_size_t, _P),
    "cuMemAllocFromPoolAsync": (_OUT, c_size_t, _P, _P),
    "cuMemFreeAsync": (_P, _P),
    "cuMemPoolCreate": (_OUT, POINTER(PoolProperties)),
    "cuMemPoolDestroy": (_P,),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProperties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemGetAllocationGranularity": (_SIZE_OUT, POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (_OUT, c_size_t, c_size_t, _P, c_uint64),
    "cuMemAddressFree": (_P, c_size_t),
    "cuMemMap": (_P, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (_P, c_size_t),
    "cuMemSetAccess": (_P, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuArray3DCreate": (_OUT, POINTER(ArrayDescription)),
    "cuArrayDestroy": (_P,),
    "cuMemsetD8Async": (_P, ctypes.c_ubyte, c_size_t, _P),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamSynchronize": (_P,),
    "cuStreamDestroy": (_P,),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventRecord": (_P, _P),
    "cuEventSynchronize": (_P,),
    "cuEventElapsedTime": (POINTER(ctypes.c_float), _P, _P),
    "cuEventDestroy": (_P,),
    "cuModuleLoadData": (_OUT, c_char_p),
    "cuModuleGetFunction": (_OUT, _P, c_char_p),
    "cuModuleUnload": (_P,),
    "cuLaunchKernel": (_P, *([c_uint] * 7), _P, POINTER(c_void_p), POINTER(c_void_p)),
    "cuGraphCreate": (_OUT, c_uint),
    "cuGraphAddKernelNode": (_OUT, _P, _OUT, c_size_t, POINTER(KernelNode)),
    "cuGraphInstantiateWithFlags": (_OUT, _P, c_uint64),
    "cuGraphLaunch": (_P, _P),
    "cuGraphExecDestroy": (_P,),
    "cuGraphDestroy": (_P,),
}
# Functions whose interface has changed: their symbol ends in _v2.
_SECOND_VERSION: Final = frozenset(
    {
        "cuDeviceTotalMem",
        "cuDevicePrimaryCtxRelease",
        "cuMemGetInfo",
        "cuMemAlloc",
        "cuMemFree",
        "cuArray3DCreate",
        "cuStreamDestroy",
        "cuEventDestroy",
    }
)
# cuGetProcAddress returns the second of these for the name of the first.
_BY_SYMBOL: Final = frozenset({"cuDeviceGetUuid", "cuDeviceGetUuid_v2"})


class CudaError(AllotError):
    """A failed driver call: `code` and `name` are its CUresult, `call` is the function."""

    def __init__(self, *, code: int, name: str, call: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.code = code
        self.name = name
        self.call = call

    @property
    def is_missing_device(self) -> bool:
        """Whether the error means that the device does not exist."""
        return self.code == NO_DEVICE or (self.call, self.code) == ("cuDeviceGet", INVALID_DEVICE)


class Driver:
    """A loaded `libcuda.so.1`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._functions: dict[str, Any] = {}
        self._get_proc_address = self._lookup()

    @classmethod
    def load(cls, library: str = LIBRARY) -> Driver:
        """Load the library; OSError with the loader's reason on failure."""
        return cls(ctypes.CDLL(library))

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - ctypes converts by signature
        function = self._functions.get(name) or self._find(name)
        code: int = function(*arguments)
        if code:
            raise CudaError(code=code, name=self.error_name(code), call=name)

    def offers(self, name: str) -> bool:
        try:
            self._find(name)
        except PrerequisiteError:
            return False
        return True

    def device_count(self) -> int:
        """Return the number of devices; 0 if the driver cannot report it."""
        count = c_int()
        try:
            self.call("cuDeviceGetCount", ctypes.byref(count))
        except CudaError:
            return 0
        return count.value

    def error_name(self, code: int) -> str:
        """Return the driver's name of a CUresult, or `CUDA_ERROR_<code>`."""
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
        arguments = _ARGUMENTS[name]
        symbol = f"{name}_v2" if name in _SECOND_VERSION else name
        address = c_void_p()
        function: Any
        # A driver older than 11.3 has no cuGetProcAddress. A name unknown to it is resolved by
        # symbol, so that the error is the loader's.
        if (
            name not in _BY_SYMBOL
            and self._get_proc_address is not None
            and not self._get_proc_address(
                name.encode(), ctypes.byref(address), _INTERFACE_VERSION, 0
            )
            and address.value
        ):
            function = ctypes.CFUNCTYPE(c_int, *arguments)(address.value)
        else:
            try:
                function = getattr(self._library, symbol)
            except AttributeError:
                message = f"this driver lacks {symbol}"
                raise PrerequisiteError(
                    message, hint="choose another --api, or install a newer driver"
                ) from None
            function.argtypes = list(arguments)
            function.restype = c_int
        self._functions[name] = function
        return function


class MemoryInfo(msgspec.Struct, frozen=True):
    """The result of cuMemGetInfo, in bytes."""

    free_bytes: int
    total_bytes: int


class CudaContext(msgspec.Struct, frozen=True):
    """A device with its primary context, current on the calling thread."""

    driver: Driver
    ordinal: int
    device: int
    uuid: str
    name: str
    total_bytes: int

    @classmethod
    def open(cls, driver: Driver, ordinal: int) -> CudaContext:
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
        self.driver.call("cuDevicePrimaryCtxRelease", self.device)

    def multiprocessors(self) -> int:
        """Return the multiprocessors of this process; an MPS client may have only a part."""
        return self._attribute(_MULTIPROCESSOR_COUNT)

    def blocks_that_fill_it(self, threads: int) -> int:
        """Return how many blocks of `threads` threads run at once on all multiprocessors."""
        most_threads = self._attribute(_MAX_THREADS_PER_MULTIPROCESSOR)
        return self.multiprocessors() * max(1, most_threads // threads)

    def _attribute(self, number: int) -> int:
        value = c_int()
        self.driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    def memory(self) -> MemoryInfo:
        free, total = c_size_t(), c_size_t()
        self.driver.call("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free_bytes=free.value, total_bytes=total.value)

    def allocation_properties(self) -> AllocationProperties:
        """Describe memory on this device, for cuMemCreate."""
        properties = AllocationProperties()
        properties.type = _ALLOCATION_PINNED
        properties.location = MemoryLocation(_LOCATION_DEVICE, self.device)
        return properties

    def pool_properties(self) -> PoolProperties:
        properties = PoolProperties()
        properties.allocation_type = _ALLOCATION_PINNED
        properties.location = MemoryLocation(_LOCATION_DEVICE, self.device)
        return properties

    def access(self) -> AccessDescription:
        return AccessDescription(MemoryLocation(_LOCATION_DEVICE, self.device), _ACCESS_READ_WRITE)


def _uuid_of(driver: Driver, device: c_int) -> str:
    """Return the UUID as NVML shows it: `GPU-...`, or `MIG-...` for a slice.

    For a slice the first form of the call returns the UUID of the GPU, and the second, from driver
    470 on, that of the slice (cuda.h 11.4).
    """
    own, of_gpu = _Uuid(), _Uuid()
    driver.call("cuDeviceGetUuid", ctypes.byref(of_gpu), device)
    if not driver.offers("cuDeviceGetUuid_v2"):
        return format_uuid("GPU", bytes(of_gpu).hex())
    driver.call("cuDeviceGetUuid_v2", ctypes.byref(own), device)
    is_slice = bytes(own) != bytes(of_gpu)
    return format_uuid("MIG" if is_slice else "GPU", bytes(own).hex())


SPIN_ENTRY: Final = b"allot_spin"

SPIN_PTX: Final = b"""\
.version 6.0
.target sm_50
.address_size 64

.visible .entry allot_spin(
    .param .u64 allot_spin_nanoseconds
)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;

    ld.param.u64 %rd1, [allot_spin_nanoseconds];
    mov.u64 %rd2, %globaltimer;
spin:
    mov.u64 %rd3, %globaltimer;
    sub.s64 %rd4, %rd3, %rd2;
    setp.lt.u64 %p1, %rd4, %rd1;
    @%p1 bra spin;
    ret;
}
"""
