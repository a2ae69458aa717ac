# SPDX-License-Identifier: Apache-2.0
"""The life of shares: made whole or not at all, never booked twice, gone when they ended."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
from allotment.shares import lives
from allotment.shares.folders import StateFolder
from allotment.shares.records import read_record
from allotment.shares.resizing import Change, resize

GI = 1 << 30
Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "subprocess.Popen[bytes]"]


def to(memory: str) -> Change:
    return Change(memory=parse_memory(memory))


def booked(folder: StateFolder) -> dict[str, int]:
    return lives.allotted(lives.look(folder))


def test_a_share_is_whole_when_it_can_be_seen(folder: StateFolder, make: Make) -> None:
    share, directory = make("4Gi", name="train")
    names = ["contract-0", "leases-0", "policy", "share.json", "usage"]
    assert sorted(path.name for path in directory.iterdir()) == names
    common = folder.devices / "GPU-00000000"
    assert (directory / "contract-0").samefile(common / "contract")
    assert (directory / "leases-0").samefile(common / "leases")
    assert read_record(directory) == share
    (found,) = lives.look(folder)
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
        lives.create(folder, lives.Order(request, Injection.ENVIRONMENT), devices)
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
        assert lives.find(folder, word).id == share.id
    with pytest.raises(NotFoundError) as caught:
        lives.find(folder, "trian")
    assert "train" in (caught.value.hint or "")


def test_a_share_whose_runner_died_is_removed_by_the_next(
    folder: StateFolder, make: Make, dead_runner: Runner
) -> None:
    make("10Gi", runner=dead_runner, count=2)
    make("10Gi", count=2)
    assert len(lives.look(folder)) == 1


def test_a_share_without_runner_stays(folder: StateFolder, make: Make) -> None:
    make(runner=None)
    with folder.locked():
        assert len(lives.recover(folder)) == 1


def test_processes_left_in_a_share_keep_it(
    folder: StateFolder, make: Make, dead_runner: Runner, sleeper: Sleeper
) -> None:
    _, directory = make("10Gi", runner=dead_runner)
    process = sleeper(ALLOTMENT_SHARE=str(directory))
    with folder.locked():
        assert len(lives.recover(folder)) == 1
    process.communicate()
    with folder.locked():
        assert lives.recover(folder) == []


def test_a_process_id_that_was_given_again_is_not_the_runner(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    make(runner=Runner(sleeper().pid, 1, "another boot"))
    with folder.locked():
        assert lives.recover(folder) == []


def test_the_end_waits_for_who_is_left(folder: StateFolder, make: Make, sleeper: Sleeper) -> None:
    share, directory = make()
    process = sleeper(ALLOTMENT_SHARE=str(directory))
    assert not lives.end(folder, share)
    process.communicate()
    assert lives.end(folder, share)
    assert not directory.exists()


def test_rm_refuses_what_is_in_use(folder: StateFolder, make: Make) -> None:
    share, _ = make(name="train")
    with pytest.raises(BusyError, match="train is in use"):
        lives.destroy(folder, lives.find(folder, share.id), force=False)
    lives.destroy(folder, lives.find(folder, share.id), force=True)
    assert lives.look(folder) == []


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
    damaged, whole = lives.look(folder)
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
    damaged = lives.look(folder)[0]
    assert str(directory / name) in str(damaged.problem)
    assert booked(folder)["GPU-00000000"] == 16 * GI
    lives.destroy(folder, damaged, force=False)
    assert len(lives.look(folder)) == 1


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


_HOLDER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
ledger = ctypes.create_string_buffer(4096)
directory = sys.argv[2].encode()
assert library.allot_ledger_open(ledger, directory) == 0
assert library.allot_ledger_attach(ledger) == 0
library.allot_ledger_reserve.restype = ctypes.c_bool
library.allot_ledger_reserve.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint64]
assert library.allot_ledger_reserve(ledger, int(sys.argv[3]), 3 << 30)
print("held", flush=True)
sys.stdin.read()
"""


def test_resize_below_the_use_changes_no_device(
    folder: StateFolder, make: Make, devices: tuple[Device, ...], native_dir: Path
) -> None:
    _, directory = make("4Gi", name="pair", count=2)
    library = native_dir / "liballotment-ledger.so"
    # Uses the second device, so that the first one is changed and has to be put back.
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(library), str(directory), "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(LimitBelowUseError, match="3Gi"):
            resize(folder, "pair", to("2Gi"), devices, force=False)
        found = lives.find(folder, "pair")
        assert found.ledger
        assert [each.memory_limit for each in found.ledger.policy.devices] == [4 * GI, 4 * GI]
        assert set(found.limits().values()) == {4 * GI}
        forced = resize(folder, "pair", to("2Gi"), devices, force=True)
        assert set(forced.limits().values()) == {2 * GI}
        assert forced.ledger
        assert [each.pid for each in forced.ledger.processes] == [holder.pid]
        holder.communicate()
    found = lives.find(folder, "pair")
    assert found.ledger
    assert found.ledger.devices[1].used == 0


_CREATE = """
import sys
from pathlib import Path
from allotment.model.devices import Device
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.model.errors import DoesNotFitError
from allotment.shares import lives
from allotment.shares.folders import StateFolder
device = Device("GPU-0", "T4", 0, 16 << 30, 40, (7, 5), None, "0000:00:00.0", True, False)
order = lives.Order(Request(parse_memory("3Gi")), Injection.ENVIRONMENT)
made = 0
for _ in range(4):
    try:
        lives.create(StateFolder(Path(sys.argv[1])), order, [device])
        made += 1
    except DoesNotFitError:
        pass
print(made)
"""


def test_many_at_once_never_overcommit(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATE, str(tmp_path / "fresh")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    made = sum(int(process.communicate()[0]) for process in processes)
    assert made == 5
    assert booked(StateFolder(tmp_path / "fresh")) == {"GPU-0": 15 * GI}
