# SPDX-License-Identifier: Apache-2.0
"""What HAMi and Volcano mean by their resources: Volcano's were made after HAMi's.

Amounts are of each GPU. Memory is MiB, or percent of the GPU where no MiB are asked for; neither is
all of it. Cores are percent of its time, reserved and not exceeded; 100 is a GPU that nobody else
is on yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from allotment.dialects.foreign import ForeignContainer, ForeignPod
from allotment.dialects.foreign_amounts import MAX_DEVICES, MIB, PERCENT, amount_of, bytes_of
from allotment.dialects.modes import in_modes, suiting, unsuited, without_effect
from allotment.dialects.protocol import refusal, shown
from allotment.dialects.quantities import items_of, keys_of, model_rules
from allotment.dialects.values import part_amount
from allotment.model.compute import WHOLE, Compute, ComputeClass, revised
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import MIG, MPS, SOFT, Constraints, Request

__all__ = [
    "NOT_TYPE",
    "USE_TYPE",
    "Asked",
    "Names",
    "asked",
    "in_sharing_modes",
    "request_of",
    "sharing_modes",
    "wanted_devices",
]

USE_TYPE: Final = "nvidia.com/use-gputype"
NOT_TYPE: Final = "nvidia.com/nouse-gputype"

_ALL_PERCENT: Final = 100
_MOST_TOLD: Final = 4
_MODES: Final[Mapping[str, str]] = {"hami-core": SOFT, "mig": MIG, "mps": MPS}
WITHOUT_TURNS: Final = "in a MIG slice nobody takes turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How the resources are called, and what is had without them."""

    count: str
    memory: str
    percentage: str
    cores: str
    factor: int = 1
    """MiB in one of `memory`."""
    default_memory: int = 0
    """What is had without any memory asked for, in units of `memory`; 0: all of it."""
    default_cores: int = 0
    default_count: int = 1
    is_whole_by_default: bool = False
    """All memory and nothing said about cores is a GPU that nobody else is on."""

    @property
    def amounts(self) -> tuple[str, ...]:
        """Return the resources that say how much of each GPU."""
        return (self.memory, self.percentage, self.cores)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a container asks for."""

    count: int
    memory: MemoryAmount
    cores: int
    passed_over: tuple[str, ...] = ()


def asked(pod: ForeignPod, container: ForeignContainer, names: Names) -> Asked | None:
    """Read a container's resources; None: it asks for no GPU. Raises `UsageError`."""
    amounts = keys_of(container, names.amounts)
    count = _count(pod, container, names, amounts)
    if count == 0:
        return None
    memory, told = _memory(pod, container, names)
    cores = amount_of(pod, container, names.cores)
    if names.cores not in amounts:
        is_whole = names.is_whole_by_default and memory.part == 1
        cores = _ALL_PERCENT if is_whole else names.default_cores
    if cores > _ALL_PERCENT:
        told = (*told, f"{names.cores} is {cores}: more than 100 percent is taken for 100")
        cores = _ALL_PERCENT
    return Asked(
        count, memory, cores, tuple(f"container {container.name!r}: {one}" for one in told)
    )


def request_of(its: Asked, *, has_ceiling: bool = True, constraints: Constraints) -> Request:
    """Return the request. Without `has_ceiling` others' time may be used while they leave it."""
    compute = Compute()
    if its.cores:
        guarantee = its.cores * PERCENT
        compute = Compute(guarantee, guarantee if has_ceiling else WHOLE, is_governed=True)
    if its.cores == _ALL_PERCENT:
        constraints = replace(constraints, is_alone=True)
    return Request(its.memory, count=its.count, compute=compute, constraints=constraints)


def wanted_devices(pod: ForeignPod, *, uuids: str, not_uuids: str) -> Constraints:
    """Return which GPUs annotations want; both have those with models in HAMi's words.

    `uuids` and `not_uuids` are how the other two are called.
    """
    return Constraints(
        models=model_rules(pod, USE_TYPE, refuses=False),
        not_models=model_rules(pod, NOT_TYPE, refuses=True),
        uuids=items_of(pod.annotations.get(uuids, "")),
        not_uuids=items_of(pod.annotations.get(not_uuids, "")),
    )


def sharing_modes(
    pod: ForeignPod, key: str, modes: frozenset[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modes that an annotation wants, of those that `modes` has, as they stand there.

    Empty: it is not there, so that it is left open. Also returned is which of its words are none,
    as whoever wrote them is told. Raises `UsageError` if it wants none of the modes.
    """
    text = pod.annotations.get(key)
    if text is None:
        return (), ()
    # The annotation is looked through for the name of a GPU's mode: it may have several, and
    # `migg` is one of these (HAMi v2.10 `pkg/device/nvidia/device.go`, `checkType`).
    there = sorted((text.index(word), mode) for word, mode in _MODES.items() if word in text)
    wanted = [mode for _, mode in there]
    found = tuple(each for each in wanted if each in modes)
    if found:
        strange = [each for each in items_of(text) if each not in _MODES]
        words = " and ".join(shown(each) for each in strange[:_MOST_TOLD])
        told = f"{key}: its words are {', '.join(_MODES)}, and {words} is not; taken for"
        return found, (f"{told} {_words(found)}",) if strange else ()
    if not wanted:
        problem = f"the annotation {key} is {shown(text)}, which has none of its words"
        raise refusal(pod, None, problem, hint=f"write one of: {', '.join(_MODES)}")
    problem = f"the annotation {key} wants GPUs in mode {_words(wanted)}, which no node has"
    hint = "remove it, or write hami-core: parts of GPUs that are enforced by software"
    raise refusal(pod, None, problem, hint=hint)


def _words(modes: Sequence[str]) -> str:
    """Name modes in these systems' words."""
    return " or ".join(word for mode in modes for word, each in _MODES.items() if each == mode)


def in_sharing_modes(
    pod: ForeignPod, container: str, request: Request, modes: tuple[str, ...], *, key: str
) -> tuple[Request, tuple[str, ...]]:
    """Return the request in the modes that an annotation wants, and what is not honoured.

    `key` is the annotation. Raises `UsageError`: none of them can give what is asked for.
    """
    if not modes:
        return request, ()
    told = []
    if modes == (MIG,):
        # What these systems set for all pods, or for those that compete for a GPU's time.
        request = replace(request, may_oversubscribe=False)
        if request.compute.kind is not ComputeClass.NORMAL:
            told.append(f"its priority: {WITHOUT_TURNS}")
            request = replace(request, compute=revised(request.compute, kind=ComputeClass.NORMAL))
    suited = suiting(request, modes)
    if not suited:
        why = unsuited(request, modes[0]) or " and ".join(without_effect(request, modes[0]))
        problem = f"{key} asks for mode {modes[0]}, and there {why}"
        hint = (
            "say how many MiB of memory each slice is to have"
            if modes[0] == MIG
            else f"ask for one GPU, or write {key}: hami-core"
        )
        raise refusal(pod, container, problem, hint=hint)
    for mode in modes:
        if mode not in suited:
            why = unsuited(request, mode) or f"{without_effect(request, mode)[0]} has no effect"
            told.append(f"{key}, mode {mode}: {why}")
    return in_modes(request, suited), tuple(f"container {container!r}: {each}" for each in told)


def _count(
    pod: ForeignPod, container: ForeignContainer, names: Names, amounts: tuple[str, ...]
) -> int:
    is_there = bool(keys_of(container, (names.count,)))
    count = amount_of(pod, container, names.count)
    if not is_there:
        return names.default_count if amounts else 0
    if count > MAX_DEVICES:
        problem = f"{names.count} is {count}, more GPUs than any node has"
        raise refusal(pod, container.name, problem, hint="ask for as many as a node has")
    if count == 0 and any(amount_of(pod, container, each) for each in amounts):
        problem = f"it asks for {' and '.join(amounts)} of {names.count}: 0"
        raise refusal(pod, container.name, problem, hint=f"write `{names.count}: 1`")
    return count


def _memory(
    pod: ForeignPod, container: ForeignContainer, names: Names
) -> tuple[MemoryAmount, tuple[str, ...]]:
    amount = amount_of(pod, container, names.memory)
    has_percentage = bool(keys_of(container, (names.percentage,)))
    percentage = amount_of(pod, container, names.percentage)
    if amount:
        told = f"{names.percentage}: {names.memory} says how much already"
        size = bytes_of(pod, container.name, names.memory, amount, unit=MIB * names.factor)
        return size, (told,) if has_percentage else ()
    if has_percentage:
        if not 0 < percentage <= _ALL_PERCENT:
            problem = f"{names.percentage} is {percentage}"
            hint = "write 1 to 100, or leave it out for all of the memory"
            raise refusal(pod, container.name, problem, hint=hint)
        return part_amount(Fraction(percentage, _ALL_PERCENT)), ()
    if names.default_memory:
        unit = MIB * names.factor
        return bytes_of(pod, container.name, names.memory, names.default_memory, unit=unit), ()
    return part_amount(Fraction(1)), ()
