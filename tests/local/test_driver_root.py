# SPDX-License-Identifier: Apache-2.0
"""`allot env --driver-root`: NVIDIA's own programs on a simulated machine, unchanged.

Tests of those need the folder NVIDIA_PROGRAMS with the programs, as they are or packed by xz.
"""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.plugin.conftest import KubeletTwin

from allotment.agent.config.overlay import load
from allotment.agent.labels.features import node_features
from allotment.agent.resources import plan
from allotment.devices.facts import FactReader, NodeFacts
from allotment.devices.nvml import Nvml
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.structs import replace
from allotment.shares.run.namespace import can_unshare

Allot = Any  # tests/conftest.py: CommandLine
Inside = Callable[..., str]
NvidiaProgram = Callable[[str], Path]

pytestmark = pytest.mark.skipif(not can_unshare(), reason="needs CAP_SYS_ADMIN")


@pytest.fixture
def inside(allot: Allot, tmp_path: Path) -> Inside:
    """Runs a program on a simulated machine with a driver's files; returns what it printed."""

    def run(spec: str, *command: str | Path) -> str:
        root = tmp_path / "root"
        done = allot("env", "--simulated", spec, "--driver-root", root, "--", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        text: str = done.stdout
        return text

    return run


def test_a_program_sees_a_driver(inside: Inside, allot: Allot, tmp_path: Path) -> None:
    spec = "h100-80gb[mig=1g.10gb],rtx4090"
    script = """
        cat /proc/driver/nvidia/gpus/0000:07:00.0/information
        cat /proc/driver/nvidia/capabilities/gpu0/mig/gi*/access
        cat /sys/bus/pci/devices/*/class
        stat -c '%t:%T %a %F' /dev/nvidia1 /dev/nvidia-caps/nvidia-cap2 /dev/null
        grep -c nvidia /proc/modules /proc/devices
        readlink -f /sys/bus/pci/devices/0000:07:00.0
    """
    text = inside(spec, "sh", "-c", script)
    (uuid, _) = (each.uuid for each in read_machine(machine_path(allot.state, spec)).devices)
    assert f"GPU UUID:         {uuid}" in text
    assert "Device Minor:     0" in text
    assert "DeviceFileMinor: " in text
    assert "0x030200\n0x030000\n" in text
    assert "c3:1 666 character special file\n1fe:2 666 character special file\n1:3 666" in text
    assert "/proc/modules:3\n/proc/devices:3\n" in text
    assert "\n/sys/devices/pci0000:00/0000:07:00.0\n" in text
    assert not Path("/dev/nvidia1").exists()
    libraries = sorted(path.name for path in (tmp_path / "root" / "usr" / "lib64").iterdir())
    assert libraries[:3] == ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"]


def test_a_program_needs_no_variables(inside: Inside, tmp_path: Path) -> None:
    # NVIDIA's plugin starts the control daemon of MPS with an environment of its own.
    text = inside("t4:2", "env", "-i", tmp_path / "root" / "usr" / "bin" / "nvidia-smi", "-L")
    assert text.count("UUID: GPU-") == 2


def test_doctor_names_a_gpu_that_a_container_was_not_given(inside: Inside, allot: Allot) -> None:
    uuids = [each.uuid for each in read_machine(machine_path(allot.state, "t4:2")).devices]
    words = shlex.join(allot.command("doctor"))
    text = inside("t4:2", "sh", "-c", f"ALLOTMENT_SIMULATED_DEVICES={uuids[1]} {words} || true")
    assert f"GPU {uuids[0]}: the kernel's driver lists it, and this process cannot see it" in text
    assert f"GPU {uuids[1]}" not in text
    assert "cannot see it" not in inside("t4:2", "sh", "-c", f"{words} || true")


def test_other_files_are_left_alone(allot: Allot, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    done = allot("env", "--simulated", "t4", "--driver-root", tmp_path, "--", "true")
    assert done.returncode != 0
    assert "has other files" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name == "usr"] == []


def test_libraries_are_not_where_none_can_be_loaded(allot: Allot, tmp_path: Path) -> None:
    words = allot.command("env", "--simulated", "t4", "--driver-root", tmp_path, "--", "true")
    script = f"mount -t tmpfs -o noexec none {tmp_path} && exec {shlex.join(words)}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=allot.environment(ALLOTMENT_STATE=str(tmp_path.parent / "noexec-state")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "is mounted noexec" in done.stderr


def test_no_command_runs_where_the_shim_cannot_be_loaded(allot: Allot, tmp_path: Path) -> None:
    words = allot.command(
        "run", "--simulated", "t4", "--memory", "1Gi", "--inject", "environment", "--", "true"
    )
    script = f"mount -t tmpfs -o noexec none {tmp_path} && exec {shlex.join(words)}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=allot.environment(ALLOTMENT_STATE=str(tmp_path / "noexec-state")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "is on a file system mounted noexec" in done.stderr


CONFIGS = {
    "none": "version: v1\n",
    "single": "version: v1\nflags: {migStrategy: single}\n",
    "mixed": "version: v1\nflags: {migStrategy: mixed}\n",
    "shared": "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu,"
    " replicas: 4}]}}\n",
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "spec",
    [
        "t4:4",
        "a100-80gb:2",
        "a100-40gb[mig=1g.5gb*7]",
        "a30:2",
        "h100-80gb[mig=3g.40gb*2]:2",
        "h200:8",
        "b200[mig=1g.23gb+3g.90gb],b200",
        "rtx4090,l4",
    ],
)
def test_the_labels_are_nvidias(
    inside: Inside,
    nvidia_program: NvidiaProgram,
    allot: Allot,
    tmp_path: Path,
    spec: str,
    config: str,
) -> None:
    program = nvidia_program("gpu-feature-discovery")
    settings, output = tmp_path / "config.yaml", tmp_path / "labels"
    settings.write_text(CONFIGS[config])
    flags = ("-oneshot", "-no-timestamp", "-use-node-feature-api=false")
    inside(spec, program, *flags, "-config-file", settings, "-output-file", output)
    theirs = dict(line.split("=", 1) for line in output.read_text().splitlines())

    machine = machine_path(allot.state, spec)
    known = load(settings.read_text(), source="config.yaml")
    facts = FactReader(machine=machine, patience_s=60).read()
    with Nvml(machine=machine) as nvml:
        devices = (*nvml.inventory().devices, *nvml.slices())

    def labels(of: NodeFacts) -> dict[str, str]:
        found = node_features(
            of, offer=plan(devices, {}, known), config=known, machine_type="unknown"
        ).labels
        return {key: value for key, value in found.items() if key.startswith("nvidia.com/")}

    # Of two models NVIDIA's program describes any one: it loops over a map of Go.
    other = labels(replace(facts, devices=facts.devices[::-1]))
    other.pop("nvidia.com/gpu.mode")
    assert theirs in [labels(facts), labels(facts) | other]


def test_mig_parted_applies_a_configuration(
    inside: Inside, nvidia_program: NvidiaProgram, tmp_path: Path
) -> None:
    program, config = nvidia_program("nvidia-mig-parted"), tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nmig-configs:\n  mixed:\n  - devices: all\n    mig-enabled: true\n"
        "    mig-devices: {1g.10gb: 2, 3g.40gb: 1}\n"
    )
    spec = "h100-80gb:2"
    for verb in ("apply", "assert"):
        inside(spec, program, verb, "-f", config, "-c", "mixed")
    assert inside(spec, "nvidia-smi", "-L").count("MIG 1g.10gb") == 4


def test_mig_parted_resets_an_ampere(
    inside: Inside, nvidia_program: NvidiaProgram, tmp_path: Path
) -> None:
    program, config = nvidia_program("nvidia-mig-parted"), tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nmig-configs:\n  all:\n  - devices: all\n    mig-enabled: true\n"
        "    mig-devices: {1g.10gb: 7}\n"
    )
    inside("a100-80gb", program, "apply", "-f", config, "-c", "all")
    assert inside("a100-80gb", "nvidia-smi", "-L").count("MIG 1g.10gb") == 7


@pytest.fixture
def mount_points() -> Iterator[None]:
    """Folders to mount on, where NVIDIA's programs have theirs."""
    wanted = (Path("/mps"), Path("/var/lib/kubelet/device-plugins"))
    missing = [folder for path in wanted for folder in (path, *path.parents) if not folder.exists()]
    for path in wanted:
        path.mkdir(parents=True, exist_ok=True)
    yield
    for folder in missing:
        folder.rmdir()


@pytest.mark.usefixtures("mount_points")
def test_nvidias_plugin_offers_the_devices(
    allot: Allot, nvidia_program: NvidiaProgram, tmp_path: Path
) -> None:
    asyncio.run(offer_devices(allot, nvidia_program("nvidia-device-plugin"), tmp_path))


async def offer_devices(allot: Allot, program: Path, tmp_path: Path) -> None:
    kubelet = KubeletTwin(tmp_path / "kubelet")
    await kubelet.start()
    spec = "h100-80gb[mig=1g.10gb*2+3g.40gb],h100-80gb"
    flags = "--mig-strategy mixed --pass-device-specs --device-list-strategy envvar"
    script = f"""
        mount --bind {kubelet.folder} /var/lib/kubelet/device-plugins
        exec {program} {flags} > {tmp_path}/log 2>&1
    """
    root = ("--driver-root", str(tmp_path / "root"))
    plugin = await asyncio.create_subprocess_exec(
        *allot.command("env", "--simulated", spec, *root, "--", "sh", "-c", script),
        env=allot.environment(),
    )
    try:
        wanted = {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 2, "nvidia.com/mig-3g.40gb": 1}
        async with asyncio.timeout(60):
            while {name: len(kubelet.healthy(name)) for name in wanted} != wanted:
                assert plugin.returncode is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        (slice_id,) = kubelet.healthy("nvidia.com/mig-3g.40gb")
        answer = await kubelet.allocate(
            "nvidia.com/mig-3g.40gb", [slice_id], pod="0a", container="main"
        )
    finally:
        plugin.terminate()
        await plugin.wait()
        await kubelet.stop()
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == slice_id
    nodes = {each.container_path for each in answer.devices}
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"} <= nodes
    assert len([node for node in nodes if node.startswith("/dev/nvidia-caps/")]) == 2


@pytest.mark.usefixtures("mount_points")
def test_nvidias_daemon_of_mps_starts_ours(
    inside: Inside, nvidia_program: NvidiaProgram, tmp_path: Path
) -> None:
    program, config = nvidia_program("mps-control-daemon"), tmp_path / "config.yaml"
    config.write_text(
        "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
    )
    # It keeps its files in /mps.
    script = f"""
        mount -t tmpfs mps /mps
        {program} --config-file {config} > {tmp_path}/log 2>&1 &
        daemon=$!
        until grep -q "Starting log tailer" {tmp_path}/log; do
          kill -0 $daemon || exit 1; sleep 0.05
        done
        nvidia-smi --query-gpu=compute_mode --format=csv,noheader
        kill $daemon; wait $daemon
        nvidia-smi --query-gpu=compute_mode --format=csv,noheader
    """
    text = inside("t4:2", "sh", "-c", script)
    assert text.split() == ["Exclusive_Process"] * 2 + ["Default"] * 2
