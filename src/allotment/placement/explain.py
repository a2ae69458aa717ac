# SPDX-License-Identifier: Apache-2.0
"""Refusals and their texts: what was needed, what each device or node has, and what would help.

A `Refusal` is made where the decision is made. Nodes, quotas, events and `allot explain` print the
same value.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from allotment.model.compute import WHOLE
from allotment.model.formats import format_bytes, format_count, format_percent, need_and_have
from allotment.model.modes import joined_by_mode, traits_of
from allotment.model.placements import DeviceState, Judgement, Verdict
from allotment.model.requests import Request
from allotment.model.structs import replace
from allotment.placement.booking import Footprint
from allotment.placement.constraints import (
    OF_OTHER_AFFINITY,
    OF_OTHER_EXCLUSION,
    OF_OTHER_MODEL,
    OF_OTHER_UUID,
    OF_SAME_ANTI_AFFINITY,
)
from allotment.placement.judge import (
    ALL_GUARANTEED,
    MIG_IS_OFF,
    MIG_IS_ON,
    NO_PROFILE,
    NO_SEAT,
    NO_SLOTS,
    NOT_ALONE,
    NOT_SELECTED,
    NOT_SERVED,
    OTHER_MODE,
    TAKEN_WHOLE,
    TOO_LITTLE_COMPUTE,
    TOO_LITTLE_MEMORY,
    memory_room,
)
from allotment.placement.mig import reason_of
from allotment.placement.views import one_slice_of

if TYPE_CHECKING:  # `allot run` starts without the scheduler's values
    from allotment.model.clusters import PodNeed, WantedContainer


class Reason(StrEnum):
    """The cause of a refusal: the label of metrics."""

    UNKNOWN_NODE = "unknown-node"
    CPU = "cpu"
    MEMORY = "memory"
    NO_GPU = "no-gpu"
    TOO_FEW_GPUS = "too-few-gpus"
    MODEL = "model"
    UUID = "uuid"
    MODE = "mode"
    PROBLEM = "problem"
    MIG_PROFILE = "mig-profile"
    """No GPU offers such slices."""
    MIG_ROOM = "mig-room"
    """Other users occupy the slots for such slices."""
    GPU_MEMORY = "gpu-memory"
    GPU_COMPUTE = "gpu-compute"
    COMPUTE_FLOOR = "compute-floor"
    """Too little compute that is not guaranteed, for a request without compute."""
    HOST_MEMORY = "host-memory"
    SHARES = "shares"
    COMPANY = "company"
    """Other shares use the GPUs, and one side must be alone, or modes differ."""
    TAGS = "tags"
    """Affinity, anti-affinity, exclusion."""
    TOPOLOGY = "topology"
    """Enough GPUs, but not on one NUMA node or not joined by NVLink."""
    CONTAINERS = "containers"
    """Each container fits alone, but not all together."""
    CHANGED = "changed"
    """It had no room when asked, but has some since."""
    UNDECIDED = "undecided"
    """Too many combinations to check."""
    QUOTA = "quota"
    BINDING = "being bound"
    """The pod is being bound, or is bound, to another node."""
    RESIZE = "resize"
    """The pod's new amounts are invalid, or its mode cannot change them."""


class Refusal(msgspec.Struct, frozen=True):
    """Why a node, a quota or another part of the cluster refuses a pod."""

    reason: str
    """From a fixed list: refusals are counted by it."""
    text: str
    """Need and have, as shown in events: no full stop."""
    stem: str
    """The text with `{have}` in place of the amount; nodes with the same stem form a group."""
    have: int = 0
    """That amount: bytes, basis points, thousandths of a core, or a count, by `reason`."""
    hint: str = ""
    details: str = ""
    """Details of single devices, shown if the report is about one node."""


class RefusalGroup(msgspec.Struct, frozen=True):
    """Nodes with the same refusal."""

    reason: str
    text: str
    """Need and have; of the amounts of these nodes, the largest."""
    nodes: tuple[str, ...]
    note: str = ""
    """Further facts: the models of these nodes, or their cordons."""


class DeadEnd(msgspec.Struct, frozen=True):
    """Result of a search: the container without a place, and each device's verdict."""

    depth: int = 0
    """Number of containers with a place."""
    container: str = ""
    judgements: tuple[Judgement, ...] = ()
    """One for each allowed mode."""
    is_unfinished: bool = False


_HAVE = "{have}"
_NAMES = 3
"""Number of a device's shares that are named; the rest are counted."""
_MOST_DETAILS = 4
"""Most different texts about single GPUs of one node: an event has a thousand characters."""

_PHRASES: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        NOT_SELECTED: (Reason.UUID, "none of the GPUs asked for"),
        OF_OTHER_UUID: (Reason.UUID, "none of the GPUs asked for"),
        OF_OTHER_MODEL: (Reason.MODEL, "GPUs of other models"),
        NOT_SERVED: (Reason.MODE, "GPUs of another mode"),
        "": (Reason.PROBLEM, ""),  # rank of a device's own problem
        OTHER_MODE: (Reason.COMPANY, "GPUs with shares of another mode"),
        TAKEN_WHOLE: (Reason.COMPANY, "GPUs that other shares use in full"),
        NOT_ALONE: (Reason.COMPANY, "GPUs with other shares on them"),
        OF_OTHER_AFFINITY: (Reason.TAGS, "no GPU that is idle or has its affinity tag"),
        OF_SAME_ANTI_AFFINITY: (Reason.TAGS, "GPUs with its anti-affinity tag"),
        OF_OTHER_EXCLUSION: (Reason.TAGS, "GPUs with another exclusion tag"),
        NO_SEAT: (Reason.SHARES, "GPUs with the most shares they can take"),
        NO_PROFILE: (Reason.MIG_PROFILE, "GPUs without such a profile"),
        MIG_IS_OFF: (Reason.COMPANY, "GPUs with MIG off that are in use"),
        MIG_IS_ON: (Reason.COMPANY, "GPUs in MIG mode"),
        NO_SLOTS: (Reason.MIG_ROOM, "no room for one"),
        TOO_LITTLE_MEMORY: (Reason.GPU_MEMORY, f"at most {_HAVE} on a GPU"),
        TOO_LITTLE_COMPUTE: (Reason.GPU_COMPUTE, f"at most {_HAVE} of compute on a GPU"),
        ALL_GUARANTEED: (
            Reason.COMPUTE_FLOOR,
            f"at most {_HAVE} of a GPU's compute that is not guaranteed to others",
        ),
    }
)
"""By reason of `judge`; the most telling one about a node comes last."""
_RANKS = {reason: rank for rank, reason in enumerate(_PHRASES)}

_FORMATS: Mapping[str, Callable[..., str]] = MappingProxyType(
    {
        Reason.CPU: lambda have: f"{have}m",
        Reason.MEMORY: format_bytes,
        Reason.GPU_MEMORY: format_bytes,
        Reason.HOST_MEMORY: format_bytes,
        Reason.GPU_COMPUTE: lambda have: f"{format_percent(have)} %",
        Reason.COMPUTE_FLOOR: lambda have: f"{format_percent(have)} %",
        Reason.TOO_FEW_GPUS: lambda have: format_count(have, "GPU"),
    }
)


# ---- refusals of nodes -------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def refuse(reason: str, stem: str, have: int = 0, *, hint: str = "") -> Refusal:
    """Make a refusal; many nodes share one."""
    form = _FORMATS.get(reason, str)
    shown = form(have)
    if form is format_bytes and shown in stem.replace(",", " ").split():
        shown = f"{have}B"  # rounding hides the difference
    return Refusal(reason, stem.replace(_HAVE, shown, 1), stem, have, hint)


UNKNOWN_NODE = refuse(
    Reason.UNKNOWN_NODE, "need a node with GPUs, have no GPUs published by its agent"
)
CHANGED = refuse(Reason.CHANGED, "had no room, but has changed since")


def lacks_host(need: PodNeed, *, cpu_free: int, memory_free: int) -> Refusal | None:
    """A node's lack of CPU or memory; None: enough. Thousandths of a core, bytes."""
    # As in kube-scheduler, a pod without a request fits an overcommitted node.
    if need.cpu_milli and need.cpu_milli > cpu_free:
        stem = f"need {need.cpu_milli}m of CPU, have {_HAVE}"
        return refuse(Reason.CPU, stem, max(0, cpu_free))
    if need.memory_bytes and need.memory_bytes > memory_free:
        stem = f"need {format_bytes(need.memory_bytes)} of memory, have {_HAVE}"
        return refuse(Reason.MEMORY, stem, max(0, memory_free))
    return None


def undecided(need: PodNeed) -> Refusal:
    parts = sum(container.request.count for container in need.containers)
    return refuse(
        Reason.UNDECIDED,
        f"need {format_count(parts, 'GPU')} for {format_count(len(need.containers), 'container')},"
        " have more combinations than can be checked; use fewer containers with GPUs",
    )


def lacks_together(least: WantedContainer, places: int, have: int) -> Refusal:
    """No room for several containers at the same time.

    `places`: needed places of at least the size of `least`; `have`: existing ones.
    """
    one = in_words(replace(least.request, count=1))
    stem = f"container {least.name} and others: need {places} times {one}, have room for {_HAVE}"
    return refuse(Reason.CONTAINERS, stem, have)


def lacks_devices(request: Request, number: int, *, whose: str = "") -> Refusal:
    if not number:
        return _lacks(request, Reason.NO_GPU, "no GPU", whose=whose)
    return _lacks(request, Reason.TOO_FEW_GPUS, _HAVE, number, whose=whose)


def lacks_slices(request: Request, number: int, *, whose: str = "", beside: str = "") -> Refusal:
    return _lacks(request, Reason.MIG_ROOM, f"{beside}room for {_HAVE}", number, whose=whose)


def lacks_room(
    request: Request, verdict: str, have: int, *, such: int, whose: str = "", beside: str = ""
) -> Refusal:
    """Too few devices of a node fit.

    `verdict`: the reason of `judge` of those that come closest; `have`: the most on any of them, in
    bytes or basis points; `such`: number of devices that fit.
    """
    reason, phrase = _PHRASES.get(verdict, _PHRASES[""])
    phrase = phrase or f"only GPUs with a problem ({verdict})"
    beside += f"{such} such and else " if such else ""
    return _lacks(request, reason, f"{beside}{phrase}", have, whose=whose)


def _lacks(
    request: Request, reason: Reason, phrase: str, have: int = 0, *, whose: str = ""
) -> Refusal:
    return refuse(reason, f"{whose}need {in_words(request)}, have {phrase}", have)


def lacks_on_device(state: DeviceState, before: Footprint, after: Footprint) -> Refusal | None:
    """Why a device has no room for a pod that grows; None: it has.

    `state` is the device without the pod. Amounts that do not grow are not checked.
    """
    part, its = after.part, f"{state.device.uuid} ({state.device.name})"
    grows = part.memory > before.part.memory or part.guarantee > before.part.guarantee
    if grows and state.problem:
        return refuse(Reason.PROBLEM, f"{its} takes no more at present: {state.problem}")
    if part.memory > before.part.memory:
        # Memory that stays on the device is the narrower need.
        for need, may_oversubscribe in ((part.fixed, False), (part.memory, True)):
            have = memory_room(state, may_oversubscribe=may_oversubscribe)
            if need > have:
                stem = f"{its}: need {format_bytes(need)}, have {_HAVE} beside other pods"
                return refuse(Reason.GPU_MEMORY, stem, have, hint=_hint_to_grow(state, need))
    if before.part.guarantee < part.guarantee > state.free_guarantee:
        stem = f"{its}: need {format_percent(part.guarantee)} % of compute, have {_HAVE} beside"
        hint = "guarantee less, or wait until a pod on this GPU ends"
        return refuse(Reason.GPU_COMPUTE, f"{stem} other pods", state.free_guarantee, hint=hint)
    if before.floor < after.floor > state.unguaranteed:
        stem = f"{its}: need {format_percent(after.floor)} % of compute that is not guaranteed"
        return refuse(Reason.COMPUTE_FLOOR, f"{stem}, have {_HAVE}", state.unguaranteed)
    return None


def _hint_to_grow(state: DeviceState, need: int) -> str:
    whole = state.device.allottable_bytes
    if need > whole and not state.oversubscribed_bytes:
        return f"ask for less: this GPU has {format_bytes(whole)}, even when empty"
    return "ask for less, or wait until a pod on this GPU ends"


def refusal_of(need: PodNeed, dead_end: DeadEnd) -> Refusal:
    """Refusal of a pod by one node, after a search."""
    if dead_end.is_unfinished:
        return undecided(need)
    whose = f"container {dead_end.container}: " if len(need.containers) > 1 else ""
    beside = "beside the pod's other containers: " if dead_end.depth else ""
    return in_all_modes(
        {
            judgement.request.mode: _of_judgement(judgement, whose, beside)
            for judgement in dead_end.judgements
        }
    )


def in_all_modes(refusals: Mapping[str, Refusal]) -> Refusal:
    """One refusal for all of these modes."""
    first, *others = refusals.values()
    if not others:
        return first

    return replace(
        first,
        text=joined_by_mode({mode: refusal.text for mode, refusal in refusals.items()}),
        stem=joined_by_mode({mode: refusal.stem for mode, refusal in refusals.items()}),
        details=joined_by_mode({mode: refusal.details for mode, refusal in refusals.items()}),
    )


def _of_judgement(judgement: Judgement, whose: str, beside: str) -> Refusal:
    request, verdicts, number = judgement.request, judgement.verdicts, judgement.parts
    is_cut = traits_of(request.mode).is_slice
    if len(verdicts) < (1 if is_cut else max(1, request.count)):
        return lacks_devices(request, len(verdicts), whose=whose)
    if number >= request.count:
        return _apart(judgement, whose)
    if is_cut and number:
        refusal = lacks_slices(request, number, whose=whose, beside=beside)
    else:
        reason, have = _nearest(verdicts)
        refusal = lacks_room(request, reason, have, such=number, whose=whose, beside=beside)
    return replace(refusal, details=_details(judgement)) if is_cut else refusal


def _nearest(verdicts: Sequence[Verdict]) -> tuple[str, int]:
    """Reason of the devices that came closest, and the largest amount that one of them has."""
    unfit = [verdict for verdict in verdicts if not verdict.fits]
    reason = max(unfit, key=lambda verdict: _RANKS.get(verdict.reason, _RANKS[""])).reason
    alike = [verdict for verdict in unfit if verdict.reason == reason]
    if reason == TOO_LITTLE_MEMORY:
        return reason, max(verdict.have_bytes for verdict in alike)
    if reason == TOO_LITTLE_COMPUTE:
        return reason, max(verdict.have_guarantee for verdict in alike)
    if reason == ALL_GUARANTEED:
        return reason, max(verdict.state.unguaranteed for verdict in alike)
    return reason, 0


def _details(judgement: Judgement) -> str:
    devices = defaultdict(list)
    for verdict in judgement.verdicts:
        text, layout = verdict.reason, verdict.state.layout
        if text in {NO_SLOTS, NO_PROFILE} and layout is not None:
            text = reason_of(layout, one_slice_of(judgement.request))
        if text:
            devices[text].append(str(verdict.state.device.index))
    lines = [
        f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {text}"
        for text, numbers in devices.items()
    ]
    more = [f"{len(lines) - _MOST_DETAILS} more"] if len(lines) > _MOST_DETAILS else []
    return "; ".join(lines[:_MOST_DETAILS] + more)


def _apart(judgement: Judgement, whose: str) -> Refusal:
    """Enough devices fit, each alone, but not together."""
    request, constraints = judgement.request, judgement.request.constraints
    is_cut = traits_of(request.mode).is_slice
    fitting = [verdict for verdict in judgement.verdicts if verdict.fits]
    if request.count > 1 and (constraints.same_numa or constraints.needs_nvlink):
        parts: Counter[int | None] = Counter()
        for verdict in fitting:
            parts[verdict.state.device.numa_node] += verdict.slices if is_cut else 1
        most = max(parts.values())
        if constraints.same_numa and most < request.count:
            phrase, have = f"at most {_HAVE} of them on one NUMA node", most
        else:
            phrase, have = f"{_HAVE} such that are not all joined", parts.total()
        return _lacks(request, Reason.TOPOLOGY, phrase, have, whose=whose)
    if any(
        verdict.need_bytes > verdict.state.device.allottable_bytes - verdict.state.allotted_bytes
        for verdict in fitting
    ):
        left = max(0, min(verdict.state.host_budget_bytes for verdict in fitting))
        phrase = f"{_HAVE} of host memory left for the whole request"
        return _lacks(request, Reason.HOST_MEMORY, phrase, left, whose=whose)
    phrase = "no such beside the pod's other containers"
    return _lacks(request, Reason.CONTAINERS, phrase, whose=whose)


def grouped(refusals: Mapping[str, Refusal]) -> list[RefusalGroup]:
    """Group nodes, by name, with the same refusal, the largest group first."""
    alike: dict[tuple[str, str], dict[str, Refusal]] = defaultdict(dict)
    for node, refusal in refusals.items():
        alike[refusal.reason, refusal.stem][node] = refusal
    groups = []
    for by_node in alike.values():
        best = max(by_node.values(), key=lambda refusal: refusal.have)
        details = f" ({best.details})" if len(by_node) == 1 and best.details else ""
        groups.append(RefusalGroup(best.reason, best.text + details, tuple(sorted(by_node))))
    return sorted(groups, key=lambda group: (-len(group.nodes), group.text))


# ---- requests in words -------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def in_words(request: Request, capacity: int | None = None) -> str:
    """Describe a request: `2 GPUs with 20Gi and 30 % of compute each`, `a MIG slice 1g.10gb`.

    `capacity`: bytes of each device, to show the size of a part of the memory.
    """
    traits, constraints, several = traits_of(request.mode), request.constraints, request.count > 1
    models, plural = models_of(request), "s" if several else ""
    number = str(request.count) if several else "a"
    is_by_profile = traits.is_slice and request.memory.size_bytes == 0
    amounts = [] if is_by_profile else [_memory(request, capacity)]
    if request.compute.guarantee:
        amounts.append(f"{format_percent(request.compute.guarantee)} % of compute")
    amount = f" with {' and '.join(amounts)}{' each' if several else ''}" if amounts else ""
    where = " on one NUMA node" * constraints.same_numa
    where += " joined by NVLink" * constraints.needs_nvlink
    where = where if several else ""
    if traits.is_slice:
        amount = f" {request.mig_profile}" if request.mig_profile else amount
        return (
            f"{number} MIG slice{plural}{amount}{f' of a GPU ({models})' if models else ''}{where}"
        )
    device = f"GPU{plural}{f' ({models})' if models else ''}"
    if traits.is_exclusive or traits.is_time_sliced:
        return f"{number} {'whole' if traits.is_exclusive else 'time-sliced'} {device}{where}"
    return f"{number} {device}{amount}{where}{', alone' if constraints.is_alone else ''}"


def _memory(request: Request, capacity: int | None) -> str:
    memory = request.memory
    if memory.part is None:
        return f"{memory}"
    if memory.part == 1:
        return "all of its memory"
    size = "" if capacity is None else f" ({format_bytes(memory.of(capacity))})"
    return f"{format_percent(round(memory.part * WHOLE))} % of its memory{size}"


def models_of(request: Request) -> str:
    """The models that a request admits: `A100 or H100`, `no T4`."""
    wanted = request.constraints
    texts = [" or ".join(rule.text for rule in wanted.models)] if wanted.models else []
    texts += [f"no {rule.text}" for rule in wanted.not_models]
    return " and ".join(texts)


# ---- the devices of one machine ----------------------------------------------------------------


def explain(judgement: Judgement) -> str:
    """One summary line and one line for each device, without a full stop."""
    request, verdicts = judgement.request, judgement.verdicts
    capacities = {verdict.state.device.allottable_bytes for verdict in verdicts}
    asked = in_words(request, capacities.pop() if len(capacities) == 1 else None)
    devices = format_count(len(verdicts), "GPU fits", "GPUs fit")
    apart = f", but not {judgement.together}" if judgement.together else ""
    lines = [f"no room for {asked}: {judgement.fitting} of {devices}{apart}"]
    for verdict in verdicts:
        device = verdict.state.device
        lines.append(f"  {device.uuid} ({device.name}): {_reason(verdict, request)}")
    return "\n".join(lines)


def main_reason(judgement: Judgement) -> str:
    """The most telling reason of a refusal, without a full stop."""
    if judgement.together:
        return f"no fitting GPUs are {judgement.together}"
    verdicts = [verdict for verdict in judgement.verdicts if not verdict.fits]
    asked_for = [verdict for verdict in verdicts if is_asked_for(verdict)] or verdicts
    able = [verdict for verdict in asked_for if not verdict.state.problem] or asked_for
    reasons = {verdict.state.device.uuid: _reason(verdict, judgement.request) for verdict in able}
    return most_telling(reasons, is_all=len(able) == len(asked_for))


def most_telling(reasons: Mapping[str, str], *, is_all: bool = True) -> str:
    """The most common reason, by UUID; with a GPU's name unless it applies to all GPUs."""
    if not reasons:
        return ""
    [(common, number)] = Counter(reasons.values()).most_common(1)
    if is_all and number == len(reasons):
        return common
    return next(f"{uuid}: {why}" for uuid, why in reasons.items() if why == common)


def is_asked_for(verdict: Verdict) -> bool:
    """True if the request's selectors, if any, admit the device."""
    return verdict.reason not in {NOT_SELECTED, OF_OTHER_MODEL, OF_OTHER_UUID}


def _reason(verdict: Verdict, request: Request) -> str:
    state, reason = verdict.state, verdict.reason
    amounts = need_and_have(verdict.need_bytes, verdict.have_bytes)
    if verdict.fits:
        is_alone = traits_of(request.mode).is_exclusive or request.constraints.is_alone
        return f"fits, {'need it alone, have no other share on it' if is_alone else amounts}"
    if reason in {NOT_ALONE, TAKEN_WHOLE, OTHER_MODE}:
        return _company(verdict, request)
    if reason in {TOO_LITTLE_MEMORY, TOO_LITTLE_COMPUTE, NO_SEAT}:
        return _shortage(verdict, amounts)
    if reason == OF_OTHER_MODEL:
        return f"need {models_of(request)}, have {state.device.name}"
    if reason in {NOT_SELECTED, NOT_SERVED, OF_OTHER_UUID, state.problem, state.mig_off}:
        return reason
    return f"{reason}, {amounts}"


def _shortage(verdict: Verdict, amounts: str) -> str:
    state = verdict.state
    if verdict.reason == NO_SEAT:
        return f"{NO_SEAT}: {state.shares}"
    if verdict.reason == TOO_LITTLE_COMPUTE:
        asked, left = format_percent(verdict.need_guarantee), format_percent(verdict.have_guarantee)
        given = format_percent(state.guaranteed)
        return f"need {asked} % of compute, have {left} % ({given} % guaranteed)"
    total, given = format_bytes(state.device.allottable_bytes), format_bytes(state.allotted_bytes)
    host = ""
    if state.oversubscribed_bytes or verdict.have_bytes > state.device.allottable_bytes:
        host = f", {format_bytes(state.host_budget_bytes)} of host memory left"
    return f"{amounts} ({given} of {total} allotted{host})"


def _company(verdict: Verdict, request: Request) -> str:
    state = verdict.state
    sharers = ", ".join(state.sharers[:_NAMES])
    if len(state.sharers) > _NAMES:
        sharers += f" and {len(state.sharers) - _NAMES} more"
    if verdict.reason == TAKEN_WHOLE:
        part = "it alone" if traits_of(request.mode).is_exclusive else "a part of it"
        return f"need {part}, have none: used in full by {sharers}"
    if verdict.reason == NOT_ALONE:
        return f"need it alone, have {format_count(state.shares, 'share')} on it ({sharers})"
    return f"need mode {request.mode}, have shares of mode {state.mode} on it ({sharers})"
