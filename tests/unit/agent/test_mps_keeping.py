# SPDX-License-Identifier: Apache-2.0
"""Keeping the MPS daemons of a node: real shares, real daemons, and agents that come and go."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kubelet_twin import ReportsTwin
from patience import wait_until

from allotment.agent.mps_keeping import LOST, MpsKeeping
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import BusyError, PrerequisiteError, StateError
from allotment.model.modes import MIG, MPS, SOFT
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareId
from allotment.modes.mps.control import Control, with_namespaces
from allotment.modes.mps.state import DaemonState, MpsStatus, process_start
from allotment.modes.mps.supervisor import Timing
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import control_of, part_of, parts_there, place_of
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares
from allotment.shares.record import LoadedShare
from allotment.shares.recovery import list_shares

BRIEF = Timing(look=0.1, idle=0.5, ready=20.0, retry=0.1)
HALF = Compute(5000, 5000, is_governed=True)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="a GPU's compute mode is root's to set"),
]


class Reports(ReportsTwin):
    """Remembers gauges, too."""

    def __init__(self) -> None:
        super().__init__()
        self.gauges: dict[tuple[str, ...], float] = {}

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[name, labels.get("device", "")] = value


class Node:
    """Two simulated GPUs, and agents one after the other."""

    def __init__(self, root: Path, spec: str = "a100-80gb:2") -> None:
        self.machine = machine_path(root, spec)
        self.devices = read_machine(self.machine).devices
        self.uuids = [each.uuid for each in self.devices]
        self.folder = StateFolder(root / "state")
        self.cdi = root / "cdi"
        self.shares = PodShares(
            self.folder, machine=self.machine, spec=spec, folders=NodeFolders(cdi=self.cdi)
        )
        self.reports = Reports()
        self.agents: list[MpsKeeping] = []
        self.agent = self.start()

    def start(self) -> MpsKeeping:
        """Starts the next agent; the last one has ended."""
        self.folder.prepare()
        self.agent = MpsKeeping(
            self.folder, reports=self.reports, machine=self.machine, timing=BRIEF
        )
        self.agents.append(self.agent)
        return self.agent

    def share(
        self,
        name: str,
        *,
        gpu: int = 0,
        compute: Compute = HALF,
        injection: Injection | None = None,
        mode: str = MPS,
        resource: str = "allotment.dev/gpu",
    ) -> Share:
        number = abs(hash(name)) % (1 << 40)
        return self.shares.prepare(
            ShareOrder(
                Request(parse_memory("4Gi"), compute=compute, mode=mode),
                injection or Injection.CDI,
                id=ShareId(f"{number:012x}"),
                owner=Owner(
                    uid=PodUid(f"uid-{name}"),
                    namespace="lab",
                    pod=name,
                    container="train",
                    kind=ContainerKind.REGULAR,
                    resource=resource,
                ),
                devices=(self.uuids[gpu],),
            ),
            NodePolicy(devices=self.devices),
        )

    def edits(self, share: Share) -> dict[str, Any]:
        (path,) = self.cdi.glob(f"*{share.id}.json")
        (device,) = json.loads(path.read_text())["devices"]
        found: dict[str, Any] = device["containerEdits"]
        return found

    def ready(self, share: Share) -> None:
        asyncio.run(self.agent.ready(share))

    def tell(self, *, until: Callable[[], object]) -> None:
        """Lets the agent's loop go round until something holds."""

        async def main() -> None:
            task = asyncio.create_task(self.agent.run())
            try:
                async with asyncio.timeout(40):
                    while not until():  # noqa: ASYNC110 - of files as well
                        await asyncio.sleep(0.02)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(main())

    def gauged(self, gpu: int = 0) -> bool:
        return self.reports.gauges.get(("mps_daemon_up", self.uuids[gpu])) == 1.0

    def status(self, gpu: int = 0) -> MpsStatus:
        return place_of(self.folder, self.uuids[gpu]).status()

    def settings(self, gpu: int = 0) -> GpuSettings:
        return GpuSettings(self.uuids[gpu], machine=self.machine)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for gpu in range(len(self.uuids)):
            pid = self.status(gpu).daemon
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path, native_dir: Path) -> Iterator[Node]:
    assert native_dir.is_dir()
    made = Node(tmp_path)
    yield made
    made.close()


def test_a_daemon_is_there_before_the_first_container_and_gone_after_the_last(node: Node) -> None:
    share = node.share("one")
    assert node.status().state is DaemonState.STOPPED
    node.ready(share)
    assert node.status().state is DaemonState.READY
    assert node.settings().compute_mode() is ComputeMode.EXCLUSIVE_PROCESS
    assert node.status(1).daemon is None
    daemon = node.status().daemon
    node.ready(node.share("two"))
    assert node.status().daemon == daemon
    for each in node.shares.owned():
        node.shares.end(each.id)
    wait_until(lambda: node.status().state is DaemonState.STOPPED, "it goes on")
    assert node.settings().compute_mode() is ComputeMode.DEFAULT
    node.ready(node.share("three"))
    assert node.status().daemon not in {None, daemon}


def test_a_container_gets_its_daemon_and_its_part(node: Node) -> None:
    low = Compute(2500, 2500, kind=ComputeClass.BESTEFFORT, is_governed=True)
    share = node.share("low", compute=low)
    edits = node.edits(share)
    pipes = str(place_of(node.folder, node.uuids[0]).pipes)
    assert edits["env"] == [
        f"CUDA_MPS_PIPE_DIRECTORY={pipes}",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
        "CUDA_MPS_CLIENT_PRIORITY=1",
    ]
    mounts = {each["containerPath"]: each for each in edits["mounts"]}
    # Whichever protocol the daemon will have: a link to its folder, or the namespace's socket.
    part = place_of(node.folder, node.uuids[0]).part(share.id)
    assert mounts[pipes]["hostPath"] == str(part)
    assert "ro" in mounts[pipes]["options"]
    assert mounts["/dev/shm"]["hostPath"] == "/dev/shm"  # noqa: S108 - the driver's
    assert "rw" in mounts["/dev/shm"]["options"]  # noqa: S108
    # It takes no turns, so that there is nothing of them to be mounted.
    assert not [each for each in mounts if "contract" in each or "leases" in each]
    assert all(
        Path(each["hostPath"]).exists() for each in mounts.values() if each is not mounts[pipes]
    )


def test_without_cdi_it_is_refused_before_anything_is_made(node: Node) -> None:
    with pytest.raises(PrerequisiteError, match="needs a container runtime with CDI"):
        node.share("one", injection=Injection.MOUNTS)
    assert node.shares.owned() == ()


def test_a_killed_daemon_is_back_and_its_pods_are_told(node: Node) -> None:
    node.ready(node.share("one"))
    node.ready(node.share("two"))
    node.ready(node.share("other", gpu=1))
    node.tell(until=lambda: node.gauged() and node.gauged(1))
    neighbour = node.status(1)
    daemon = node.status().daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: node.status().restarts == 1, "it is not back")
    node.tell(until=lambda: len(node.reports.events) >= 2)
    assert [(pod, reason) for pod, reason, _ in node.reports.events] == [
        ("one", LOST),
        ("two", LOST),
    ]
    assert node.status(1) == neighbour
    assert [name for name, _ in node.reports.counts] == ["mps_restarts", "mps_losses"]


def test_the_next_agent_goes_on_with_the_daemon_and_keeps_it(node: Node) -> None:
    node.ready(node.share("one"))
    before = node.status()
    node.agent.close()
    assert not place_of(node.folder, node.uuids[0]).is_owned()
    node.start().look()
    wait_until(lambda: place_of(node.folder, node.uuids[0]).is_owned(), "nobody keeps it")
    assert node.status().daemon == before.daemon
    assert before.daemon is not None
    os.kill(before.daemon, signal.SIGKILL)
    wait_until(lambda: node.status().restarts == 1, "it is not back")


def test_what_was_lost_while_no_agent_was_there_is_told_by_the_next(node: Node) -> None:
    node.ready(node.share("one"))
    daemon = node.status().daemon
    assert daemon is not None
    node.agent.close()
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: process_start(daemon) is None, "it lives")
    node.start()
    newcomer = node.share("two")
    node.ready(newcomer)
    node.tell(until=lambda: node.reports.events)
    (loss,) = node.status().losses
    assert loss.shares == ("lab/one/train",)
    assert [(pod, reason) for pod, reason, _ in node.reports.events] == [("one", LOST)]


@pytest.mark.parametrize("mode", [ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS])
def test_a_gpu_that_is_somebody_elses_is_refused_until_it_is_free(
    node: Node, mode: ComputeMode
) -> None:
    node.settings().set_compute_mode(mode)
    unfit = node.agent.unfit(MPS, node.uuids)
    assert list(unfit) == node.uuids[:1]
    assert mode.name in unfit[node.uuids[0]]
    assert node.agent.unfit("soft", node.uuids) == {}
    share = node.share("one")
    for _ in range(2):
        with pytest.raises(BusyError, match=f"compute mode {mode.name}, set outside Allotment"):
            node.ready(share)
    assert node.settings().compute_mode() is mode
    node.settings().set_compute_mode(ComputeMode.DEFAULT)
    node.ready(share)
    assert node.agent.unfit(MPS, node.uuids) == {}


def test_it_waits_beside_who_keeps_the_daemon_and_follows(node: Node) -> None:
    first, second = node.agent, node.start()
    one, two = node.share("one"), node.share("two")
    asyncio.run(first.ready(one))
    supervised = node.status()
    asyncio.run(second.ready(two))
    assert node.status().daemon == supervised.daemon
    first.close()  # as one that is killed: the lock goes, the daemon stays
    wait_until(lambda: place_of(node.folder, node.uuids[0]).is_owned(), "nobody keeps it")
    asyncio.run(second.ready(two))
    assert node.status().daemon == supervised.daemon
    assert node.status().restarts == 0


def test_many_at_once_have_one_daemon(node: Node) -> None:
    shares = [node.share(f"pod-{number}", compute=Compute(500, 500, is_governed=True))
              for number in range(12)]  # fmt: skip

    async def main() -> None:
        await asyncio.gather(*(node.agent.ready(each) for each in shares))

    asyncio.run(main())
    started = [line for line in place_of(node.folder, node.uuids[0]).root.joinpath("events.log")
               .read_text().splitlines() if "is ready" in line]  # fmt: skip
    assert len(started) == 1


SOFT_HALF = Compute(5000, 10000, is_governed=True)


def test_the_gpu_is_anothers_modes_as_soon_as_its_share_is_there(node: Node) -> None:
    slow_agent(node, look=0.1)
    node.ready(node.share("one"))
    node.shares.end(node.shares.owned()[0].id)
    assert node.status().state is DaemonState.READY
    node.ready(node.share("two", mode=SOFT, compute=SOFT_HALF))
    assert node.settings().compute_mode() is ComputeMode.DEFAULT
    assert node.status().state is DaemonState.STOPPED


def test_what_an_agent_left_behind_is_put_right_by_the_next(node: Node) -> None:
    node.ready(node.share("one"))
    node.agent.close()
    daemon = node.status().daemon
    node.shares.end(node.shares.owned()[0].id)
    assert node.settings().compute_mode() is ComputeMode.EXCLUSIVE_PROCESS
    node.start().look()
    wait_until(lambda: not node.status().holds_gpu, "it stays")
    assert node.settings().compute_mode() is ComputeMode.DEFAULT
    assert node.status().daemon is None
    assert daemon is not None
    assert node.status().state is DaemonState.STOPPED


def test_a_daemon_that_cannot_start_again_leaves_the_gpu_with_the_last_share(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: Control) -> subprocess.Popen[bytes]:
        raise PrerequisiteError("it cannot be started")

    share = node.share("one")
    node.ready(share)
    monkeypatch.setattr(Control, "start", start)
    daemon = node.status().daemon
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: node.status().state is DaemonState.FAILED, "it is back")
    assert node.settings().compute_mode() is ComputeMode.EXCLUSIVE_PROCESS
    node.shares.end(share.id)
    node.ready(node.share("two", mode=SOFT, compute=SOFT_HALF))
    assert node.settings().compute_mode() is ComputeMode.DEFAULT


def test_a_state_folder_that_is_removed_takes_its_daemon_with_it(node: Node) -> None:
    node.ready(node.share("one"))
    daemon = node.status().daemon
    assert daemon is not None
    # In one step: who keeps the daemon writes into a folder that is half removed.
    node.folder.root.rename(node.folder.root.with_name("removed"))
    shutil.rmtree(node.folder.root.with_name("removed"))
    wait_until(lambda: process_start(daemon) is None, "it goes on")
    wait_until(lambda: node.settings().compute_mode() is ComputeMode.DEFAULT, "it is kept")
    assert not node.folder.exists()


def test_a_gpu_that_is_wanted_for_slices_is_given_up_by_its_daemon(node: Node) -> None:
    slow_agent(node, look=0.1)
    share = node.share("one")
    node.ready(share)
    assert node.agent.unfit(MIG, node.uuids) == {}  # it is not free, but for a share
    node.shares.end(share.id)
    assert list(node.agent.unfit(MIG, node.uuids)) == node.uuids[:1]
    wait_until(lambda: node.agent.unfit(MIG, node.uuids) == {}, "it goes on")
    assert node.settings().compute_mode() is ComputeMode.DEFAULT


def test_without_cdi_a_replica_is_told_of_its_daemon_before_its_share_is_made(node: Node) -> None:
    envs, mounts = node.shares.mps_by_mounts(node.uuids[0], percent=25)
    pipes = str(place_of(node.folder, node.uuids[0]).pipes)
    assert envs == {
        "CUDA_MPS_PIPE_DIRECTORY": pipes,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    part = place_of(node.folder, node.uuids[0]).part("part_25")
    assert [each.host_path for each in mounts] == [str(part), "/dev/shm"]  # noqa: S108 - the driver's
    assert mounts[0].container_path == pipes
    assert [each.is_read_only for each in mounts] == [True, False]
    share = node.share("one", injection=Injection.MOUNTS, resource="nvidia.com/gpu")
    assert share.mode == MPS


@pytest.fixture
def newer_node(tmp_path: Path, native_dir: Path) -> Iterator[Node]:
    assert native_dir.is_dir()
    description = tmp_path / "machine.yaml"
    description.write_text("driver: 615.71.09\ngpus: [{model: a100-80gb, count: 2}]\n")
    made = Node(tmp_path, str(description))
    yield made
    made.close()


def test_a_container_has_the_socket_of_its_namespace_and_of_no_other(newer_node: Node) -> None:
    shares = [newer_node.share(name) for name in ("one", "two")]
    for share in shares:
        newer_node.ready(share)
    place = place_of(newer_node.folder, newer_node.uuids[0])
    assert newer_node.status().protocol == 3
    for share in shares:
        mounts = {each["containerPath"]: each for each in newer_node.edits(share)["mounts"]}
        part = Path(mounts[str(place.pipes)]["hostPath"])
        assert [path.name for path in part.iterdir()] == ["control"]
        assert (part / "control").samefile(place.pipes / "shares" / share.id / "control")
    newer_node.shares.end(shares[0].id)
    wait_until(lambda: newer_node.status().parts == (shares[1].id,), "its part is left behind")


def test_replicas_without_cdi_have_a_part_by_their_size(newer_node: Node) -> None:
    quarter = Compute(2500, 2500, is_governed=True)
    share = newer_node.share(
        "one", compute=quarter, injection=Injection.MOUNTS, resource="nvidia.com/gpu"
    )
    _, mounts = newer_node.shares.mps_by_mounts(newer_node.uuids[0], percent=25)
    newer_node.ready(share)
    assert newer_node.status().parts == ("part_25",)
    assert (Path(mounts[0].host_path) / "control").is_socket()
    # Shares of one size have the part together: their memory is each one's ledger's.
    assert limits_on(newer_node, "part_25") == ("25", "-")


def limits_on(node: Node, part: str) -> tuple[str, str]:
    older: Control = control_of(node.folder, node.uuids[0], machine=node.machine)
    control = with_namespaces(older)
    percentage, memory = (
        control._do("namespace", "get", part, "shares", field)  # noqa: SLF001 - what it said
        for field in ("active-thread-percentage", "pinned-memory-limit")
    )
    return percentage, memory


@pytest.mark.parametrize("injection", [Injection.CDI, Injection.MOUNTS], ids=["cdi", "mounts"])
@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "missing"])
def test_a_share_that_cannot_be_read_for_a_while_keeps_its_part(
    newer_node: Node, injection: Injection, *, is_there: bool
) -> None:
    node = newer_node
    kept = node.share("kept", injection=injection, resource="nvidia.com/gpu")
    tenth = Compute(1000, 1000, is_governed=True)
    other, ended = (node.share(name, compute=tenth) for name in ("other", "ended"))
    for share in (kept, other, ended):
        node.ready(share)
    part = part_of(kept)
    assert node.status().parts == tuple(sorted((part, other.id, ended.id)))
    folder = place_of(node.folder, node.uuids[0]).part(part)
    before = (folder.stat().st_ino, (folder / "control").stat().st_ino)
    record = node.folder.share(kept.id) / "share.json"
    text = record.read_bytes()
    record.unlink()
    if is_there:
        record.write_bytes(b"{")
    shutil.rmtree(node.folder.share(ended.id))
    wait_until(lambda: ended.id not in node.status().parts, "it stays")
    assert node.status().parts == tuple(sorted((part, other.id)))
    record.write_bytes(text)
    node.ready(kept)
    assert (folder.stat().st_ino, (folder / "control").stat().st_ino) == before
    assert limits_on(node, part)[0] == "50"


def test_parts_that_cannot_be_read_are_not_known(node: Node) -> None:
    def unreadable() -> list[LoadedShare]:
        raise StateError("too many open files")

    share = node.share("one")
    (uuid, _) = node.uuids
    found = list_shares(node.folder)
    assert set(parts_there(node.folder, lambda: found, uuid) or {}) == {share.id}
    assert parts_there(node.folder, unreadable, uuid) is None
    unread = parts_there(node.folder, list, uuid)
    assert unread is not None
    assert {share.id, "part_0", "part_25", "part_100"} <= unread.keys()
    assert set(unread.values()) == {None}
    shutil.rmtree(node.folder.root)
    assert parts_there(node.folder, list, uuid) is None


def slow_agent(node: Node, *, look: float) -> MpsKeeping:
    node.agent.close()
    slow = Timing(look=look, idle=60.0, ready=20.0, retry=0.1)
    node.agent = MpsKeeping(node.folder, reports=node.reports, machine=node.machine, timing=slow)
    node.agents.append(node.agent)
    return node.agent


def test_shares_that_cannot_be_read_are_no_reason_to_give_the_gpu_up_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []

    def fail(_: Bookings) -> list[LoadedShare]:
        looks.append(time.monotonic())
        raise StateError("too many open files")

    slow_agent(node, look=0.1)
    node.ready(node.share("one"))
    daemon = node.status().daemon
    with monkeypatch.context() as patch:
        patch.setattr(Bookings, "read", fail)
        wait_until(lambda: len(looks) > 12, "nobody looks")
    assert (node.status().state, node.status().daemon) == (DaemonState.READY, daemon)


def test_an_agent_that_ends_does_not_wait_for_the_next_look(node: Node) -> None:
    agent = slow_agent(node, look=3600.0)
    node.ready(node.share("one"))
    agent.close()
    assert not place_of(node.folder, node.uuids[0]).is_owned()


def test_a_compute_mode_that_cannot_be_put_back_is_tried_with_pauses_that_double(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []
    put = GpuSettings.set_compute_mode

    def refuse(gpu: GpuSettings, mode: ComputeMode) -> None:
        if mode is not ComputeMode.DEFAULT:
            put(gpu, mode)
            return
        tries.append(time.monotonic())
        raise PrerequisiteError("the driver has a fault")

    share = node.share("one")
    node.ready(share)
    monkeypatch.setattr(GpuSettings, "set_compute_mode", refuse)
    node.shares.end(share.id)
    wait_until(lambda: len(tries) >= 5, "it is given up")
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert all(pause >= BRIEF.retry * 2**number for number, pause in enumerate(pauses[:4]))
    monkeypatch.undo()
    wait_until(lambda: not node.status().holds_gpu, "it is not put back")
