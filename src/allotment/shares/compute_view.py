# SPDX-License-Identifier: Apache-2.0
"""A share's use of one device's compute, beside what it was promised."""

from collections.abc import Collection

import msgspec

from allotment.devices.sources import Problem, Reading
from allotment.ledger import DeviceUse, Ledger, SeatAccount
from allotment.model.compute import Compute, exceeds, in_full
from allotment.model.structs import replace
from allotment.modes import Turns, traits_of
from allotment.shares.record import LoadedShare


class Rates(msgspec.Struct, frozen=True):
    """A share's use of one device between two looks, in parts of that time."""

    gpu: float
    copy: float
    held: float
    """Sum of all threads, may exceed 1."""
    borrowed: float
    lent: float


class ComputeView(msgspec.Struct, frozen=True):
    """A share's promised part of one device's compute, and its use so far."""

    promised: Compute
    is_suspended: bool
    is_measured: bool
    """GPU time is measured: only if a share of the device asks for compute."""
    use: DeviceUse
    account: SeatAccount
    driver_percent: int | None
    """NVML's utilisation of the device by its processes in the last second."""
    read_ns: int
    rates: Rates | None = None
    """None: no earlier look to compare with."""
    takes_turns: bool = True
    """False: it runs at the same time as others (MPS), and is not measured."""
    distrusted_by: tuple[str, ...] = ()
    """Shares that take no turns with it."""

    @property
    def state(self) -> str | None:
        """`holding` the device, `waiting`, `idle` or `suspended`; None without turns."""
        if not self.takes_turns:
            return None
        if self.is_suspended:
            return "suspended"
        if self.account.holding:
            return "holding"
        return "waiting" if self.account.waiting else "idle"

    def beyond(self, recorded: Compute) -> str:
        """How the contract allows more than was recorded; empty: it does not."""
        is_governed = self.promised.is_governed and self.is_measured
        in_force = self.promised
        if is_governed != in_force.is_governed:
            in_force = replace(in_force, is_governed=is_governed)
        if not self.takes_turns or not exceeds(in_force, recorded):
            return ""
        return f"{in_full(in_force)}, not {in_full(recorded)} as recorded"

    def since(self, before: "ComputeView") -> "ComputeView":
        """This view with its rates since an earlier one."""
        elapsed = self.read_ns - before.read_ns
        if elapsed <= 0 or not (self.is_measured and before.is_measured):
            return self

        def rate(later: int, earlier: int) -> float:
            return max(0, later - earlier) / elapsed

        rates = Rates(
            # Of the same reading as what is borrowed: that is a part of it.
            gpu=rate(
                self.account.used_ns + self.account.running_ns,
                before.account.used_ns + before.account.running_ns,
            ),
            copy=rate(self.use.copy_ns, before.use.copy_ns),
            held=rate(self.use.held_ns, before.use.held_ns),
            borrowed=rate(self.account.borrowed_ns, before.account.borrowed_ns),
            lent=rate(self.account.lent_ns, before.account.lent_ns),
        )
        return replace(self, rates=rates)


def utilization(reading: Reading | Problem | None, pids: Collection[int]) -> int | None:
    """The driver's figure; None: it does not report one."""
    if not isinstance(reading, Reading):
        return None
    percents = [each.gpu_percent for each in reading.processes if each.pid in pids]
    known = [each for each in percents if each is not None]
    return None if percents and not known else sum(known)


def compute_of(
    found: LoadedShare,
    ledger: Ledger,
    uuid: str,
    use: DeviceUse,
    turns: Turns | None,
    *,
    driver_percent: int | None,
) -> ComputeView | None:
    """The view of one of a share's devices; None: nothing is promised or known of its compute."""
    terms = found.terms.get(uuid)
    if traits_of(found.mode).needs_daemon:  # it takes no turns
        terms, turns = None, None
        promised = next((each.compute for each in found.devices() if each.uuid == uuid), None)
    elif terms is not None and turns is not None:
        promised = terms.compute
    else:
        return None
    if promised is None:
        return None
    return ComputeView(
        promised=promised,
        is_suspended=terms is not None and terms.is_suspended,
        is_measured=turns is not None and turns.is_governed,
        use=use,
        account=SeatAccount() if turns is None else turns.account,
        driver_percent=driver_percent,
        read_ns=ledger.read_ns,
        takes_turns=turns is not None,
        distrusted_by=() if turns is None else turns.distrusted_by,
    )
