# SPDX-License-Identifier: Apache-2.0
"""Words, flags and lists that foreign pods write, with the pod and the key in every refusal."""

from collections.abc import Iterable, Mapping

from allotment.dialects.foreign import ForeignContainer, ForeignPod
from allotment.dialects.protocol import meant, refusal, shown
from allotment.model.requests import ModelRule

__all__ = ["flag_of", "items_of", "keys_of", "model_rules", "word_of"]

_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE = frozenset({"0", "f", "F", "FALSE", "false", "False"})
_VENDOR = "nvidia"


def keys_of(container: ForeignContainer, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the resources that a container has in its limits or requests."""
    return tuple(each for each in names if each in container.limits or each in container.requests)


def items_of(text: str) -> tuple[str, ...]:
    """Return the items of a comma list, without the blanks around them; empty ones left out."""
    return tuple(dict.fromkeys(each for part in text.split(",") if (each := part.strip())))


def word_of(pod: ForeignPod, key: str, text: str, known: Mapping[str, object]) -> str:
    """Return a word that is one of those known. Raises `UsageError`."""
    word = text.strip()
    if word in known:
        return word
    problem = f"the annotation {key} is {shown(text)}{meant(word.lower(), known)}"
    raise refusal(pod, None, problem, hint=f"write one of: {', '.join(known)}")


def flag_of(text: str) -> bool | None:
    """Return what Go's `strconv.ParseBool` reads; None: it reads nothing."""
    word = text.strip()
    return word in _TRUE if word in _TRUE | _FALSE else None


def model_rules(pod: ForeignPod, key: str, *, refuses: bool) -> tuple[ModelRule, ...]:
    """Return the models that an annotation of HAMi's makes: some part of a device's type.

    The type is the model, with `NVIDIA-` before it where it does not begin so. `refuses`: none of
    these is wanted. Raises `UsageError` where that would be every GPU.
    """
    found: dict[ModelRule, None] = {}
    for item in items_of(pod.annotations.get(key, "")):
        plain = item.casefold().replace(" ", "-").replace("_", "-")
        if plain in f"{_VENDOR}-":
            if not refuses:
                return ()  # every NVIDIA GPU is one of these, so that any is
            problem = f"the annotation {key} has {shown(item)}, which every NVIDIA GPU is"
            raise refusal(pod, None, problem, hint="name a model, or remove the annotation")
        found[ModelRule(item)] = None
        if plain.startswith(f"{_VENDOR}-"):
            found[ModelRule(item[len(_VENDOR) + 1 :])] = None
    return tuple(found)
