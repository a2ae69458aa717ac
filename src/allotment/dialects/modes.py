# SPDX-License-Identifier: Apache-2.0
"""Which modes can give what is asked for, and what of it would have no effect in one.

A container names its modes, the one it likes best first, or leaves them open: then it is for the
scheduler to say, or for the node where no scheduler has placed it. What somebody has named has to
be possible; of what is left open, or asked for as `strongest`, only the modes that suit are taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, ComputeClass
from allotment.model.formats import format_percent
from allotment.model.quantities import LEAST_BYTES, MemoryAmount
from allotment.model.requests import MIG, MPS, SOFT, Request

__all__ = [
    "ANY_MEMORY",
    "STRONGEST",
    "STRONGEST_FIRST",
    "in_modes",
    "is_any_memory",
    "suiting",
    "unsuited",
    "without_effect",
]

STRONGEST: Final = "strongest"
"""In place of a list: the strongest isolation that there is room for."""
STRONGEST_FIRST: Final = (MIG, SOFT, MPS)
"""Apart by hardware; by turns; side by side, where one's fault ends the others."""
ANY_MEMORY: Final = MemoryAmount("any", size_bytes=LEAST_BYTES)
"""The floor of who asks for a slice by its profile alone."""
_LEAST_CEILING: Final = 100
"""Basis points: the driver takes an active thread percentage below 1 for no limit at all."""


def suiting(request: Request, modes: Iterable[str]) -> tuple[str, ...]:
    """Return those of the modes that can give all of what a request says, in their order."""
    return tuple(
        mode for mode in modes if not unsuited(request, mode) and not without_effect(request, mode)
    )


def in_modes(request: Request, modes: Sequence[str]) -> Request:
    """Return the request in these modes, at least one."""
    return replace(request, mode=modes[0], other_modes=tuple(modes[1:]))


def unsuited(request: Request, mode: str) -> str:
    """Say why a request cannot be had in a mode, wherever; empty: it can."""
    if mode == MIG:
        if request.may_oversubscribe:
            return "a slice's memory is the hardware's, and cannot be promised twice"
        if request.memory.part is not None:
            return (
                f"its memory is {request.memory} of a GPU, and of which one is not known before a"
                " slice is chosen by it"
            )
    if mode == MPS:
        if request.count > 1:
            return (
                "a share is of one GPU there, since each has a control daemon of its own and a"
                f" program finds one of them; it asks for {request.count}"
            )
        if request.compute.ceiling < _LEAST_CEILING:
            ceiling = format_percent(request.compute.ceiling)
            return f"{ceiling} percent of a GPU's compute is less than MPS can hold to"
    return ""


def without_effect(request: Request, mode: str) -> tuple[str, ...]:
    """Name what of a request's compute nobody sees to in a mode: each as a sentence has it."""
    its = request.compute
    found = []
    if mode in {MIG, MPS} and its.weight != DEFAULT_WEIGHT:
        found.append(f"the weight {its.weight}")
    if mode == MIG and its.kind is not ComputeClass.NORMAL:
        found.append(f"the class {its.kind}")
    if mode == MIG and its.ceiling not in {its.guarantee, WHOLE}:
        found.append(f"the ceiling of {format_percent(its.ceiling)} percent")
    return tuple(found)


def is_any_memory(request: Request) -> bool:
    """Is a profile all that says how much memory a slice has to have?"""
    return (
        request.mode == MIG
        and not request.other_modes
        and bool(request.mig_profile)
        and request.memory.size_bytes == LEAST_BYTES
    )
