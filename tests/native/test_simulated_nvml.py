# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ANN401 - nvidia-ml-py has no types
"""The simulated libnvidia-ml.so.1 as its clients see it, through nvidia-ml-py."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from allotment.devices import faults
from allotment.devices.descriptions import parse_short
from allotment.devices.model_facts import Architecture, Model
from allotment.devices.models import MODELS

GIB = 1 << 30
MIB = 1 << 20
HOLDER = Path(__file__).with_name("cuda_holder.py")

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
EACH_MODEL = pytest.mark.parametrize("key", MODELS)

# Came after the R580 drivers, which these machines say they have.
LATER = re.compile(
    r"_v1$|_v[34]$|nvmlDeviceGetRemappedRows_v2|nvmlDeviceGetAccountingStats_v2|Scheduler\w+_v2"
    r"|nvmlSystemGetConfComputeSettings_v2|ProfileInfoByIdV"
)
OLDER = re.compile(r"RunningProcesses_v3$|PciInfo_v3$|GridLicensableFeatures_v[34]$")


@pytest.fixture(scope="module")
def library(native_dir: Path) -> Path:
    return native_dir / "simulated" / "libnvidia-ml.so.1"


class Refusal(int):
    """The number of an error, where a value could be a number too."""


def outcome(call: Callable[..., Any], *arguments: object) -> Any:
    """What a call gives, or the number of its error."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        return Refusal(error.value)


# What no real library has: the engine's own account (test_simulated_times.py).
OURS = {
    "allotSimulatedProcessBusy",
    "allotSimulatedReset",
    "allotSimulatedSetTimeslice",
    "allotSimulatedTimes",
}


# ---- the library ---------------------------------------------------------------------------------


def exported(library: Path) -> set[str]:
    with library.open("rb") as file:
        section = ELFFile(file).get_section_by_name(".dynsym")
        assert isinstance(section, SymbolTableSection)
        return {
            symbol.name
            for symbol in section.iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        }


def test_the_library_has_the_real_soname_and_only_public_names(library: Path) -> None:
    with library.open("rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        names = [getattr(tag, "soname", "") for tag in dynamic.iter_tags("DT_SONAME")]
    assert names == ["libnvidia-ml.so.1"]
    assert {name for name in exported(library) if not name.startswith("nvml")} == OURS


def test_every_function_of_its_driver_version_is_there(library: Path) -> None:
    source = inspect.getsource(pynvml)
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', source))
    assert len(asked) > 350
    missing = asked - exported(library)
    assert {name for name in missing if not LATER.search(name) or OLDER.search(name)} == set()


def test_nothing_makes_the_library_crash(library: Path, machine: Callable[[str], Path]) -> None:
    # Each function, on no device, on garbage and on a device, with nothing where it would write.
    code = """
import ctypes, re, sys
library = ctypes.CDLL(sys.argv[1])
device = ctypes.c_void_p()
assert library.nvmlInit_v2() == 0
assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
for name in sys.argv[2:]:
    if re.fullmatch("nvml(Shutdown|Init.*|ErrorString)", name):
        continue
    of_device = re.match("nvmlDevice(?!GetCount|GetHandleBy|.*Drain|Remove|Discover)", name)
    firsts = [None, ctypes.c_void_p(1), device] if of_device else [None]
    for first in firsts:
        result = getattr(library, name)(first, *[None] * 6)
        assert 0 <= result <= 30, (name, result)
print("alive")
"""
    environment = {**os.environ, "ALLOTMENT_SIMULATED_MACHINE": str(machine("a100-80gb"))}
    done = subprocess.run(
        [sys.executable, "-c", code, library, *sorted(exported(library) - OURS)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "alive\n", done.stderr


def test_without_a_machine_no_driver_is_loaded(library: Path, tmp_path: Path) -> None:
    code = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]);"
        "print(library.nvmlInit_v2(), library.nvmlShutdown())"
    )
    results = {}
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"garbage" * 100)
    for name, path in {"none": tmp_path / "none", "garbage": garbage}.items():
        done = subprocess.run(
            [sys.executable, "-c", code, library],
            env={**os.environ, "ALLOTMENT_SIMULATED_MACHINE": str(path)},
            capture_output=True,
            text=True,
            check=True,
        )
        results[name] = done.stdout.split()
    assert results["none"] == [
        str(pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        str(pynvml.NVML_ERROR_UNINITIALIZED),
    ]
    assert results["garbage"][0] == str(pynvml.NVML_ERROR_UNKNOWN)


# ---- what each model is and has ------------------------------------------------------------------


@EACH_MODEL
def test_a_model_is_told_as_described(key: str, nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on(f"t4,{key}")
    handle, model = nvml.nvmlDeviceGetHandleByIndex(1), MODELS[key]
    assert nvml.nvmlDeviceGetName(handle) == model.name
    assert nvml.nvmlDeviceGetIndex(handle) == 1
    assert nvml.nvmlDeviceGetCudaComputeCapability(handle) == model.core.compute_capability
    assert nvml.nvmlDeviceGetArchitecture(handle) == model.core.architecture
    assert nvml.nvmlDeviceGetBrand(handle) == model.brand
    assert nvml.nvmlDeviceGetMemoryBusWidth(handle) == model.memory_bus_bits
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    assert (memory.total, memory.reserved) == (model.memory_mib * MIB, model.reserved_mib * MIB)
    assert (memory.used, memory.free) == (0, memory.total - memory.reserved)
    old = nvml.nvmlDeviceGetMemoryInfo(handle)
    assert (old.total, old.used, old.free) == (memory.total, memory.reserved, memory.free)
    assert nvml.nvmlDeviceGetPowerManagementLimit(handle) == model.power[0] * 1000
    assert nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle) == [
        model.power[1] * 1000,
        model.power[2] * 1000,
    ]
    assert nvml.nvmlDeviceGetPowerUsage(handle) == model.power_idle * 1000
    assert (
        nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU) == model.temperatures[0]
    )
    assert nvml.nvmlDeviceGetUtilizationRates(handle).gpu == 0
    assert nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM) == model.sm_clock_max
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    assert pci.pciDeviceId == model.pci_device << 16 | 0x10DE
    assert nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle) == model.core.pcie_generation
    assert nvml.nvmlDeviceGetNumGpuCores(handle) in {64 * model.sm_count, 128 * model.sm_count}
    uuid = nvml.nvmlDeviceGetUUID(handle)
    for found in (
        nvml.nvmlDeviceGetHandleByUUID(uuid),
        nvml.nvmlDeviceGetHandleByPciBusId(pci.busId),
        nvml.nvmlDeviceGetHandleByPciBusId(pci.busIdLegacy),
    ):
        assert nvml.nvmlDeviceGetIndex(found) == nvml.nvmlDeviceGetIndex(handle)


Call = tuple[str, tuple[object, ...]]
LACKS: list[tuple[Callable[[Model], bool], list[Call]]] = [
    (lambda _: True, [("nvmlDeviceGetCurrentDriverModel", ())]),
    (
        lambda model: model.fans == 0,
        [
            ("nvmlDeviceGetFanSpeed", ()),
            ("nvmlDeviceGetFanSpeed_v2", (0,)),
            ("nvmlDeviceGetNumFans", ()),
        ],
    ),
    (
        lambda model: not model.ecc,
        [("nvmlDeviceGetTotalEccErrors", (0, 0)), ("nvmlDeviceGetDetailedEccErrors", (0, 0))],
    ),
    (
        lambda model: not model.ecc or model.core.architecture >= Architecture.AMPERE,
        [("nvmlDeviceGetRetiredPages", (0,)), ("nvmlDeviceGetRetiredPagesPendingStatus", ())],
    ),
    (
        lambda model: model.core.architecture < Architecture.AMPERE or "GeForce" in model.name,
        [("nvmlDeviceGetRemappedRows", ()), ("nvmlDeviceGetRowRemapperHistogram", ())],
    ),
    (
        lambda model: not model.mig,
        [("nvmlDeviceGetMigMode", ()), ("nvmlDeviceGetMigDeviceHandleByIndex", (0,))],
    ),
    (
        lambda model: model.nvlinks == 0,
        [("nvmlDeviceGetNvLinkState", (0,)), ("nvmlDeviceGetNvLinkVersion", (0,))],
    ),
    (
        lambda model: "GeForce" in model.name,
        [
            ("nvmlDeviceGetSerial", ()),
            ("nvmlDeviceGetBoardPartNumber", ()),
            ("nvmlDeviceGetApplicationsClock", (0,)),
            ("nvmlDeviceGetMaxCustomerBoostClock", (0,)),
        ],
    ),
    (
        lambda model: model.core.architecture < Architecture.VOLTA,
        [("nvmlDeviceGetTotalEnergyConsumption", ())],
    ),
    (
        lambda model: model.core.architecture < Architecture.TURING,
        [("nvmlDeviceGetGspFirmwareVersion", ()), ("nvmlDeviceGetGspFirmwareMode", ())],
    ),
    (lambda model: not model.coherent, [("nvmlDeviceGetNumaNodeId", ())]),
    (lambda model: not model.encoders, [("nvmlDeviceGetEncoderCapacity", (0,))]),
]


def has_not(model: Model) -> dict[str, tuple[object, ...]]:
    """The calls that a model does not support, with their arguments behind the handle."""
    return {name: args for lacks, calls in LACKS if lacks(model) for name, args in calls}


ALL_CALLS = {name: args for _, calls in LACKS for name, args in calls}


@EACH_MODEL
def test_a_model_has_exactly_what_it_has(key: str, nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on(f"t4,{key}")
    handle, missing = nvml.nvmlDeviceGetHandleByIndex(1), has_not(MODELS[key])
    said = {
        name: isinstance(said := outcome(getattr(nvml, name), handle, *arguments), Refusal)
        and said == NOT_SUPPORTED
        for name, arguments in ALL_CALLS.items()
    }
    assert said == {name: name in missing for name in ALL_CALLS}


@EACH_MODEL
def test_every_plain_question_has_an_honest_answer(key: str, nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on(f"t4,{key}")
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    honest = {
        NOT_SUPPORTED,
        nvml.NVML_ERROR_NOT_FOUND,
        nvml.NVML_ERROR_INVALID_ARGUMENT,  # MIG's own calls on a whole GPU
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # functions of later drivers
    }
    answered = 0
    for name, call in inspect.getmembers(nvml, inspect.isfunction):
        if not name.startswith("nvmlDeviceGet") or name.startswith("nvmlDeviceGetHandle"):
            continue
        parameters = list(inspect.signature(call).parameters.values())
        if [p for p in parameters[1:] if p.default is p.empty] or not parameters:
            continue
        said = outcome(call, handle)
        refused = isinstance(said, Refusal)
        assert not refused or said in honest, name
        answered += not refused
    assert answered > 60


def test_text_and_size_is_checked(nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on("rtx4090")
    assert nvml.nvmlSystemGetDriverVersion() == "580.95.05"
    assert nvml.nvmlSystemGetNVMLVersion() == "13.580.95.05"
    assert nvml.nvmlSystemGetCudaDriverVersion() == 13000
    assert nvml.nvmlSystemGetProcessName(os.getpid()).endswith(
        Path("/proc/self/cmdline").read_text().split("\0")[0]
    )
    assert outcome(nvml.nvmlSystemGetProcessName, 2**22 + 1) == nvml.NVML_ERROR_NOT_FOUND
    assert outcome(nvml.nvmlDeviceGetHandleByIndex, 1) == nvml.NVML_ERROR_INVALID_ARGUMENT
    assert outcome(nvml.nvmlDeviceGetHandleByUUID, "GPU-0") == nvml.NVML_ERROR_NOT_FOUND
    short = ctypes.create_string_buffer(5)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    call = nvml.nvmlLib.nvmlDeviceGetName
    assert call(handle, short, 5) == nvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert short.raw == b"\0" * 5


@pytest.mark.parametrize(
    ("call", "structure"),
    [
        ("nvmlDeviceGetMemoryInfo_v2", "c_nvmlMemory_v2_t"),
        ("nvmlDeviceGetRunningProcessDetailList", "c_nvmlProcessDetailList_v1_t"),
        ("nvmlDeviceGetProcessesUtilizationInfo", "c_nvmlProcessesUtilizationInfo_v1_t"),
        ("nvmlDeviceGetTemperatureV", "c_nvmlTemperature_v1_t"),
        ("nvmlDeviceGetMarginTemperature", "c_nvmlMarginTemperature_v1_t"),
        ("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v2_t"),
    ],
)
def test_a_structure_of_another_version_is_refused(
    call: str, structure: str, nvml_on: Callable[[str], Any]
) -> None:
    nvml, _ = nvml_on("h100-80gb")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    for version in (0, 1, 99 << 24 | ctypes.sizeof(getattr(nvml, structure)), 2**32 - 1):
        value = getattr(nvml, structure)()
        value.version = version
        result = getattr(nvml.nvmlLib, call)(handle, ctypes.byref(value))
        assert result == nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


# ---- topology ------------------------------------------------------------------------------------


def test_links_of_switched_gpus_end_in_switches(nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on("a100-80gb:4,t4")
    first, other, t4 = (nvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 3, 4))
    for link in range(12):
        assert nvml.nvmlDeviceGetNvLinkState(first, link) == nvml.NVML_FEATURE_ENABLED
        remote = nvml.nvmlDeviceGetNvLinkRemotePciInfo(first, link)
        assert remote.pciDeviceId == 0x1AF110DE
        assert nvml.nvmlDeviceGetNvLinkRemoteDeviceType(first, link) == 2
    assert outcome(nvml.nvmlDeviceGetNvLinkState, first, 12) == nvml.NVML_ERROR_INVALID_ARGUMENT
    index = nvml.NVML_P2P_CAPS_INDEX_NVLINK
    assert nvml.nvmlDeviceGetP2PStatus(first, other, index) == nvml.NVML_P2P_STATUS_OK
    assert nvml.nvmlDeviceGetP2PStatus(first, t4, index) != nvml.NVML_P2P_STATUS_OK


def test_links_of_direct_gpus_end_in_each_other(nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on("v100-32gb:4")
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(4)]
    addresses = {nvml.nvmlDeviceGetPciInfo(handle).busId: i for i, handle in enumerate(handles)}
    for at, handle in enumerate(handles):
        ends = [
            addresses[nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId]
            for link in range(6)
        ]
        assert sorted(ends) == sorted([i for i in range(4) if i != at] * 2)


def test_neighbours_are_nearer_than_others(nvml_on: Callable[[str], Any]) -> None:
    nvml, _ = nvml_on("l4:8")
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(8)]
    levels = [nvml.nvmlDeviceGetTopologyCommonAncestor(handles[0], each) for each in handles[1:]]
    assert (
        levels
        == [nvml.NVML_TOPOLOGY_SINGLE]
        + [nvml.NVML_TOPOLOGY_NODE] * 2
        + [nvml.NVML_TOPOLOGY_SYSTEM] * 4
    )
    nearest = nvml.nvmlDeviceGetTopologyNearestGpus(handles[0], nvml.NVML_TOPOLOGY_NODE)
    assert [nvml.nvmlDeviceGetIndex(handle) for handle in nearest] == [2, 3]
    everyone = [nvml.nvmlDeviceGetCpuAffinity(handle, 4) for handle in handles]
    assert everyone[0][0] != 0


# ---- faults --------------------------------------------------------------------------------------


def test_ecc_errors_are_counted_everywhere(nvml_on: Callable[[str], Any]) -> None:
    nvml, path = nvml_on("a100-80gb:2")
    counters = {"ecc_volatile_corrected": 5, "ecc_aggregate_uncorrected": 2}
    faults.set_fault(path, 1, counters={**counters, "remapped_rows_uncorrectable": 3})
    sound, broken = (nvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
    corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    assert nvml.nvmlDeviceGetTotalEccErrors(broken, corrected, nvml.NVML_VOLATILE_ECC) == 5
    assert nvml.nvmlDeviceGetTotalEccErrors(sound, corrected, nvml.NVML_VOLATILE_ECC) == 0
    assert nvml.nvmlDeviceGetDetailedEccErrors(broken, 1, nvml.NVML_AGGREGATE_ECC).deviceMemory == 2
    location = nvml.NVML_MEMORY_LOCATION_DRAM
    assert nvml.nvmlDeviceGetMemoryErrorCounter(broken, 1, 1, location) == 2
    assert nvml.nvmlDeviceGetRemappedRows(broken) == (0, 3, 0, 0)
    histogram = nvml.nvmlDeviceGetRowRemapperHistogram(broken)
    assert (histogram.max, histogram.high) == (637, 3)
    fields = nvml.nvmlDeviceGetFieldValues(
        broken, [nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, nvml.NVML_FI_DEV_REMAPPED_UNC]
    )
    assert [field.value.ullVal & 0xFFFFFFFF for field in fields] == [5, 3]


def test_a_lost_gpu_takes_no_other_with_it(nvml_on: Callable[[str], Any]) -> None:
    nvml, path = nvml_on("t4:3")
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    faults.set_fault(path, 1, lost=True)
    assert nvml.nvmlDeviceGetCount() == 3
    assert outcome(nvml.nvmlDeviceGetHandleByIndex, 1) == nvml.NVML_ERROR_GPU_IS_LOST
    assert outcome(nvml.nvmlDeviceGetName, handle) == nvml.NVML_ERROR_GPU_IS_LOST
    for index in (0, 2):
        assert nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)) == "Tesla T4"
    faults.clear_faults(path)
    assert nvml.nvmlDeviceGetName(handle) == "Tesla T4"


def test_a_hung_call_takes_its_time(nvml_on: Callable[[str], Any]) -> None:
    nvml, path = nvml_on("t4")
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    faults.set_fault(path, 0, hang_us=80_000)
    before = time.monotonic()
    nvml.nvmlDeviceGetPowerUsage(handle)
    assert time.monotonic() - before >= 0.08


# ---- what an exporter asks, as DCGM does ---------------------------------------------------------

EXPORTED = {
    "NVML_FI_DEV_ECC_CURRENT": {"t4", "a100-80gb", "h100-80gb", "rtx4090"},
    "NVML_FI_DEV_ECC_DBE_VOL_TOTAL": {"t4", "a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_RETIRED_DBE": {"t4"},
    "NVML_FI_DEV_MEMORY_TEMP": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION": {"t4", "a100-80gb", "h100-80gb", "rtx4090"},
    "NVML_FI_DEV_NVLINK_LINK_COUNT": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_NVLINK_SPEED_MBPS_L0": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_NVLINK_BANDWIDTH_C0_TOTAL": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_PCIE_REPLAY_COUNTER": {"t4", "a100-80gb", "h100-80gb", "rtx4090"},
    "NVML_FI_DEV_REMAPPED_UNC": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_REMAPPED_FAILURE": {"a100-80gb", "h100-80gb"},
    "NVML_FI_DEV_POWER_INSTANT": {"t4", "a100-80gb", "h100-80gb", "rtx4090"},
    "NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT": {"h100-80gb", "rtx4090"},
}


def test_an_exporter_gets_every_field_a_model_has(nvml_on: Callable[[str], Any]) -> None:
    keys = ["t4", "a100-80gb", "h100-80gb", "rtx4090"]
    nvml, _ = nvml_on(",".join(keys))
    said: dict[str, set[str]] = {name: set() for name in EXPORTED}
    for index, key in enumerate(keys):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        fields = nvml.nvmlDeviceGetFieldValues(handle, [getattr(nvml, name) for name in EXPORTED])
        for name, field in zip(EXPORTED, fields, strict=True):
            assert field.nvmlReturn in {nvml.NVML_SUCCESS, NOT_SUPPORTED}
            if field.nvmlReturn == nvml.NVML_SUCCESS:
                said[name].add(key)
    assert said == EXPORTED


# ---- processes of the simulated driver -----------------------------------------------------------


@contextmanager
def holder(path: Path, native_dir: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program that uses the simulated libcuda."""
    environment = {
        **os.environ,
        "ALLOTMENT_SIMULATED_MACHINE": str(path),
        "LD_LIBRARY_PATH": str(native_dir / "simulated"),
    }
    with subprocess.Popen(
        [sys.executable, HOLDER, *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.measured
def test_processes_are_listed_with_their_memory(
    nvml_on: Callable[[str], Any], native_dir: Path
) -> None:
    nvml, path = nvml_on("a100-80gb,t4")
    gpu, t4 = (nvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1))
    context = parse_short("a100-80gb").gpus[0].model.context_mib * MIB
    with (
        holder(path, native_dir, 0, 3 * GIB, "busy") as first,
        holder(path, native_dir, 0, 5 * GIB, "busy") as second,
    ):
        listed = {each.pid: each for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        assert set(listed) == {first.pid, second.pid}
        assert 3 * GIB + context <= listed[first.pid].usedGpuMemory < 4 * GIB + context
        total = sum(each.usedGpuMemory for each in listed.values())
        assert nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used == total
        assert nvml.nvmlDeviceGetComputeRunningProcesses(t4) == []
        assert nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu) == []

        def are_busy() -> bool:
            rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
            parts = {each.pid: each.smUtil for each in nvml.nvmlDeviceGetProcessUtilization(gpu, 0)}
            both_share = all(15 <= part <= 75 for part in parts.values())
            return rates.gpu >= 50 and set(parts) == {first.pid, second.pid} and both_share

        while not are_busy():  # figures are of the last second; the test's time-out ends it
            time.sleep(0.1)
        assert nvml.nvmlDeviceGetPowerUsage(gpu) > 200_000
    assert nvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    assert nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used == 0
