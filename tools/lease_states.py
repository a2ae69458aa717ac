# SPDX-License-Identifier: Apache-2.0
"""The pure core of leases (native/lease_core.c) for tests, and what holds in each of its states.

The structures are native/lease.h's; tests/unit/leases asks a C compiler whether they still are.
The checks know what a valid state is and nothing of how the core comes by it.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from typing import Final

from allotment.libraries import LEDGER, library_path

SEATS: Final = 64
PLACES: Final = 256
WHOLE: Final = 10_000
QUANTUM_NS: Final = 10_000_000
#: All who want the device have their turn in about so long, with leases no shorter than these.
ROUND_NS: Final = 32_000_000
SHORTEST_NS: Final = 3_000_000
#: What a ceiling lets a share catch up of what it left unused: nobody is further above it.
BURST_NS: Final = 25_000_000

TAKEN: Final = 1 << 48
GOVERNED: Final = 1 << 49
SUSPENDED: Final = 1 << 50

LATENCY: Final = 0
NORMAL: Final = 1
BEST_EFFORT: Final = 2


class PlaceIs(IntEnum):
    """ALLOT_PLACE_*."""

    FREE = 0
    IDLE = 1
    WAITING = 2
    HOLDING = 3


class Kind(IntEnum):
    """allot_event_kind."""

    JOIN = 0
    LEAVE = 1
    WANT = 2
    CHARGE = 3
    RELEASE = 4
    EVICT = 5
    LOOK = 6


class ContractSeat(ctypes.Structure):
    """allot_contract_seat."""

    _fields_ = (
        ("terms", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),
        ("share_id", ctypes.c_char * 64),
    )
    terms: int
    serial: int


class Contract(ctypes.Structure):
    """allot_contract."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_uint32),
        ("governed", ctypes.c_uint32),
        ("generation", ctypes.c_uint64),
        ("serial", ctypes.c_uint64),
        ("quantum_us", ctypes.c_uint32),
        ("spare", ctypes.c_uint32 * 7),
        ("uuid", ctypes.c_char * 48),
        ("seats", ContractSeat * SEATS),
    )
    quantum_us: int
    seats: ctypes.Array[ContractSeat]


class SeatState(ctypes.Structure):
    """allot_seat_state."""

    _fields_ = (
        ("serial", ctypes.c_uint64),
        ("used_ns", ctypes.c_uint64),
        ("borrowed_ns", ctypes.c_uint64),
        ("lent_ns", ctypes.c_uint64),
        ("virtual_ns", ctypes.c_uint64),
        ("budget_ns", ctypes.c_int64),
        ("owed_ns", ctypes.c_int64),
        ("active_ns", ctypes.c_uint64),
        ("move_ns", ctypes.c_uint64),
        ("leases", ctypes.c_uint64),
        ("evictions", ctypes.c_uint64),
        ("blocked", ctypes.c_uint64),
        ("grace_ns", ctypes.c_int64),
        ("launch_ns", ctypes.c_uint64),
    )
    serial: int
    used_ns: int
    borrowed_ns: int
    lent_ns: int
    virtual_ns: int
    budget_ns: int
    owed_ns: int
    active_ns: int
    move_ns: int
    leases: int
    evictions: int
    blocked: int
    grace_ns: int
    launch_ns: int


class PlaceState(ctypes.Structure):
    """allot_place_state."""

    _fields_ = (
        ("seat", ctypes.c_uint16),
        ("state", ctypes.c_uint8),
        ("slot", ctypes.c_uint8),
        ("serial", ctypes.c_uint32),
        ("since_ns", ctypes.c_uint64),
        ("burst_ns", ctypes.c_uint64),
        ("gap_ns", ctypes.c_uint64),
    )
    seat: int
    state: int
    serial: int
    since_ns: int


class LeaseState(ctypes.Structure):
    """allot_lease_state."""

    _fields_ = (
        ("now_ns", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("holder", ctypes.c_int32),
        ("next", ctypes.c_int32),
        ("granted_ns", ctypes.c_uint64),
        ("expires_ns", ctypes.c_uint64),
        ("virtual_ns", ctypes.c_uint64),
        ("waiting", ctypes.c_uint32),
        ("places_taken", ctypes.c_uint32),
        ("keep_ns", ctypes.c_uint64),
        ("is_lent", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
        ("seats", SeatState * SEATS),
        ("places", PlaceState * PLACES),
    )
    now_ns: int
    epoch: int
    holder: int
    next: int
    granted_ns: int
    expires_ns: int
    waiting: int
    places_taken: int
    keep_ns: int
    is_lent: int
    seats: ctypes.Array[SeatState]
    places: ctypes.Array[PlaceState]


class Event(ctypes.Structure):
    """allot_event."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("place", ctypes.c_int),
        ("seat", ctypes.c_int),
        ("epoch", ctypes.c_uint64),
        ("used_ns", ctypes.c_uint64),
        ("move_ns", ctypes.c_uint64),
        ("launch_ns", ctypes.c_uint64),
        ("burst_ns", ctypes.c_uint64),
        ("gap_ns", ctypes.c_uint64),
        ("now_ns", ctypes.c_uint64),
    )


STRUCTURES: Final = {
    "allot_contract_seat": ContractSeat,
    "allot_contract": Contract,
    "allot_seat_state": SeatState,
    "allot_place_state": PlaceState,
    "allot_lease_state": LeaseState,
    "allot_event": Event,
}


@cache
def library() -> ctypes.CDLL:
    """The core, as it ships."""
    loaded = ctypes.CDLL(str(library_path(LEDGER)))
    state, contract = ctypes.POINTER(LeaseState), ctypes.POINTER(Contract)
    loaded.allot_lease_decide.argtypes = [state, contract, ctypes.POINTER(Event)]
    loaded.allot_lease_decide.restype = None
    loaded.allot_lease_must_yield.argtypes = [state, contract, ctypes.c_uint64]
    loaded.allot_lease_must_yield.restype = ctypes.c_bool
    loaded.allot_lease_fraction.argtypes = [state, contract, ctypes.c_int, ctypes.c_uint64]
    loaded.allot_lease_fraction.restype = ctypes.c_uint32
    return loaded


def terms(
    guarantee: int = 0,
    ceiling: int = WHOLE,
    *,
    weight: int = 100,
    share_class: int = NORMAL,
    flags: int = TAKEN | GOVERNED,
) -> int:
    """ALLOT_TERMS; the guarantee and the ceiling are in basis points."""
    return guarantee | ceiling << 14 | weight << 28 | share_class << 42 | flags


def ceiling_of(word: int) -> int:
    """A share's ceiling in basis points, as the core takes it."""
    return min(word >> 14 & 0x3FFF, WHOLE)


def guarantee_of(word: int) -> int:
    """A share's guarantee in basis points, as the core takes it."""
    return min(word & 0x3FFF, ceiling_of(word))


class Core:
    """A device's contract and state, which change by events alone."""

    def __init__(self) -> None:
        self.state = LeaseState(holder=-1, next=-1)
        self.contract = Contract(quantum_us=QUANTUM_NS // 1000)
        self._library = library()
        self._event = Event()
        self._serial = 0

    def take_seat(self, seat: int, word: int) -> int:
        """Give a seat to another share: its serial."""
        self._serial += 1
        self.contract.seats[seat].serial = self._serial
        self.contract.seats[seat].terms = word
        return self._serial

    def decide(
        self,
        kind: int,
        now_ns: int,
        *,
        place: int = -1,
        seat: int = -1,
        epoch: int | None = None,
        used_ns: int = 0,
        move_ns: int = 0,
        launch_ns: int = 0,
        burst_ns: int = 0,
        gap_ns: int = 0,
    ) -> None:
        """Apply one event. An eviction is from the lease in force unless another is named."""
        event = self._event
        event.kind, event.place, event.seat = kind, place, seat
        event.epoch = self.state.epoch if epoch is None else epoch
        event.used_ns, event.move_ns, event.now_ns = used_ns, move_ns, now_ns
        event.launch_ns, event.burst_ns, event.gap_ns = launch_ns, burst_ns, gap_ns
        self._library.allot_lease_decide(self.state, self.contract, event)

    def must_yield(self, now_ns: int) -> bool:
        """Has the holder to stop submitting work?"""
        return bool(self._library.allot_lease_must_yield(self.state, self.contract, now_ns))

    def fraction(self, seat: int, now_ns: int) -> int:
        """What the seat is owed of the device, in basis points."""
        found = self._library.allot_lease_fraction(self.state, self.contract, seat, now_ns)
        return int(found)

    def is_current(self, place: int) -> bool:
        """Is the place of a share that has its seat still?"""
        one = self.state.places[place]
        seat = self.contract.seats[one.seat]
        return bool(seat.terms & TAKEN) and one.serial == seat.serial & 0xFFFF_FFFF

    def may_run(self, place: int) -> bool:
        """Would the place be given the lease if nobody else wanted it?"""
        one = self.state.places[place]
        return (
            one.state == PlaceIs.WAITING
            and self.is_current(place)
            and not self.contract.seats[one.seat].terms & SUSPENDED
            and not self.state.seats[one.seat].blocked
        )

    def problems(self) -> list[str]:
        """What is wrong with the state, whatever came before: a sentence each."""
        state, places = self.state, self.state.places
        found = []
        states = [places[i].state for i in range(PLACES)]
        holding = [i for i in range(PLACES) if states[i] == PlaceIs.HOLDING]
        runnable = [i for i in range(PLACES) if states[i] == PlaceIs.WAITING and self.may_run(i)]
        if holding != ([state.holder] if state.holder != -1 else []):
            found.append(f"{holding} hold, the holder is {state.holder}")
        if any(one > PlaceIs.HOLDING for one in states):
            found.append("a place is in no state")
        if any(places[i].seat >= SEATS for i in range(PLACES) if states[i]):
            found.append("a place is of no seat")
        if state.waiting != states.count(PlaceIs.WAITING):
            found.append(f"{states.count(PlaceIs.WAITING)} wait, {state.waiting} are counted")
        if state.places_taken != PLACES - states.count(PlaceIs.FREE):
            found.append(f"{state.places_taken} places are counted as taken")
        if state.holder == -1 and runnable:
            found.append(f"{runnable} may run and wait, and nobody holds")
        if (state.next == -1) != (not runnable) or (
            state.next != -1 and state.next not in runnable
        ):
            found.append(f"next is {state.next} of {runnable}")
        for seat in range(SEATS):
            own, word = state.seats[seat], self.contract.seats[seat].terms
            holds = state.holder != -1 and places[state.holder].seat == seat
            if word & TAKEN and own.budget_ns > BURST_NS and not holds:
                found.append(f"seat {seat} may burst by {own.budget_ns} ns")
        return found
