# SPDX-License-Identifier: Apache-2.0
"""A process on a simulated machine has the GPUs whose nodes it has, and knows of no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.packing import read_machine
from allotment.shares.run.namespace import can_unshare

# Tells all that CUDA and NVML let it see, each by its own numbers.
PROGRAM = """
import ctypes, json, sys
nvml = ctypes.CDLL("libnvidia-ml.so.1")
seen = {"nvml": [], "cuda": []}
assert nvml.nvmlInit_v2() == 0
count = ctypes.c_uint()
assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
for place in range(count.value):
    device, text, index = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.c_uint()
    assert nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetUUID(device, text, 96) == 0
    assert nvml.nvmlDeviceGetIndex(device, ctypes.byref(index)) == 0
    assert index.value == place
    minor = ctypes.c_uint()
    assert nvml.nvmlDeviceGetMinorNumber(device, ctypes.byref(minor)) == 0
    seen["nvml"].append([text.value.decode(), minor.value])
device = ctypes.c_void_p()
seen["past the end"] = nvml.nvmlDeviceGetHandleByIndex_v2(count.value, ctypes.byref(device))
seen["by uuid"] = [
    nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) for uuid in sys.argv[1:]
]
cuda = ctypes.CDLL("libcuda.so.1")
seen["init"] = cuda.cuInit(0)
number = ctypes.c_int()
if seen["init"] == 0:
    assert cuda.cuDeviceGetCount(ctypes.byref(number)) == 0
for ordinal in range(number.value):
    raw = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid_v2(raw, ordinal) == 0
    text = bytes(raw).hex()
    parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
    seen["cuda"].append("GPU-" + "-".join(parts))
print(json.dumps(seen))
"""

NOT_FOUND, INVALID_ARGUMENT, NO_DEVICE = 6, 2, 100


@pytest.fixture
def path(machine: Callable[[str], Path]) -> Path:
    return machine("t4:3")


@pytest.fixture
def look(path: Path, native_dir: Path) -> Callable[..., dict[str, Any]]:
    """Runs the program above with more variables."""

    def run(*wrapper: str, **variables: str) -> dict[str, Any]:
        uuids = [device.uuid for device in read_machine(path).devices]
        done = subprocess.run(
            [*wrapper, sys.executable, "-c", PROGRAM, *uuids],
            capture_output=True,
            text=True,
            check=False,
            env={
                **os.environ,
                "ALLOTMENT_SIMULATED_MACHINE": str(path),
                "LD_LIBRARY_PATH": str(native_dir / "simulated"),
                **variables,
            },
        )
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return run


def test_without_a_word_all_are_there(path: Path, look: Callable[..., dict[str, Any]]) -> None:
    uuids = [device.uuid for device in read_machine(path).devices]
    seen = look()
    assert [uuid for uuid, _ in seen["nvml"]] == seen["cuda"] == uuids


def test_only_nodes_are_there_and_count_from_zero(
    path: Path, look: Callable[..., dict[str, Any]]
) -> None:
    first, second, third = (device.uuid for device in read_machine(path).devices)
    seen = look(ALLOTMENT_SIMULATED_DEVICES=f"{third},{second}")
    # In the driver's order, and with the numbers that the nodes have.
    assert seen["nvml"] == [[second, 1], [third, 2]]
    assert seen["cuda"] == [second, third]
    assert seen["past the end"] == INVALID_ARGUMENT
    assert seen["by uuid"] == [NOT_FOUND, 0, 0]
    # CUDA's own variable chooses among them.
    assert look(ALLOTMENT_SIMULATED_DEVICES=f"{second} {third}", CUDA_VISIBLE_DEVICES="1")[
        "cuda"
    ] == [third]
    beyond = look(ALLOTMENT_SIMULATED_DEVICES=second, CUDA_VISIBLE_DEVICES=first)
    assert (beyond["cuda"], beyond["init"]) == ([], NO_DEVICE)


@pytest.mark.parametrize("named", ["", "GPU-", "none", ","])
def test_what_names_no_gpu_leaves_none(look: Callable[..., dict[str, Any]], named: str) -> None:
    seen = look(ALLOTMENT_SIMULATED_DEVICES=named)
    assert (seen["nvml"], seen["init"]) == ([], NO_DEVICE)


@pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")
def test_a_file_is_as_good_as_the_variable(
    path: Path, look: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Each of a container's shares has a file there."""
    first, second, _ = (device.uuid for device in read_machine(path).devices)
    nodes = tmp_path / "devices"
    nodes.write_text(f"{first}\n{second}\n")
    script = (
        "mkdir -p /run/allotment && mount -t tmpfs none /run/allotment &&"
        " mkdir -p /run/allotment/simulated/devices &&"
        " head -n 1 $0 > /run/allotment/simulated/devices/one &&"
        " tail -n 1 $0 > /run/allotment/simulated/devices/other &&"
        ' exec "$@"'
    )
    wrapper = ("unshare", "-m", "--propagation", "private", "sh", "-c", script, str(nodes))
    assert look(*wrapper)["cuda"] == [first, second]
