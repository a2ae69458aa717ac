# SPDX-License-Identifier: Apache-2.0
"""Finds a pod's dialect and translates the pod into Allotment's own.

A pod uses one dialect; a pod with two is refused with both names. Resources that stay (NVIDIA's
whole GPUs, allocated by the kubelet) may be in other containers of the same pod.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from allotment.dialects.foreign.base import DIALECT, ForeignDialect, Translated, Translation
from allotment.dialects.own import annotations as keys
from allotment.dialects.own.allotment import GPU, GPU_COMPUTE, GPU_MEMORY, RESOURCES
from allotment.dialects.own.annotations import (
    NUMA,
    NVLINK,
    part_amount,
    written_items,
    written_rules,
    written_tag,
    written_weights,
)
from allotment.dialects.own.protocol import is_any_memory, refusal
from allotment.dialects.own.registry import wanted
from allotment.model.clusters import WantedContainer
from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.formats import format_percent
from allotment.model.modes import MIG, SOFT
from allotment.model.pods import Container, ForeignContainer, ForeignPod, Pod, PodUid
from allotment.model.quantities import MAX_BYTES, parse_whole
from allotment.model.requests import Request
from allotment.model.structs import replace

_OWN = "Allotment's"
_MAX_SHOWN = 6


class _Claim(msgspec.Struct, frozen=True):
    """A dialect's keys in a pod: resources, annotations, labels."""

    title: str
    keys: tuple[str, ...]
    dialect: ForeignDialect | None = None
    """None: Allotment's own."""
    keeps_resources: bool = False

    def __str__(self) -> str:
        """Dialect and keys, cut to a length for messages."""
        rest = len(self.keys) - _MAX_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return f"{self.title} {', '.join(self.keys[:_MAX_SHOWN])}{more}"


def translate(pod: ForeignPod, dialects: Sequence[ForeignDialect]) -> Translation | None:
    """Translate a pod from its dialect. Raises `UsageError`.

    None: the pod asks for no GPU, uses Allotment's own or untranslated resources, or was translated
    before. If two dialects recognise a key, the first one in the list wins.
    """
    if DIALECT in pod.annotations:
        return None
    claims = _claims(pod, dialects)
    moving = [claim for claim in claims if not claim.keeps_resources]
    if len(moving) > 1:
        raise _mixed(pod, None, moving)
    staying = [claim for claim in claims if claim.keeps_resources]
    for container in pod.containers:
        _check_apart(pod, container, moving, staying)
    translations = [
        (each, each.dialect.translate(pod))
        for each in (*staying, *moving)
        if each.dialect is not None
    ]
    found = next((found for each, found in translations if each in moving), None)
    return found if found and found.containers else None


def _claims(pod: ForeignPod, dialects: Iterable[ForeignDialect]) -> list[_Claim]:
    own = sorted(
        {name for container in pod.containers for name in _resources(container)} & {*RESOURCES}
    )
    claims = [_Claim(_OWN, tuple(own))] if own else []
    taken = {*own}
    for dialect in dialects:
        keys = tuple(key for key in dialect.recognises(pod) if key not in taken)
        if keys:
            taken |= {*keys}
            claims.append(
                _Claim(dialect.title, keys, dialect, keeps_resources=dialect.keeps_resources(pod))
            )
    return claims


def _check_apart(
    pod: ForeignPod,
    container: ForeignContainer,
    moving: Sequence[_Claim],
    staying: Sequence[_Claim],
) -> None:
    there = _resources(container)
    both = [
        _Claim(each.title, tuple(key for key in each.keys if key in there))
        for each in (*moving, *staying)
        if not there.isdisjoint(each.keys)
    ]
    if len(both) > 1:
        raise _mixed(pod, container.name, both)


def _resources(container: ForeignContainer) -> set[str]:
    return {*container.limits, *container.requests}


def _mixed(pod: ForeignPod, container: str | None, claims: Sequence[_Claim]) -> UsageError:
    both = " and ".join(map(str, claims[:2]))
    titles = " or ".join(claim.title for claim in claims[:2])
    where = "a pod" if container is None else "a container"
    hint = f"keep the keys of {titles} and remove the rest: {where} follows one dialect only"
    return refusal(pod, container, f"it asks for GPUs in two ways: {both}", hint=hint)


_PERCENT = WHOLE // 100


class Changes(msgspec.Struct, frozen=True):
    """Changes to a pod."""

    limits: Mapping[str, Mapping[str, str | None]] = msgspec.field(default_factory=dict)
    """By container: the quantity of each resource; None: remove it. Applies to `limits`, and to
    `requests` if the container has the resource there."""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Annotations to set."""


def written(pod: ForeignPod, translation: Translation) -> Changes:
    """The changes that make a pod ask natively for what its author meant.

    Existing `allotment.dev/` annotations stay unless the translation sets the same one. Raises
    `UsageError` if both set it, an amount exceeds any node, or the result is invalid.
    """
    limits: dict[str, dict[str, str | None]] = {}
    for container in translation.containers:
        changed: dict[str, str | None] = dict.fromkeys(container.removes)
        limits[container.container] = changed | _limits(pod, container.container, container.request)
    annotations = {DIALECT: translation.dialect}
    for key, write in _WRITERS.items():
        text = _joined(
            key, {container.container: write(container) for container in translation.containers}
        )
        if text is None:
            continue
        if key in pod.annotations:
            problem = f"it has the annotation {key}, but {translation.dialect} asks for {text!r}"
            hint = f"remove {key}, or ask for everything with {GPU} and annotations"
            raise refusal(pod, None, f"{problem} for the same setting", hint=hint)
        annotations[key] = text
    changes = Changes(limits, annotations)
    wanted_of(applied(pod, changes))
    return changes


def applied(pod: ForeignPod, changes: Changes) -> ForeignPod:
    containers = tuple(
        replace(
            container,
            limits=_merged(container.limits, changes.limits.get(container.name, {}), adds=True),
            requests=_merged(
                container.requests, changes.limits.get(container.name, {}), adds=False
            ),
        )
        for container in pod.containers
    )
    annotations = {**pod.annotations, **changes.annotations}
    return replace(pod, annotations=annotations, containers=containers)


def is_native(pod: ForeignPod) -> bool:
    return any(
        name in container.limits or name in container.requests
        for container in pod.containers
        for name in RESOURCES
    )


def native_pod(pod: ForeignPod) -> Pod:
    """A pod at creation as the scheduler and the agent will see it. No uid.

    Raises `UsageError` for an invalid amount of Allotment's resources. Invalid amounts of others
    are omitted, as on the node.
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
            Container(container.name, container.kind, dict(_amounts(pod, container)))
            for container in pod.containers
        ),
    )


@lru_cache(maxsize=4096)
def whole_amount(text: str) -> int:
    """Cached `parse_whole`: many pods have the same amounts."""
    return parse_whole(text)


def wanted_of(pod: ForeignPod) -> tuple[WantedContainer, ...]:
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
            problem = f"its request is {amount} of {name}, more than any node can have"
            raise refusal(pod, container, problem, hint="ask for less, or for fewer GPUs")
    return {name: str(amount) for name, amount in amounts.items()}


# ---- annotations ---------------------------------------------------------------------------------


def _compute(request: Request) -> str | None:
    its = request.compute
    sum_is_whole = its.guarantee * request.count % _PERCENT == 0
    if its.guarantee and its.guarantee == its.ceiling and sum_is_whole:
        return None  # the resource states it in full
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
    """The annotation's text: one value for all containers, or one for each that has any."""
    said = {name: text for name, text in texts.items() if text is not None}
    if not said:
        return None
    if len(said) == len(texts) and len(set(said.values())) == 1:
        return next(iter(said.values()))
    separator = ";" if key in keys.LISTS else ","
    return separator.join(f"{name}={text}" for name, text in said.items())
