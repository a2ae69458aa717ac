# SPDX-License-Identifier: Apache-2.0
"""Containers with shares by CDI: one of them, two, and two that do not go together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allotment.devices.simulated import machine_path
from allotment.ledger import layout
from allotment.model.modes import MIG
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.shares import cdi, lifecycle
from allotment.shares.folders import StateFolder, shim_copy, simulated_copy
from allotment.shares.mode_lives import life_of
from allotment.shares.placing import ShareOrder
from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
GI = 1 << 30
BURN = (sys.executable, "-m", "allotment", "burn", "-o", "json")
PAIR = ("--simulated", "a100-80gb,h100-80gb")
CUT = ("--simulated", "h100-80gb")
HALVES = """\
version: v1
mig-configs:
  halves: [{devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}]
"""
TENANT = Path(__file__).with_name("mig_tenant.py")

pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")


def shares(allot: Allot) -> list[Any]:
    done = allot("ps", "-o", "json")
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)["shares"]
    return found


def run_in_container(
    allot: Allot, specs: Path, *command: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a container with all shares of the folder.

    As a container runtime does: the specs' mounts in the container's namespace and their variables,
    and of two mounts on one path, or of two values of a variable, the later
    (tags.cncf.io/container-device-interface, ContainerEdits.Apply).
    """
    mounts: dict[str, str] = {}
    variables: list[str] = []
    for path in sorted(specs.glob("*.json")):
        (device,) = json.loads(path.read_text())["devices"]
        for mount in device["containerEdits"]["mounts"]:
            mounts[mount["containerPath"]] = mount["hostPath"]
        variables += device["containerEdits"].get("env", [])
    libraries = Path(mounts["/usr/lib/libcuda.so.1"]).parent
    steps = ["mount -t tmpfs none /run", "touch /etc/ld.so.preload"]
    for target, source in mounts.items():
        # This machine's own folders stand for the image's: no file is made in them.
        if not target.startswith("/usr/"):
            kind = (
                "mkdir -p" if Path(source).is_dir() else f"mkdir -p {Path(target).parent} && touch"
            )
            steps += [f"{kind} {target}", f"mount --bind {source} {target}"]
    variables.append(f"LD_LIBRARY_PATH={libraries}")
    steps.append(f"exec env {' '.join((*variables, *command))}")
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", "\n".join(steps)],
        capture_output=True,
        text=True,
        check=False,
        env=allot.environment(),
        timeout=120,
    )


def create(allot: Allot, specs: Path, *words: str) -> None:
    done = allot("cdi", "create", *words, "--cdi-dir", specs)
    assert done.returncode == 0, done.stderr


def test_a_container_gets_its_share(allot: Allot, tmp_path: Path) -> None:
    create(allot, tmp_path, "--simulated", "a100-80gb", "--memory", "2Gi", "--name", "box")
    done = run_in_container(allot, tmp_path, *BURN, "--memory", "6Gi", "--seconds", "1")
    assert done.returncode == 9, done.stderr
    (process,) = json.loads(done.stdout)["processes"]
    assert process["device"]["total_bytes"] == 2 * GI
    (share,) = shares(allot)
    assert (share["state"], share["injection"]) == ("kept", "cdi")
    assert share["devices"][0]["memory_used_bytes"] == 0
    assert 1.9 * GI < share["devices"][0]["memory_peak_bytes"] <= 2 * GI
    assert "box" in allot("cdi", "list").stdout
    assert allot("cdi", "rm", "allotment.dev/share=box").returncode == 0
    assert list(tmp_path.glob("*.json")) == []
    assert shares(allot) == []


# Takes all that there is of each device, and says what it sees of both.
TWO = """
import ctypes, json, subprocess, sys
import pynvml
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
call("cuInit", 0)
count, free, total = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t()
call("cuDeviceGetCount", ctypes.byref(count))
seen = []
pynvml.nvmlInit()
for ordinal in range(count.value):
    context, memory = ctypes.c_void_p(), ctypes.c_ulonglong()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call("cuCtxSetCurrent", context)
    call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    block = ctypes.c_size_t(free.value >> 21 << 21)
    call("cuMemAlloc_v2", ctypes.byref(memory), block)
    refused = cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 << 20))
    device = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
    seen.append([total.value, refused, pynvml.nvmlDeviceGetMemoryInfo(device).total,
                 len(pynvml.nvmlDeviceGetComputeRunningProcesses(device))])
ps = subprocess.run([sys.executable, "-m", "allotment", "run", "--memory", "1Gi", "true"],
                    capture_output=True, text=True)
print(json.dumps({"seen": sorted(seen), "nested": ps.stderr,
                  "nvml": pynvml.nvmlDeviceGetCount()}), flush=True)
"""


def test_a_container_with_two_shares_has_the_devices_of_both(allot: Allot, tmp_path: Path) -> None:
    specs, program = tmp_path / "cdi", tmp_path / "two.py"
    program.write_text(TWO)
    for name, memory, gpu in (("one", "2Gi", "a100"), ("other", "3Gi", "h100")):
        create(allot, specs, *PAIR, "--gpu", gpu, "--memory", memory, "--compute", "30",
               "--name", name)  # fmt: skip
    assert len({share["devices"][0]["uuid"] for share in shares(allot)}) == 2
    done = run_in_container(allot, specs, sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["seen"] == [[2 * GI, 2, 2 * GI, 1], [3 * GI, 2, 3 * GI, 1]]
    assert said["nvml"] == 2
    assert "shares do not nest" in said["nested"]
    used = {share["name"]: share["devices"][0]["memory_peak_bytes"] for share in shares(allot)}
    assert 2 * GI - (4 << 20) < used["one"] <= 2 * GI
    assert 3 * GI - (4 << 20) < used["other"] <= 3 * GI


def test_two_shares_of_one_gpu_are_refused_with_the_reason(allot: Allot, tmp_path: Path) -> None:
    for name in ("one", "other"):
        create(allot, tmp_path, "--simulated", "t4", "--memory", "1Gi", "--name", name)
    done = run_in_container(allot, tmp_path, *BURN, "--memory", "64Mi", "--seconds", "1")
    assert done.returncode != 0
    assert "two of its shares are parts of GPU-" in done.stderr


def test_a_share_without_a_ledger_goes_with_no_other(allot: Allot, tmp_path: Path) -> None:
    """Else its devices would be hidden. Pods alone get such modes."""
    create(allot, tmp_path, *PAIR, "--gpu", "a100", "--memory", "1Gi")
    inside = tmp_path / "whole.json"
    (marker := tmp_path / "id").write_text("0123456789ab\n")
    mount = {"hostPath": str(marker), "containerPath": "/run/allotment/share/0123456789ab/id"}
    inside.write_text(json.dumps({"devices": [{"containerEdits": {"mounts": [mount]}}]}))
    done = run_in_container(allot, tmp_path, *BURN, "--memory", "64Mi", "--seconds", "1")
    assert done.returncode != 0
    assert "whole devices (mode exclusive or timeslice): it cannot be combined" in done.stderr


def hold_slice(allot: Allot, specs: Path, uuid: str) -> None:
    """Make a share of all of a MIG device, and its spec: both as for a pod's container."""
    folder = StateFolder(allot.state)
    machine = machine_path(allot.state, CUT[1])

    def publish(share: Share, directory: Path) -> None:
        shim, preload = shim_copy(folder), directory / "ld.so.preload"
        preload.write_text(cdi.preload_line(shim))
        content = cdi.CdiContent(directory, shim, preload, machine, simulated_copy(folder))
        content = life_of(MIG).equip(content, folder, share)
        cdi.write_spec(specs / cdi.spec_name(share.id), cdi.make_spec(share, content))

    request = Request(parse_memory("8000Mi"), selectors=(uuid,), mode=MIG)
    order = ShareOrder(request, Injection.CDI, machine=machine, cdi_folder=specs)
    door = lifecycle.FrontDoor(locked=folder.locked, publish=publish)
    lifecycle.create(folder, order, (), door=door)


def test_slices_of_two_shares_go_together(allot: Allot, tmp_path: Path) -> None:
    """Each is a device of its own, and a program has one of them: the later, or what it names."""
    specs, file = tmp_path / "cdi", tmp_path / "halves.yaml"
    file.write_text(HALVES)
    assert allot("mig", "apply", "-f", file, *CUT).returncode == 0
    (gpu,) = json.loads(allot("devices", *CUT, "-o", "json").stdout)["devices"]
    for row in gpu["mig_slices"]:
        hold_slice(allot, specs, row["uuid"])
    slices = {share["id"]: share["devices"][0]["uuid"] for share in shares(allot)}
    first, second = (slices[share] for share in sorted(slices))
    tenant = (sys.executable, str(TENANT), "8000")
    for uuid, chosen in ((second, ()), (first, ("env", f"CUDA_VISIBLE_DEVICES={first}"))):
        done = run_in_container(allot, specs, *chosen, *tenant)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["cuda"]["uuid"] == uuid.removeprefix("MIG-").replace("-", "")
        assert (said["had_mib"], said["nvml"]["count"]) == (8000, 2)
    peaks = [share["devices"][0]["memory_peak_bytes"] for share in shares(allot)]
    assert min(peaks) > 7 * GI, "each program was charged to the share of its slice"


def test_a_share_of_mode_mps_goes_with_no_other(allot: Allot, tmp_path: Path) -> None:
    """A process has one MPS pipe directory. Pods alone get this mode in a container."""
    for name, gpu in (("one", "a100"), ("other", "h100")):
        create(allot, tmp_path, *PAIR, "--gpu", gpu, "--memory", "1Gi", "--name", name)
    policy = allot.state / "shares" / shares(allot)[0]["id"] / "policy"
    flags_at = layout.POLICY_DEVICES_AT + layout.DEVICE_POLICY_FLAGS_AT
    with policy.open("r+b") as file:
        file.seek(flags_at)
        file.write(layout.DEVICE_MPS.to_bytes(4, "little"))
    done = run_in_container(allot, tmp_path, *BURN, "--memory", "64Mi", "--seconds", "1")
    assert done.returncode != 0
    assert "one of its 2 shares is of mode mps: an mps share cannot be combined" in done.stderr
