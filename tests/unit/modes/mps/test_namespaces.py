# SPDX-License-Identifier: Apache-2.0
"""Daemons with namespaces: what is made of the shares, and when the older way is taken instead.

The daemons are simulated ones of a driver that has protocol 3; those that do not do as documented
are the same program behind a script.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from allotment.devices.compute_modes import ComputeMode
from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.libraries import SIMULATED, library_path
from allotment.model.errors import PrerequisiteError
from allotment.model.structs import replace
from allotment.modes.mps.control import (
    Control,
    MpsUnreachableError,
    NamespaceControl,
    folder_of,
    with_namespaces,
)
from allotment.modes.mps.daemons import Parts
from allotment.modes.mps.mode import Limits
from allotment.modes.mps.state import DaemonState, MpsPlace, MpsStatus, process_start
from allotment.modes.mps.supervisor import Supervisor, Timing

BRIEF = Timing(look=0.05, idle=0.3, ready=20.0, retry=0.05)
HALF = Limits(percentage=50, memory_mib=4096)
pytestmark = pytest.mark.timeout(90)


class Gpu:
    """A GPU's driver, as far as a supervisor asks it."""

    mode = ComputeMode.DEFAULT

    def compute_mode(self) -> ComputeMode:
        return self.mode

    def set_compute_mode(self, mode: ComputeMode) -> None:
        self.mode = mode

    def computing(self) -> tuple[int, ...]:
        return ()


class Scene:
    """A place of a GPU whose driver has protocol 3, and the shares on it."""

    def __init__(self, root: Path) -> None:
        description = root / "machine.yaml"
        description.write_text("driver: 615.71.09\ngpus: [a100-80gb]\n")
        machine = machine_path(root, str(description))
        (device,) = SimulatedMachine(machine).devices()
        self.root = root
        self.place = MpsPlace(root / "mps" / device.uuid)
        self.place.prepare(simulated=True)
        self.program = str(library_path(SIMULATED) / "nvidia-cuda-mps-control")
        self.control = Control(
            self.place.pipes,
            self.place.logs,
            device.uuid,
            self.program,
            {"ALLOTMENT_SIMULATED_MACHINE": str(machine)},
        )
        self.gpu = Gpu()
        self.wanted: dict[str, Limits | None] = {"one": HALF}

    @property
    def newer(self) -> NamespaceControl:
        return with_namespaces(self.control)

    def supervisor(self, control: Control | None = None, *, timing: Timing = BRIEF) -> Supervisor:
        return Supervisor(
            self.place,
            control or self.control,
            self.gpu,
            shares=lambda: tuple(self.wanted),
            parts=lambda: dict(self.wanted),
            timing=timing,
        )

    def behind(self, cases: str) -> Control:
        """The program, save what a script's `case` over its arguments does itself."""
        path = self.root / "nvidia-cuda-mps-control"
        path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}\nesac\nexec {self.program} "$@"\n')
        path.chmod(0o755)
        return replace(self.control, program=str(path))


@pytest.fixture
def scene(tmp_path: Path, native_dir: Path) -> Iterator[Scene]:
    assert native_dir.is_dir()
    made = Scene(tmp_path)
    yield made
    pid = made.place.status().daemon
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stepping_until(supervisor: Supervisor, holds: Callable[[MpsStatus], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds(supervisor.status):
        pause = supervisor.step()
        assert pause is not None
        assert time.monotonic() < deadline, supervisor.status
        supervisor.wait(min(pause, 0.1))


def has_restarted(before: int, status: MpsStatus) -> bool:
    return status.restarts > before


def socket_of(scene: Scene, name: str) -> Path:
    return scene.place.part(name) / "control"


def test_a_part_is_the_socket_of_its_namespace(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    status = scene.place.status()
    assert (status.state, status.protocol, status.parts) == (DaemonState.READY, 3, ("one",))
    assert scene.place.serves("one") is False  # nobody owns it here
    assert socket_of(scene, "one").samefile(folder_of(scene.newer.pipes, "one") / "control")
    assert [path.name for path in scene.place.part("one").iterdir()] == ["control"]
    supervisor.close()
    assert scene.place.status().protocol == 0


@pytest.mark.parametrize(
    ("cases", "why"),
    [
        ('*"-p 3 -f"*|*"-f -p 3"*) exit 1;;', "ended at once"),
        ('"server create"*) exit 0;;', "no MPS server became active"),
        ('"server set"*) exit 1;;', "server set shares"),
        ('"server set"*) exit 0;;', "namespace default: active-thread-percentage is -, not 1"),
        ('"namespace create"*) echo no >&2; exit 1;;', "namespace create allotment_trial"),
        ('"namespace set"*) exit 0;;', "client-priority is 0, not 1"),
        ('*"get allotment_trial shares pinned"*) echo 7M; exit 0;;', "is 7M, not 512M"),
        ('*"get allotment_trial shares pipe-dir"*) echo /p; exit 0;;', "a namespace is at /p"),
        ('"namespace create one"*) echo full >&2; exit 1;;', "full"),
    ],
    ids=[
        "ends",
        "no server",
        "refuses to hold others",
        "does not hold others",
        "no namespace",
        "no limits",
        "other limits",
        "elsewhere",
        "no part",
    ],
)
def test_a_daemon_that_does_not_do_as_documented_is_followed_by_the_older_one(
    scene: Scene, cases: str, why: str
) -> None:
    timing = replace(BRIEF, ready=3.0)
    supervisor = scene.supervisor(scene.behind(cases), timing=timing)
    supervisor.begin()
    status = scene.place.status()
    assert (status.state, status.protocol, status.parts) == (DaemonState.READY, 2, ("one",))
    assert why in status.older_because
    assert scene.place.part("one").resolve() == scene.place.pipes
    assert scene.control.ask("get_default_active_thread_percentage") == "100.0"
    supervisor.close()


def test_a_mig_device_has_the_older_way(scene: Scene) -> None:
    supervisor = scene.supervisor(replace(scene.control, uuid="MIG-1"))
    assert supervisor._daemon._why_older() == "protocol 3 serves no MIG devices"  # noqa: SLF001


def test_shares_that_began_by_the_older_way_keep_to_it(scene: Scene) -> None:
    first = scene.supervisor(scene.behind('"namespace create"*) exit 1;;'))
    first.begin()
    assert first.status.protocol == 2
    daemon = first.status.daemon
    assert daemon is not None
    first._daemon._older = scene.control  # noqa: SLF001 - it would have namespaces by now
    os.kill(daemon, signal.SIGKILL)
    stepping_until(first, lambda status: status.restarts == 1)
    assert first.status.protocol == 2
    assert first.status.older_because == "some shares started without namespaces"
    first.close()
    # None is left: the next ones begin anew.
    second = scene.supervisor()
    second.begin()
    assert second.status.protocol == 3
    second.close()


@pytest.mark.parametrize("is_there", [True, False], ids=["there", "gone"])
def test_the_older_way_is_kept_for_as_long_as_its_shares(scene: Scene, *, is_there: bool) -> None:
    first = scene.supervisor(scene.behind('"namespace create"*) exit 1;;'))
    first.begin()
    daemon = first.status.daemon
    assert (first.status.protocol, daemon is not None) == (2, True)
    first.leave()
    os.kill(daemon or 0, signal.SIGKILL)
    os.waitpid(daemon or 0, 0)
    with pytest.raises(PrerequisiteError):
        scene.supervisor(scene.behind("*) exit 1;;")).begin()
    assert scene.place.status().state is DaemonState.FAILED
    scene.wanted = {"two": HALF, **({"one": HALF} if is_there else {})}
    last = scene.supervisor()
    last.begin()
    assert last.status.protocol == (2 if is_there else 3)
    last.close()


def percentage_of_others(scene: Scene) -> str:
    field = "active-thread-percentage"
    return scene.newer._do("namespace", "get", "default", "shares", field)  # noqa: SLF001


def test_a_supervisor_that_follows_holds_who_comes_by_no_namespace(scene: Scene) -> None:
    daemon = scene.newer.start()
    while not scene.newer.answers():
        assert daemon.poll() is None
    # The one before was killed between these two commands.
    scene.newer._do("server", "create", "shares")  # noqa: SLF001
    assert percentage_of_others(scene) == "-"
    start = process_start(daemon.pid) or 0
    scene.place.write(
        MpsStatus(state=DaemonState.STARTING, daemon=daemon.pid, daemon_start=start, protocol=3)
    )
    supervisor = scene.supervisor()
    supervisor.begin()
    assert (supervisor.status.daemon, supervisor.status.protocol) == (daemon.pid, 3)
    assert percentage_of_others(scene) == "1"
    supervisor.close()
    daemon.wait()


def test_who_cannot_be_held_at_once_is_held_later(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    scene.newer._do("server", "set", "shares", "--active-thread-percentage=90")  # noqa: SLF001
    supervisor.leave()
    broken = scene.behind('"server set"*) echo busy >&2; exit 1;;')
    follower = scene.supervisor(broken)
    follower.begin()
    follower.step()
    assert follower.status.state is DaemonState.READY
    assert percentage_of_others(scene) == "90"
    follower._daemon.control = scene.newer  # noqa: SLF001
    follower.step()
    assert percentage_of_others(scene) == "1"
    told = (scene.place.root / "events.log").read_text()
    assert told.count("programs besides the shares' are not held: server set shares") == 1
    follower.close()


@pytest.mark.parametrize("is_late", [True, False], ids=["beside ours", "in its place"])
def test_a_server_besides_ours_is_ended(scene: Scene, *, is_late: bool) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    (server,) = scene.newer.servers()
    if not is_late:  # a program that connects then has one made for it
        os.kill(server, signal.SIGKILL)
    scene.newer._do("server", "create", f"--uid={os.geteuid()}")  # noqa: SLF001
    assert scene.newer.others() == (f"uid_{os.geteuid()}",)
    stepping_until(supervisor, lambda status: bool(status.losses) is not is_late)
    supervisor.step()
    assert scene.newer.others() == ()
    assert percentage_of_others(scene) == "1"
    assert supervisor.status.parts == ("one",)
    supervisor.close()


def test_a_part_stays_where_it_is_when_its_daemon_is_followed_by_another(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    folder = scene.place.part("one").stat().st_ino
    for cases in ("", '"namespace create"*) exit 1;;'):  # the last one has none
        supervisor._daemon._older = scene.behind(cases)  # noqa: SLF001
        daemon, restarts = supervisor.status.daemon, supervisor.status.restarts
        assert daemon is not None
        before = socket_of(scene, "one").stat().st_ino
        os.kill(daemon, signal.SIGKILL)
        stepping_until(supervisor, partial(has_restarted, restarts))
        # A container has it mounted, and is not told again.
        assert scene.place.part("one").stat().st_ino == folder
        assert socket_of(scene, "one").stat().st_ino != before
    assert supervisor.status.protocol == 2
    assert socket_of(scene, "one").samefile(scene.place.pipes / "control")
    supervisor.close()


def test_a_supervisor_that_follows_knows_the_namespaces(scene: Scene) -> None:
    first = scene.supervisor()
    first.begin()
    scene.wanted["two"] = Limits(percentage=12.5)
    del scene.wanted["one"]
    second = scene.supervisor()
    second.begin()
    assert second.status.daemon == first.status.daemon
    assert second.status.parts == ("two",)
    assert scene.newer.namespaces() == {"two"}
    assert second.step() == BRIEF.look
    second.close()
    first.close()  # its child, which a killed one would leave to init


@pytest.mark.parametrize("wanted", [None, {"one": None}], ids=["of all", "of one"])
def test_what_cannot_be_read_for_a_while_stays(
    scene: Scene, wanted: Mapping[str, Limits | None] | None
) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    folder, socket = (path.stat() for path in (scene.place.part("one"), socket_of(scene, "one")))
    readable = supervisor._daemon._part_limits  # noqa: SLF001
    supervisor._daemon._part_limits = lambda: wanted  # noqa: SLF001
    supervisor.step()
    for each in (lambda: wanted, readable):
        supervisor._daemon._part_limits = each  # noqa: SLF001
        supervisor.step()
        assert scene.place.status().parts == ("one",)
        assert scene.newer.namespaces() == {"one"}
        assert scene.place.part("one").stat().st_ino == folder.st_ino
        assert socket_of(scene, "one").stat().st_ino == socket.st_ino
    supervisor.close()


def test_a_daemon_begins_while_nothing_can_be_read(scene: Scene) -> None:
    supervisor = scene.supervisor()
    readable = supervisor._daemon._part_limits  # noqa: SLF001
    supervisor._daemon._part_limits = lambda: None  # noqa: SLF001
    supervisor.begin()
    assert (supervisor.status.state, supervisor.status.parts) == (DaemonState.READY, ())
    supervisor._daemon._part_limits = readable  # noqa: SLF001
    supervisor.step()
    assert supervisor.status.parts == ("one",)
    supervisor.close()


def test_a_namespace_with_clients_is_removed_when_they_have_left(scene: Scene) -> None:
    scene.wanted["two"] = HALF
    supervisor = scene.supervisor()
    supervisor.begin()
    broken = scene.behind('"namespace delete"*) echo it has clients >&2; exit 1;;')
    supervisor._daemon.control = with_namespaces(broken)  # noqa: SLF001
    del scene.wanted["two"]
    supervisor.step()
    assert (supervisor.status.parts, supervisor.status.problem) == (("one",), "")
    assert scene.newer.namespaces() == {"one", "two"}
    supervisor._daemon.control = scene.newer  # noqa: SLF001
    supervisor.step()
    assert scene.newer.namespaces() == {"one"}
    supervisor.close()


def test_a_problem_goes_with_the_share_that_had_it(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    broken = scene.behind('"namespace create two"*) echo full >&2; exit 1;;')
    supervisor._daemon.control = with_namespaces(broken)  # noqa: SLF001
    scene.wanted["two"] = HALF
    supervisor.step()
    assert "full" in scene.place.status().problem
    del scene.wanted["two"]
    supervisor.step()
    assert scene.place.status().problem == ""
    supervisor.close()


def test_a_share_that_comes_is_looked_at_when_the_supervisor_is_woken(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    scene.wanted["two"] = HALF
    scene.place.wake()
    supervisor.wait(3600)  # the test would not end
    supervisor.step()
    assert scene.place.status().parts == ("one", "two")
    supervisor.close()
    scene.place.wake()  # nobody is there to be woken


def test_a_server_that_cannot_be_had_again_is_tried_again(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    working = supervisor._daemon.control  # noqa: SLF001
    broken = scene.behind('"server create"*) echo full >&2; exit 1;;')
    supervisor._daemon.control = with_namespaces(broken)  # noqa: SLF001
    (server,) = scene.newer.servers()
    os.kill(server, signal.SIGKILL)
    stepping_until(supervisor, lambda status: bool(status.losses) and bool(status.problem))
    assert scene.place.status().parts == ()
    supervisor._daemon.control = working  # noqa: SLF001
    stepping_until(supervisor, lambda status: status.parts == ("one",))
    assert len(supervisor.status.losses) == 1
    assert socket_of(scene, "one").samefile(folder_of(scene.newer.pipes, "one") / "control")
    supervisor.close()


def test_a_server_that_the_daemon_lists_after_its_end_is_one_loss(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    (server,) = scene.newer.servers()
    listed = scene.root / "listed"
    listed.write_text(scene.newer._do("server", "list", "--format=csv,noheader"))  # noqa: SLF001
    late = scene.behind(f'"server list"*) cat {listed}; exit 0;;')
    supervisor._daemon.control = with_namespaces(late)  # noqa: SLF001
    os.kill(server, signal.SIGKILL)
    stepping_until(supervisor, lambda status: bool(status.losses))
    for _ in range(3):
        supervisor.step()
    assert len(supervisor.status.losses) == 1
    supervisor.close()


def test_a_part_that_cannot_be_made_is_tried_again_and_named(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    working = supervisor._daemon.control  # noqa: SLF001
    broken = scene.behind('"namespace create two"*) echo full >&2; exit 1;;')
    supervisor._daemon.control = with_namespaces(broken)  # noqa: SLF001
    scene.wanted["two"] = HALF
    supervisor.step()
    assert scene.place.status().parts == ("one",)
    assert "full" in scene.place.status().problem
    supervisor._daemon.control = working  # noqa: SLF001
    supervisor.step()
    assert scene.place.status().parts == ("one", "two")
    assert scene.place.status().problem == ""
    supervisor.close()


@pytest.mark.parametrize(
    ("limits", "held"),
    [
        (Limits(percentage=12.5, memory_mib=100), ("12", "100M", "0")),
        (Limits(is_below_normal=True), ("-", "-", "1")),
        (Limits(percentage=99.99, memory_mib=1 << 20), ("99", "1024G", "0")),
    ],
)
def test_a_namespace_has_no_more_than_its_share(
    scene: Scene, limits: Limits, held: tuple[str, ...]
) -> None:
    scene.wanted = {"one": limits}
    supervisor = scene.supervisor()
    supervisor.begin()
    fields = ("active-thread-percentage", "pinned-memory-limit", "client-priority")
    said = [scene.newer._do("namespace", "get", "one", "shares", each) for each in fields]  # noqa: SLF001
    assert tuple(said) == held
    supervisor.close()


def test_what_a_daemon_refuses_is_said(scene: Scene) -> None:
    supervisor = scene.supervisor()
    supervisor.begin()
    with pytest.raises(MpsUnreachableError, match="there is a namespace: one"):
        scene.newer.create("one")
    with pytest.raises(MpsUnreachableError, match="no such namespace: none"):
        scene.newer.delete("none")
    supervisor.close()


wanted_maps = st.dictionaries(
    st.sampled_from(["a1", "b2", "c3", "part_25"]),
    st.none()
    | st.builds(
        Limits,
        percentage=st.none() | st.integers(1, 100).map(float),
        memory_mib=st.none() | st.integers(1, 200 << 10),
        is_below_normal=st.booleans(),
    ),
)


@settings(max_examples=examples(1 / 4), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(wanted_maps, max_size=4), is_newer=st.booleans())
def test_there_are_parts_for_the_shares_and_no_others(
    scene: Scene, changes: list[Mapping[str, Limits | None]], *, is_newer: bool
) -> None:
    control = scene.newer if is_newer else scene.control
    daemon = control.start()
    try:
        while not control.answers():
            assert daemon.poll() is None
        if is_newer:
            control.start_server()
        parts = Parts(scene.place)
        made = set[str]()
        for wanted in (*changes, {}):
            assert parts.update(control, wanted) == ""
            assert parts.are(wanted)
            # Of what cannot be read stays what there was.
            made = {name for name, limits in wanted.items() if limits is not None or name in made}
            assert set(parts.names) == made
            assert {path.name for path in scene.place.parts.iterdir()} == made
            assert all((scene.place.part(name) / "control").is_socket() for name in made)
            if is_newer:
                assert scene.newer.namespaces() == made
    finally:
        daemon.kill()
        daemon.wait()
