# SPDX-License-Identifier: Apache-2.0
"""The answer to where a pod may go: the nodes that do, best first, and why the others do not."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from allotment.model.clusters import NodeRejection

__all__ = ["Ranking", "Refusals", "Why"]

Why = Callable[[Collection[str]], Mapping[str, NodeRejection]]
"""Says why some nodes do not do."""


class Refusals(Mapping[str, NodeRejection]):
    """Why nodes do not do, by name: worked out for all of them when any of it is asked for."""

    def __init__(self, names: Iterable[str] | Callable[[], Iterable[str]], why: Why) -> None:
        """Names that take time to find may be given as what finds them."""
        self._found = names
        self._known: Mapping[str, NodeRejection] | None = None
        self._why = why

    @cached_property
    def _names(self) -> dict[str, None]:
        return dict.fromkeys(self._found() if callable(self._found) else self._found)

    def __getitem__(self, name: str) -> NodeRejection:
        """Return why this node does not do."""
        if self._known is None:
            self._known = self._why(self._names)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._names)

    def reasons(self) -> Counter[str]:
        """Return how many nodes do not do for each reason."""
        return Counter(each.reason for each in self.values())


@dataclass(frozen=True, slots=True)
class Ranking:
    """Which nodes do for a pod."""

    best: list[str]
    """Those that do, the best first; as many as were asked for."""
    refused: Refusals
    """Those that do not, as far as they were looked at; true until the cluster changes."""
