# SPDX-License-Identifier: Apache-2.0
"""What is shown of shares: the ledger's word, checked against the driver's and the kernel's."""

import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest
from patience import wait_until

from allotment import ledger
from allotment.devices.sources import DeviceProcess, Problem, Reading
from allotment.ledger import DeviceUse, ProcessUse, SeatAccount, leases
from allotment.ledger.layout import NAME_BYTES, SLOT_PID_AT, SLOT_START_TIME_AT, USAGE_SLOTS_AT
from allotment.model.compute import Compute, ComputeClass, parse_compute
from allotment.model.devices import Device
from allotment.model.errors import BusyError, DoesNotFitError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.shares import Runner, Share, SuspendedBy, Suspension
from allotment.model.structs import replace
from allotment.modes.mps.state import Loss
from allotment.shares import recovery, status
from allotment.shares.compute_view import ComputeView, Rates
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import command_of, start_time
from allotment.shares.record import write_record
from allotment.shares.resize import LimitChange, resize
from allotment.shares.status import (
    DRIVER_TOLERANCE_BYTES,
    DeviceView,
    LiveState,
    LossView,
    OutsideView,
    ShareStatus,
    ShareView,
    current,
    share_status,
    view,
)
from allotment.shares.suspension import LockedShare

GI = 1 << 30
Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "subprocess.Popen[bytes]"]
Hold = Callable[..., AbstractContextManager["subprocess.Popen[bytes]"]]


def driver(
    *processes: tuple[int, int | None], gpu_percent: int | None = None
) -> Callable[[Path | None], Mapping[str, Reading | Problem]]:
    """A driver that sees these processes on the first device."""
    reading = Reading(
        used_bytes=0, gpu_percent=0, memory_percent=0, temperature_c=None, power_mw=None,
        processes=tuple(DeviceProcess(pid, used, gpu_percent) for pid, used in processes),
    )  # fmt: skip
    return lambda _machine: {"GPU-00000000": reading}


def test_a_quiet_share(folder: StateFolder, make: Make) -> None:
    make("4Gi", name="train")
    (share,) = view(current(folder), driver())
    assert (share.name, share.state, share.is_enforced) == ("train", LiveState.RUNNING, True)
    assert [(each.limit, each.used, each.peak) for each in share.devices] == [(4 * GI, 0, 0)]
    assert share.processes == ()


def test_a_member_that_the_ledger_does_not_know_is_not_enforced(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    member, stranger = sleeper(ALLOTMENT_SHARE=str(directory)), sleeper()
    (share,) = view(current(folder), driver((member.pid, 3 * GI), (stranger.pid, GI)))
    (process,) = share.processes
    assert (process.pid, process.used, process.is_enforced) == (member.pid, (3 * GI,), False)
    assert process.command == "/bin/cat"
    assert not share.is_enforced


def test_a_program_that_began_after_its_ledger_was_read_is_enforced(
    folder: StateFolder, make: Make, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    read_before = current(folder)
    monkeypatch.setenv("ALLOTMENT_SHARE", str(directory))
    with hold(directory) as holder:
        monkeypatch.delenv("ALLOTMENT_SHARE")
        (share,) = view(read_before, driver((holder.pid, 3 * GI)))
    assert (share.pids, share.is_enforced) == ((holder.pid,), True)
    assert [each.used for each in share.devices] == [3 * GI]


def test_a_program_that_ends_meanwhile_is_not_unenforced_beside_one_that_is(
    folder: StateFolder,
    make: Make,
    hold: Hold,
    sleeper: Sleeper,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    escaped = sleeper(ALLOTMENT_SHARE=str(directory)).pid
    monkeypatch.setenv("ALLOTMENT_SHARE", str(directory))
    with hold(directory) as holder:
        monkeypatch.delenv("ALLOTMENT_SHARE")

        def ask(machine: Path | None) -> Mapping[str, Reading | Problem]:
            holder.kill()
            holder.wait()
            return driver((escaped, GI), (holder.pid, 3 * GI))(machine)

        (share,) = view(current(folder), ask)
    assert [each.pid for each in share.processes if not each.is_enforced] == [escaped]


def test_a_program_of_a_share_that_begins_while_the_driver_is_asked_is_not_outside(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    stranger = sleeper()

    def ask(machine: Path | None) -> Mapping[str, Reading | Problem]:
        begun = sleeper(ALLOTMENT_SHARE=str(directory))
        return driver((begun.pid, None), (stranger.pid, GI))(machine)

    seen = share_status(current(folder), ask)
    assert [each.pid for each in seen.outside] == [stranger.pid]


def test_what_escaped_the_shim_counts_as_used(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", runner=None)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    (share,) = view(current(folder), driver((member.pid, 3 * GI)))
    assert [(each.used, each.peak) for each in share.devices] == [(3 * GI, 3 * GI)]


def test_compute_is_shown_with_what_the_driver_says(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", runner=None, compute=parse_compute("30:80"))
    members = [sleeper(ALLOTMENT_SHARE=str(directory)) for _ in range(2)]
    ask = driver(*((each.pid, GI) for each in members), gpu_percent=21)
    (share,) = view(current(folder), ask)
    compute = share.devices[0].compute
    assert compute
    assert (str(compute.promised), compute.state, compute.is_measured) == ("30:80", "idle", True)
    assert compute.driver_percent == 42
    (share,) = view(current(folder), driver((members[0].pid, GI)))
    assert share.devices[0].compute
    assert share.devices[0].compute.driver_percent is None
    assert share.devices[0].compute.rates is None


def test_losses_are_those_of_the_share_itself(folder: StateFolder, make: Make) -> None:
    share, _ = make("1Gi", name="train")
    make("1Gi", name="other")
    uuid = share.devices[0].uuid
    losses = {
        uuid: (
            Loss(share.created - 60, "of one before it with this name", ("train",)),
            Loss(share.created + 1, "another share's", ("serve",)),
            Loss(share.created + 2, "both", ("other", "train"), recovered_s=0.5),
            Loss(share.created + 3, "not back", ("train",)),
        ),
        "GPU-11111111": (Loss(share.created + 4, "elsewhere", ("train",)),),
    }
    seen = {
        each.name: each for each in share_status(current(folder), driver(), losses=losses).shares
    }
    assert seen["train"].losses == (
        LossView(uuid, share.created + 2, "both", recovered_s=0.5),
        LossView(uuid, share.created + 3, "not back", recovered_s=None),
    )
    assert [loss.reason for loss in seen["other"].losses] == ["both"]


def test_rates_are_of_the_time_between_two_looks() -> None:
    def at(
        read_ns: int, gpu_ns: int, borrowed_ns: int, *, running_ns: int = 0, measured: bool = True
    ) -> ShareStatus:
        compute = ComputeView(
            promised=parse_compute("30:80"), is_suspended=False, is_measured=measured,
            # The ledger is read a moment before: by then less was charged.
            use=DeviceUse(used=0, peak=0, refusals=0, gpu_ns=100, held_ns=2 * gpu_ns),
            account=SeatAccount(
                used_ns=gpu_ns, running_ns=running_ns, borrowed_ns=borrowed_ns
            ),
            driver_percent=None,
            read_ns=read_ns,
        )  # fmt: skip
        device = DeviceView("GPU-0", "T4", GI, 0, 0, 0, compute=compute)
        shares = (ShareView("s", "train", LiveState.RUNNING, None, (device,), (), None),)
        return ShareStatus(shares, ())

    def rates(later: ShareStatus, earlier: ShareStatus) -> Rates | None:
        compute = later.since(earlier).shares[0].devices[0].compute
        assert compute
        return compute.rates

    before, after = at(1000, 500, 100), at(3000, 1500, 300)
    assert rates(after, before) == Rates(gpu=0.5, copy=0, held=1.0, borrowed=0.1, lent=0)
    # What has not ended counts, once.
    running = at(3000, 500, 100, running_ns=1000)
    assert rates(running, before) == Rates(gpu=0.5, copy=0, held=0, borrowed=0, lent=0)
    assert rates(at(4000, 1600, 300), running) == Rates(
        gpu=0.1, copy=0, held=2.2, borrowed=0.2, lent=0
    )
    assert rates(after, ShareStatus((), ())) is None  # it was not there
    assert rates(after, at(1000, 500, 100, measured=False)) is None
    assert rates(before, before) is None  # no time has passed
    assert rates(at(4000, 0, 0), after) == Rates(gpu=0, copy=0, held=0, borrowed=0, lent=0)


def test_use_that_the_driver_does_not_tell_is_no_reason_to_be_silent(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make(runner=None)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    (share,) = view(current(folder), driver((member.pid, None)))
    assert [each.is_enforced for each in share.processes] == [False]


def test_states(folder: StateFolder, make: Make, dead_runner: Runner, sleeper: Sleeper) -> None:
    make(name="kept", runner=None)
    _, directory = make(name="left", runner=dead_runner)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    make(name="running")
    _, broken = make(name="broken")
    (broken / "usage").write_bytes(b"")
    states = {each.name: each.state for each in view(current(folder), driver())}
    assert states == {
        "kept": LiveState.KEPT,
        "left": LiveState.LEFT,
        "running": LiveState.RUNNING,
        "broken": LiveState.DAMAGED,
    }
    member.communicate()


def test_a_share_of_a_pod_tells_what_runs_in_it(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    owner = Owner(
    uid=PodUid("1"), namespace="lab", pod="one", container="main", kind=ContainerKind.REGULAR,
    resource="allotment.dev/gpu",
)  # fmt: skip
    _, directory = make(runner=None, owner=owner)
    (share,) = view(current(folder), driver())
    assert (share.state, share.command) == (LiveState.WAITING, "")
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    (share,) = view(current(folder), driver())
    assert (share.state, share.command, share.processes) == (LiveState.RUNNING, "/bin/cat", ())
    member.communicate()
    (share,) = view(current(folder), driver())
    assert share.state is LiveState.WAITING


def test_a_pods_program_that_left_its_shares_mounts_is_not_enforced(
    folder: StateFolder, make: Make, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = PodUid("1b4e28ba-2fa1-11d2-883f-0016d3cca427")
    owner = Owner(
        uid=uid, namespace="lab", pod="one", container="main", kind=ContainerKind.REGULAR,
        resource="allotment.dev/gpu",
    )  # fmt: skip
    make("4Gi", runner=None, owner=owner)
    hidden, other = sleeper(), sleeper()
    pods = {hidden.pid: uid, other.pid: PodUid("another")}
    monkeypatch.setattr(status, "is_in_pod", lambda pid, of: pods[pid] == of)
    seen = share_status(
        current(folder), driver((hidden.pid, 5 * GI), (other.pid, GI)), machines=[None]
    )
    (share,) = seen.shares
    assert [(each.pid, each.is_enforced) for each in share.processes] == [(hidden.pid, False)]
    assert share.devices[0].overuse
    assert share.pids == (hidden.pid,)
    assert [each.pid for each in seen.outside] == [other.pid]


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_the_driver_has_put_aside_is_on_the_host(
    folder: StateFolder, make: Make, *, is_complete: bool
) -> None:
    share, directory = make(runner=None)
    by = Suspension(1.0, SuspendedBy.CHECKPOINT, is_complete=is_complete)
    write_record(directory, replace(share, suspension=by))
    (found,) = current(folder)
    assert found.ledger
    ledger = replace(found.ledger, devices=(DeviceUse(used=3 * GI, peak=3 * GI, refusals=0),))
    (seen,) = view([replace(found, ledger=ledger)], driver())
    assert (seen.devices[0].used, seen.devices[0].host_bytes) == (3 * GI, 3 * GI * is_complete)


def test_damage_is_not_called_enforced(folder: StateFolder, make: Make) -> None:
    _, directory = make(name="broken")
    (directory / "policy").write_bytes(b"")
    (share,) = view(current(folder), driver())
    assert not share.is_enforced
    assert share.problem
    assert [each.limit for each in share.devices] == [4 * GI]


def test_a_silent_driver_is_no_reason_to_fail(folder: StateFolder, make: Make) -> None:
    make()
    (share,) = view(current(folder), lambda _machine: {"GPU-00000000": Problem(0, None, "lost")})
    assert share.is_enforced


def test_no_folder_has_no_shares(tmp_path: Path) -> None:
    assert current(StateFolder(tmp_path / "none")) == []


def test_looking_removes_what_ended(folder: StateFolder, make: Make, dead_runner: Runner) -> None:
    make(runner=dead_runner)
    assert current(folder) == []
    assert recovery.list_shares(folder) == []


def test_the_files_of_a_device_are_read_once_for_all_its_shares(
    folder: StateFolder, make: Make
) -> None:
    for _ in range(4):
        make("8Gi")
    opened: list[str] = []
    is_watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if is_watching and event == "open" and not str(arguments[0]).startswith("/proc/"):
            opened.append(str(arguments[0]).rpartition("/")[2])

    sys.addaudithook(watch)
    loaded = recovery.list_shares(folder)
    at_listing, opened[:] = Counter(opened), []
    seen = share_status(loaded, driver())
    is_watching = False
    devices = len({device.uuid for share in seen.shares for device in share.devices})
    assert (len(seen.shares), devices) == (4, 2)
    assert at_listing["usage"] == 4
    assert at_listing["contract-0"] == 2 * devices, "read until it is twice the same"
    assert sum(name.isdigit() for name in opened) == 4, "the file of each seat"
    assert Counter(opened)["contract-0"] == 2 * devices


def test_who_is_in_no_share_is_shown_outside(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    member, stranger = sleeper(ALLOTMENT_SHARE=str(directory)), sleeper()
    ask = driver((member.pid, 3 * GI), (stranger.pid, GI))
    (user,) = share_status(current(folder), ask).outside
    assert user == OutsideView(stranger.pid, "/bin/cat", "GPU-00000000", GI)
    assert share_status(current(folder), driver((member.pid, GI))).outside == ()


def test_a_member_on_a_gpu_that_its_share_does_not_have_is_outside(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    member = sleeper(ALLOTMENT_SHARE=str(directory))
    answers = driver((member.pid, GI))(None)
    ask = {"GPU-10000000": answers["GPU-00000000"]}
    seen = share_status(current(folder), lambda _machine: ask)
    assert [(each.pid, each.uuid) for each in seen.outside] == [(member.pid, "GPU-10000000")]


def test_who_uses_the_machine_is_shown_where_there_are_no_shares(
    tmp_path: Path, sleeper: Sleeper
) -> None:
    pid = sleeper().pid
    seen = share_status(current(StateFolder(tmp_path / "none")), driver((pid, None)))
    assert [(each.pid, each.used) for each in seen.outside] == [(pid, None)]


def test_more_than_the_limit_by_the_driver_is_not_enforced(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("1Gi", name="train", runner=None)
    pid = sleeper(ALLOTMENT_SHARE=str(directory)).pid

    def look(used: int | None) -> ShareView:
        (share,) = view(current(folder), driver((pid, used)))
        return replace(share, processes=())  # without the shim, they are not enforced anyway

    within = look(GI + DRIVER_TOLERANCE_BYTES)
    assert (within.is_enforced, within.excess) == (True, "")
    unknown = look(None)
    assert (unknown.is_enforced, unknown.devices[0].driver_used) == (True, None)
    beyond = look(GI + DRIVER_TOLERANCE_BYTES + 1)
    assert (beyond.is_enforced, beyond.enforcement) == (False, "no")
    assert "the limit is 1Gi" in beyond.excess


def test_a_share_that_was_larger_takes_nothing_back(
    folder: StateFolder, make: Make, devices: tuple[Device, ...], sleeper: Sleeper
) -> None:
    """Not by writing a use above its limit into its ledger."""
    _, directory = make("6Gi", name="train", runner=None)
    pid = sleeper(ALLOTMENT_SHARE=str(directory)).pid
    smaller = LimitChange(memory=parse_memory("1Gi"))
    found = resize(folder, "train", smaller, devices, force=True)
    assert found.ledger
    forged = replace(found.ledger, devices=(replace(found.ledger.devices[0], used=6 * GI),))
    (share,) = view([replace(found, ledger=forged)], driver((pid, 6 * GI)))
    assert "the limit is 1Gi" in share.overuse


def test_no_resize_records_a_limit_that_was_raised_in_the_ledger_alone(
    folder: StateFolder, make: Make, devices: tuple[Device, ...]
) -> None:
    _, directory = make("1Gi", name="train", compute=parse_compute("30:80"))
    for change in (LimitChange(weight=50), LimitChange(memory=parse_memory("500Gi"))):
        ledger.set_limit(directory, 0, 40 * GI, force=False)
        with suppress(DoesNotFitError):
            resize(folder, "train", change, devices, force=False)
        (found,) = current(folder)
        assert [each.memory_bytes for each in found.devices()] == [GI]
    assert ledger.read(directory).policy.devices[0].memory_limit == 40 * GI
    (share,) = view(current(folder), driver())
    assert share.enforcement == "no"


def test_a_killed_resize_leaves_its_programs_what_they_had(
    folder: StateFolder,
    make: Make,
    devices: tuple[Device, ...],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, directory = make("8Gi", name="train", runner=None)
    written: list[Share] = []

    def write_first(directory: Path, share: Share) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(share)
        write_record(directory, share)

    monkeypatch.setattr("allotment.shares.resize.write_record", write_first)
    smaller = LimitChange(memory=parse_memory("2Gi"))
    with hold(directory) as holder:
        with pytest.raises(KeyboardInterrupt):
            resize(folder, "train", smaller, devices, force=True)
        monkeypatch.undo()
        (share,) = view(current(folder), driver((holder.pid, 3 * GI)))
        assert (share.devices[0].used, share.overuse) == (3 * GI, "")
    assert resize(folder, "train", smaller, devices, force=True).limits() == {
        devices[0].uuid: 2 * GI
    }


def test_a_limit_that_was_raised_in_the_ledger_alone_is_not_enforced(
    folder: StateFolder, make: Make
) -> None:
    _, directory = make("1Gi", name="train")
    ledger.set_limit(directory, 0, 40 * GI, force=False)
    (share,) = view(current(folder), driver())
    assert (share.is_enforced, share.enforcement) == (False, "no")
    assert "is 40Gi, not 1Gi as recorded" in share.excess
    assert share.overuse == ""  # which alone ends programs


def change_contract(folder: StateFolder, uuid: str, compute: Compute) -> None:
    """As a program that may write the contract."""
    (taken,) = ledger.read_contract(folder.devices / uuid / "contract").seats
    leases.change(folder.devices / uuid, taken.seat, replace(taken.terms, compute=compute))


PROMISED = parse_compute("10:20")


@pytest.mark.parametrize(
    ("compute", "text"),
    [
        (replace(PROMISED, ceiling=9000), "is 10:90 (weight 100, class normal), not 10:20 (weight"),
        (replace(PROMISED, guarantee=1500), "is 15:20 (weight"),
        (replace(PROMISED, weight=500), "is 10:20 (weight 500, class normal), not 10:20 (weight"),
        (replace(PROMISED, kind=ComputeClass.LATENCY), "is 10:20 (weight 100, class latency), not"),
        (replace(PROMISED, is_governed=False), "is 10:20 without turns, not 10:20 (weight"),
        (replace(PROMISED, guarantee=0), ""),
    ],
    ids=["ceiling", "guarantee", "weight", "class", "turns", "less"],
)
def test_compute_that_was_raised_in_the_contract_alone_is_not_enforced(
    folder: StateFolder, make: Make, compute: Compute, text: str
) -> None:
    share, _ = make("1Gi", name="train", compute=PROMISED)
    change_contract(folder, share.devices[0].uuid, compute)
    (seen,) = view(current(folder), driver())
    assert (seen.is_enforced, bool(seen.excess)) == (not text, bool(text))
    assert text in seen.excess
    assert seen.overuse == ""  # which alone ends programs


def test_no_resize_records_compute_that_was_raised_in_the_contract_alone(
    folder: StateFolder, make: Make, devices: tuple[Device, ...]
) -> None:
    make("1Gi", name="train", compute=PROMISED)
    uuid = devices[0].uuid
    change_contract(folder, uuid, replace(PROMISED, ceiling=9000, kind=ComputeClass.LATENCY))
    resize(folder, "train", LimitChange(memory=parse_memory("2Gi")), devices, force=False)
    (found,) = current(folder)
    assert [each.compute for each in found.devices()] == [PROMISED]
    assert found.terms[uuid].compute == PROMISED


def test_a_slices_use_is_what_the_driver_lists_on_its_gpu(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    share, directory = make("1Gi", name="train", runner=None)
    (device,) = share.devices
    cut = replace(device, gpu="GPU-whole", profile="1g.10gb")
    write_record(directory, replace(share, devices=(cut,)))
    pid = sleeper(ALLOTMENT_SHARE=str(directory)).pid
    (reading,) = driver((pid, 8 * GI))(None).values()
    (seen,) = view(current(folder), lambda _machine: {"GPU-whole": reading})
    assert seen.devices[0].driver_used == 8 * GI
    assert "its programs have 8Gi of GPU-whole by the driver" in seen.devices[0].overuse


def name_in_slot(directory: Path, pid: int) -> None:
    """Forges the first slot of a share's ledger."""
    with (directory / "usage").open("r+b") as file:
        for at, kind, value in (
            (SLOT_PID_AT, "<i", pid),
            (SLOT_START_TIME_AT, "<Q", start_time(pid)),
        ):
            file.seek(USAGE_SLOTS_AT + at)
            file.write(struct.pack(kind, value))


def test_a_process_that_the_ledger_alone_names_is_shown_and_never_acted_on(
    folder: StateFolder, make: Make, hold: Hold, sleeper: Sleeper
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    member, stranger = sleeper(ALLOTMENT_SHARE=str(directory)), sleeper()
    with hold(directory):
        name_in_slot(directory, stranger.pid)
        seen = share_status(current(folder), driver((member.pid, GI), (stranger.pid, 8 * GI)))
    (share,) = seen.shares
    assert {each.pid for each in share.processes} == {member.pid, None}
    assert share.pids == (member.pid,)
    assert (share.devices[0].driver_used, share.overuse) == (GI, "")
    assert [each.pid for each in seen.outside] == [stranger.pid], "no share can hide it"


def test_who_has_the_ledger_mapped_is_a_member_without_any_other_mark(
    folder: StateFolder, make: Make, hold: Hold
) -> None:
    _, directory = make("4Gi", name="train", runner=None)
    with hold(directory) as holder:
        seen = share_status(current(folder), driver((holder.pid, 3 * GI)))
    (share,) = seen.shares
    assert (share.pids, share.is_enforced, seen.outside) == ((holder.pid,), True, ())
    assert share.devices[0].driver_used == 3 * GI


def test_no_ledger_can_have_another_shares_process_suspended(
    folder: StateFolder, make: Make, hold: Hold, sleeper: Sleeper
) -> None:
    share, directory = make("4Gi", name="thief", runner=None)
    victim = sleeper()
    with hold(directory):
        name_in_slot(directory, victim.pid)
        (found,) = current(folder)
        assert found.ledger
        assert [each.pid for each in found.ledger.processes] == [victim.pid]
        locked = LockedShare(folder, found, share, driver((victim.pid, GI)))
        with pytest.raises(BusyError, match="cannot be found on this machine"):
            locked.gpu_users()


def test_a_command_line_that_the_ledger_cut_is_shown_whole(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    _, directory = make("1Gi", name="train", runner=None)
    pid = sleeper(ALLOTMENT_SHARE=str(directory)).pid
    wait_until(lambda: command_of(pid))  # it has begun
    whole = command_of(pid)
    (found,) = current(folder)
    assert found.ledger
    shown = []
    cut = ("python train.py --learning-rate " + "x" * NAME_BYTES)[: NAME_BYTES - 1]
    for start, number in ((cut, pid), ("short", pid), (cut, 0), (cut.replace(" ", "-"), 0)):
        named = ProcessUse(
            pid=number, start_time=start_time(pid) or 0, command=start,
            used=(GI,), context=(0,), peak=(GI,), refusals=0,
        )  # fmt: skip
        (share,) = view(
            [replace(found, ledger=replace(found.ledger, processes=(named,)))], driver()
        )
        shown.append(share.processes[0].command)
    unread = ["python train.py --learning-rate ...", cut.replace(" ", "-")]
    assert shown == [whole, "short", *unread]
