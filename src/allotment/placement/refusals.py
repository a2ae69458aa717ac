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
from allotment.model.requests import EXCLUSIVE, TIMESLICE, Request
from allotment.placement.constraints import (
    OF_OTHER_AFFINITY,
    OF_OTHER_EXCLUSION,
    OF_OTHER_MODEL,
    OF_OTHER_UUID,
    OF_SAME_ANTI_AFFINITY,
)
from allotment.placement.explain import models_of
from allotment.placement.fit import (
    NO_SEAT,
    NOT_ALONE,
    NOT_SELECTED,
    NOT_SERVED,
    OTHER_MODE,
    TAKEN_WHOLE,
    TOO_LITTLE_COMPUTE,
    TOO_LITTLE_MEMORY,
)

__all__ = [
    "Reason",
    "Refusal",
    "grouped",
    "lacks_devices",
    "lacks_host",
    "lacks_room",
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
class Refusal:
    """What a search found out: the container for which there was no place, and each device."""

    depth: int = 0
    """How many containers had theirs."""
    wanted: WantedContainer | None = None
    verdicts: tuple[Verdict, ...] = ()
    is_unfinished: bool = False


_HAVE = "{have}"
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
    request = wanted.request
    whose = f"container {wanted.name}: " if len(need.containers) > 1 else ""
    asked = asked_for(request)
    if refusal.is_unfinished:
        return undecided(node, need)
    verdicts = refusal.verdicts
    if len(verdicts) < max(1, request.count):
        return lacks_devices(node, request, len(verdicts), whose=whose)
    fitting = sum(verdict.fits for verdict in verdicts)
    if fitting >= request.count:
        return _apart(node, whose, request, refusal)
    reason, have, amount = _nearest([verdict for verdict in verdicts if not verdict.fits])
    others = "beside the pod's other containers: " if refusal.depth else ""
    stem = f"{whose}need {asked}, have {others}{_such(fitting)}{have}"
    return _filled(node, reason, stem, amount)


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


def _apart(node: str, whose: str, request: Request, refusal: Refusal) -> NodeRejection:
    """Say why devices that fit one by one do not do."""
    asked = asked_for(request)
    fitting = [verdict for verdict in refusal.verdicts if verdict.fits]
    constraints = request.constraints
    if constraints.same_numa or constraints.needs_nvlink:
        nodes = [each.state.device.numa_node for each in fitting]
        most = max(nodes.count(each) for each in nodes)
        if constraints.same_numa and most < request.count:
            text = f"{whose}need {asked}, have at most {_HAVE} of them on one NUMA node"
            return _filled(node, Reason.TOPOLOGY, text, most)
        text = f"{whose}need {asked}, have {_HAVE} such that are not all joined"
        return _filled(node, Reason.TOPOLOGY, text, len(fitting))
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
    if request.mode in {EXCLUSIVE, TIMESLICE}:
        how = "whole" if request.mode == EXCLUSIVE else "time-sliced"
        return f"{number} {how} {word}{end}"
    part = _memory(request)
    if request.compute.guarantee:
        part += f" and {format_percent(request.compute.guarantee)} % of compute"
    each = " each" if several else ""
    alone = ", alone" if constraints.is_alone else ""
    return f"{number} {word} with {part}{each}{end}{alone}"


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
        found.append((best.text, tuple(sorted(one.node for one in alike))))
    return sorted(found, key=lambda group: (-len(group[1]), group[0]))
