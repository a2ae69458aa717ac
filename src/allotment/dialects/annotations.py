# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/...` annotations of a pod: what they say about each of its containers.

A value is for every container of the pod that it can mean something to (`30:80`), or is given by
container (`train=30:80,side=10`). What would have no effect is refused: somebody expects one.
"""

from collections.abc import Mapping
from dataclasses import replace

from allotment.dialects.placements import PLACEMENT, placements_of
from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.wishes import ComputeWish, Wishes
from allotment.model.compute import ComputeClass, parse_compute, parse_weight
from allotment.model.errors import QuantityError
from allotment.model.pods import Pod

__all__ = [
    "CLASS",
    "COMPUTE",
    "KEYS",
    "MODE",
    "MODES",
    "OVERSUBSCRIBE",
    "PREFIX",
    "WEIGHT",
    "wishes_of",
]

PREFIX = "allotment.dev/"
COMPUTE = f"{PREFIX}compute"
CLASS = f"{PREFIX}class"
WEIGHT = f"{PREFIX}weight"
MODE = f"{PREFIX}mode"
OVERSUBSCRIBE = f"{PREFIX}oversubscribe"
KEYS = frozenset({COMPUTE, CLASS, WEIGHT, MODE, OVERSUBSCRIBE, PLACEMENT})
"""Every annotation of a pod that means anything."""

MODES = ("exclusive", "timeslice", "mps", "mig", "soft", "passthrough")
"""The words for modes. Whether a device is in that mode is not a question of words."""

_BOOLEANS = {"true": True, "false": False}
_BY_CONTAINER = "write one value for all (`30:80`), or one for each by name (`train=30:80,side=10`)"


def wishes_of(pod: Pod, takers: Mapping[str, frozenset[str]]) -> dict[str, Wishes]:
    """Read a pod's annotations. Raises `UsageError`.

    `takers` has the containers that ask for GPUs, each with the annotations that can mean something
    to it; the result has the same containers.
    """
    for key in pod.annotations:
        if key.startswith(PREFIX) and key not in KEYS:
            problem = f"the annotation {shown(key)} is not known{meant(key, KEYS)}"
            known = ", ".join(sorted(KEYS))
            raise refusal(pod, None, problem, hint=f"correct or remove it; there are: {known}")
    wishes = dict.fromkeys(takers, Wishes())
    for key in sorted(KEYS - {PLACEMENT}):
        for name, text in _by_container(pod, key, takers).items():
            wishes[name] = _with(pod, name, wishes[name], key, text)
    placed = placements_of(pod, {name: PLACEMENT in takes for name, takes in takers.items()})
    for name, placement in placed.items():
        wishes[name] = replace(wishes[name], placement=placement)
    return wishes


def _by_container(pod: Pod, key: str, takers: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """Return an annotation's value for each container that it is for."""
    text = pod.annotations.get(key)
    if text is None:
        return {}
    able = [name for name, takes in takers.items() if key in takes]
    if "=" not in text:
        if not able:
            problem = f"the annotation {key} has no effect: no container asks for what it is about"
            raise refusal(pod, None, problem, hint=_effect_hint(key))
        return dict.fromkeys(able, text)
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            problem = f"the annotation {key} has {shown(part.strip())} without a container's name"
            raise refusal(pod, None, problem, hint=_BY_CONTAINER)
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
    value = text.strip()
    try:
        if key == COMPUTE:
            return replace(wishes, compute=ComputeWish(value, parse_compute(value)))
        if key == WEIGHT:
            return replace(wishes, weight=parse_weight(value))
    except QuantityError as error:
        problem = f"the annotation {key}: {error.message}"
        raise refusal(pod, name, problem, hint=error.hint or _BY_CONTAINER) from error
    if key == CLASS:
        word = _word(pod, name, key, value, tuple(map(str, ComputeClass)))
        return replace(wishes, kind=ComputeClass(word))
    if key == MODE:
        return replace(wishes, mode=_word(pod, name, key, value, MODES))
    word = _word(pod, name, key, value, tuple(_BOOLEANS))
    return replace(wishes, may_oversubscribe=_BOOLEANS[word])


def _word(pod: Pod, name: str, key: str, value: str, known: tuple[str, ...]) -> str:
    if value in known:
        return value
    problem = f"the annotation {key} is {shown(value)}{meant(value.lower(), known)}"
    raise refusal(pod, name, problem, hint=f"write one of: {', '.join(known)}")
