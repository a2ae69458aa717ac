# SPDX-License-Identifier: Apache-2.0
"""What foreign pods write, read with the pod, the container and the key in every refusal."""

from collections.abc import Iterable

from allotment.dialects.foreign import ForeignContainer, ForeignPod
from allotment.dialects.protocol import meant, refusal, shown
from allotment.model.errors import UsageError
from allotment.model.quantities import MAX_BYTES, parse_whole

__all__ = ["MIB", "amount_of", "bytes_of", "flag_of", "items_of", "keys_of", "whole_of", "word_of"]

MIB = 1 << 20
_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def keys_of(container: ForeignContainer, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the resources that a container has in its limits or requests."""
    return tuple(each for each in names if each in container.limits or each in container.requests)


def amount_of(pod: ForeignPod, container: ForeignContainer, name: str) -> int | None:
    """Return a whole amount of a resource, from the limits, else from the requests; None: neither.

    Raises `UsageError`: it is none, or the two differ, which the API server refuses too.
    """
    texts = [each[name] for each in (container.limits, container.requests) if name in each]
    amounts = {whole_of(pod, container.name, name, text) for text in texts}
    if len(amounts) > 1:
        problem = f"{name} is {shown(texts[0])} in limits and {shown(texts[1])} in requests"
        raise refusal(pod, container.name, problem, hint="write the same in both, or limits alone")
    return amounts.pop() if amounts else None


def whole_of(
    pod: ForeignPod, container: str | None, key: str, text: str, *, most: int = MAX_BYTES
) -> int:
    """Return a Kubernetes quantity as a whole number, zero included. Raises `UsageError`."""
    try:
        amount = parse_whole(text)
    except UsageError as error:
        hint = error.hint or ""
        raise refusal(pod, container, f"{key}: {error.message}", hint=hint) from error
    if amount > most:
        problem = f"{key} is {shown(text)}, more than {most}"
        raise refusal(pod, container, problem, hint=f"write at most {most}")
    return amount


def bytes_of(pod: ForeignPod, container: str | None, key: str, amount: int, *, unit: int) -> int:
    """Return an amount in bytes, of a unit of so many. Raises `UsageError` beyond all devices."""
    size = amount * unit
    if size > MAX_BYTES:
        problem = f"{key} is {amount}, which comes to {size} bytes: more than any GPU has"
        raise refusal(pod, container, problem, hint=f"it is in units of {unit} bytes")
    return size


def items_of(text: str) -> tuple[str, ...]:
    """Return the items of a comma list, without the blanks around them; empty ones left out."""
    return tuple(dict.fromkeys(each for part in text.split(",") if (each := part.strip())))


def word_of(pod: ForeignPod, key: str, text: str, known: Iterable[str]) -> str:
    """Return a word that is one of those known. Raises `UsageError`."""
    word = text.strip()
    words = list(known)
    if word in words:
        return word
    problem = f"{key} is {shown(text)}{meant(word.lower(), words)}"
    raise refusal(pod, None, problem, hint=f"write one of: {', '.join(words)}")


def flag_of(pod: ForeignPod, key: str, text: str) -> bool:
    """Return what Go's `strconv.ParseBool` reads. Raises `UsageError`."""
    word = text.strip()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise refusal(pod, None, f"{key} is {shown(text)}", hint="write true or false")
