# SPDX-License-Identifier: Apache-2.0
"""A translated pod, as it is written in Allotment's own dialect.

`written` says what of a pod has to change so that its native reading (`wanted`) is what its author
meant. The mutating webhook makes the patch of it; the scheduler and the node's agent read the
result, and know no other dialect.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from allotment.dialects import annotations as keys
from allotment.dialects.allotment import GPU, GPU_COMPUTE, GPU_MEMORY, RESOURCES
from allotment.dialects.foreign import (
    DIALECT,
    ForeignContainer,
    ForeignPod,
    Translated,
    Translation,
)
from allotment.dialects.modes import is_any_memory
from allotment.dialects.protocol import refusal
from allotment.dialects.registry import wanted
from allotment.dialects.values import (
    NUMA,
    NVLINK,
    part_amount,
    written_items,
    written_rules,
    written_tag,
    written_weights,
)
from allotment.model.clusters import WantedContainer
from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.formats import format_percent
from allotment.model.pods import Container, Pod, PodUid
from allotment.model.quantities import MAX_BYTES, parse_whole
from allotment.model.requests import MIG, SOFT, Request

__all__ = [
    "Changes",
    "applied",
    "is_native",
    "native_pod",
    "wanted_of",
    "whole_amount",
    "written",
]

_PERCENT = WHOLE // 100


@dataclass(frozen=True, slots=True)
class Changes:
    """What of a pod is to be changed."""

    limits: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    """By container: the quantity of a resource; None: it has to go. Both are about `limits`, and
    about `requests` where the container has any of the same resource there."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those to set."""


def written(pod: ForeignPod, translation: Translation) -> Changes:
    """Say what to write into a pod, so that it asks natively for what its author meant.

    Annotations of `allotment.dev/` that are there already stay, unless the translation says
    something in the same place. Raises `UsageError`: both do, an amount is beyond all nodes, or
    what comes out of both together cannot be meant.
    """
    limits: dict[str, dict[str, str | None]] = {}
    for each in translation.containers:
        changed: dict[str, str | None] = dict.fromkeys(each.removes)
        limits[each.container] = changed | _limits(pod, each.container, each.request)
    annotations = {DIALECT: translation.dialect}
    for key, write in _WRITERS.items():
        text = _joined(key, {each.container: write(each) for each in translation.containers})
        if text is None:
            continue
        if key in pod.annotations:
            problem = f"it has the annotation {key}, and {translation.dialect} asks for {text!r}"
            hint = f"remove {key}, or ask for everything by {GPU} and annotations"
            raise refusal(pod, None, f"{problem} in the same place", hint=hint)
        annotations[key] = text
    changes = Changes(limits, annotations)
    wanted_of(applied(pod, changes))
    return changes


def applied(pod: ForeignPod, changes: Changes) -> ForeignPod:
    """Return the pod with the changes made."""
    containers = tuple(
        replace(
            each,
            limits=_merged(each.limits, changes.limits.get(each.name, {}), adds=True),
            requests=_merged(each.requests, changes.limits.get(each.name, {}), adds=False),
        )
        for each in pod.containers
    )
    annotations = {**pod.annotations, **changes.annotations}
    return replace(pod, annotations=annotations, containers=containers)


def is_native(pod: ForeignPod) -> bool:
    """Does a container ask by Allotment's own resources?"""
    return any(
        name in each.limits or name in each.requests
        for each in pod.containers
        for name in RESOURCES
    )


def native_pod(pod: ForeignPod) -> Pod:
    """Return a pod that is about to be created as the scheduler and the agent will see it. No uid.

    Raises `UsageError` for an amount of Allotment's resources that is none. What is none of
    others' is left out, as on the node: it is theirs to say.
    """
    return Pod(
        uid=PodUid(""),
        namespace=pod.namespace,
        name=pod.name,
        node=pod.node,
        annotations={
            key: text for key, text in pod.annotations.items() if key.startswith(keys.PREFIX)
        },
        containers=tuple(
            Container(each.name, each.kind, dict(_amounts(pod, each))) for each in pod.containers
        ),
    )


@lru_cache(maxsize=4096)
def whole_amount(text: str) -> int:
    """Read an amount as `parse_whole` does: pods are alike, and ask for the same time and again."""
    return parse_whole(text)


def wanted_of(pod: ForeignPod) -> tuple[WantedContainer, ...]:
    """Read a pod that is about to be created. Raises `UsageError`, as `wanted` does."""
    return wanted(native_pod(pod))


def _merged(
    before: Mapping[str, str], changed: Mapping[str, str | None], *, adds: bool
) -> dict[str, str]:
    after = dict(before)
    for name, text in changed.items():
        if text is None:
            after.pop(name, None)
        elif adds or name in before:
            after[name] = text
    return after


def _amounts(pod: ForeignPod, container: ForeignContainer) -> Iterable[tuple[str, int]]:
    """Yield the container's extended resources."""
    for name, text in container.limits.items():
        domain, slash, _ = name.partition("/")
        if not slash or domain == "kubernetes.io" or domain.endswith(".kubernetes.io"):
            continue
        try:
            yield name, whole_amount(text)
        except UsageError as error:
            if name in RESOURCES:
                problem = f"{name}: {error.message}"
                raise refusal(pod, container.name, problem, hint=error.hint or "") from error


# ---- resources -----------------------------------------------------------------------------------


def _limits(pod: ForeignPod, container: str, request: Request) -> dict[str, str | None]:
    amounts = {GPU: request.count}
    if request.memory.size_bytes is not None and not is_any_memory(request):
        amounts[GPU_MEMORY] = request.memory.size_bytes * request.count
    if request.compute.guarantee:
        amounts[GPU_COMPUTE] = -(-request.compute.guarantee * request.count // _PERCENT)
    for name, amount in amounts.items():
        if amount > MAX_BYTES:
            problem = f"what it asks for comes to {amount} of {name}, more than any node can have"
            raise refusal(pod, container, problem, hint="ask for less, or for fewer GPUs")
    return {name: str(amount) for name, amount in amounts.items()}


# ---- annotations ---------------------------------------------------------------------------------


def _compute(request: Request) -> str | None:
    its = request.compute
    sum_is_whole = its.guarantee * request.count % _PERCENT == 0
    if its.guarantee and its.guarantee == its.ceiling and sum_is_whole:
        return None  # the resource says it all
    is_plain = its.weight == DEFAULT_WEIGHT and its.kind is ComputeClass.NORMAL
    if its.guarantee == 0 and its.ceiling == WHOLE and not (its.is_governed and is_plain):
        return None
    return f"{format_percent(its.guarantee)}:{format_percent(its.ceiling)}"


def _modes(its: Translated) -> str | None:
    request = its.request
    is_open = request.mode == SOFT and not request.other_modes and not its.names_mode
    is_implied = request.mode == MIG and not request.other_modes and request.mig_profile
    return None if is_open or is_implied else _list((request.mode, *request.other_modes))


def _topology(request: Request) -> str | None:
    its = request.constraints
    return _list(
        each for each, is_asked in ((NUMA, its.same_numa), (NVLINK, its.needs_nvlink)) if is_asked
    )


def _list(items: Iterable[str]) -> str | None:
    return written_items(items) or None


def _memory(request: Request) -> str | None:
    part = request.memory.part
    return None if part is None or part == 1 else str(part_amount(part))


def _exclusion(request: Request) -> str | None:
    tag = request.constraints.exclusion
    return None if tag is None else written_tag(tag)


def _weights(request: Request) -> str | None:
    weights = request.preferences.weights
    return None if weights is None else written_weights(weights)


_WRITERS: Mapping[str, Callable[[Translated], str | None]] = {
    keys.MEMORY: lambda its: _memory(its.request),
    keys.COMPUTE: lambda its: _compute(its.request),
    keys.CLASS: lambda its: (
        None if its.request.compute.kind is ComputeClass.NORMAL else its.request.compute.kind
    ),
    keys.WEIGHT: lambda its: (
        None if its.request.compute.weight == DEFAULT_WEIGHT else str(its.request.compute.weight)
    ),
    keys.MIG_PROFILE: lambda its: its.request.mig_profile or None,
    keys.OVERSUBSCRIBE: lambda its: "true" if its.request.may_oversubscribe else None,
    keys.MODELS: lambda its: written_rules(its.request.constraints.models) or None,
    keys.NOT_MODELS: lambda its: written_rules(its.request.constraints.not_models) or None,
    keys.UUIDS: lambda its: _list(its.request.constraints.uuids),
    keys.NOT_UUIDS: lambda its: _list(its.request.constraints.not_uuids),
    keys.AFFINITY: lambda its: written_tag(its.request.constraints.affinity) or None,
    keys.ANTI_AFFINITY: lambda its: written_tag(its.request.constraints.anti_affinity) or None,
    keys.EXCLUSION: lambda its: _exclusion(its.request),
    keys.ALONE: lambda its: "true" if its.request.constraints.is_alone else None,
    keys.TOPOLOGY: lambda its: _topology(its.request),
    keys.NODE_POLICY: lambda its: _list(its.request.preferences.node_policies),
    keys.GPU_POLICY: lambda its: _list(its.request.preferences.device_policies),
    keys.GPU_WEIGHTS: lambda its: _weights(its.request),
    keys.MODE: _modes,
}


def _joined(key: str, texts: Mapping[str, str | None]) -> str | None:
    """Write an annotation: one value for all containers, or one for each that has any."""
    said = {name: text for name, text in texts.items() if text is not None}
    if not said:
        return None
    if len(said) == len(texts) and len(set(said.values())) == 1:
        return next(iter(said.values()))
    separator = ";" if key in keys.LISTS else ","
    return separator.join(f"{name}={text}" for name, text in said.items())
