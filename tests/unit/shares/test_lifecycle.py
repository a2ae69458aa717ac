# SPDX-License-Identifier: Apache-2.0
"""The life of shares: made whole or not at all, never booked twice, gone when they ended."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from allotment.ledger import Terms, read_contract
from allotment.ledger.leases import TakenSeat
from allotment.model.compute import Compute, parse_compute
from allotment.model.devices import Device
from allotment.model.errors import (
    BusyError,
    DoesNotFitError,
    LimitBelowUseError,
    NotFoundError,
    StateError,
    UsageError,
)
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, Runner, Share
from allotment.shares import booking, lifecycle, recovery
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.record import LoadedShare, read_record
from allotment.shares.resize import LimitChange, resize
from allotment.shares.resume import resume
from allotment.shares.suspend import suspend

GI = 1 << 30
Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "subprocess.Popen[bytes]"]
Hold = Callable[..., AbstractContextManager[subprocess.Popen[bytes]]]


def to(memory: str) -> LimitChange:
    return LimitChange(memory=parse_memory(memory))


def booked(folder: StateFolder) -> dict[str, int]:
    return booking.allotted(recovery.list_shares(folder))


def test_a_share_is_whole_when_it_can_be_seen(folder: StateFolder, make: Make) -> None:
    share, directory = make("4Gi", name="train")
    names = ["contract-0", "policy", "seat-0", "seats-0", "share.json", "usage"]
    assert sorted(path.name for path in directory.iterdir()) == names
    common = folder.devices / "GPU-00000000"
    assert (directory / "contract-0").samefile(common / "contract")
    assert (directory / "seats-0").samefile(common / "seats")
    (own,) = (common / "seats").iterdir()
    assert (directory / "seat-0").samefile(own)
    assert read_record(directory) == share
    (found,) = recovery.list_shares(folder)
    assert (found.name, found.problem) == ("train", None)
    assert found.limits() == {"GPU-00000000": 4 * GI}


def test_each_share_gets_its_own_part(folder: StateFolder, make: Make) -> None:
    make("10Gi")
    make("10Gi")
    make("6Gi")
    assert booked(folder) == {"GPU-00000000": 16 * GI, "GPU-10000000": 10 * GI}


def test_what_does_not_fit_is_refused_with_numbers_and_leaves_nothing(
    folder: StateFolder, make: Make
) -> None:
    make("10Gi")
    with pytest.raises(DoesNotFitError) as caught:
        make("10Gi", count=2)
    assert "need 10Gi, have 6Gi (10Gi of 16Gi allotted)" in caught.value.message
    assert "fits, need 10Gi, have 16Gi" in caught.value.message
    assert len(list(folder.shares.iterdir())) == 1


@pytest.mark.parametrize(
    ("memory", "count", "hint"),
    [("17Gi", 1, "even when empty"), ("1Gi", 3, "has 2 GPUs")],
)
def test_the_hint_tells_what_can_never_fit(make: Make, memory: str, count: int, hint: str) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        make(memory, count=count)
    assert hint in (caught.value.hint or "")


def test_an_unknown_gpu_is_named_with_those_that_are_there(
    folder: StateFolder, devices: tuple[Device, ...]
) -> None:
    request = Request(parse_memory("1Gi"), selectors=("h100",))
    with pytest.raises(NotFoundError, match="GPU-00000000") as caught:
        lifecycle.create(folder, ShareOrder(request, Injection.ENVIRONMENT), devices)
    assert "'h100'" in caught.value.message


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "..", "é", "a" * 64, "a."])
def test_names_that_cannot_be(make: Make, name: str) -> None:
    with pytest.raises(UsageError):
        make(name=name)


def test_a_name_is_one_shares_only(make: Make) -> None:
    make(name="train")
    with pytest.raises(UsageError, match="already"):
        make(name="train")


def test_find_by_name_id_and_beginning(folder: StateFolder, make: Make) -> None:
    share, _ = make(name="train")
    for word in ("train", share.id, share.id[:4]):
        assert lifecycle.find(folder, word).id == share.id
    with pytest.raises(NotFoundError) as caught:
        lifecycle.find(folder, "trian")
    assert caught.value.message == "there is no share 'trian' (did you mean 'train'?)"
    assert "train" in (caught.value.hint or "")


def test_a_share_whose_runner_died_is_removed_by_the_next(
    folder: StateFolder, make: Make, dead_runner: Runner
) -> None:
    make("10Gi", runner=dead_runner, count=2)
    make("10Gi", count=2)
    assert len(recovery.list_shares(folder)) == 1


def test_a_share_without_runner_stays(folder: StateFolder, make: Make) -> None:
    make(runner=None)
    with folder.locked():
        assert len(recovery.recover(folder)) == 1


def test_processes_left_in_a_share_keep_it(
    folder: StateFolder, make: Make, dead_runner: Runner, sleeper: Sleeper
) -> None:
    _, directory = make("10Gi", runner=dead_runner)
    process = sleeper(ALLOTMENT_SHARE=str(directory))
    with folder.locked():
        assert len(recovery.recover(folder)) == 1
    process.communicate()
    with folder.locked():
        assert recovery.recover(folder) == []


def test_a_process_id_that_was_given_again_is_not_the_runner(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    make(runner=Runner(sleeper().pid, 1, "another boot"))
    with folder.locked():
        assert recovery.recover(folder) == []


def test_the_end_waits_for_who_is_left(
    folder: StateFolder, make: Make, dead_runner: Runner, sleeper: Sleeper
) -> None:
    # Not this process: what other tests leave running for a moment would be the share's too.
    share, directory = make(runner=dead_runner)
    process = sleeper(ALLOTMENT_SHARE=str(directory))
    assert not lifecycle.end(folder, share)
    process.communicate()
    assert lifecycle.end(folder, share)
    assert not directory.exists()


def test_rm_refuses_what_is_in_use(folder: StateFolder, make: Make) -> None:
    share, _ = make(name="train")
    with pytest.raises(BusyError, match="train is in use"):
        lifecycle.destroy(folder, lifecycle.find(folder, share.id), force=False)
    lifecycle.destroy(folder, lifecycle.find(folder, share.id), force=True)
    assert recovery.list_shares(folder) == []


def test_half_made_and_half_removed_shares_are_swept(folder: StateFolder, make: Make) -> None:
    for name in (".new-0123", ".old-4567"):
        (folder.shares / name).mkdir()
        (folder.shares / name / "policy").write_bytes(b"x")
    make()
    assert [path.name[0] != "." for path in folder.shares.iterdir()] == [True]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 99}', b"\xff", b"[" * 100_000])
def test_a_damaged_record_is_named_and_the_others_work(
    folder: StateFolder, make: Make, damage: bytes
) -> None:
    _, directory = make("10Gi")
    (directory / "share.json").write_bytes(damage)
    make("6Gi")
    damaged, whole = recovery.list_shares(folder)
    assert isinstance(damaged.problem, StateError)
    assert str(directory / "share.json") in damaged.problem.message
    assert "allot rm" in (damaged.problem.hint or "")
    assert whole.problem is None
    assert booked(folder)["GPU-00000000"] == 16 * GI  # the ledger still says what is given out


@pytest.mark.parametrize("name", ["policy", "usage"])
@pytest.mark.parametrize("damage", [b"", b"x" * 50, None])
def test_a_damaged_ledger_is_named_and_stays_booked(
    folder: StateFolder, make: Make, name: str, damage: bytes | None
) -> None:
    _, directory = make("10Gi", runner=None)
    if damage is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(damage)
    make("6Gi")
    damaged = recovery.list_shares(folder)[0]
    assert str(directory / name) in str(damaged.problem)
    assert booked(folder)["GPU-00000000"] == 16 * GI
    lifecycle.destroy(folder, damaged, force=False)
    assert len(recovery.list_shares(folder)) == 1


def test_resize_grows_into_what_is_free_and_no_further(
    folder: StateFolder, make: Make, devices: tuple[Device, ...]
) -> None:
    make("10Gi", name="a")
    make("6Gi", name="b")
    with pytest.raises(DoesNotFitError, match="need 7Gi, have 6Gi"):
        resize(folder, "b", to("7Gi"), devices, force=True)
    resize(folder, "a", to("8Gi"), devices, force=False)
    again = resize(folder, "b", to("50%"), devices, force=False)
    assert again.limits() == {"GPU-00000000": 8 * GI}
    assert read_record(again.directory).devices[0].memory_bytes == 8 * GI
    assert booked(folder)["GPU-00000000"] == 16 * GI


def test_resize_below_the_use_changes_no_device(
    folder: StateFolder, make: Make, devices: tuple[Device, ...], hold: Hold
) -> None:
    _, directory = make("4Gi", name="pair", count=2)
    # Uses the second device, so that the first one is changed and has to be put back.
    with hold(directory, 1) as holder:
        with pytest.raises(LimitBelowUseError, match="3Gi"):
            resize(folder, "pair", to("2Gi"), devices, force=False)
        found = lifecycle.find(folder, "pair")
        assert found.ledger
        assert [each.memory_limit for each in found.ledger.policy.devices] == [4 * GI, 4 * GI]
        assert set(found.limits().values()) == {4 * GI}
        forced = resize(folder, "pair", to("2Gi"), devices, force=True)
        assert set(forced.limits().values()) == {2 * GI}
        assert forced.ledger
        assert [each.pid for each in forced.ledger.processes] == [holder.pid]
        # What is in use may stay, and is all that may be above the limit.
        assert _kept(forced) == [None, 3 * GI]
        assert _kept(resize(folder, "pair", to("4Gi"), devices, force=True)) == [None, None]
        assert _kept(resize(folder, "pair", to("1Gi"), devices, force=True)) == [None, 3 * GI]
        holder.communicate()
    found = lifecycle.find(folder, "pair")
    assert found.ledger
    assert found.ledger.processes == ()


def _kept(found: LoadedShare) -> list[int | None]:
    assert found.share
    return [each.most_bytes for each in found.share.devices]


_CREATE = """
import sys
from pathlib import Path
from allotment.model.compute import Compute
from allotment.model.devices import Device
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.model.errors import DoesNotFitError
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
device = Device("GPU-0", "T4", 0, 16 << 30, 40, (7, 5), None, "0000:00:00.0", True, False)
request = Request(parse_memory(sys.argv[2]), compute=Compute(int(sys.argv[3])))
made = 0
for _ in range(4):
    try:
        order = ShareOrder(request, Injection.ENVIRONMENT)
        lifecycle.create(StateFolder(Path(sys.argv[1])), order, [device])
        made += 1
    except DoesNotFitError:
        pass
print(made)
"""


@pytest.mark.parametrize(
    ("memory", "guarantee", "fitting"), [("3Gi", 0, 5), ("1Gi", 3000, 3), ("2Gi", 1250, 8)]
)
def test_many_at_once_never_overcommit(
    tmp_path: Path, native_dir: Path, memory: str, guarantee: int, fitting: int
) -> None:
    assert native_dir.is_dir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATE, str(tmp_path / "fresh"), memory, str(guarantee)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    made = sum(int(process.communicate()[0]) for process in processes)
    assert made == fitting
    (there,) = booking.booked(recovery.list_shares(StateFolder(tmp_path / "fresh"))).values()
    assert (there.shares, there.guaranteed) == (fitting, fitting * guarantee)
    assert there.memory == fitting * parse_memory(memory).of(0)
    contract = read_contract(tmp_path / "fresh" / "devices" / "GPU-0" / "contract")
    assert len(contract.seats) == fitting


def test_a_share_is_promised_what_it_asked_for_on_each_device(
    folder: StateFolder, make: Make
) -> None:
    share, directory = make(count=2, compute=parse_compute("30:80"), may_oversubscribe=True)
    (found,) = recovery.list_shares(folder)
    assert found.guarantees() == {"GPU-00000000": 3000, "GPU-10000000": 3000}
    assert found.ledger
    for index, device in enumerate(found.ledger.policy.devices):
        assert device.is_oversubscribed
        assert device.seat is not None
        contract = read_contract(directory / f"contract-{index}")
        assert contract.uuid == device.uuid
        terms = Terms(parse_compute("30:80"), is_oversubscribed=True)
        assert contract.seats == (TakenSeat(device.seat, share.id, terms),)


def test_guarantees_are_booked(folder: StateFolder, make: Make) -> None:
    make(compute=parse_compute("70"))
    make(compute=parse_compute("40"))  # on the other device
    with pytest.raises(DoesNotFitError) as caught:
        make(compute=parse_compute("61"))
    assert "need 61 % of compute, have 30 % (70 % guaranteed)" in caught.value.message
    assert "need 61 % of compute, have 60 % (40 % guaranteed)" in caught.value.message
    assert "0:100" in (caught.value.hint or "")
    assert booking.booked(recovery.list_shares(folder))["GPU-00000000"].guaranteed == 7000


def test_a_share_that_cannot_be_made_leaves_no_seat(folder: StateFolder, make: Make) -> None:
    make()
    (folder.devices / "GPU-10000000").write_bytes(b"in the way")
    with pytest.raises(StateError):
        make("1Gi", count=2)
    assert len(recovery.list_shares(folder)) == 1
    assert len(read_contract(folder.devices / "GPU-00000000" / "contract").seats) == 1
    assert [path.name for path in folder.shares.iterdir() if path.name.startswith(".")] == []


def test_resize_of_compute_is_checked_on_all_devices_before_any_is_changed(
    folder: StateFolder, make: Make, devices: tuple[Device, ...]
) -> None:
    pair, _ = make(count=2, compute=parse_compute("30"))
    make("10Gi", compute=parse_compute("50"))
    (busy,) = [
        u
        for u, each in booking.booked(recovery.list_shares(folder)).items()
        if each.guaranteed > 3000
    ]
    with pytest.raises(DoesNotFitError, match=f"{busy}.*need 60 % of compute, have 50 %"):
        resize(folder, pair.id, LimitChange(compute=parse_compute("60")), devices, force=False)
    found = lifecycle.find(folder, pair.id)
    assert set(found.guarantees().values()) == {3000}
    again = resize(
        folder, pair.id, LimitChange(compute=parse_compute("50"), weight=7), devices, force=False
    )
    assert {each.compute for each in again.terms.values()} == {
        Compute(5000, 5000, 7, is_governed=True)
    }
    assert [each.compute for each in read_record(again.directory).devices] == [
        each.compute for each in again.terms.values()
    ]


def test_a_refused_limit_puts_compute_back(
    folder: StateFolder, make: Make, devices: tuple[Device, ...], hold: Hold
) -> None:
    _, directory = make("4Gi", name="pair", count=2, compute=parse_compute("30"))
    with hold(directory, 1) as holder:
        change = LimitChange(memory=parse_memory("2Gi"), compute=parse_compute("80"))
        with pytest.raises(LimitBelowUseError):
            resize(folder, "pair", change, devices, force=False)
        holder.communicate()
    found = lifecycle.find(folder, "pair")
    assert set(found.guarantees().values()) == {3000}
    assert [each.compute.guarantee for each in read_record(directory).devices] == [3000, 3000]


def test_nothing_is_oversubscribed_unless_asked_for(folder: StateFolder, make: Make) -> None:
    make("16Gi", host_budget=64 * GI)
    make("16Gi", host_budget=64 * GI)
    with pytest.raises(DoesNotFitError, match="need 1Gi, have 0B"):
        make("1Gi", host_budget=64 * GI)
    make("20Gi", may_oversubscribe=True, host_budget=64 * GI)
    with pytest.raises(DoesNotFitError, match="need 45Gi, have 44Gi") as caught:
        make("45Gi", may_oversubscribe=True, host_budget=64 * GI)
    assert "--host-memory" in (caught.value.hint or "")
    make("44Gi", may_oversubscribe=True, host_budget=64 * GI)
    assert sum(booked(folder).values()) == 96 * GI


def test_a_damaged_contract_is_named_and_made_anew_when_nobody_needs_it(
    folder: StateFolder, make: Make
) -> None:
    make(name="first", runner=None, compute=parse_compute("30"))
    contract = folder.devices / "GPU-00000000" / "contract"
    contract.write_bytes(b"")
    (first,) = recovery.list_shares(folder)
    assert str(folder.share(first.id) / "contract-0") in str(first.problem)
    assert first.guarantees() == {"GPU-00000000": 3000}  # as it was recorded
    lifecycle.destroy(folder, first, force=True)
    make(compute=parse_compute("100"))
    assert len(read_contract(contract).seats) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_users_of_a_common_folder_take_turns(
    common_folder: Path, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> None:
    folder = StateFolder(common_folder)
    lifecycle.create(folder, order(compute=parse_compute("60")), devices[:1])
    os.seteuid(65534)
    try:
        with pytest.raises(DoesNotFitError, match="have 40 %"):
            lifecycle.create(folder, order(compute=parse_compute("50")), devices[:1])
        share, directory = lifecycle.create(folder, order(compute=parse_compute("40")), devices[:1])
        assert os.access(directory / "seat-0", os.W_OK, effective_ids=True)
        lifecycle.destroy(folder, lifecycle.find(folder, share.id), force=True)
    finally:
        os.seteuid(0)
    assert len(read_contract(folder.devices / devices[0].uuid / "contract").seats) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(
    ("permissions", "others", "usage"), [(0o755, False, 0o666), (0o1777, True, 0o644)]
)
def test_files_that_every_user_may_write_are_out_of_reach(
    common_folder: Path,
    devices: tuple[Device, ...],
    order: Callable[..., ShareOrder],
    *,
    permissions: int,
    others: bool,
    usage: int,
) -> None:
    common_folder.chmod(permissions)
    folder = StateFolder(common_folder)
    _, directory = lifecycle.create(folder, order(compute=parse_compute("30")), devices[:1])
    (leases,) = (folder.devices / devices[0].uuid / "seats").iterdir()
    assert (directory / "usage").stat().st_mode & 0o777 == usage
    assert leases.stat().st_mode & 0o777 == usage
    os.seteuid(65534)
    try:
        reached = [os.access(path, os.F_OK, effective_ids=True) for path in (directory, leases)]
    finally:
        os.seteuid(0)
    assert reached == [others, others]


def test_a_folder_of_a_release_before_is_closed(folder: StateFolder, make: Make) -> None:
    make(compute=parse_compute("30"))
    for path in (folder.shares, folder.devices):
        path.chmod(0o755)
    make(compute=parse_compute("30"))
    assert folder.is_closed()


def test_a_device_of_a_release_before_gets_seats(folder: StateFolder, make: Make) -> None:
    seats = folder.devices / "GPU-00000000" / "seats"
    make(compute=parse_compute("30"))
    shutil.rmtree(seats)
    make(compute=parse_compute("30"))
    assert len(list(seats.iterdir())) == 1


def test_a_share_of_the_version_before_stays_booked_and_is_named(
    folder: StateFolder, make: Make
) -> None:
    """Its ledger has another layout: its programs keep their limits, and take no turns."""
    _, directory = make("10Gi", name="old", runner=None)
    for name in ("policy", "usage"):
        with (directory / name).open("r+b") as file:
            file.seek(8)
            file.write((1).to_bytes(4, "little"))
    record = json.loads((directory / "share.json").read_text())
    record["version"] = 1
    (directory / "share.json").write_text(json.dumps(record))
    (folder.root / "version").write_text("1\n")
    make("6Gi", compute=parse_compute("30"))
    old = recovery.list_shares(folder)[0]
    assert "ledger version 1, this program reads 2" in str(old.problem)
    assert "run it again" in (old.problem.hint or "" if old.problem else "")
    assert booked(folder)["GPU-00000000"] == 16 * GI
    assert (folder.root / "version").read_text() == "2\n"
    lifecycle.destroy(folder, old, force=True)
    assert len(recovery.list_shares(folder)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_refusal_of_another_users_share_names_the_owner(
    common_folder: Path, devices: tuple[Device, ...], order: Callable[..., ShareOrder]
) -> None:
    folder = StateFolder(common_folder)
    share, _ = lifecycle.create(folder, order(name="train"), devices)
    smaller = LimitChange(memory=parse_memory("1Gi"))
    os.seteuid(65534)
    try:
        found = lifecycle.find(folder, "train")
        refused = r"share train belongs to root \(uid 0\)"
        with pytest.raises(StateError, match=refused):
            lifecycle.destroy(folder, found, force=True)
        with pytest.raises(StateError, match=refused):
            resize(folder, "train", smaller, devices, force=True)
        with pytest.raises(StateError, match=refused):
            suspend(folder, "train", lambda _: {}, patience_s=1)
        with pytest.raises(StateError, match=refused):
            resume(folder, "train", lambda _: {}, devices, host_budget=None)
    finally:
        os.seteuid(0)
    assert lifecycle.find(folder, "train").id == share.id
