# SPDX-License-Identifier: Apache-2.0
"""In a state folder for all users, each of them may make any file beside those of the others.

None of these stops the commands of the others, or lets them wait.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from users import as_user

from allotment.cli import doctor, ps, rm, top
from allotment.cli.options import complete_share
from allotment.devices import simulated
from allotment.ledger import leases, reap, set_limit
from allotment.ledger.layout import USAGE_SIZE
from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError, LedgerError, StateError
from allotment.model.shares import Runner, Share, ShareId
from allotment.shares import folders, lifecycle, mps_daemons, recovery
from allotment.shares.cdi import spec_name
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import ModePolicy, read_mode_policies, write_mode_policy
from allotment.shares.placing import ShareOrder
from allotment.shares.record import Traces, write_traces
from allotment.shares.run import command

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
    pytest.mark.timeout(30),
]

NOBODY, DAEMON = 65534, 1
FOREIGN = "0123456789ab"

Make = Callable[..., tuple[Share, Path]]


@pytest.fixture
def common(common_folder: Path, native_dir: Path) -> StateFolder:
    assert native_dir.is_dir()
    folder = StateFolder(common_folder)
    folder.prepare()
    return folder


@pytest.fixture
def make(
    common: StateFolder, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> Make:
    def create(memory: str = "4Gi", **rest: object) -> tuple[Share, Path]:
        return lifecycle.create(common, order(memory, **rest), devices[:1])

    return create


def test_an_ended_share_of_another_user_stops_nobody_and_stays_booked(
    common: StateFolder, make: Make, dead_runner: Runner
) -> None:
    with as_user(DAEMON):
        left, _ = make("10Gi", runner=dead_runner)
    with as_user(NOBODY):
        own, _ = make("4Gi")
        with pytest.raises(DoesNotFitError):
            make("4Gi")
    assert {each.id for each in recovery.list_shares(common)} == {left.id, own.id}
    with as_user(DAEMON), common.locked():
        assert [each.id for each in recovery.recover(common)] == [own.id]


def test_nobody_else_keeps_a_share_from_its_removal(common: StateFolder, make: Make) -> None:
    with as_user(DAEMON):
        share, _ = make()
    with as_user(NOBODY):
        (common.shares / f".old-{share.id}" / "taken").mkdir(parents=True)
    with as_user(DAEMON):
        lifecycle.destroy(common, lifecycle.find(common, share.id), force=True)
    assert recovery.list_shares(common) == []


@pytest.mark.parametrize("is_own", [False, True], ids=["root's", "its own"])
@pytest.mark.parametrize("named", ["id", "another id"])
def test_a_record_removes_no_cdi_spec_but_its_own(
    common: StateFolder,
    make: Make,
    dead_runner: Runner,
    tmp_path: Path,
    named: str,
    *,
    is_own: bool,
) -> None:
    with as_user(NOBODY):
        share, directory = make(runner=dead_runner)
    spec = tmp_path / spec_name(share.id if named == "id" else ShareId(FOREIGN))
    spec.write_text("{}")
    os.chown(spec, NOBODY if is_own else 0, -1)
    path = directory / "share.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cdi_spec": str(spec)}))
    with common.locked():
        assert recovery.recover(common) == []
    assert spec.exists() != (is_own and named == "id")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_file(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_long_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("kind", [a_pipe, an_endless_file, a_long_file])
@pytest.mark.parametrize("name", ["share.json", "processes.json", "policy", "usage", "contract-0"])
def test_no_file_of_a_share_is_waited_for(
    common: StateFolder, make: Make, dead_runner: Runner, name: str, kind: Callable[[Path], None]
) -> None:
    with as_user(NOBODY):
        _, directory = make("1Gi", runner=dead_runner)
        (directory / name).unlink(missing_ok=True)
        kind(directory / name)
    with as_user(DAEMON):
        make("1Gi")
    with common.locked():
        recovery.recover(common)


@pytest.mark.parametrize("name", ["mps", "mps/GPU-1"])
def test_no_link_leads_the_files_of_an_mps_daemon_elsewhere(
    common: StateFolder, tmp_path: Path, name: str
) -> None:
    victim = tmp_path / "root's own"
    (victim / "GPU-1").mkdir(mode=0o700, parents=True)
    victim.chmod(0o700)
    before = sorted(victim.rglob("*"))
    with as_user(NOBODY):
        (common.root / name).parent.mkdir(exist_ok=True)
        (common.root / name).symlink_to(victim)
    place = mps_daemons.place_of(common, "GPU-1")
    with pytest.raises(StateError, match="belongs to another user"):
        place.prepare(simulated=True)
    with pytest.raises(StateError, match="belongs to another user"), place.owned():
        pass
    place.ask_for_way()
    place.wake()
    assert not place.is_owned()
    assert (victim.stat().st_mode & 0o777, sorted(victim.rglob("*"))) == (0o700, before)


def test_no_link_gives_others_policies_of_modes(common: StateFolder, tmp_path: Path) -> None:
    with as_user(NOBODY):
        common.modes.symlink_to(tmp_path)  # root's, with files of others
    (tmp_path / "GPU-1.json").write_text("{")
    assert read_mode_policies(common) == {}
    with pytest.raises(StateError, match="belongs to another user"):
        write_mode_policy(common, "GPU-1", ModePolicy(modes=("soft",)))


@pytest.mark.parametrize("kind", [a_pipe, an_endless_file, a_long_file])
def test_no_contract_is_waited_for(
    common: StateFolder, make: Make, kind: Callable[[Path], None]
) -> None:
    with as_user(NOBODY):
        (common.devices / "GPU-9").mkdir()
        kind(common.devices / "GPU-9" / "contract")
    with as_user(DAEMON):
        make("1Gi")


@pytest.mark.parametrize("kind", [a_pipe, an_endless_file, a_long_file])
def test_no_simulated_machine_is_waited_for(
    common: StateFolder, kind: Callable[[Path], None]
) -> None:
    with as_user(NOBODY):
        (common.simulated / "x").mkdir()
        kind(common.simulated / "x" / "machine")
    shown = CliRunner().invoke(ps.command, ["--state", str(common.root)])
    assert shown.exit_code == 0, shown.exception


def test_a_device_that_another_user_left_unfinished_stops_nobody(
    common: StateFolder, make: Make, devices: tuple[Device, ...]
) -> None:
    with as_user(NOBODY):
        (common.devices / f".new-{devices[0].uuid}" / "seats").mkdir(parents=True)
    with as_user(DAEMON):
        make()


@pytest.mark.parametrize("room", ["shares", "devices"])
def test_a_closed_folder_stops_nobody(common: StateFolder, make: Make, room: str) -> None:
    with as_user(NOBODY):
        (common.root / room / FOREIGN).mkdir(mode=0o700)
    with as_user(DAEMON):
        make()
        assert [each.problem is None for each in recovery.list_shares(common)][-1]


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (ps.command, ()),
        (ps.command, ("-o", "name")),
        (ps.command, ("-o", "json")),
        (ps.command, ("-o", "yaml")),
        (top.command, ("--once",)),
    ],
    ids=["ps", "name", "json", "yaml", "top"],
)
def test_a_folder_whose_name_is_no_text_is_shown(
    common: StateFolder, command: click.Command, options: tuple[str, ...]
) -> None:
    with as_user(NOBODY):
        # By the second sequence a terminal takes a title, which no library for terminals removes.
        directory = common.shares / os.fsdecode(b"\xff\x1b[31m\x1b]0;x\x07")
        directory.mkdir()
        (directory / "share.json").write_text("{}")
    shown = CliRunner().invoke(command, ["--state", str(common.root), *options])
    assert shown.exit_code == 0, shown.exception
    assert "\\udcff" in shown.output.lower()
    assert not {"\x1b", "\x07"} & {*shown.output}


@pytest.mark.parametrize("name", ["$(id)", "a\nfile,b", "--force", "a b", ""])
def test_no_name_that_a_shell_would_run_is_completed(
    common: StateFolder, make: Make, name: str
) -> None:
    share, directory = make(name="train")
    context = click.Context(ps.command)
    context.params["state"] = common.root
    assert complete_share(context, ps.command.params[0], "") == ["train"]
    record = (directory / "share.json").read_text()
    assert f'"name": "{share.name}"' in record
    (directory / "share.json").write_text(
        record.replace(f'"name": "{share.name}"', f'"name": {json.dumps(name)}')
    )
    assert complete_share(context, ps.command.params[0], "") == []


@pytest.mark.parametrize(
    ("written", "negative"),
    [
        (f'"memory_bytes": {4 << 30}', f'"memory_bytes": -{70 << 30}'),
        ('"guarantee": 0', '"guarantee": -9'),
    ],
    ids=["memory", "guarantee"],
)
def test_a_record_with_less_than_nothing_is_damaged(
    common: StateFolder, make: Make, written: str, negative: str
) -> None:
    share, directory = make("4Gi")
    record = (directory / "share.json").read_text()
    assert written in record
    (directory / "share.json").write_text(record.replace(written, negative))
    (found,) = recovery.list_shares(common)
    assert isinstance(found.problem, StateError)
    assert found.limits() == {share.devices[0].uuid: 4 << 30}  # by its ledger


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "ba9876543210"},
        {"created": 1e308},
        {"created": float("nan")},
        {"suspension": {"since": -1e308, "by": "checkpoint", "complete": True, "stopped": []}},
        {"name": "\ud800"},
    ],
    ids=["another's id", "no time", "no number", "no time of suspension", "no text"],
)
def test_a_record_that_no_allot_writes_is_damaged_and_stops_nobody(
    common: StateFolder, make: Make, dead_runner: Runner, changes: dict[str, object]
) -> None:
    with as_user(NOBODY):
        share, directory = make("4Gi", runner=dead_runner)
        path = directory / "share.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with as_user(DAEMON):
        other, _ = make()
        with common.locked():
            found = {each.id: each for each in recovery.recover(common)}
    assert found.keys() == {share.id, other.id}
    assert isinstance(found[share.id].problem, StateError)
    assert found[share.id].limits() == {share.devices[0].uuid: 4 << 30}  # by its ledger


@pytest.mark.parametrize("name", ["lock", "events", "version"])
def test_who_made_a_file_for_all_could_replace_it(common: StateFolder, name: str) -> None:
    os.chown(common.root / name, NOBODY, NOBODY)
    with as_user(DAEMON), pytest.raises(StateError, match=f"{name} belongs to another user"):
        common.prepare()
    (common.root / name).unlink()
    with as_user(DAEMON), pytest.raises(StateError, match="only root may create it"):
        common.prepare()


@pytest.mark.parametrize("part", ["lock", "events", "shares", "queue", "shim", "simulated/lib"])
def test_the_command_in_the_hint_makes_what_is_missing(common: StateFolder, part: str) -> None:
    path = common.root / part
    path.rmdir() if path.is_dir() else path.unlink()
    with as_user(DAEMON), pytest.raises(StateError, match=f"{part} does not exist"):
        common.prepare()
    CliRunner().invoke(doctor.command, ["--state", str(common.root)])
    with as_user(DAEMON):
        common.prepare()


class OvertakenFolder(StateFolder):
    """Another user makes a link after the owners were checked."""

    target: Path

    def _make_parts(self, permissions: int) -> None:
        with as_user(NOBODY):
            self.queue.symlink_to(self.target)
        super()._make_parts(permissions)


def test_no_link_leads_root_to_another_folder(common_folder: Path, tmp_path: Path) -> None:
    folder = OvertakenFolder(common_folder)
    folder.target = tmp_path
    tmp_path.chmod(0o755)
    with pytest.raises(StateError, match="queue belongs to another user"):
        folder.prepare()
    assert tmp_path.stat().st_mode & 0o7777 == 0o755


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of root's, with files that nobody else should change or remove."""
    folder = tmp_path / "root's own"
    folder.mkdir(mode=0o700)
    (folder / "1").write_text("1")
    (folder / "usage").write_bytes(b"x" * (USAGE_SIZE + 1))
    (folder / "below").mkdir()
    (folder / "below" / "file").write_text("x")
    return folder


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(each): (each.stat().st_mode, each.read_bytes() if each.is_file() else b"")
        for each in folder.rglob("*")
    }


def test_no_link_in_place_of_the_seats_leads_root_elsewhere(
    common: StateFolder, make: Make, devices: tuple[Device, ...], victim: Path
) -> None:
    """Who is the first on a device owns its folder. Root removed what was no seat there."""
    shutil.rmtree(victim / "below")  # a folder could not be removed so, and ended that
    before = content(victim)
    with as_user(NOBODY):
        make("1Gi")
        seats = common.devices / devices[0].uuid / "seats"
        seats.rename(seats.with_name("away"))
        seats.symlink_to(victim)
    with common.locked():
        recovery.recover(common)
    assert content(victim) == before
    with pytest.raises(LedgerError):
        make("1Gi")
    assert content(victim) == before


def test_no_link_in_place_of_a_device_leads_root_elsewhere(
    common: StateFolder, make: Make, devices: tuple[Device, ...], tmp_path: Path
) -> None:
    device = tmp_path / devices[0].uuid
    device.mkdir()
    leases.create_device(device, device.name)
    seat = leases.take(device, "of another folder", leases.Terms(Compute()))
    with as_user(NOBODY):
        (common.devices / device.name).symlink_to(device)
    with common.locked():
        recovery.recover(common)
    with pytest.raises((LedgerError, OSError)):
        make("1Gi")
    (taken,) = leases.read_contract(device / "contract").seats
    assert taken.seat == seat
    assert [each.name for each in (device / "seats").iterdir()] == [str(seat.serial)]


@pytest.mark.parametrize("command", [ps.command, rm.command], ids=["ps", "rm"])
def test_in_a_folder_of_another_user_root_removes_nothing(
    common_folder: Path, victim: Path, native_dir: Path, command: click.Command
) -> None:
    """A folder without a share's files is removed; this one is what another user says it is."""
    assert native_dir.is_dir()
    before = content(victim)
    own = common_folder / "own"
    with as_user(NOBODY):
        own.mkdir()
        StateFolder(own).prepare()
        (own / "shares").rmdir()
        (own / "shares").symlink_to(victim)
    CliRunner().invoke(
        command, ["--state", str(own), *(["below"] if command is rm.command else [])]
    )
    assert content(victim) == before
    with pytest.raises(StateError, match="belongs to another user"), StateFolder(own).locked():
        pass


def test_no_link_in_place_of_a_share_leads_root_elsewhere(
    common: StateFolder, victim: Path
) -> None:
    before = content(victim)
    with as_user(NOBODY):
        (common.shares / FOREIGN).symlink_to(victim)
    with common.locked():
        assert recovery.recover(common) == []
    with pytest.raises(StateError):  # made after the share was read
        write_traces(common.shares / FOREIGN, Traces(namespace=1))
    assert content(victim) == before


def test_no_link_in_place_of_a_machine_leads_root_elsewhere(
    common: StateFolder, victim: Path, tmp_path: Path
) -> None:
    before = content(victim)
    name = simulated.machine_path(tmp_path, "t4").parent.name
    with as_user(NOBODY):
        (common.simulated / name).symlink_to(victim)
    with pytest.raises(StateError):
        simulated.machine_path(common.root, "t4")
    assert content(victim) == before


@pytest.mark.parametrize("name", ["policy", "usage"])
def test_no_link_in_place_of_a_ledger_leads_root_to_another_one(make: Make, name: str) -> None:
    _, of_root = make("1Gi")
    with as_user(NOBODY):
        _, directory = make("1Gi")
        (directory / name).unlink()
        (directory / name).symlink_to(of_root / name)
    before = (of_root / name).read_bytes()
    with pytest.raises(LedgerError):
        set_limit(directory, 0, 8 << 30)
    with pytest.raises(LedgerError):
        reap(directory)
    assert (of_root / name).read_bytes() == before


def test_what_a_user_may_not_look_at_is_no_share_of_theirs(
    common_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /run/allotment, which a node's agent closes: `allot run` and `ps` ended with an error."""
    run_folder = common_folder / "allotment"
    monkeypatch.setattr(command, "RUN_FOLDER", run_folder)
    monkeypatch.setenv("ALLOTMENT_SHARE", str(run_folder / "share"))
    (run_folder / "share" / "0123").mkdir(parents=True)
    (run_folder / "share" / "0123" / "policy").touch()
    assert command.inside_share() == str(run_folder / "share" / "0123")
    run_folder.chmod(0o700)
    with as_user(NOBODY):
        assert command.inside_share() == ""
        monkeypatch.setenv("ALLOTMENT_SHARE", str(common_folder))
        (common_folder / "policy").touch()
        assert command.inside_share() == str(common_folder)


def test_where_programs_look_for_their_share_is_roots(
    common: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "RUN_FOLDER", common.root)
    with as_user(DAEMON), pytest.raises(StateError, match="share does not exist") as caught:
        common.prepare()
    hint = (caught.value.hint or "").partition(": ")[2]
    assert hint == f"mkdir -p -m 1777 {common.root} && allot doctor --state {common.root}"
    CliRunner().invoke(doctor.command, ["--state", str(common.root)])
    with as_user(DAEMON):
        common.prepare()
    os.chown(common.root / "share", NOBODY, NOBODY)
    with as_user(DAEMON), pytest.raises(StateError, match="share belongs to another user"):
        common.prepare()


@pytest.fixture(autouse=True)
def _whole(common_folder: Path) -> Iterator[None]:
    """Removes what others closed."""
    yield
    shutil.rmtree(common_folder, ignore_errors=True)
    common_folder.mkdir(exist_ok=True)
