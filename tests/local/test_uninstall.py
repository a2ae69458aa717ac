# SPDX-License-Identifier: Apache-2.0
"""`allot uninstall --node`: what an agent left goes, with all shares, and no file of others."""

import fcntl
import json
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allotment.model.errors import UsageError
from allotment.modes.mig.journal import Journal
from allotment.shares.folders import StateFolder
from allotment.shares.mig.allocate import free_orphans

Allot = Any  # tests/conftest.py: CommandLine
OURS = (
    "device-plugins/allotment-offer.json",
    "device-plugins/allotment-nvidia.com_gpu.sock",
    "device-plugins/.allotment-x",
    "plugins/gpu.allotment.dev/dra-0123abcd.sock",
    "plugins/gpu.nvidia.com/dra-0123abcd.sock",
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
def node() -> Iterator[Path]:
    """The kubelet's folder with what agents and others left, and the folder of CDI specs in it."""
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="node-") as folder:
        for name in (*OURS, *OTHERS):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        yield Path(folder)


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


def test_beside_a_plugin_that_answers_nothing_is_removed(allot: Allot, node: Path) -> None:
    """Its agent may have another state folder."""
    path = node / "device-plugins" / "allotment-nvidia.com_gpu.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as plugin:
        plugin.bind(str(path))
        plugin.listen()
        before = files(node)
        done = allot("uninstall", *options(node))
        assert done.returncode != 0
        assert "error: an agent runs on this node" in done.stderr
        assert files(node) == before


def test_it_takes_root(allot: Allot, node: Path) -> None:
    before = files(node)
    command = ["setpriv", "--reuid=65534", "--clear-groups", *allot.command("uninstall", "--node")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=allot.environment(), check=False
    )
    assert done.returncode == UsageError.exit_code, done.stderr
    assert "only root can remove" in done.stderr
    assert files(node) == before


def test_warm_slices_go_too(allot: Allot) -> None:
    cut = ("--simulated", "h100-80gb", "--mode", "mig", "--memory", "8Gi", "--mig-keep", "1h")
    done = allot("run", *cut, "--", "true")
    assert done.returncode == 0, done.stderr
    folder = StateFolder.at(allot.state)

    def slices() -> int:
        return sum(len(Journal(each).read().records) for each in folder.mig.iterdir())

    assert free_orphans(folder) == []
    assert slices() == 1
    assert free_orphans(folder, keeps_warm=False) == []
    assert slices() == 0
