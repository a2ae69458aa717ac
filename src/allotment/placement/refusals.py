# SPDX-License-Identifier: Apache-2.0
"""Why a pod cannot be on a node: one of a fixed list of reasons, and a line with need and have."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from allotment.model.clusters import NodeRejection, PodNeed, WantedContainer
from allotment.model.compute import WHOLE
from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.placements import Verdict
from allotment.model.requests import EXCLUSIVE, MIG, TIMESLICE, Request
from allotment.placement.constraints import (
    OF_OTHER_AFFINITY,
    OF_OTHER_EXCLUSION,
    OF_OTHER_MODEL,
    OF_OTHER_UUID,
    OF_SAME_ANTI_AFFINITY,
)
from allotment.placement.explain import models_of
from allotment.placement.fit import (
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
)
from allotment.placement.layouts import one_slice_of
from allotment.placement.mig import reason_of

__all__ = [
    "Attempt",
    "Reason",
    "Refusal",
    "grouped",
    "in_all_modes",
    "lacks_devices",
    "lacks_host",
    "lacks_room",
    "lacks_slices",
    "lacks_together",
    "refused",
    "told",
    "undecided",
    "unknown_node",
]


class Reason(StrEnum):
    """What keeps a pod from a node: the label of metrics."""

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
    """No GPU can be cut into such slices."""
    MIG_ROOM = "mig-room"
    """Others have the slots where such slices could be."""
    GPU_MEMORY = "gpu-memory"
    GPU_COMPUTE = "gpu-compute"
    HOST_MEMORY = "host-memory"
    SHARES = "shares"
    COMPANY = "company"
    """Other shares are on the GPUs, and one of both has to be alone, or they are of two modes."""
    TAGS = "tags"
    """Affinity, anti-affinity, exclusion."""
    TOPOLOGY = "topology"
    """Enough GPUs, but not on one NUMA node or not joined by NVLink."""
    CONTAINERS = "containers"
    """Each container has room by itself, and all of them together have not."""
    CHANGED = "changed"
    """It had no room when it was asked, and has some by now."""
    UNDECIDED = "undecided"
    """There were too many choices to look at all of them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What each device says to a container in one mode."""

    request: Request
    verdicts: tuple[Verdict, ...]

    @property
    def parts(self) -> int:
        """How many devices fit by themselves, or slices of them all."""
        if self.request.mode == MIG:
            return sum(each.slices for each in self.verdicts if each.fits)
        return sum(each.fits for each in self.verdicts)

    @property
    def has_enough(self) -> bool:
        """Are there as many as are asked for, whatever else is asked of them together?"""
        return self.parts >= self.request.count


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a search found out: the container for which there was no place, and each device."""

    depth: int = 0
    """How many containers had theirs."""
    wanted: WantedContainer | None = None
    attempts: tuple[Attempt, ...] = ()
    """In each mode that would do."""
    is_unfinished: bool = False


_HAVE = "{have}"
_MOST_TOLD = 4
"""Different things that are said of single GPUs of one node: an event has a thousand characters."""
_WORD = re.compile(r"[0-9A-Za-z.]+")
_Format = Callable[[int], str]


def unknown_node(name: str) -> NodeRejection:
    """Say that nothing is known of a node's devices."""
    return NodeRejection(
        name, Reason.UNKNOWN_NODE, "need a node with GPUs, have none that its agent has published"
    )


def lacks_host(
    need: PodNeed, node: str, *, cpu_free: int, memory_free: int
) -> NodeRejection | None:
    """Say what a node lacks besides devices; None: nothing. Thousandths of a core, bytes."""
    # As kube-scheduler has it, who asks for nothing is not kept from a node that is overcommitted.
    if need.cpu_milli and need.cpu_milli > cpu_free:
        stem = f"need {need.cpu_milli}m of CPU, have {_HAVE}"
        return _filled(node, Reason.CPU, stem, max(0, cpu_free))
    if need.memory_bytes and need.memory_bytes > memory_free:
        stem = f"need {format_bytes(need.memory_bytes)} of memory, have {_HAVE}"
        return _filled(node, Reason.MEMORY, stem, max(0, memory_free))
    return None


def refused(node: str, need: PodNeed, refusal: Refusal) -> NodeRejection:
    """Say in one line why a pod's containers have no place on a node."""
    wanted = refusal.wanted
    if wanted is None:
        raise ValueError(node)
    whose = f"container {wanted.name}: " if len(need.containers) > 1 else ""
    if refusal.is_unfinished:
        return undecided(node, need)
    beside = "beside the pod's other containers: " if refusal.depth else ""
    return in_all_modes(
        [
            (each.request.mode, _refused(node, each, whose=whose, beside=beside))
            for each in refusal.attempts
        ]
    )


def in_all_modes(found: Sequence[tuple[str, NodeRejection]]) -> NodeRejection:
    """Say of a container that may have several modes why it can have none: of each by its name."""
    first = found[0][1]
    if len(found) == 1:
        return first
    return NodeRejection(
        first.node,
        first.reason,
        "; ".join(f"mode {mode}: {each.text}" for mode, each in found),
        stem="; ".join(f"mode {mode}: {each.stem or each.text}" for mode, each in found),
        have=first.have,
        details="; ".join(f"mode {mode}: {each.details}" for mode, each in found if each.details),
    )


def _refused(node: str, attempt: Attempt, *, whose: str, beside: str) -> NodeRejection:
    """Say why a container has no place in one mode."""
    request, verdicts = attempt.request, attempt.verdicts
    is_cut = request.mode == MIG
    if len(verdicts) < (1 if is_cut else max(1, request.count)):
        return lacks_devices(node, request, len(verdicts), whose=whose)
    asked = asked_for(request)
    number = attempt.parts
    if attempt.has_enough:
        return _apart(node, whose, attempt)
    if is_cut and number:
        rejection = lacks_slices(node, request, number, whose=whose, beside=beside)
    else:
        reason, have, amount = _nearest([verdict for verdict in verdicts if not verdict.fits])
        stem = f"{whose}need {asked}, have {beside}{_such(number)}{have}"
        rejection = _filled(node, reason, stem, amount)
    return replace(rejection, details=_details(attempt)) if is_cut else rejection


def _details(attempt: Attempt) -> str:
    """Say of each GPU why it has no slice, those together that have the same to say."""
    words: dict[str, list[str]] = {}
    for each in attempt.verdicts:
        text, layout = each.reason, each.state.layout
        if text in {NO_SLOTS, NO_PROFILE} and layout is not None:
            text = reason_of(layout, one_slice_of(attempt.request))
        if text:
            words.setdefault(text, []).append(str(each.state.device.index))
    lines = [
        f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {text}"
        for text, numbers in words.items()
    ]
    more = [f"{len(lines) - _MOST_TOLD} more"] if len(lines) > _MOST_TOLD else []
    return "; ".join(lines[:_MOST_TOLD] + more)


def undecided(node: str, need: PodNeed) -> NodeRejection:
    """Say that nobody has looked at all choices that a node leaves for a pod."""
    parts = sum(each.request.count for each in need.containers)
    text = (
        f"need {format_count(parts, 'GPU')} for {format_count(len(need.containers), 'container')}, "
        "have more choices than can be looked at; fewer containers with a GPU leave fewer"
    )
    return NodeRejection(node, Reason.UNDECIDED, text)


def lacks_together(node: str, least: WantedContainer, places: int, have: int) -> NodeRejection:
    """Say that there is no room for several containers at the same time.

    `places`: for so many shares as large as that of `least`, or larger; `have`: there are so many.
    """
    one = asked_for(replace(least.request, count=1))
    stem = f"container {least.name} and others: need {places} times {one}, have room for {_HAVE}"
    return _filled(node, Reason.CONTAINERS, stem, have)


def lacks_devices(node: str, request: Request, number: int, *, whose: str = "") -> NodeRejection:
    """Say that a node has only so many devices, whatever is on them."""
    asked = asked_for(request)
    if not number:
        return NodeRejection(node, Reason.NO_GPU, f"{whose}need {asked}, have no GPU")
    return _filled(node, Reason.TOO_FEW_GPUS, f"{whose}need {asked}, have {_HAVE}", number)


def lacks_slices(
    node: str, request: Request, number: int, *, whose: str = "", beside: str = ""
) -> NodeRejection:
    """Say that there is room for so many slices of those that are asked for, and no more."""
    stem = f"{whose}need {asked_for(request)}, have {beside}room for {_HAVE}"
    return _filled(node, Reason.MIG_ROOM, stem, number)


def lacks_room(
    node: str, request: Request, reason: Reason, have: int, *, such: int
) -> NodeRejection:
    """Say that the only container of a pod finds too little of something on a node's devices.

    `have`: the most on any of them, in bytes or basis points; `such`: how many have enough.
    """
    phrase = next(phrase for each, phrase in _PHRASES.values() if each is reason)
    stem = f"need {asked_for(request)}, have {_such(such)}{phrase}"
    return _filled(node, reason, stem, have)


def _such(number: int) -> str:
    return f"{number} such and else " if number else ""


def _apart(node: str, whose: str, attempt: Attempt) -> NodeRejection:
    """Say why devices that fit one by one do not do."""
    request = attempt.request
    asked = asked_for(request)
    fitting = [verdict for verdict in attempt.verdicts if verdict.fits]
    constraints = request.constraints
    if (constraints.same_numa or constraints.needs_nvlink) and request.count > 1:
        nodes = [each.state.device.numa_node for each in fitting]
        parts = [each.slices if request.mode == MIG else 1 for each in fitting]
        most = max(sum(part for part, at in zip(parts, nodes, strict=True) if at == each)
                   for each in nodes)  # fmt: skip
        if constraints.same_numa and most < request.count:
            text = f"{whose}need {asked}, have at most {_HAVE} of them on one NUMA node"
            return _filled(node, Reason.TOPOLOGY, text, most)
        text = f"{whose}need {asked}, have {_HAVE} such that are not all joined"
        return _filled(node, Reason.TOPOLOGY, text, sum(parts))
    if any(each.need_bytes > each.state.device.allottable_bytes - each.state.allotted_bytes
           for each in fitting):  # fmt: skip
        left = max(0, min(each.state.host_budget_bytes for each in fitting))
        text = f"{whose}need {asked}, have {_HAVE} of host memory left for all of it"
        return _filled(node, Reason.HOST_MEMORY, text, left)
    text = f"{whose}need {asked}, have no such beside the pod's other containers"
    return NodeRejection(node, Reason.CONTAINERS, text)


def asked_for(request: Request) -> str:
    """Return what a container asks for, in words: `2 GPUs with 20Gi and 30 % of compute each`."""
    several = request.count > 1
    constraints = request.constraints
    what = models_of(request)
    word = ("GPUs" if several else "GPU") + (f" ({what})" if what else "")
    number = f"{request.count}" if several else "a"
    where = " on one NUMA node" * constraints.same_numa + " joined by NVLink" * (
        constraints.needs_nvlink
    )
    end = where if several else ""
    if request.mode == MIG:
        return _slices_asked(request) + end
    if request.mode in {EXCLUSIVE, TIMESLICE}:
        how = "whole" if request.mode == EXCLUSIVE else "time-sliced"
        return f"{number} {how} {word}{end}"
    part = _memory(request)
    if request.compute.guarantee:
        part += f" and {format_percent(request.compute.guarantee)} % of compute"
    each = " each" if several else ""
    alone = ", alone" if constraints.is_alone else ""
    return f"{number} {word} with {part}{each}{end}{alone}"


def _slices_asked(request: Request) -> str:
    """Return it of slices: `2 slices 1g.10gb`, `a slice with 20Gi`."""
    several = request.count > 1
    models = models_of(request)
    number = f"{request.count} MIG slices" if several else "a MIG slice"
    where = f" of a GPU ({models})" if models else ""
    if request.mig_profile:
        return f"{number} {request.mig_profile}{where}"
    parts = [] if request.memory.size_bytes == 0 else [_memory(request)]
    if request.compute.guarantee:
        parts.append(f"{format_percent(request.compute.guarantee)} % of compute")
    each = " each" if several and parts else ""
    return number + (f" with {' and '.join(parts)}{each}" if parts else "") + where


def _memory(request: Request) -> str:
    memory = request.memory
    if memory.part is None:
        return f"{memory}"
    if memory.part == 1:
        return "all of its memory"
    return f"{format_percent(round(memory.part * WHOLE))} % of its memory"


def _nearest(verdicts: Sequence[Verdict]) -> tuple[Reason, str, int]:
    """Return the reason of the devices that came nearest, what they have in words, and how much."""
    ranks = {reason: number for number, reason in enumerate(_PHRASES)}
    last = max(verdicts, key=lambda each: ranks.get(each.reason, _PROBLEM_RANK))
    if last.reason not in _PHRASES:
        return Reason.PROBLEM, f"only GPUs with a problem ({last.reason})", 0
    same = [each for each in verdicts if each.reason == last.reason]
    reason, phrase = _PHRASES[last.reason]
    if reason is Reason.GPU_MEMORY:
        return reason, phrase, max(each.have_bytes for each in same)
    if reason is Reason.GPU_COMPUTE:
        return reason, phrase, max(each.have_guarantee for each in same)
    return reason, phrase, 0


_PHRASES: Mapping[str, tuple[Reason, str]] = MappingProxyType(
    {
        NOT_SELECTED: (Reason.UUID, "none that was asked for"),
        OF_OTHER_UUID: (Reason.UUID, "none that was asked for"),
        OF_OTHER_MODEL: (Reason.MODEL, "GPUs of other models"),
        NOT_SERVED: (Reason.MODE, "GPUs of another mode"),
        "": (Reason.PROBLEM, ""),  # where a device's own problem ranks
        OTHER_MODE: (Reason.COMPANY, "GPUs with shares of another mode"),
        TAKEN_WHOLE: (Reason.COMPANY, "GPUs that others have whole"),
        NOT_ALONE: (Reason.COMPANY, "GPUs with other shares on them"),
        OF_OTHER_AFFINITY: (Reason.TAGS, "no GPU that is idle or has its affinity tag"),
        OF_SAME_ANTI_AFFINITY: (Reason.TAGS, "GPUs with its anti-affinity tag"),
        OF_OTHER_EXCLUSION: (Reason.TAGS, "GPUs with another exclusion tag"),
        NO_SEAT: (Reason.SHARES, "GPUs with as many shares as they take"),
        NO_PROFILE: (Reason.MIG_PROFILE, "GPUs that cannot be cut so"),
        MIG_IS_OFF: (Reason.COMPANY, "GPUs whose MIG is off, with others on them"),
        MIG_IS_ON: (Reason.COMPANY, "GPUs in MIG mode"),
        NO_SLOTS: (Reason.MIG_ROOM, "no room for one"),
        TOO_LITTLE_MEMORY: (Reason.GPU_MEMORY, f"at most {_HAVE} on a GPU"),
        TOO_LITTLE_COMPUTE: (Reason.GPU_COMPUTE, f"at most {_HAVE} of compute on a GPU"),
    }
)
"""By reason of `fit`, the one that says most about a node last."""
_PROBLEM_RANK = list(_PHRASES).index("")

_FORMATS: Mapping[Reason, _Format] = MappingProxyType(
    {
        Reason.CPU: lambda have: f"{have}m",
        Reason.MEMORY: format_bytes,
        Reason.GPU_MEMORY: format_bytes,
        Reason.HOST_MEMORY: format_bytes,
        Reason.GPU_COMPUTE: lambda have: f"{format_percent(have)} %",
        Reason.TOO_FEW_GPUS: lambda have: format_count(have, "GPU"),
    }
)


def _filled(node: str, reason: Reason, stem: str, have: int) -> NodeRejection:
    form = _FORMATS.get(reason, str)
    shown = form(have)
    if form is format_bytes and shown in _WORD.findall(stem):
        shown = f"{have}B"  # rounding hides the difference
    text = stem.replace(_HAVE, shown, 1)
    return NodeRejection(node, reason, text, stem=stem if _HAVE in stem else "", have=have)


def told(rejections: Iterable[NodeRejection]) -> str:
    """Return a line for each group of nodes that fail alike: `312 nodes: need 20Gi, have ...`."""
    return "\n".join(
        f"{names[0] if len(names) == 1 else format_count(len(names), 'node')}: {text}"
        for text, names in grouped(rejections)
    )


def grouped(rejections: Iterable[NodeRejection]) -> list[tuple[str, tuple[str, ...]]]:
    """Return what nodes that fail alike have in common, with their names, the most nodes first.

    Of an amount that they have, the text has the most that any of them has.
    """
    groups: dict[tuple[str, str], list[NodeRejection]] = {}
    for each in rejections:
        groups.setdefault((each.reason, each.stem or each.text), []).append(each)
    found = []
    for alike in groups.values():
        best = max(alike, key=lambda one: one.have)
        details = f" ({best.details})" if len(alike) == 1 and best.details else ""
        found.append((best.text + details, tuple(sorted(one.node for one in alike))))
    return sorted(found, key=lambda group: (-len(group[1]), group[0]))
