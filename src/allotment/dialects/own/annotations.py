# SPDX-License-Identifier: Apache-2.0
"""The `allotment.dev/...` annotations of a pod, read for each container.

A value applies to all containers with GPUs (`30:80`) or is given by container
(`train=30:80,side=10`). If values are lists, semicolons separate containers
(`train=A100,V100;side=T4`). A value without effect is refused, because its author expects one.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.own.placement import (
    KEPT_CHARACTERS,
    LEFT_OUT,
    PLACEMENT,
    RESIZE,
    accepted_resize,
    placements_of,
)
from allotment.dialects.own.protocol import (
    STRONGEST,
    ComputeWish,
    PodAnnotations,
    ResizeWish,
    refusal,
    shown,
)
from allotment.model.compute import ComputeClass, parse_compute, parse_weight
from allotment.model.errors import UsageError
from allotment.model.formats import meant
from allotment.model.modes import MODES
from allotment.model.pods import Pod
from allotment.model.quantities import MemoryAmount, parse_memory
from allotment.model.requests import DeviceWeights, ModelRule
from allotment.model.structs import replace

NUMA: Final = "numa"
NVLINK: Final = "nvlink"
TOPOLOGIES = (NUMA, NVLINK)
"""Properties that all devices of a container can be required to share."""
NODE_POLICIES = ("binpack", "spread", "fragmentation", "topology", "numa")
DEVICE_POLICIES = ("binpack", "spread", "fragmentation", "topology", "numa")
"""Criteria for choosing among fitting places."""

_MAX_ITEMS = 256
_MAX_WEIGHT = 1_000_000
_SEPARATORS = '%,;="'
_RATIO = re.compile(r"(?P<above>[0-9]{1,18})/(?P<below>[0-9]{1,18})", re.ASCII)
_WEIGHTS = re.compile(
    r"(?:shares|compute|memory)\s*=\s*[0-9]+"
    r"(?:\s*,\s*(?:shares|compute|memory)\s*=\s*[0-9]+)*",
    re.ASCII,
)
_MAX_DECIMALS = 40  # of a percentage, with its digits: `parse_memory` reads 64 characters


# ---- items and lists -----------------------------------------------------------------------------


def written_tag(text: str) -> str:
    """Escape any text so that no separator remains in it."""
    last = len(text) - 1
    return "".join(
        _escaped(each) if _has_to_be_escaped(each, at_end=place in {0, last}) else each
        for place, each in enumerate(text)
    )


def parse_tag(text: str) -> str:
    body = text.strip()
    wrong = next((each for each in ',;="' if each in body), None)
    if wrong is not None:
        problem = f"{shown(body)} contains {wrong!r}, which is a separator"
        raise UsageError(problem, hint=f"write it as {_escaped(wrong)}")
    try:
        return unquote_to_bytes(body).decode()
    except UnicodeError as error:
        problem = f"{shown(body)} is not valid text after decoding %.."
        raise UsageError(problem, hint="write a percent sign as %25") from error


def written_items(items: Iterable[str]) -> str:
    return ",".join(written_tag(item) for item in items)


def parse_items(text: str) -> tuple[str, ...]:
    return tuple(parse_tag(each) for each in _split(text))


def parse_words(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Each word at most once. Raises `UsageError`."""
    words = parse_items(text)
    for place, word in enumerate(words):
        if word not in known:
            problem = f"{shown(word)} is not an allowed word{meant(word.lower(), known)}"
            raise UsageError(problem, hint=f"write words from: {', '.join(known)}")
        if word in words[:place]:
            raise UsageError(f"it has {word} twice", hint="keep one of them")
    return words


def _split(text: str) -> list[str]:
    parts = text.split(",")
    if len(parts) > _MAX_ITEMS:
        problem = f"it has {len(parts)} items, more than {_MAX_ITEMS}"
        raise UsageError(problem, hint="name fewer of them")
    if any(not part.strip() for part in parts):
        problem = "it is empty" if len(parts) == 1 else "one of its items is empty"
        raise UsageError(problem, hint="write at least one item, separated by commas")
    return parts


def _has_to_be_escaped(character: str, *, at_end: bool) -> bool:
    if character == " ":
        return at_end
    return character in _SEPARATORS or not character.isprintable()


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))


# ---- models --------------------------------------------------------------------------------------


def written_rules(rules: Iterable[ModelRule]) -> str:
    """A whole model name is written in quotes."""
    return ",".join(
        f'"{written_tag(each.text)}"' if each.is_exact else written_tag(each.text) for each in rules
    )


def parse_rules(text: str) -> tuple[ModelRule, ...]:
    return tuple(_rule(each.strip()) for each in _split(text))


def _rule(text: str) -> ModelRule:
    is_exact = len(text) > 1 and text[0] == text[-1] == '"'
    name = parse_tag(text[1:-1] if is_exact else text)
    if not name.strip():
        raise UsageError("a model's name is empty", hint='write some of it: A100, or "Tesla T4"')
    return ModelRule(name, is_exact=is_exact)


# ---- parts of memory -----------------------------------------------------------------------------


def part_amount(part: Fraction) -> MemoryAmount:
    """The amount for a part of each device, as `parse_part` would read it."""
    return MemoryAmount(written_part(part), part=part)


def written_part(part: Fraction) -> str:
    """A part in (0, 1] of each device: `50%`, or `1/3` if no percentage is exact."""
    percent = part * 100
    digits = 0
    rest = percent.denominator
    while rest % 2 == 0 or rest % 5 == 0:
        rest //= 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
        digits += 1
    if rest != 1 or digits > _MAX_DECIMALS:
        return f"{part.numerator}/{part.denominator}"
    if digits == 0:
        return f"{percent.numerator}%"
    scaled = percent * 10**digits
    whole, decimals = divmod(scaled.numerator // scaled.denominator, 10**digits)
    return f"{whole}.{decimals:0{digits}d}".rstrip("0") + "%"


def parse_part(text: str) -> MemoryAmount:
    body = text.strip()
    if body.endswith("%"):
        amount = parse_memory(body)
        return part_amount(amount.part) if amount.part else amount
    match = _RATIO.fullmatch(body)
    above, below = (int(match["above"]), int(match["below"])) if match else (0, 1)
    if not 0 < above <= below:
        problem = f"{shown(body)} is not a part of each GPU"
        raise UsageError(
            problem,
            hint=(
                "write percent, like 50%, or a ratio, like 1/3; an amount like 4Gi belongs in "
                "the resource allotment.dev/gpu-memory"
            ),
        )
    return part_amount(Fraction(above, below))


# ---- weights -------------------------------------------------------------------------------------


def is_weights(text: str) -> bool:
    """True for one value of `allotment.dev/gpu-weights`; False for values by container."""
    return _WEIGHTS.fullmatch(text.strip()) is not None


def written_weights(weights: DeviceWeights) -> str:
    return f"shares={weights.shares},compute={weights.compute},memory={weights.memory}"


def parse_weights(text: str) -> DeviceWeights:
    hint = "write whole numbers, at least one above 0: shares=1,compute=1,memory=3"
    found: dict[str, int] = {}
    for part in text.split(",") if is_weights(text) else ():
        name, _, digits = (each.strip() for each in part.partition("="))
        if name in found:
            raise UsageError(f"{name} is listed twice", hint=hint)
        found[name] = int(digits) if len(digits) <= len(str(_MAX_WEIGHT)) else _MAX_WEIGHT + 1
    return weights_of(found, shown(text.strip()), hint=hint)


def weights_of(found: Mapping[str, int], text: str, *, hint: str) -> DeviceWeights:
    """`found` has some of `shares`, `compute`, `memory`; others weigh 0."""
    if not any(found.values()):
        raise UsageError(f"{text} has no weight above 0", hint=hint)
    if max(found.values()) > _MAX_WEIGHT:
        raise UsageError(f"{text} has a weight above {_MAX_WEIGHT}", hint=hint)
    if min(found.values()) < 0:
        raise UsageError(f"{text} has a weight below 0", hint=hint)
    return DeviceWeights(
        shares=found.get("shares", 0),
        compute=found.get("compute", 0),
        memory=found.get("memory", 0),
    )


PREFIX = "allotment.dev/"
COMPUTE = f"{PREFIX}compute"
CLASS = f"{PREFIX}class"
WEIGHT = f"{PREFIX}weight"
MODE = f"{PREFIX}mode"
MIG_PROFILE = f"{PREFIX}mig-profile"
OVERSUBSCRIBE = f"{PREFIX}oversubscribe"
MEMORY = f"{PREFIX}memory"
"""A part of each GPU's memory, used if `allotment.dev/gpu-memory` sets no bytes."""
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
    {
        *{MODE, MODELS, NOT_MODELS, UUIDS, NOT_UUIDS, TOPOLOGY},
        *{NODE_POLICY, GPU_POLICY, GPU_WEIGHTS, RESIZE},
    }
)
"""Annotations whose values may contain commas."""

MODE_WORDS = (*MODES, "passthrough")
"""The words for modes. Whether a device offers a mode is checked elsewhere."""
_PROFILE = re.compile(
    r"[1-9][0-9]?g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})?)?", re.ASCII
)

_BOOLEANS = {"true": True, "false": False}
_BY_CONTAINER = "write one value for all (`30:80`), or one for each by name (`train=30:80,side=10`)"
_LIST_BY_CONTAINER = (
    "write one list for all (`A100,V100`), or one for each by name (`train=A100,V100;side=T4`)"
)


def annotations_of(
    pod: Pod,
    takers: Mapping[str, frozenset[str]],
    *,
    has_placement: bool = True,
    resize: str = "",
) -> dict[str, PodAnnotations]:
    """Read a pod's annotations. Raises `UsageError`.

    `takers` has the containers with GPUs, each with the annotations that apply to it; the result
    has the same containers. Without `has_placement` a placement is ignored, and `resize` counts
    in place of the pod's own text.
    """
    for key in pod.annotations:
        if key.startswith(PREFIX) and key not in KEYS:
            problem = f"the annotation {shown(key)} is unknown{meant(key, KEYS)}"
            known = ", ".join(sorted(KEYS))
            raise refusal(
                pod, None, problem, hint=f"correct or remove it; known annotations: {known}"
            )
    _check_length(pod, KEYS if has_placement else KEYS - {PLACEMENT, RESIZE})
    wish = accepted_resize(pod).wish if has_placement else resize
    written = {key: text for key, text in pod.annotations.items() if key != RESIZE}
    pod = replace(pod, annotations={**written, RESIZE: wish} if wish else written)
    annotations = dict.fromkeys(takers, PodAnnotations())
    for key in sorted(_READERS.keys() & pod.annotations.keys()):
        for name, text in _by_container(pod, key, takers).items():
            annotations[name] = _with(pod, name, annotations[name], key, text)
    if has_placement and PLACEMENT in pod.annotations:
        can_take = {name: PLACEMENT in takes for name, takes in takers.items()}
        for name, placement in placements_of(pod, can_take).items():
            annotations[name] = replace(annotations[name], placement=placement)
    return annotations


def _check_length(pod: Pod, keys: frozenset[str]) -> None:
    """Refuse annotations that were cut by length: a part of a value may be valid text."""
    for key in sorted(keys & pod.annotations.keys()):
        if pod.annotations[key] == LEFT_OUT:
            problem = (
                f"the annotation {key} is too long, or those before it are: annotations that begin"
            )
            problem += f" with {PREFIX} may have {KEPT_CHARACTERS} characters together"
            raise refusal(pod, None, problem, hint="shorten or remove some of them")


def _by_container(pod: Pod, key: str, takers: Mapping[str, frozenset[str]]) -> dict[str, str]:
    text = pod.annotations[key]
    able = [name for name, takes in takers.items() if key in takes]
    if "=" not in text or (key == GPU_WEIGHTS and is_weights(text)):
        if not able:
            problem = f"the annotation {key} has no effect: no container uses it"
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
        problem = f"the annotation {key} names container {shown(name)}, which is not in the pod"
        hint = f"its containers with GPUs are: {', '.join(takers)}"
        raise refusal(pod, None, problem + meant(name, takers), hint=hint)
    if name not in takers:
        problem = f"the annotation {key} names this container, which asks for no GPU"
        raise refusal(pod, name, problem, hint="add a resource to its limits, or remove its value")
    if key not in takers[name]:
        problem = f"the annotation {key} has no effect on this container"
        raise refusal(pod, name, problem, hint=_effect_hint(key))


def _effect_hint(key: str) -> str:
    return f"remove {key}, or ask for allotment.dev/gpu, which it describes"


def _with(pod: Pod, name: str, annotations: PodAnnotations, key: str, text: str) -> PodAnnotations:
    try:
        return read_value(annotations, key, text.strip())
    except _WordError as error:
        problem = f"the annotation {key} is {error.message}"
        raise refusal(pod, name, problem, hint=error.hint or "") from error
    except UsageError as error:
        problem = f"the annotation {key}: {error.message}"
        hint = error.hint or _BY_CONTAINER
        if key in LISTS - {GPU_WEIGHTS} and "=" in text:
            hint = _LIST_BY_CONTAINER  # instead of how to write the sign
        raise refusal(pod, name, problem, hint=hint) from error


class _WordError(UsageError):
    """A value is not one of the allowed words."""


def _word(value: str, known: Mapping[str, object]) -> str:
    if value in known:
        return value
    problem = f"{shown(value)}{meant(value.lower(), known)}"
    raise _WordError(problem, hint=f"write one of: {', '.join(known)}")


def _tag(text: str) -> str:
    tag = parse_tag(text)
    if not tag:
        raise UsageError("it is empty", hint="write the tag of the other shares, or remove it")
    return tag


def _modes(text: str) -> tuple[str, ...]:
    if text.strip() == STRONGEST:
        return (STRONGEST,)
    words = parse_words(text, (*MODE_WORDS, STRONGEST))
    if STRONGEST in words:
        problem = f"{STRONGEST} means a list of modes and cannot be combined with other words"
        raise UsageError(problem, hint=f"write {STRONGEST} alone, or the modes themselves")
    return words


def parse_profile(text: str) -> str:
    """Check the form of a MIG profile's name; the GPU may lack it. Raises `UsageError`."""
    if not _PROFILE.fullmatch(text):
        problem = f"{shown(text)} is not a MIG profile"
        raise UsageError(problem, hint="write one in NVIDIA's form: 1g.10gb, 1g.10gb+me, 3g.40gb")
    return text


def _boolean(text: str) -> bool:
    return _BOOLEANS[_word(text, _BOOLEANS)]


def parse_resize(text: str) -> ResizeWish:
    """Parse `memory:6Gi,compute:30:80,class:latency,weight:200`. Raises `UsageError`."""
    found: dict[str, str] = {}
    for item in _split(text):
        word, _, value = item.strip().partition(":")
        _word(word, _RESIZED)
        if word in found:
            raise UsageError(f"it has {word} twice", hint="keep one of them")
        found[word] = value.strip()
    return ResizeWish(**{_RESIZED[word][0]: _RESIZED[word][1](found[word]) for word in found})


def changed_wish(text: str, *, container: str | None, words: Mapping[str, str]) -> str:
    """Return `allotment.dev/resize` with other words for a container, or for all.

    Words that are not named keep their value. Raises `UsageError`.
    """
    by_container = {
        name.strip(): value for name, _, value in (part.partition("=") for part in text.split(";"))
    }
    if text and ("=" in text) != (container is not None):
        its = "names containers" if container is None else "is for all containers"
        problem = f"{RESIZE} is {shown(text)}, which {its}"
        hint = "name a container" if container is None else "name no container"
        raise UsageError(problem, hint=f"{hint}, or remove the annotation first")
    if container is None:
        by_container = {"": text}
    before = by_container.get(container or "", "")
    kept = {
        word.strip(): value
        for word, _, value in (item.partition(":") for item in before.split(","))
        if word.strip()
    }
    changed = {**kept, **words}
    written = ",".join(f"{word}:{changed[word]}" for word in _RESIZED if word in changed)
    parse_resize(written)
    if container is None:
        return written
    by_container = {name: value for name, value in by_container.items() if name}
    return ";".join(
        f"{name}={value}" for name, value in {**by_container, container: written}.items()
    )


_CLASSES = {str(kind): kind for kind in ComputeClass}
_RESIZED: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "memory": ("memory", parse_memory),
    "compute": ("compute", lambda text: ComputeWish(text, parse_compute(text))),
    "class": ("kind", lambda text: _CLASSES[_word(text, _CLASSES)]),
    "weight": ("weight", parse_weight),
}
"""The field of `ResizeWish` that each word sets, and its parser."""
_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    COMPUTE: ("compute", lambda text: ComputeWish(text, parse_compute(text))),
    WEIGHT: ("weight", parse_weight),
    CLASS: ("kind", lambda text: _CLASSES[_word(text, _CLASSES)]),
    MODE: ("modes", _modes),
    MIG_PROFILE: ("mig_profile", parse_profile),
    OVERSUBSCRIBE: ("may_oversubscribe", _boolean),
    MEMORY: ("memory", parse_part),
    RESIZE: ("resize", parse_resize),
    MODELS: ("constraints.models", parse_rules),
    NOT_MODELS: ("constraints.not_models", parse_rules),
    UUIDS: ("constraints.uuids", parse_items),
    NOT_UUIDS: ("constraints.not_uuids", parse_items),
    AFFINITY: ("constraints.affinity", _tag),
    ANTI_AFFINITY: ("constraints.anti_affinity", _tag),
    EXCLUSION: ("constraints.exclusion", parse_tag),
    ALONE: ("constraints.is_alone", _boolean),
    TOPOLOGY: ("constraints", lambda text: parse_words(text, TOPOLOGIES)),
    NODE_POLICY: ("preferences.node_policies", lambda text: parse_words(text, NODE_POLICIES)),
    GPU_POLICY: ("preferences.device_policies", lambda text: parse_words(text, DEVICE_POLICIES)),
    GPU_WEIGHTS: ("preferences.weights", parse_weights),
}
"""The field of `PodAnnotations` that each annotation sets, and its parser."""


def read_value(annotations: PodAnnotations, key: str, text: str) -> PodAnnotations:
    """Set what an annotation of a known key means for one container. Raises `UsageError`."""
    path, parse = _READERS[key]
    value: Any = parse(text)
    if key == TOPOLOGY:
        value = replace(
            annotations.constraints, same_numa=NUMA in value, needs_nvlink=NVLINK in value
        )
    name, _, field = path.partition(".")
    if field:
        value = replace(getattr(annotations, name), **{field: value})
    return replace(annotations, **{name: value})


KEYS = frozenset({*_READERS, PLACEMENT, DIALECT})
"""Every annotation of a pod that has a meaning."""
