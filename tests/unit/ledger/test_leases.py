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
    assert found.quantum_us > 0
    turns = leases.read_leases(device / "leases")
    assert (turns.epoch, turns.waiting, turns.accounts) == (0, 0, {})


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


@pytest.mark.parametrize("length", [0, 8, 4096, layout.LEASES_FILE_SIZE - 1])
def test_leases_that_were_cut_short_are_put_right(device: Path, length: int) -> None:
    seat = leases.take(device, "one", HALF)
    before = (device / "leases").stat().st_ino
    os.truncate(device / "leases", length)
    assert "truncated" in leases.mend(device)
    assert leases.mend(device) == ""
    status = (device / "leases").stat()
    assert (status.st_ino, status.st_size) == (before, layout.LEASES_FILE_SIZE)
    assert leases.read_leases(device / "leases").accounts == {}
    assert leases.DeviceFiles().terms(device / "contract", seat) == HALF


@pytest.mark.parametrize("at", [0, layout.LEASES_FILE_VERSION_AT, layout.LEASES_FILE_ROOT_AT])
def test_a_head_that_was_written_over_is_put_right(device: Path, at: int) -> None:
    with (device / "leases").open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 4)
    assert "overwritten" in leases.mend(device)
    assert leases.read_leases(device / "leases").epoch == 0


def test_leases_that_were_made_longer_are_cut(device: Path) -> None:
    with (device / "leases").open("r+b") as file:
        file.seek(layout.LEASES_FILE_SIZE + (1 << 20))
        file.write(b"x")
    assert "longer by 1" in leases.mend(device)
    assert (device / "leases").stat().st_size == layout.LEASES_FILE_SIZE
    assert leases.mend(device) == ""


def test_leases_of_a_damaged_contract_are_left_alone(device: Path) -> None:
    (device / "contract").write_bytes(b"x" * 9000)
    os.truncate(device / "leases", 0)
    with pytest.raises(LedgerError):
        leases.mend(device)
    assert (device / "leases").stat().st_size == 0


def test_seats_are_limited_and_that_is_said(device: Path) -> None:
    for number in range(layout.SEAT_UNBOOKED):
        leases.take(device, f"share{number}", Terms(Compute()))
    with pytest.raises(DoesNotFitError, match="63 shares"):
        leases.take(device, "more", Terms(Compute()))


def test_a_device_that_is_gone_has_no_seats_to_free(tmp_path: Path) -> None:
    leases.free(tmp_path / "gone", Seat(0, 1))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("contract", None, "No such file"),
        ("contract", b"", "0 bytes"),
        ("contract", b"x" * 9000, "magic number"),
        ("leases", None, "No such file"),
        ("leases", b"", "0 bytes"),
        ("leases", b"x" * 9000, "magic number"),
    ],
)
def test_damage_is_named_with_the_next_step(
    device: Path, name: str, content: bytes | None, says: str
) -> None:
    path = device / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(LedgerError, match=says) as caught:
        (leases.read_contract if name == "contract" else leases.read_leases)(path)
    assert str(path) in caught.value.message
    assert "rm -r" in (caught.value.hint or "")
    if name == "contract":
        with pytest.raises(LedgerError, match=str(device)):
            leases.take(device, "ab12", HALF)


def test_a_state_that_is_cut_off_is_named(device: Path) -> None:
    path = device / "leases"
    os.truncate(path, layout.LEASES_FILE_STATES_AT)
    with path.open("ab") as file:
        file.write(b"half a state")
    with pytest.raises(LedgerError, match="its state has 12 bytes"):
        leases.read_leases(path)


def test_another_version_is_named(device: Path) -> None:
    for name in ("contract", "leases"):
        with (device / name).open("r+b") as file:
            file.seek(layout.CONTRACT_VERSION_AT)
            file.write((layout.LEASE_VERSION + 1).to_bytes(4, "little"))
    named = f"version {layout.LEASE_VERSION + 1}, this program reads {layout.LEASE_VERSION}"
    with pytest.raises(LedgerError, match=named):
        leases.read_contract(device / "contract")
    with pytest.raises(LedgerError, match=named):
        leases.read_leases(device / "leases")


def test_reads_the_state_in_force(device: Path) -> None:
    buffer, seat, serial = 7, 5, 99
    state = bytearray(layout.LEASE_STATE_SIZE)
    struct.pack_into("<Q", state, layout.LEASE_STATE_EPOCH_AT, 12)
    at = layout.LEASE_STATE_SEATS_AT + seat * layout.SEAT_STATE_SIZE
    for field, value in (
        (layout.SEAT_STATE_SERIAL_AT, serial),
        (layout.SEAT_STATE_USED_NS_AT, 1000),
        (layout.SEAT_STATE_BORROWED_NS_AT, 300),
        (layout.SEAT_STATE_LENT_NS_AT, 40),
        (layout.SEAT_STATE_LEASES_AT, 3),
        (layout.SEAT_STATE_EVICTIONS_AT, 1),
    ):
        struct.pack_into("<Q", state, at + field, value)
    for place, doing in ((0, layout.PLACE_HOLDING), (9, layout.PLACE_WAITING)):
        at = layout.LEASE_STATE_PLACES_AT + place * layout.PLACE_STATE_SIZE
        struct.pack_into("<HH", state, at, seat, doing)
    with (device / "leases").open("r+b") as file:
        file.seek(layout.LEASES_FILE_STATES_AT + buffer * layout.LEASE_STATE_SIZE)
        file.write(state)
        file.seek(layout.LEASES_FILE_ROOT_AT)
        file.write(struct.pack("<Q", 1 << 33 | buffer << 16 | 1))
    turns = leases.read_leases(device / "leases")
    assert turns.epoch == 12
    assert turns.accounts == {
        serial: SeatAccount(
            used_ns=1000, borrowed_ns=300, lent_ns=40, leases=3, evictions=1, holding=1, waiting=1
        )
    }


@given(st.data())
def test_foreign_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    device = tmp_path_factory.mktemp("fuzz")
    try:
        leases.create_device(device, "GPU-0")
        leases.take(device, "ab12", HALF)
        for name, read in (("contract", leases.read_contract), ("leases", leases.read_leases)):
            content = bytearray((device / name).read_bytes()[: 64 << 10])
            for _ in range(data.draw(st.integers(1, 8))):
                at = data.draw(st.integers(0, min(len(content), 24 << 10) - 8))
                content[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
            (device / name).write_bytes(content[: data.draw(st.integers(0, len(content)))])
            try:
                read(device / name)
            except LedgerError as error:
                assert name in error.message  # noqa: PT017 - both ends are fine
    finally:
        shutil.rmtree(device)
