# SPDX-License-Identifier: Apache-2.0
"""`allot uninstall --node`: what an agent left goes, and nothing of anybody else."""

import fcntl
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

Allot = Any  # tests/conftest.py: CommandLine
OURS = (
    "device-plugins/allotment-offer.json",
    "device-plugins/allotment-nvidia.com_gpu.sock",
    "device-plugins/.allotment-x",
    "plugins/gpu.allotment.dev/dra-0123abcd.sock",
    "plugins_registry/gpu.allotment.dev-0123abcd-reg.sock",
    "plugins_registry/gpu.nvidia.com-0123abcd-reg.sock",
)
OTHERS = (
    "device-plugins/kubelet_internal_checkpoint",
    "device-plugins/nvidia-gpu.sock",
    "plugins/gpu.nvidia.com/dra.sock",
    "plugins_registry/gpu.nvidia.com-reg.sock",
    "cdi/nvidia.yaml",
    "cdi/k8s.gpu.nvidia.com-device_base.yaml",
)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The kubelet's folder with what agents and others left, and the folder of CDI specs in it."""
    kubelet = tmp_path / "kubelet"
    for name in (*OURS, *OTHERS):
        path = kubelet / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return kubelet


def options(node: Path) -> list[str]:
    socket = node / "device-plugins" / "kubelet.sock"
    return ["--node", "--cdi-dir", str(node / "cdi"), "--kubelet-socket", str(socket)]


def make(allot: Allot, node: Path, name: str) -> None:
    given = ["--memory", "1Gi", "--name", name, "--simulated", "t4", "--cdi-dir", str(node / "cdi")]
    done = allot("cdi", "create", *given)
    assert done.returncode == 0, done.stderr


def test_it_removes_what_is_allotments_alone(allot: Allot, node: Path) -> None:
    make(allot, node, "left")
    assert len(files(node)) == len(OURS) + len(OTHERS) + 1
    done = allot("uninstall", *options(node))
    assert done.returncode == 0, done.stderr
    assert files(node) == {*OTHERS}
    assert not allot.state.exists()
    assert f"{allot.state}: removed" in done.stdout
    again = allot("uninstall", *options(node))
    assert (again.returncode, again.stdout) == (0, "")


def test_a_program_in_a_share_keeps_everything(allot: Allot, node: Path) -> None:
    make(allot, node, "idle")
    before = files(node)
    share = ("--memory", "1Gi", "--name", "busy", "--simulated", "t4")
    command = allot.command("run", *share, "--", "sh", "-c", "echo begun; exec sleep 60")
    program = subprocess.Popen(command, env=allot.environment(), stdout=subprocess.PIPE, text=True)
    assert program.stdout
    try:
        assert program.stdout.readline() == "begun\n"
        done = allot("uninstall", *options(node))
        assert done.returncode != 0
        assert "programs use shares on this node: busy (" in done.stderr
        assert files(node) == before
        shares = json.loads(allot("ps", "-o", "json").stdout)["shares"]
        assert {each["name"] for each in shares} == {"busy", "idle"}
    finally:
        program.terminate()
        program.communicate()


@pytest.mark.parametrize("lock", ["agent.lock", "front.lock"])
def test_beside_an_agent_nothing_is_removed(allot: Allot, node: Path, lock: str) -> None:
    make(allot, node, "left")
    before = files(node)
    with (allot.state / lock).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = allot("uninstall", *options(node))
    assert done.returncode != 0
    assert "error: an agent runs on this node" in done.stderr
    assert files(node) == before
