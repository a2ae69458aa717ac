# SPDX-License-Identifier: Apache-2.0
"""ResourceQuota on GPU resources, for every dialect: what a namespace may use and uses.

Kubernetes counts `requests.` of extended resources as plain numbers. Here they are bytes, parts of
a GPU's time, and GPUs, for all dialects together. Charged as Kubernetes charges; slices count until
the pod is gone. Checked at creation (against all pods) and at bind (against bound pods).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import add, sub
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from allotment.dialects.foreign.aliyun import AliyunSettings
from allotment.dialects.foreign.deepomatic import DeepomaticSettings
from allotment.dialects.foreign.hami import HamiSettings
from allotment.dialects.foreign.settings import DialectSettings
from allotment.dialects.foreign.tencent import ElasticGpuSettings, QgpuSettings, TencentSettings
from allotment.dialects.foreign.volcano import VolcanoSettings
from allotment.model.accounting import most_of, phases
from allotment.model.clusters import NamespaceQuota, PlacedContainer, PodBooking, PodNeed
from allotment.model.errors import QuantityError
from allotment.model.formats import format_apart, format_bytes, format_percent
from allotment.model.modes import traits_of
from allotment.model.pods import PodUid
from allotment.model.quantities import MemoryAmount, parse_whole
from allotment.model.requests import Request
from allotment.placement.booking import held_slices
from allotment.placement.explain import Reason, Refusal, refuse

Charge = Counter[str]
"""A pod's usage by measure: bytes, basis points of GPUs, GPUs."""

MEMORY, PART, COMPUTE, DEVICES = "memory", "part", "compute", "devices"
_UNKNOWN = "unknown"
"""A part of a GPU's memory before the GPU is chosen, in basis points."""

_PERCENT = 100  # basis points
_WHOLE = 100 * _PERCENT


class Unit(msgspec.Struct, frozen=True):
    """The size of one unit of a resource: bytes, basis points or GPUs."""

    measure: str
    size: int = 1
    dialects: frozenset[str] = frozenset()
    """Counts only pods of these dialects; empty: all pods."""


OWN_UNITS: Final[Mapping[str, Unit]] = MappingProxyType(
    {
        "allotment.dev/gpu": Unit(DEVICES),
        "allotment.dev/gpu-memory": Unit(MEMORY),
        "allotment.dev/gpu-compute": Unit(COMPUTE, _PERCENT),
    }
)
"""Allotment's own resources; `units_of` has all."""

_OWN_REQUESTS: Final = frozenset(f"requests.{each}" for each in OWN_UNITS)


class QuotaUse(NamedTuple):
    """The use of one limit by bound pods. Bytes, basis points or GPUs, by `measure`."""

    namespace: str
    quota: str
    key: str
    """As in the quota: `requests.allotment.dev/gpu-memory`."""
    measure: str
    used: int
    hard: int


class _Limit(msgspec.Struct, frozen=True):
    """One entry of one quota."""

    quota: str
    name: str
    """The quota's, without its namespace."""
    key: str
    unit: Unit
    hard: int
    """In bytes, basis points or GPUs."""

    def amount(self, charge: Charge) -> int:
        unit = self.unit
        if not unit.dialects:
            return charge.get(unit.measure, 0)
        return sum(charge.get(f"{unit.measure}:{each}", 0) for each in unit.dialects)


class _Entry(msgspec.Struct, frozen=True):
    namespace: str
    charge: Charge
    is_bound: bool
    dialect: str
    need: PodNeed | None = None
    """The request that the watch reported; None: the pod is gone, or not reported yet."""


class _Tally(msgspec.Struct):
    """The usage of a namespace: of all its pods, and of its bound pods."""

    every: Charge = msgspec.field(default_factory=Charge)
    bound: Charge = msgspec.field(default_factory=Charge)


class QuotaBook:
    """The namespaces' quotas and their pods' usage. No clock, no I/O; not thread-safe."""

    def __init__(self, *, units: Mapping[str, Unit] | None = None) -> None:
        """`units` None: the dialects' defaults."""
        if units is None:
            units = units_of()
        self._units = units
        self._limits: dict[str, list[_Limit]] = {}
        self._entries: dict[PodUid, _Entry] = {}
        self._tallies: dict[str, _Tally] = {}
        self.problems: tuple[str, ...] = ()
        """Quotas that cannot be enforced, as text for the log."""

    def set_quotas(self, quotas: Iterable[NamespaceQuota]) -> None:
        limits: dict[str, list[_Limit]] = {}
        problems: list[str] = []
        for quota in quotas:
            found = list(self._limits_of(quota, problems))
            if found and quota.is_scoped:
                names = ", ".join(each.key for each in found)
                problems.append(
                    f"{quota} applies to some pods only (scopes), so Allotment does not enforce"
                    f" {names}"
                )
                continue
            limits.setdefault(quota.namespace, []).extend(found)
        self._limits = limits
        self.problems = tuple(problems)

    def add(self, need: PodNeed, *, booking: PodBooking | None = None, dialect: str = "") -> None:
        """Count a reported pod, as bound if it has a booking. Replaces its earlier count.

        `dialect` is the short name of the pod's syntax; empty: Allotment's own.
        """
        charge = charge_of(need, booking=booking, dialect=dialect)
        entry = _Entry(need.namespace, charge, booking is not None, dialect, need)
        self._replace(need.uid, entry)

    def remove(self, uid: PodUid) -> None:
        """The watch reports that a pod is gone. A later `reserve` counts until `release`."""
        entry = self._entries.get(uid)
        if entry is not None and entry.need is not None:
            self._replace(uid, None)

    def reserve(self, need: PodNeed, booking: PodBooking) -> None:
        """Count a pod that is being bound: parallel binds may not exceed the quota together."""
        before = self._entries.get(need.uid)
        dialect = before.dialect if before is not None else ""
        charge = charge_of(need, booking=booking, dialect=dialect)
        reported = before.need if before is not None else None
        entry = _Entry(need.namespace, charge, is_bound=True, dialect=dialect, need=reported)
        self._replace(need.uid, entry)

    def release(self, uid: PodUid) -> None:
        """Count a pod whose bind failed as waiting, if it still exists."""
        entry = self._entries.get(uid)
        if entry is not None and entry.need is not None:
            self.add(entry.need, dialect=entry.dialect)
        else:
            self._replace(uid, None)

    def check(
        self,
        need: PodNeed,
        *,
        booking: PodBooking | None = None,
        dialect: str | None = None,
        without: Collection[PodUid] = (),
    ) -> Refusal | None:
        """Return why a pod may not be bound, by the usage of bound pods; None if it may.

        Exact with its booking; without one, as far as amounts are known. `dialect` None: as added.
        `without`: count as if these pods were gone.
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
                used = used - each.charge
        if dialect is None:
            dialect = own.dialect if own is not None else ""
        charge = charge_of(need, booking=booking, dialect=dialect)
        return _refusal(limits, charge, used)

    def check_new(self, need: PodNeed, *, dialect: str = "") -> Refusal | None:
        """Return why a pod may not be created, by the usage of all pods; None if it may.

        Allotment's own `requests.` are left to Kubernetes, which counts them at the same time.
        """
        found = self._limits.get(need.namespace, ())
        limits = [each for each in found if each.key not in _OWN_REQUESTS]
        if not limits:
            return None
        tally = self._tallies.get(need.namespace, _NO_TALLY)
        return _refusal(limits, charge_of(need, dialect=dialect), tally.every)

    def usage(self, namespace: str) -> list[QuotaUse]:
        tally = self._tallies.get(namespace, _NO_TALLY)
        return [
            QuotaUse(
                namespace=namespace,
                quota=each.name,
                key=each.key,
                measure=each.unit.measure,
                used=each.amount(tally.bound),
                hard=each.hard,
            )
            for each in self._limits.get(namespace, ())
        ]

    def bound(self) -> dict[str, Charge]:
        """Return what the bound pods of each namespace have, by measure."""
        return {name: Charge(tally.bound) for name, tally in self._tallies.items() if tally.bound}

    def is_limited(self, namespace: str) -> bool:
        return bool(self._limits.get(namespace))

    def namespaces(self) -> tuple[str, ...]:
        return tuple(sorted(self._limits))

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the tallies are the sums of the entries."""
        wanted: dict[str, _Tally] = {}
        for entry in self._entries.values():
            tally = wanted.setdefault(entry.namespace, _Tally())
            tally.every += entry.charge
            if entry.is_bound:
                tally.bound += entry.charge
        if {key: each for key, each in wanted.items() if each.every} != self._tallies:
            raise AssertionError(f"the tallies {self._tallies} are not the sums {wanted}")

    def _replace(self, uid: PodUid, entry: _Entry | None) -> None:
        before = self._entries.pop(uid, None)
        if before is not None:
            self._count(before, sub)
        if entry is not None:
            self._entries[uid] = entry
            self._count(entry, add)

    def _count(self, entry: _Entry, change: Callable[[Charge, Charge], Charge]) -> None:
        tally = self._tallies.setdefault(entry.namespace, _Tally())
        tally.every = change(tally.every, entry.charge)
        if entry.is_bound:
            tally.bound = change(tally.bound, entry.charge)
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
                # The author meant a limit: to ignore it would be the worse mistake.
                problems.append(f"{quota}: {key}: {error.message}; treated as 0")
                hard = 0
            yield _Limit(str(quota), quota.name, key, unit, hard)


_NO_TALLY: Final = _Tally()


def charge_of(need: PodNeed, *, booking: PodBooking | None = None, dialect: str = "") -> Charge:
    """Return a pod's usage: exact with a booking, otherwise as far as amounts are known."""
    placed = {each.name: each for each in booking.containers} if booking else {}
    charges = [(_charge(each.request, placed.get(each.name)), each) for each in need.containers]
    slices = held_slices(booking.containers) if booking else ()
    whole = most_of(phases(charges), Charge()) + Charge(
        {
            DEVICES: len(slices),
            MEMORY: sum(each.memory for each in slices),
            COMPUTE: sum(each.guarantee for each in slices),
        }
    )
    if dialect and DEVICES in whole:
        whole[f"{DEVICES}:{dialect}"] = whole[DEVICES]
    return whole


def _charge(request: Request, placed: PlacedContainer | None) -> Charge:
    """Return what one container counts as, without its slices."""
    charge = Charge()
    modes = request.modes if placed is None else (placed.mode,)
    is_whole = all(traits_of(mode).is_exclusive for mode in modes)
    if placed is None:
        charge[DEVICES] = request.count
        charge[COMPUTE] = (_WHOLE if is_whole else request.compute.guarantee) * request.count
        if request.memory.size_bytes is not None and not is_whole:
            charge[MEMORY] = request.memory.size_bytes * request.count
    elif not traits_of(placed.mode).is_slice:
        charge[DEVICES] = len(placed.devices)
        charge[MEMORY] = sum(device.memory for device in placed.devices)
        charge[COMPUTE] = sum(device.guarantee for device in placed.devices)
    part = _WHOLE if is_whole else points_of(request.memory)
    if placed is not None and placed.part is not None:
        part = placed.part
    if part:
        charge[PART] = part * request.count
        if placed is None:
            charge[_UNKNOWN] = charge[PART]
    return charge


def is_known(need: PodNeed) -> bool:
    """Return whether a pod counts the same whichever GPUs or slices it gets."""
    requests = [each.request for each in need.containers]
    modes = [traits_of(mode) for each in requests for mode in each.modes]
    is_fixed = not any(each.is_slice or each.is_exclusive for each in modes)
    return is_fixed and not any(_charge(each, None)[_UNKNOWN] for each in requests)


def points_of(memory: MemoryAmount) -> int:
    """Return a part of a GPU's memory in basis points; 0: an amount in bytes."""
    return int((memory.part or 0) * _WHOLE)


def _refusal(limits: Iterable[_Limit], charge: Charge, used: Charge) -> Refusal | None:
    for limit in limits:
        need = limit.amount(charge)
        unknown = charge.get(_UNKNOWN, 0) if limit.unit.measure == MEMORY else 0
        if not need and not unknown:
            continue
        has = limit.amount(used)
        have = limit.hard - has
        # An amount that is not known yet does not fit if nothing is left.
        if need > have or (unknown and have <= need):
            return _refused(limit, need=need, unknown=unknown, used=has)
    return None


def _refused(limit: _Limit, *, need: int, unknown: int, used: int) -> Refusal:
    measure = limit.unit.measure
    have = max(0, limit.hard - used)
    shown_need, shown_have = (
        format_apart(need, have)
        if measure == MEMORY
        else (_shown(measure, need), _shown(measure, have))
    )
    needs = [shown_need] if need or not unknown else []
    if unknown:
        needs.append(f"{format_percent(unknown)} % of a GPU of unknown size")
    what = f"need {' and '.join(needs)} {_NOUNS[measure]}, have {shown_have}"
    where = f"{limit.key} of {limit.quota}"
    if limit.hard:
        shown, taken = (_shown(measure, each) for each in (limit.hard, used))
        text = f"quota of its namespace exceeded: {what} of {shown} ({where}, {taken} used)"
        hint = f"request less, wait until pods of the namespace end, or raise {limit.quota}"
    else:
        text = f"its namespace's quota allows none: {what} ({where})"
        hint = f"use a namespace whose quota allows it, or raise {limit.quota}"
    return refuse(Reason.QUOTA, text, have, hint=hint)


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


_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


def units_of(settings: DialectSettings | None = None) -> Mapping[str, Unit]:
    """Return the unit of each resource by name: Allotment's own and all dialects'."""
    its = settings or DialectSettings()
    units = dict(OWN_UNITS)
    units |= _vgpu(_section(its, "hami", HamiSettings), "memory_factor", "hami", "nvidia")
    units |= _vgpu(_section(its, "volcano", VolcanoSettings), "gpu_memory_factor", "volcano")
    units |= {
        "volcano.sh/gpu-memory": Unit(MEMORY, _MIB),
        "volcano.sh/gpu-number": Unit(DEVICES, dialects=frozenset({"volcano-gpushare"})),
    }
    aliyun = _section(its, "aliyun", AliyunSettings)
    units[aliyun.memory] = Unit(MEMORY, _MIB if aliyun.memory_unit == "MiB" else _GIB)
    units[aliyun.compute] = Unit(COMPUTE, _PERCENT)
    tencent = _section(its, "tencent", TencentSettings)
    units[tencent.memory] = Unit(MEMORY, tencent.memory_block_bytes)
    units[tencent.core] = Unit(COMPUTE, _PERCENT)
    qgpu = _section(its, "qgpu", QgpuSettings)
    units[qgpu.memory] = Unit(MEMORY, _GIB)
    units[qgpu.core] = Unit(COMPUTE, _PERCENT)
    elastic = _section(its, "elastic-gpu", ElasticGpuSettings)
    units[elastic.memory] = Unit(MEMORY, _MIB)
    units[elastic.core] = Unit(COMPUTE, _PERCENT)
    shared = _section(its, "deepomatic", DeepomaticSettings)
    units[shared.resource] = Unit(DEVICES, dialects=frozenset({"deepomatic"}))
    return units


def _vgpu(settings: Any, factor: str, *dialects: str) -> dict[str, Unit]:  # noqa: ANN401 - two kinds
    """Return the units of HAMi's resource names, which Volcano uses too."""
    return {
        settings.resource_count_name: Unit(DEVICES, dialects=frozenset(dialects)),
        settings.resource_memory_name: Unit(MEMORY, _MIB * getattr(settings, factor)),
        settings.resource_memory_percentage_name: Unit(PART, _PERCENT),
        settings.resource_core_name: Unit(COMPUTE, _PERCENT),
    }


def _section(settings: DialectSettings, name: str, kind: type[msgspec.Struct]) -> Any:  # noqa: ANN401 - of that kind
    return settings.sections.get(name) or kind()
