# SPDX-License-Identifier: Apache-2.0
"""The turns of a device from the agent's side: seats, terms, and what is read of both files."""

import fcntl
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import undisturbed

from allotment.ledger import lease_layout as layout
from allotment.ledger import leases
from allotment.ledger.leases import Seat, SeatAccount, Terms
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import DoesNotFitError, LedgerError

AT_ONCE_S = 0.4  # who waits for a lock looks again after half a second
HALF = Terms(Compute(5000, 8000, is_governed=True))


@pytest.fixture
def device(tmp_path: Path, native_dir: Path) -> Path:
    assert native_dir.is_dir()
    folder = tmp_path / "GPU-0"
    folder.mkdir()
    leases.create_device(folder, "GPU-0")
    return folder


def contract(device: Path) -> leases.Contract:
    return leases.read_contract(device / "contract")


def test_a_new_device_promises_nothing(device: Path) -> None:
    found = contract(device)
    assert (found.uuid, found.seats, found.is_governed) == ("GPU-0", (), False)
    assert leases.read_leases(found, device / "seats") == leases.Leases({}, {})


def test_making_it_twice_leaves_the_first(device: Path) -> None:
    seat = leases.take(device, "ab12", HALF)
    with pytest.raises(LedgerError, match="exists"):
        leases.create_device(device, "GPU-0")
    assert leases.DeviceFiles().terms(device / "contract", seat) == HALF


terms = st.builds(
    Terms,
    st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)).flatmap(
        lambda pair: st.builds(
            Compute,
            st.just(min(pair)),
            st.just(pair[1]),
            st.integers(1, 10_000),
            st.sampled_from(ComputeClass),
            st.booleans(),
        )
    ),
    is_suspended=st.booleans(),
    is_oversubscribed=st.booleans(),
)


@given(terms, terms)
def test_what_is_promised_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, first: Terms, second: Terms
) -> None:
    device = tmp_path_factory.mktemp("GPU-0")
    try:
        leases.create_device(device, "GPU-0")
        seat = leases.take(device, "ab12", first)
        assert leases.DeviceFiles().terms(device / "contract", seat) == first
        takes_turns = first.compute.is_governed or first.is_oversubscribed
        assert contract(device).is_governed == takes_turns
        leases.change(device, seat, second)
        assert leases.DeviceFiles().terms(device / "contract", seat) == second
        assert (
            leases.DeviceFiles().terms(device / "contract", Seat(seat.number, seat.serial + 1))
            is None
        )
        assert leases.DeviceFiles().terms(device / "contract", Seat(layout.SEATS, 1)) is None
        leases.free(device, seat)
        assert contract(device).seats == ()
    finally:
        shutil.rmtree(device)


def test_guarantees_never_pass_the_whole(device: Path) -> None:
    first = leases.take(device, "one", HALF)
    second = leases.take(device, "two", HALF)
    little = Terms(Compute(1, 1, is_governed=True))
    with pytest.raises(DoesNotFitError, match="100 %"):
        leases.take(device, "three", little)
    with pytest.raises(DoesNotFitError):
        leases.change(device, first, Terms(Compute(5001, 8000)))
    assert leases.DeviceFiles().terms(device / "contract", first) == HALF
    leases.free(device, second)
    leases.take(device, "three", little)


def test_a_seat_that_changed_hands_is_not_its_old_owners(device: Path) -> None:
    old = leases.take(device, "one", HALF)
    leases.free(device, old)
    leases.free(device, old)
    new = leases.take(device, "two", HALF)
    assert new.number == old.number
    assert new.serial != old.serial
    assert leases.DeviceFiles().terms(device / "contract", old) is None
    with pytest.raises(LedgerError, match="contract"):
        leases.change(device, old, HALF)
    leases.free(device, old)
    assert leases.DeviceFiles().terms(device / "contract", new) == HALF


def test_a_tenant_that_holds_the_files_lock_holds_up_nobody(device: Path) -> None:
    with (device / "contract").open("rb") as tenant:  # as a container has it: read-only
        fcntl.flock(tenant, fcntl.LOCK_EX)

        def took() -> float:
            begun = time.monotonic()
            seat = leases.take(device, "one", Terms(Compute()))
            leases.change(device, seat, HALF)
            took = time.monotonic() - begun
            assert leases.DeviceFiles().terms(device / "contract", seat) == HALF
            leases.free(device, seat)
            return took

        assert undisturbed(took, lambda seconds: seconds < AT_ONCE_S) < AT_ONCE_S


@pytest.fixture
def seat(device: Path) -> Seat:
    return leases.take(device, "one", HALF)


@pytest.fixture
def own(device: Path, seat: Seat) -> Path:
    """The file of the one seat."""
    return Path(leases.seat_file(device, seat.serial))


def read(device: Path) -> leases.Leases:
    return leases.read_leases(contract(device), device / "seats")


@pytest.mark.parametrize("length", [0, 8, 4096, layout.LEASES_FILE_SIZE - 1])
def test_leases_that_were_cut_short_are_put_right(
    device: Path, seat: Seat, own: Path, length: int
) -> None:
    before = own.stat().st_ino
    os.truncate(own, length)
    assert "truncated" in leases.mend(own)
    assert leases.mend(own) == ""
    status = own.stat()
    assert (status.st_ino, status.st_size) == (before, layout.LEASES_FILE_SIZE)
    assert read(device).accounts == {seat.serial: SeatAccount()}
    assert leases.DeviceFiles().terms(device / "contract", seat) == HALF


@pytest.mark.parametrize("at", [0, layout.LEASES_FILE_VERSION_AT, layout.LEASES_FILE_ROOT_AT])
def test_a_head_that_was_written_over_is_put_right(device: Path, own: Path, at: int) -> None:
    with own.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 4)
    assert read(device).accounts == {}
    assert "overwritten" in leases.mend(own)
    assert list(read(device).accounts.values()) == [SeatAccount()]


def test_leases_that_were_made_longer_are_cut(own: Path) -> None:
    with own.open("r+b") as file:
        file.seek(layout.LEASES_FILE_SIZE + (1 << 20))
        file.write(b"x")
    assert "longer by 1" in leases.mend(own)
    assert own.stat().st_size == layout.LEASES_FILE_SIZE
    assert leases.mend(own) == ""


def test_the_file_of_an_older_version_is_not_missed(device: Path) -> None:
    assert leases.mend(leases.seat_file(device, 99)) == ""


def test_a_seat_that_is_freed_has_no_file(device: Path, seat: Seat, own: Path) -> None:
    leases.free(device, seat)
    assert not own.exists()


def test_seats_are_limited_and_that_is_said(device: Path) -> None:
    for number in range(layout.SEAT_UNBOOKED):
        leases.take(device, f"share{number}", Terms(Compute()))
    with pytest.raises(DoesNotFitError, match="63 shares"):
        leases.take(device, "more", Terms(Compute()))


def test_a_device_that_is_gone_has_no_seats_to_free(tmp_path: Path) -> None:
    leases.free(tmp_path / "gone", Seat(0, 1))


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b"", "0 bytes"), (b"x" * 9000, "magic number")],
)
def test_damage_is_named_with_the_next_step(device: Path, content: bytes | None, says: str) -> None:
    path = device / "contract"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(LedgerError, match=says) as caught:
        leases.read_contract(path)
    assert str(path) in caught.value.message
    assert "rm -r" in (caught.value.hint or "")
    with pytest.raises(LedgerError, match=str(device)):
        leases.take(device, "ab12", HALF)


@pytest.mark.parametrize("kind", ["cut", "folder", "fifo", "link", "gone"])
def test_what_is_no_seats_file_costs_its_share_the_account(
    device: Path, own: Path, kind: str
) -> None:
    other = leases.take(device, "two", Terms(Compute()))
    if kind == "cut":
        os.truncate(own, layout.LEASES_FILE_BUFFERS_AT + 12)
    else:
        own.unlink()
        if kind == "folder":
            own.mkdir()
        elif kind == "fifo":
            os.mkfifo(own)
        elif kind == "link":
            own.symlink_to(leases.seat_file(device, other.serial))
    assert list(read(device).accounts) == [other.serial]


def test_another_version_is_named(device: Path) -> None:
    with (device / "contract").open("r+b") as file:
        file.seek(layout.CONTRACT_VERSION_AT)
        file.write((layout.CONTRACT_VERSION + 1).to_bytes(4, "little"))
    named = f"version {layout.CONTRACT_VERSION + 1}, this program reads {layout.CONTRACT_VERSION}"
    with pytest.raises(LedgerError, match=named):
        leases.read_contract(device / "contract")


def test_reads_what_the_shares_publish(device: Path, seat: Seat, own: Path) -> None:
    lender = leases.take(device, "two", Terms(Compute()))
    buffer, root = 7, 1 << 33 | 7 << 16 | 1
    data = bytearray(layout.SEAT_BUFFER_SIZE)
    account = layout.SEAT_FACTS_ACCOUNT_AT
    for at, value in (
        (layout.SEAT_FACTS_ROOT_AT, root),
        (account + layout.SEAT_STATE_SERIAL_AT, seat.serial),
        (account + layout.SEAT_STATE_USED_NS_AT, 1000),
        (account + layout.SEAT_STATE_BORROWED_NS_AT, 300),
        (account + layout.SEAT_STATE_LEASES_AT, 3),
        (account + layout.SEAT_STATE_EVICTIONS_AT, 1),
        (layout.SEAT_BUFFER_LENT_AT + layout.LENT_SERIAL_AT, lender.serial),
        (layout.SEAT_BUFFER_LENT_AT + layout.LENT_LENT_NS_AT, 40),
    ):
        struct.pack_into("<Q", data, at, value)
    struct.pack_into("<I", data, layout.SEAT_FACTS_WAITING_AT, 1)
    data[layout.SEAT_FACTS_HOLDING_AT + layout.PLACE_STATE_STATE_AT] = layout.PLACE_HOLDING
    with own.open("r+b") as file:
        file.seek(layout.LEASES_FILE_BUFFERS_AT + buffer * layout.SEAT_BUFFER_SIZE)
        file.write(data)
        file.seek(layout.LEASES_FILE_ROOT_AT)
        file.write(struct.pack("<Q", root))
        file.seek(layout.LEASES_FILE_DISTRUSTED_AT)
        file.write(struct.pack("<Q", 1 << lender.number))
        for place, busy, since in ((0, 0, 100), (5, 1, 6000), (7, 1, 8000)):
            file.seek(layout.LEASES_FILE_HEADS_AT + place * layout.PLACE_HEAD_SIZE)
            file.write(struct.pack("<IIQiIQ", 0, busy, 9000, 1, 0, since))
    turns = read(device)
    assert turns.accounts == {
        seat.serial: SeatAccount(
            used_ns=1000,
            running_ns=3000,
            borrowed_ns=300,
            leases=3,
            evictions=1,
            holding=1,
            waiting=1,
        ),
        lender.serial: SeatAccount(lent_ns=40),
    }
    assert turns.distrusted == {lender.serial: ("one",)}


@given(st.data())
def test_foreign_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    device = tmp_path_factory.mktemp("fuzz")
    try:
        leases.create_device(device, "GPU-0")
        seat = leases.take(device, "ab12", HALF)
        found, own = contract(device), Path(leases.seat_file(device, seat.serial))

        def scribble(path: Path) -> None:
            content = bytearray(path.read_bytes()[: 64 << 10])
            for _ in range(data.draw(st.integers(1, 8))):
                at = data.draw(st.integers(0, min(len(content), 24 << 10) - 8))
                content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
            path.write_bytes(content[: data.draw(st.integers(0, len(content)))])

        scribble(own)
        assert set(leases.read_leases(found, device / "seats").accounts) <= {seat.serial}
        scribble(device / "contract")
        try:
            contract(device)
        except LedgerError as error:
            assert "contract" in error.message  # noqa: PT017 - both ends are fine
    finally:
        shutil.rmtree(device)
