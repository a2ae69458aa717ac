# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/...` annotations of a pod: what they say about each of its containers.

A value is for every container of the pod that it can mean something to (`30:80`), or is given by
container (`train=30:80,side=10`). Where a value is a list itself, containers are separated by
semicolons (`train=A100,V100;side=T4`). What would have no effect is refused: somebody expects one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from allotment.dialects.foreign import DIALECT
from allotment.dialects.modes import STRONGEST
from allotment.dialects.placements import LEFT_OUT, MOST_CHARACTERS, PLACEMENT, placements_of
from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.values import (
    DEVICE_POLICIES,
    NODE_POLICIES,
    NUMA,
    NVLINK,
    TOPOLOGIES,
    is_weights,
    parse_items,
    parse_part,
    parse_rules,
    parse_tag,
    parse_weights,
    parse_words,
)
from allotment.dialects.wishes import ComputeWish, Wishes
from allotment.model.compute import ComputeClass, parse_compute, parse_weight
from allotment.model.errors import UsageError
from allotment.model.pods import Pod

__all__ = [
    "AFFINITY",
    "ALONE",
    "ANTI_AFFINITY",
    "CLASS",
    "COMPUTE",
    "EXCLUSION",
    "GPU_POLICY",
    "GPU_WEIGHTS",
    "KEYS",
    "LISTS",
    "MEMORY",
    "MIG_PROFILE",
    "MODE",
    "MODELS",
    "MODES",
    "NODE_POLICY",
    "NOT_MODELS",
    "NOT_UUIDS",
    "OVERSUBSCRIBE",
    "PREFIX",
    "TOPOLOGY",
    "UUIDS",
    "WEIGHT",
    "parse_profile",
    "wishes_of",
]

PREFIX = "allotment.dev/"
COMPUTE = f"{PREFIX}compute"
CLASS = f"{PREFIX}class"
WEIGHT = f"{PREFIX}weight"
MODE = f"{PREFIX}mode"
MIG_PROFILE = f"{PREFIX}mig-profile"
OVERSUBSCRIBE = f"{PREFIX}oversubscribe"
MEMORY = f"{PREFIX}memory"
"""A part of each GPU's memory, where `allotment.dev/gpu-memory` does not say bytes."""
MODELS = f"{PREFIX}models"
NOT_MODELS = f"{PREFIX}not-models"
UUIDS = f"{PREFIX}uuids"
NOT_UUIDS = f"{PREFIX}not-uuids"
AFFINITY = f"{PREFIX}affinity"
ANTI_AFFINITY = f"{PREFIX}anti-affinity"
EXCLUSION = f"{PREFIX}exclusion"
ALONE = f"{PREFIX}alone"
TOPOLOGY = f"{PREFIX}topology"
NODE_POLICY = f"{PREFIX}node-policy"
GPU_POLICY = f"{PREFIX}gpu-policy"
GPU_WEIGHTS = f"{PREFIX}gpu-weights"

LISTS = frozenset(
    {MODE, MODELS, NOT_MODELS, UUIDS, NOT_UUIDS, TOPOLOGY, NODE_POLICY, GPU_POLICY, GPU_WEIGHTS}
)
"""Those whose value may have commas in it."""

MODES = ("exclusive", "timeslice", "mps", "mig", "soft", "passthrough")
"""The words for modes. Whether a device is in that mode is not a question of words."""
_PROFILE = re.compile(
    r"[1-9][0-9]?g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})?)?", re.ASCII
)

_BOOLEANS = {"true": True, "false": False}
_BY_CONTAINER = "write one value for all (`30:80`), or one for each by name (`train=30:80,side=10`)"
_LIST_BY_CONTAINER = (
    "write one list for all (`A100,V100`), or one for each by name (`train=A100,V100;side=T4`)"
)


def wishes_of(
    pod: Pod, takers: Mapping[str, frozenset[str]], *, has_placement: bool = True
) -> dict[str, Wishes]:
    """Read a pod's annotations. Raises `UsageError`.

    `takers` has the containers that ask for GPUs, each with the annotations that can mean something
    to it; the result has the same containers. Without `has_placement` a placement is not looked at.
    """
    for key in pod.annotations:
        if key.startswith(PREFIX) and key not in KEYS:
            problem = f"the annotation {shown(key)} is not known{meant(key, KEYS)}"
            known = ", ".join(sorted(KEYS))
            raise refusal(pod, None, problem, hint=f"correct or remove it; there are: {known}")
    _check_length(pod, KEYS if has_placement else KEYS - {PLACEMENT})
    wishes = dict.fromkeys(takers, Wishes())
    for key in sorted(_READERS):
        for name, text in _by_container(pod, key, takers).items():
            wishes[name] = _with(pod, name, wishes[name], key, text)
    if has_placement:
        can_take = {name: PLACEMENT in takes for name, takes in takers.items()}
        for name, placement in placements_of(pod, can_take).items():
            wishes[name] = replace(wishes[name], placement=placement)
    return wishes


def _check_length(pod: Pod, keys: frozenset[str]) -> None:
    """Refuse what was not kept, whatever it said: many of these values are any text."""
    for key in sorted(keys & pod.annotations.keys()):
        if pod.annotations[key] == LEFT_OUT:
            problem = f"the annotation {key} is too long, or those before it are: all that begin"
            problem += f" with {PREFIX} may have {MOST_CHARACTERS} characters together"
            raise refusal(pod, None, problem, hint="shorten or remove some of them")


def _by_container(pod: Pod, key: str, takers: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return an annotation's value for each container that it is for."""
    text = pod.annotations.get(key)
    if text is None:
        return {}
    able = [name for name, takes in takers.items() if key in takes]
    if "=" not in text or (key == GPU_WEIGHTS and is_weights(text)):
        if not able:
            problem = f"the annotation {key} has no effect: no container asks for what it is about"
            raise refusal(pod, None, problem, hint=_effect_hint(key))
        return dict.fromkeys(able, text)
    values: dict[str, str] = {}
    separator, hint = (";", _LIST_BY_CONTAINER) if key in LISTS else (",", _BY_CONTAINER)
    for part in text.split(separator):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            problem = f"the annotation {key} has {shown(part.strip())} without a container's name"
            raise refusal(pod, None, problem, hint=hint)
        _check_container(pod, key, name, takers)
        if name in values:
            problem = f"the annotation {key} names this container twice"
            raise refusal(pod, name, problem, hint="keep one of the values")
        values[name] = value
    return values


def _check_container(pod: Pod, key: str, name: str, takers: Mapping[str, frozenset[str]]) -> None:
    if pod.container(name) is None:
        problem = f"the annotation {key} names container {shown(name)}, which the pod has not"
        hint = f"its containers with GPUs are: {', '.join(takers)}"
        raise refusal(pod, None, problem + meant(name, takers), hint=hint)
    if name not in takers:
        problem = f"the annotation {key} names this container, which asks for no GPU"
        raise refusal(pod, name, problem, hint="add a resource to its limits, or remove its value")
    if key not in takers[name]:
        problem = f"the annotation {key} has no effect on this container"
        raise refusal(pod, name, problem, hint=_effect_hint(key))


def _effect_hint(key: str) -> str:
    return f"remove {key}, or ask by allotment.dev/gpu, of whose parts it says more"


def _with(pod: Pod, name: str, wishes: Wishes, key: str, text: str) -> Wishes:
    """Add what one annotation says."""
    try:
        return _READERS[key](wishes, text.strip())
    except _WordError as error:
        problem = f"the annotation {key} is {error.message}"
        raise refusal(pod, name, problem, hint=error.hint or "") from error
    except UsageError as error:
        problem = f"the annotation {key}: {error.message}"
        hint = error.hint or _BY_CONTAINER
        if key in LISTS - {GPU_WEIGHTS} and "=" in text:
            hint = _LIST_BY_CONTAINER  # rather than how to write the sign itself
        raise refusal(pod, name, problem, hint=hint) from error


class _WordError(UsageError):
    """A value is none of the words that there are."""


def _word(value: str, known: Mapping[str, object]) -> str:
    if value in known:
        return value
    problem = f"{shown(value)}{meant(value.lower(), known)}"
    raise _WordError(problem, hint=f"write one of: {', '.join(known)}")


def _constrained(field: str, parse: Callable[[str], object]) -> Callable[[Wishes, str], Wishes]:
    def read(wishes: Wishes, text: str) -> Wishes:
        value: Any = parse(text)
        return replace(wishes, constraints=replace(wishes.constraints, **{field: value}))

    return read


def _preferring(field: str, parse: Callable[[str], object]) -> Callable[[Wishes, str], Wishes]:
    def read(wishes: Wishes, text: str) -> Wishes:
        value: Any = parse(text)
        return replace(wishes, preferences=replace(wishes.preferences, **{field: value}))

    return read


def _tag(text: str) -> str:
    tag = parse_tag(text)
    if not tag:
        raise UsageError("it is empty", hint="write the tag that other shares have, or remove it")
    return tag


def _modes(text: str) -> tuple[str, ...]:
    if text.strip() == STRONGEST:
        return (STRONGEST,)
    words = parse_words(text, (*MODES, STRONGEST))
    if STRONGEST in words:
        problem = f"{STRONGEST} stands for a list, and there are other words beside it"
        raise UsageError(problem, hint=f"write {STRONGEST} alone, or the modes themselves")
    return words


def parse_profile(text: str) -> str:
    """Read the name of a MIG profile, be there a GPU that has it or not. Raises `UsageError`."""
    if not _PROFILE.fullmatch(text):
        problem = f"{shown(text)} is no MIG profile"
        raise UsageError(problem, hint="write one as NVIDIA has it: 1g.10gb, 1g.10gb+me, 3g.40gb")
    return text


def _topology(wishes: Wishes, text: str) -> Wishes:
    words = parse_words(text, TOPOLOGIES)
    constraints = replace(wishes.constraints, same_numa=NUMA in words, needs_nvlink=NVLINK in words)
    return replace(wishes, constraints=constraints)


_CLASSES = {str(each): each for each in ComputeClass}
_READERS: Mapping[str, Callable[[Wishes, str], Wishes]] = {
    COMPUTE: lambda wishes, text: replace(wishes, compute=ComputeWish(text, parse_compute(text))),
    WEIGHT: lambda wishes, text: replace(wishes, weight=parse_weight(text)),
    CLASS: lambda wishes, text: replace(wishes, kind=_CLASSES[_word(text, _CLASSES)]),
    MODE: lambda wishes, text: replace(wishes, modes=_modes(text)),
    MIG_PROFILE: lambda wishes, text: replace(wishes, mig_profile=parse_profile(text)),
    OVERSUBSCRIBE: lambda wishes, text: replace(
        wishes, may_oversubscribe=_BOOLEANS[_word(text, _BOOLEANS)]
    ),
    MEMORY: lambda wishes, text: replace(wishes, memory=parse_part(text)),
    MODELS: _constrained("models", parse_rules),
    NOT_MODELS: _constrained("not_models", parse_rules),
    UUIDS: _constrained("uuids", parse_items),
    NOT_UUIDS: _constrained("not_uuids", parse_items),
    AFFINITY: _constrained("affinity", _tag),
    ANTI_AFFINITY: _constrained("anti_affinity", _tag),
    EXCLUSION: _constrained("exclusion", parse_tag),
    ALONE: _constrained("is_alone", lambda text: _BOOLEANS[_word(text, _BOOLEANS)]),
    TOPOLOGY: _topology,
    NODE_POLICY: _preferring("node_policies", lambda text: parse_words(text, NODE_POLICIES)),
    GPU_POLICY: _preferring("device_policies", lambda text: parse_words(text, DEVICE_POLICIES)),
    GPU_WEIGHTS: _preferring("weights", parse_weights),
}

KEYS = frozenset({*_READERS, PLACEMENT, DIALECT})
"""Every annotation of a pod that means anything."""
