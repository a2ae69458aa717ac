# SPDX-License-Identifier: Apache-2.0
"""What of GPUs a namespace may have, and has: ResourceQuota on the names that people use.

Kubernetes counts `requests.` of extended resources by itself, as numbers on pods: without knowing
that HAMi's `gpumem` is of each GPU, or that Tencent's unit is 256 MiB. It counts no `limits.` of
them. Here they are counted as what they are: bytes, parts of a GPU's time, GPUs; of every pod with
a share, in whatever syntax it was written, so that nobody gets around a quota by writing another.

* `limits.` of any name: counted here alone.
* `requests.` of another system's name: counted here and by Kubernetes, each by itself and against
  the same amount. What is counted here is never less, so that it is what decides.
* `requests.` of Allotment's own: true sums, which Kubernetes counts when a pod is created. Counted
  here at binding, when it is known what `50%` of a GPU is.

A pod is charged as Kubernetes charges: for its regular containers and sidecars together, or for
one init container beside the sidecars before it, whichever is more. Slices that it was given are
the exception, as they are on its node: it holds each until it is gone (`placement.booking`).

Asked twice: when it is created, against all pods that are there, as far as it can be known; when
it is bound, against those that are bound, exactly. Both, since any number of pods can be created at
a time.

Pure: no clock, no API server. Not for several threads.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from allotment.kube.quotas import NamespaceQuota
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.errors import QuantityError
from allotment.model.formats import format_bytes, format_percent
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.quantities import parse_whole
from allotment.model.requests import MIG
from allotment.placement.booking import held_slices

__all__ = [
    "COMPUTE",
    "DEVICES",
    "MEMORY",
    "OWN_UNITS",
    "PART",
    "Charge",
    "QuotaBook",
    "QuotaRejection",
    "Unit",
    "charge_of",
]

Charge = Mapping[str, int]
"""What a pod counts as, by measure. Bytes, basis points of GPUs, GPUs."""

MEMORY, PART, COMPUTE, DEVICES = "memory", "part", "compute", "devices"
_UNKNOWN = "unknown"
"""Parts of a GPU's memory of which nobody knows yet of which GPU: counted as basis points."""

_PERCENT = 100  # basis points
_WHOLE = 100 * _PERCENT


@dataclass(frozen=True, slots=True)
class Unit:
    """What one of a resource is: so many bytes, basis points or GPUs."""

    measure: str
    size: int = 1
    dialects: frozenset[str] = frozenset()
    """Of pods of these dialects alone; empty: of all."""


OWN_UNITS: Final[Mapping[str, Unit]] = MappingProxyType(
    {
        "allotment.dev/gpu": Unit(DEVICES),
        "allotment.dev/gpu-memory": Unit(MEMORY),
        "allotment.dev/gpu-compute": Unit(COMPUTE, _PERCENT),
    }
)
"""Of Allotment's own resources; `quota_units` has all."""

_OWN_REQUESTS: Final = frozenset(f"requests.{each}" for each in OWN_UNITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRejection:
    """Why a pod would be more than its namespace may have. In the resource's own measure."""

    quota: str
    resource: str
    need: int
    have: int
    hard: int
    text: str
    """Need and have, in words that people read: no full stop."""
    hint: str
    reason: str = "QuotaExceeded"
    """For counting."""

    def __str__(self) -> str:
        """Return need and have."""
        return self.text


@dataclass(frozen=True, slots=True)
class _Limit:
    """One line of one quota."""

    quota: str
    key: str
    unit: Unit
    hard: int
    """In the measure: bytes, basis points, GPUs."""

    def amount(self, charge: Charge) -> int:
        """Return how much of this a charge is."""
        unit = self.unit
        if not unit.dialects:
            return charge.get(unit.measure, 0)
        return sum(charge.get(f"{unit.measure}:{each}", 0) for each in unit.dialects)


@dataclass(frozen=True, slots=True)
class _Entry:
    namespace: str
    charge: Charge
    is_bound: bool
    dialect: str


@dataclass(slots=True)
class _Tally:
    """What the pods of a namespace count as: all of them, and those that are bound."""

    every: dict[str, int] = field(default_factory=dict)
    bound: dict[str, int] = field(default_factory=dict)


class QuotaBook:
    """The namespaces' quotas, and what their pods count as."""

    def __init__(self, *, units: Mapping[str, Unit] | None = None) -> None:
        """Know no quota and no pod. `units` None: as the dialects are by default."""
        if units is None:
            from allotment.scheduler.quota_units import units_of

            units = units_of()
        self._units = units
        self._limits: dict[str, list[_Limit]] = {}
        self._entries: dict[PodUid, _Entry] = {}
        self._tallies: dict[str, _Tally] = {}
        self.problems: tuple[str, ...] = ()
        """What of the quotas cannot be held, in words: for the log."""

    def set_quotas(self, quotas: Iterable[NamespaceQuota]) -> None:
        """Replace all quotas."""
        limits: dict[str, list[_Limit]] = {}
        problems: list[str] = []
        for quota in quotas:
            found = list(self._limits_of(quota, problems))
            if found and quota.is_scoped:
                names = ", ".join(each.key for each in found)
                problems.append(
                    f"{quota} is for some pods only (scopes), so Allotment does not hold {names}"
                )
                continue
            limits.setdefault(quota.namespace, []).extend(found)
        self._limits = limits
        self.problems = tuple(problems)

    def add(self, need: PodNeed, *, booking: PodBooking | None = None, dialect: str = "") -> None:
        """Count a pod that is there: as bound, where it has a booking. Again: in its place.

        `dialect` is whose words it was written in, by its short name; empty: Allotment's own.
        """
        self.remove(need.uid)
        charge = charge_of(need, booking=booking, dialect=dialect)
        entry = _Entry(need.namespace, charge, is_bound=booking is not None, dialect=dialect)
        self._entries[need.uid] = entry
        self._count(entry, 1)

    def remove(self, uid: PodUid) -> None:
        """Stop counting a pod: it is gone, or has ended. Nothing where it is not counted."""
        entry = self._entries.pop(uid, None)
        if entry is not None:
            self._count(entry, -1)

    def check(
        self,
        need: PodNeed,
        *,
        booking: PodBooking | None = None,
        dialect: str | None = None,
        without: Collection[PodUid] = (),
    ) -> QuotaRejection | None:
        """Say whether a pod may be bound: against those that are bound. None: it may.

        Exact with the booking that it is to have; without, as far as it can be known. `dialect`
        None: as it was when the pod was added. `without`: as if these pods were gone.
        """
        limits = self._limits.get(need.namespace)
        if not limits:
            return None
        tally = self._tallies.get(need.namespace, _NO_TALLY)
        own = self._entries.get(need.uid)
        used = tally.bound
        for uid in {need.uid, *without}:
            each = self._entries.get(uid)
            if each is not None and each.is_bound and each.namespace == need.namespace:
                used = _sum(used, each.charge, -1)
        if dialect is None:
            dialect = own.dialect if own is not None else ""
        charge = charge_of(need, booking=booking, dialect=dialect)
        return _rejection(limits, charge, used)

    def check_new(self, need: PodNeed, *, dialect: str = "") -> QuotaRejection | None:
        """Say whether a pod may be created: against all that are there. None: it may.

        Allotment's own `requests.` are left to Kubernetes, which counts them at the same time.
        """
        found = self._limits.get(need.namespace, ())
        limits = [each for each in found if each.key not in _OWN_REQUESTS]
        if not limits:
            return None
        tally = self._tallies.get(need.namespace, _NO_TALLY)
        return _rejection(limits, charge_of(need, dialect=dialect), tally.every)

    def usage(self, namespace: str) -> Mapping[str, tuple[int, int]]:
        """Return what is used and allowed of each limit of a namespace, by `quota/name`."""
        tally = self._tallies.get(namespace, _NO_TALLY)
        return {
            f"{each.quota} {each.key}": (each.amount(tally.bound), each.hard)
            for each in self._limits.get(namespace, ())
        }

    def is_limited(self, namespace: str) -> bool:
        """Tell whether a namespace has any quota."""
        return bool(self._limits.get(namespace))

    def namespaces(self) -> tuple[str, ...]:
        """Return the namespaces that have a quota."""
        return tuple(sorted(self._limits))

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the tallies are the sums of what is counted."""
        wanted: dict[str, _Tally] = {}
        for entry in self._entries.values():
            tally = wanted.setdefault(entry.namespace, _Tally())
            tally.every = _sum(tally.every, entry.charge, 1)
            if entry.is_bound:
                tally.bound = _sum(tally.bound, entry.charge, 1)
        if {key: each for key, each in wanted.items() if each.every} != self._tallies:
            raise AssertionError(f"the tallies {self._tallies} are not the sums {wanted}")

    def _count(self, entry: _Entry, sign: int) -> None:
        tally = self._tallies.setdefault(entry.namespace, _Tally())
        tally.every = _sum(tally.every, entry.charge, sign)
        if entry.is_bound:
            tally.bound = _sum(tally.bound, entry.charge, sign)
        if not tally.every:
            del self._tallies[entry.namespace]

    def _limits_of(self, quota: NamespaceQuota, problems: list[str]) -> Iterator[_Limit]:
        for key, text in sorted(quota.hard.items()):
            kind, dot, resource = key.partition(".")
            unit = self._units.get(resource) if dot and kind in {"requests", "limits"} else None
            if unit is None:
                continue
            try:
                hard = parse_whole(text) * unit.size
            except QuantityError as error:
                # Whoever wrote it meant a limit: none at all would be the worse mistake.
                problems.append(f"{quota}: {key}: {error.message}; nothing is allowed of it")
                hard = 0
            yield _Limit(str(quota), key, unit, hard)


_NO_TALLY: Final = _Tally()


def charge_of(need: PodNeed, *, booking: PodBooking | None = None, dialect: str = "") -> Charge:
    """Say what a pod counts as; with a booking exactly, else as far as it can be known."""
    placed = {each.name: each for each in booking.containers} if booking else {}
    most: dict[str, int] = {}
    sidecars: dict[str, int] = {}
    regular: dict[str, int] = {}
    for each in sorted(need.containers, key=lambda each: each.place):
        request = each.request
        found = placed.get(each.name)
        charge: dict[str, int] = {}
        if found is None:
            charge[DEVICES] = request.count
            charge[COMPUTE] = request.compute.guarantee * request.count
            if request.memory.size_bytes is not None:
                charge[MEMORY] = request.memory.size_bytes * request.count
        elif found.mode != MIG:
            charge[DEVICES] = len(found.devices)
            charge[MEMORY] = sum(device.memory for device in found.devices)
            charge[COMPUTE] = sum(device.guarantee for device in found.devices)
        if request.memory.part is not None:
            charge[PART] = int(request.memory.part * _WHOLE) * request.count
            if found is None:
                charge[_UNKNOWN] = charge[PART]
        if each.kind is ContainerKind.INIT:
            most = _most(most, _sum(sidecars, charge, 1))
        elif each.kind is ContainerKind.SIDECAR:
            sidecars = _sum(sidecars, charge, 1)
        else:
            regular = _sum(regular, charge, 1)
    slices = held_slices(booking.containers) if booking else ()
    held = {
        DEVICES: len(slices),
        MEMORY: sum(each.memory for each in slices),
        COMPUTE: sum(each.guarantee for each in slices),
    }
    whole = _sum(_most(most, _sum(regular, sidecars, 1)), held, 1)
    if dialect and DEVICES in whole:
        whole[f"{DEVICES}:{dialect}"] = whole[DEVICES]
    return whole


def _rejection(
    limits: Iterable[_Limit], charge: Charge, used: Mapping[str, int]
) -> QuotaRejection | None:
    for limit in limits:
        need = limit.amount(charge)
        unknown = charge.get(_UNKNOWN, 0) if limit.unit.measure == MEMORY else 0
        if not need and not unknown:
            continue
        has = limit.amount(used)
        have = limit.hard - has
        # Of memory that is not known yet, any amount is too much where nothing is left.
        if need > have or (unknown and have <= need):
            return _refused(limit, need=need, unknown=unknown, used=has)
    return None


def _refused(limit: _Limit, *, need: int, unknown: int, used: int) -> QuotaRejection:
    measure = limit.unit.measure
    have = max(0, limit.hard - used)
    needs = [_shown(measure, need)] if need or not unknown else []
    if unknown:
        needs.append(f"{format_percent(unknown)} % of a GPU whose size is not known yet")
    what = f"need {' and '.join(needs)} {_NOUNS[measure]}, have {_shown(measure, have)}"
    where = f"{limit.key} of {limit.quota}"
    if limit.hard:
        shown, taken = (_shown(measure, each) for each in (limit.hard, used))
        text = f"more than its namespace may have: {what} of {shown} ({where}, {taken} used)"
        hint = f"ask for less, wait until pods of the namespace end, or have {limit.quota} raised"
    else:
        text = f"its namespace may have none: {what} ({where})"
        hint = f"use a namespace that may have it, or have {limit.quota} raised"
    return QuotaRejection(
        quota=limit.quota,
        resource=limit.key,
        need=need,
        have=have,
        hard=limit.hard,
        text=text,
        hint=hint,
    )


_NOUNS: Final = {
    MEMORY: "of GPU memory",
    PART: "of a GPU's memory",
    COMPUTE: "of a GPU's time",
    DEVICES: "GPUs or slices of one",
}


def _shown(measure: str, amount: int) -> str:
    if measure == MEMORY:
        return format_bytes(amount)
    return str(amount) if measure == DEVICES else f"{format_percent(amount)} %"


def _sum(left: Charge, right: Charge, sign: int) -> dict[str, int]:
    total = dict(left)
    for measure, amount in right.items():
        total[measure] = total.get(measure, 0) + sign * amount
    return _nonzero(total)


def _most(left: Charge, right: Charge) -> dict[str, int]:
    return {key: max(left.get(key, 0), right.get(key, 0)) for key in {**left, **right}}


def _nonzero(charge: Charge) -> dict[str, int]:
    return {measure: amount for measure, amount in charge.items() if amount}
