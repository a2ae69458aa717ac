# SPDX-License-Identifier: Apache-2.0
"""Which dialect a pod is written in, and what it means.

A pod speaks one dialect. One that speaks two would have to be guessed at: it is refused, with both
names. Resources that stay as they are (NVIDIA's whole GPUs, which the kubelet gives) may stand in
other containers of the same pod.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allotment.dialects.allotment import RESOURCES
from allotment.dialects.foreign import (
    DIALECT,
    ForeignContainer,
    ForeignDialect,
    ForeignPod,
    Translation,
)
from allotment.dialects.nvidia_foreign import NvidiaForeign
from allotment.dialects.protocol import refusal
from allotment.model.errors import UsageError

__all__ = ["speaker_of", "translate"]

_OWN = "Allotment's"
_MAX_SHOWN = 6


@dataclass(frozen=True, slots=True)
class _Claim:
    """What of a pod is a dialect's: resources, annotations, labels."""

    title: str
    keys: tuple[str, ...]
    dialect: ForeignDialect | None = None
    """None: Allotment's own."""
    stays: bool = False

    def __str__(self) -> str:
        """Show whose, and what, cut to what a message bears."""
        rest = len(self.keys) - _MAX_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return f"{self.title} {', '.join(self.keys[:_MAX_SHOWN])}{more}"


def translate(pod: ForeignPod, dialects: Sequence[ForeignDialect]) -> Translation | None:
    """Say what a pod means by the dialect that it is written in. Raises `UsageError`.

    None: there is nothing to translate. It asks for no GPU, or by Allotment's own resources, or for
    what stays as it is, or it has been translated already. What two dialects see in a pod is of
    that one which is named first.
    """
    if DIALECT in pod.annotations:
        return None
    claims = _claims(pod, dialects)
    moving = [each for each in claims if not each.stays]
    if len(moving) > 1:
        raise _mixed(pod, None, moving)
    staying = [each for each in claims if each.stays]
    for container in pod.containers:
        _check_apart(pod, container, moving, staying)
    translations = [
        (each, each.dialect.translate(pod))
        for each in (*staying, *moving)
        if each.dialect is not None
    ]
    found = next((found for each, found in translations if each in moving), None)
    return found if found and found.containers else None


def speaker_of(pod: ForeignPod, dialects: Sequence[ForeignDialect]) -> ForeignDialect | None:
    """Return the dialect that a pod was translated from; None: from none that is known."""
    name = pod.annotations.get(DIALECT)
    return next((each for each in dialects if each.name == name), None)


def _claims(pod: ForeignPod, dialects: Iterable[ForeignDialect]) -> list[_Claim]:
    own = sorted({name for each in pod.containers for name in _resources(each)} & {*RESOURCES})
    claims = [_Claim(_OWN, tuple(own))] if own else []
    taken = {*own}
    for dialect in dialects:
        keys = tuple(each for each in dialect.recognises(pod) if each not in taken)
        if keys:
            taken |= {*keys}
            stays = isinstance(dialect, NvidiaForeign) and dialect.stays(pod)
            claims.append(_Claim(dialect.title, keys, dialect, stays=stays))
    return claims


def _check_apart(
    pod: ForeignPod,
    container: ForeignContainer,
    moving: Sequence[_Claim],
    staying: Sequence[_Claim],
) -> None:
    """A container has its GPUs by one resource, whoever gives them."""
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
    titles = " or ".join(each.title for each in claims[:2])
    where = "a pod" if container is None else "a container"
    hint = f"keep what is {titles}, and remove the rest: {where} is read by one of them"
    return refusal(pod, container, f"it asks for GPUs in two ways: {both}", hint=hint)
