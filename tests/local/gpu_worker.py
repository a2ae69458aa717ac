# SPDX-License-Identifier: Apache-2.0
"""A program on libcuda and NVML that does what it is told: the tenant of test_properties.py.

Commands and answers are JSON lines on a Unix socket whose path is the first argument; the first
line is the worker's own: its pid. A second argument `procaddress` finds the driver's functions by
cuGetProcAddress, as CUDA's runtime does, instead of dlsym. An answer is `{"result": CUresult}` with
more keys where there is more to say. It imports nothing of allotment: a tenant has none of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_void_p,
)
from typing import Any, ClassVar

INTERFACE_VERSION = 12000
OUT_OF_MEMORY = 2
DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MAX_PROCESSES = 64


class CudaFailureError(Exception):
    """A CUresult that is not success."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Location(Structure):
    _fields_: ClassVar = [("type", c_int), ("id", c_int)]


class AllocationProperties(Structure):
    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("metadata", c_void_p),
        ("flags", c_ubyte * 8),
    ]


class Access(Structure):
    _fields_: ClassVar = [("location", Location), ("flags", c_int)]


class PoolProperties(Structure):
    _fields_: ClassVar = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("security", c_void_p),
        ("max_bytes", c_size_t),
        ("reserved", c_ubyte * 56),
    ]


class MemoryNode(Structure):
    _fields_: ClassVar = [
        ("pool", PoolProperties),
        ("accesses", POINTER(Access)),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("address", c_uint64),
    ]


class ArrayDescription(Structure):
    _fields_: ClassVar = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
    ]


class Array3dDescription(Structure):
    _fields_: ClassVar = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class Memory(Structure):
    _fields_: ClassVar = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


class Memory2(Structure):
    _fields_: ClassVar = [
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    ]


class Process1(Structure):
    _fields_: ClassVar = [("pid", c_uint), ("used", c_ulonglong)]


class Process2(Structure):
    _fields_: ClassVar = [
        ("pid", c_uint),
        ("used", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    ]


class ProcessDetail(Structure):
    _fields_: ClassVar = [*Process2._fields_, ("protected", c_ulonglong)]


class ProcessDetails(Structure):
    _fields_: ClassVar = [
        ("version", c_uint),
        ("mode", c_uint),
        ("count", c_uint),
        ("array", POINTER(ProcessDetail)),
    ]


FLOAT = 0x20
ROW_TEXELS = 4096  # of four floats: rows of 64 KiB
TEXEL_BYTES = 16


class Cuda:
    """The driver, and everything that this process has from it, by number."""

    def __init__(self, resolving: str) -> None:
        self.resolving = resolving
        self.library = ctypes.CDLL("libcuda.so.1")
        self.found: dict[str, Any] = {}
        self.releases: dict[int, Callable[[], None]] = {}
        self.stream = c_void_p()
        self.pool = c_void_p()
        self.number = 0

    def call(self, symbol: str, *arguments: object) -> None:
        function = self.found.get(symbol) or self.find(symbol)
        code = int(function(*arguments))
        if code:
            raise CudaFailureError(code)

    def find(self, symbol: str) -> Callable[..., int]:
        function: Any = getattr(self.library, symbol)
        if self.resolving == "procaddress" and symbol != "cuInit":
            name = re.sub(r"_v\d$", "", symbol)
            address = c_void_p()
            if self.library.cuGetProcAddress(
                name.encode(), byref(address), INTERFACE_VERSION, c_uint64(0)
            ):
                raise LookupError(name)
            # The types come with the arguments, as they do for a function found by symbol.
            function = ctypes.CFUNCTYPE(c_int)(address.value or 0)
        self.found[symbol] = function
        return function  # type: ignore[no-any-return]

    def open(self) -> None:
        device, context = c_int(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", byref(self.stream), 1)

    def keep(self, release: Callable[[], None]) -> int:
        self.number += 1
        self.releases[self.number] = release
        return self.number

    def allocate(self, api: str, size: int) -> int:
        return self.keep(getattr(self, f"allocate_{api}")(size))

    def release(self, number: int) -> None:
        self.releases.pop(number)()

    def sync(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    # ---- one method for each way to get device memory; each gives back how to release it --------

    def allocate_plain(self, size: int) -> Callable[[], None]:
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return lambda: self.call("cuMemFree_v2", address)

    def allocate_pitched(self, size: int) -> Callable[[], None]:
        address, pitch = c_uint64(), c_size_t()
        width = 1000
        self.call(
            "cuMemAllocPitch_v2",
            byref(address),
            byref(pitch),
            c_size_t(width),
            c_size_t(-(-size // width)),
            c_uint(4),
        )
        return lambda: self.call("cuMemFree_v2", address)

    def allocate_managed(self, size: int) -> Callable[[], None]:
        address = c_uint64()
        self.call("cuMemAllocManaged", byref(address), c_size_t(size), c_uint(1))
        return lambda: self.call("cuMemFree_v2", address)

    def allocate_array(self, size: int) -> Callable[[], None]:
        array = c_void_p()
        height = -(-size // (ROW_TEXELS * TEXEL_BYTES))
        described = ArrayDescription(ROW_TEXELS, height, FLOAT, 4)
        self.call("cuArrayCreate_v2", byref(array), byref(described))
        return lambda: self.call("cuArrayDestroy", array)

    def allocate_array3d(self, size: int) -> Callable[[], None]:
        array = c_void_p()
        side = 64
        depth = -(-size // (side * side * TEXEL_BYTES))
        described = Array3dDescription(side, side, depth, FLOAT, 4, 0)
        self.call("cuArray3DCreate_v2", byref(array), byref(described))
        return lambda: self.call("cuArrayDestroy", array)

    def allocate_mipmap(self, size: int) -> Callable[[], None]:
        mipmap = c_void_p()
        height = -(-size // (ROW_TEXELS * TEXEL_BYTES))
        described = Array3dDescription(ROW_TEXELS, height, 0, FLOAT, 4, 0)
        self.call("cuMipmappedArrayCreate", byref(mipmap), byref(described), c_uint(1))
        return lambda: self.call("cuMipmappedArrayDestroy", mipmap)

    def allocate_vmm(self, size: int) -> Callable[[], None]:
        handle, address = c_uint64(), c_uint64()
        properties = AllocationProperties(type=PINNED, location=Location(DEVICE, 0))
        granularity = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(granularity), byref(properties), c_int(0))
        rounded = c_size_t(-(-size // granularity.value) * granularity.value)
        self.call("cuMemCreate", byref(handle), rounded, byref(properties), c_ulonglong(0))
        self.call(
            "cuMemAddressReserve", byref(address), rounded, c_size_t(0), c_uint64(0), c_uint64(0)
        )
        self.call("cuMemMap", address, rounded, c_size_t(0), handle, c_uint64(0))
        access = Access(Location(DEVICE, 0), READ_WRITE)
        self.call("cuMemSetAccess", address, rounded, byref(access), c_size_t(1))

        def release() -> None:
            # The handle first: the memory lives on in its mapping.
            self.call("cuMemRelease", handle)
            self.call("cuMemUnmap", address, rounded)
            self.call("cuMemAddressFree", address, rounded)

        return release

    def allocate_async(self, size: int) -> Callable[[], None]:
        address = c_uint64()
        self.call("cuMemAllocAsync", byref(address), c_size_t(size), self.stream)
        self.sync()
        return lambda: self.free_async(address)

    def allocate_pool(self, size: int) -> Callable[[], None]:
        if not self.pool.value:
            properties = PoolProperties(type=PINNED, location=Location(DEVICE, 0))
            self.call("cuMemPoolCreate", byref(self.pool), byref(properties))
        address = c_uint64()
        self.call("cuMemAllocFromPoolAsync", byref(address), c_size_t(size), self.pool, self.stream)
        self.sync()
        return lambda: self.free_async(address)

    def free_async(self, address: c_uint64) -> None:
        self.call("cuMemFreeAsync", address, self.stream)
        self.sync()

    def allocate_graph(self, size: int) -> Callable[[], None]:
        graph, node, executable = c_void_p(), c_void_p(), c_void_p()
        access = Access(Location(DEVICE, 0), READ_WRITE)
        described = MemoryNode(
            pool=PoolProperties(type=PINNED, location=Location(DEVICE, 0)),
            accesses=ctypes.pointer(access),
            access_count=1,
            bytes=size,
        )
        self.call("cuGraphCreate", byref(graph), c_uint(0))
        try:
            self.call(
                "cuGraphAddMemAllocNode",
                byref(node),
                graph,
                None,
                c_size_t(0),
                byref(described),
            )
            self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
            try:
                self.call("cuGraphLaunch", executable, self.stream)
                self.sync()
            except CudaFailureError:
                self.call("cuGraphExecDestroy", executable)
                raise
        finally:
            self.call("cuGraphDestroy", graph)

        def release() -> None:
            self.free_async(c_uint64(described.address))
            self.call("cuGraphExecDestroy", executable)

        return release

    def allocate_global(self, size: int) -> Callable[[], None]:
        module = c_void_p()
        text = (
            ".version 6.0\n.target sm_50\n.address_size 64\n"
            f".visible .global .align 8 .b8 memory[{size}];\n"
            ".visible .entry nothing()\n{\n  ret;\n}\n"
        )
        self.call("cuModuleLoadData", byref(module), text.encode())
        return lambda: self.call("cuModuleUnload", module)

    # ---- what is not about one allocation -------------------------------------------------------

    def trim(self) -> None:
        """Give back what pools and graphs keep for later."""
        default = c_void_p()
        self.call("cuDeviceGetDefaultMemPool", byref(default), c_int(0))
        self.call("cuMemPoolTrimTo", default, c_size_t(0))
        if self.pool.value:
            self.call("cuMemPoolTrimTo", self.pool, c_size_t(0))
        self.call("cuDeviceGraphMemTrim", c_int(0))

    def storm(self, size: int, times: int) -> int:
        """Allocate and give back, over and over; how often there was room."""
        granted = 0
        for _ in range(times):
            try:
                release = self.allocate_plain(size)
            except CudaFailureError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                continue
            release()
            granted += 1
        return granted

    def report(self) -> dict[str, int]:
        free, total, whole = c_size_t(), c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        self.call("cuDeviceTotalMem_v2", byref(whole), c_int(0))
        return {"free": free.value, "total": total.value, "device_total": whole.value}


class Nvml:
    """What NVML says of the first device that it shows."""

    def __init__(self, index: int) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.handle = c_void_p()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(self.handle))

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            message = f"{name}: {code}"
            raise RuntimeError(message)

    def report(self) -> dict[str, Any]:
        first, second, count = Memory(), Memory2(version=40 | 2 << 24), c_uint()
        self.call("nvmlDeviceGetCount_v2", byref(count))
        self.call("nvmlDeviceGetMemoryInfo", self.handle, byref(first))
        self.call("nvmlDeviceGetMemoryInfo_v2", self.handle, byref(second))
        return {
            "devices": count.value,
            "v1": {"total": first.total, "free": first.free, "used": first.used},
            "v2": {
                "total": second.total,
                "free": second.free,
                "used": second.used,
                "reserved": second.reserved,
            },
            "processes": [
                self.processes("nvmlDeviceGetComputeRunningProcesses", Process1),
                self.processes("nvmlDeviceGetComputeRunningProcesses_v2", Process2),
                self.processes("nvmlDeviceGetComputeRunningProcesses_v3", Process2),
                self.details(),
            ],
        }

    def processes(self, name: str, kind: Any) -> dict[str, int]:  # noqa: ANN401 - a ctypes type
        count, found = c_uint(MAX_PROCESSES), (kind * MAX_PROCESSES)()
        self.call(name, self.handle, byref(count), found)
        return {str(each.pid): each.used for each in found[: count.value]}

    def details(self) -> dict[str, int]:
        found = (ProcessDetail * MAX_PROCESSES)()
        asked = ProcessDetails(
            version=ctypes.sizeof(ProcessDetails) | 1 << 24,
            mode=0,
            count=MAX_PROCESSES,
            array=ctypes.cast(found, POINTER(ProcessDetail)),
        )
        self.call("nvmlDeviceGetRunningProcessDetailList", self.handle, byref(asked))
        return {str(each.pid): each.used for each in found[: asked.count]}


class Worker:
    """The loop between socket and driver."""

    def __init__(self, path: str, resolving: str) -> None:
        self.path = path
        self.resolving = resolving
        self.cuda: Cuda | None = None
        self.nvml: Nvml | None = None
        self.connect()

    def connect(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(self.path)
        self.lines = self.socket.makefile("r", encoding="ascii")
        self.say({"pid": os.getpid()})

    def say(self, answer: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(answer).encode() + b"\n")

    def run(self) -> None:
        for line in self.lines:
            command = json.loads(line)
            if command["do"] == "fork":
                if os.fork() == 0:
                    # The parent's connection must end with the parent.
                    self.lines.close()
                    self.socket.close()
                    self.connect()
                    self.run()
                    os._exit(0)
                self.say({"result": 0})
                continue
            try:
                self.say({"result": 0, **self.obey(command)})
            except CudaFailureError as error:
                self.say({"result": error.code})

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "open":
                self.cuda = self.cuda or Cuda(self.resolving)
                self.cuda.open()
                return {}
            case "nvml":
                self.nvml = self.nvml or Nvml(command["index"])
                return self.nvml.report()
            case "exit":
                sys.exit(0)
        if self.cuda is None:
            message = "open comes first"
            raise RuntimeError(message)
        match command["do"]:
            case "allocate":
                return {"number": self.cuda.allocate(command["api"], command["bytes"])}
            case "storm":
                return {"granted": self.cuda.storm(command["bytes"], command["times"])}
            case "free":
                self.cuda.release(command["number"])
            case "trim":
                self.cuda.trim()
            case "report":
                return self.cuda.report()
            case other:
                message = f"no command {other}"
                raise RuntimeError(message)
        return {}


if __name__ == "__main__":
    Worker(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "dlsym").run()
