# SPDX-License-Identifier: Apache-2.0
"""What every dialect can do, and how all of them refuse."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Protocol

from allotment.dialects.foreign import ForeignPod
from allotment.dialects.wishes import Wishes
from allotment.model.errors import UsageError
from allotment.model.pods import Container, ContainerAsk, Pod

__all__ = ["Dialect", "meant", "refusal", "shown"]

_MAX_SHOWN = 60


class Dialect(Protocol):
    """One way of writing a request. It has no state."""

    @property
    def name(self) -> str:
        """Whose it is, for messages: `NVIDIA's`."""
        ...

    @property
    def takes(self) -> frozenset[str]:
        """Return the annotations that mean something to its containers."""
        ...

    def resources(self, container: Container) -> tuple[str, ...]:
        """Return which of a container's resources are this dialect's; empty: it is not its."""
        ...

    def asks(self, pod: Pod, container: Container, wishes: Wishes) -> tuple[ContainerAsk, ...]:
        """Say what a container of its asks for: one ask for each resource that the kubelet gives.

        Raises `UsageError`.
        """
        ...


def refusal(pod: Pod | ForeignPod, container: str | None, problem: str, *, hint: str) -> UsageError:
    """Return the error for a pod, or a container of it, that asks for what cannot be meant."""
    where = f"pod {pod}" if container is None else f"pod {pod}, container {container!r}"
    return UsageError(f"{where}: {problem}", hint=hint)


def meant(word: str, known: Iterable[str]) -> str:
    """Name the word that was most likely meant, as ` (did you mean ...?)`; empty: none is near."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(text: str) -> str:
    """Quote a text that someone wrote, cut to what a message bears."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
