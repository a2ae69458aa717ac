# SPDX-License-Identifier: Apache-2.0
"""What searches on nodes found out, kept as long as a node has not changed.

Pods of one kind come in numbers, and kube-scheduler asks about one that waits again and again: all
but a few nodes are then as they were.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from allotment.model.clusters import NodeRejection, PodNeed
from allotment.placement.arrays import Arrays

__all__ = ["Answer", "Answers"]

_Found = TypeVar("_Found")

_MOST_KEPT = 200_000
"""Answers, over all needs: some 20 MB."""


class Answer(NamedTuple):
    """Whether a pod has a place on a node, and how near that is to the tag that it looks for."""

    fits: bool
    untagged: int = 0
    """How many devices have no share with the pod's affinity tag."""
    is_near: bool = False
    """Some device has such a share."""
    refusal: NodeRejection | None = None
    """Why it has none, where that is what a search has found out."""
    is_final: bool = True
    """To ask again would find the same. Else there was too little effort left to look fairly."""


class Answers(Generic[_Found]):
    """By what pods ask for, and node."""

    def __init__(
        self, arrays: Arrays, *, is_final: Callable[[_Found], bool] = lambda _: True
    ) -> None:
        """`is_final`: is this worth keeping?"""
        self._arrays = arrays
        self._is_final = is_final
        self._needs: OrderedDict[Hashable, dict[int, tuple[int, _Found]]] = OrderedDict()
        self._kept = 0

    def of(self, need: PodNeed) -> Callable[[int, Callable[[], _Found]], _Found]:
        """Return what answers for pods that ask for the same: by row, or by asking."""
        key = need.cpu_milli, need.memory_bytes, need.containers
        known = self._needs.setdefault(key, {})
        self._needs.move_to_end(key)
        versions = self._arrays.version

        def answer(row: int, ask: Callable[[], _Found]) -> _Found:
            version = int(versions[row])
            before = known.get(row)
            if before is not None and before[0] == version:
                return before[1]
            now = ask()
            if self._is_final(now):
                self._kept += before is None
                known[row] = version, now
            return now

        return answer

    def trim(self) -> None:
        """Forget what has not been asked for the longest, where there is too much."""
        while self._kept > _MOST_KEPT and len(self._needs) > 1:
            _, oldest = self._needs.popitem(last=False)
            self._kept -= len(oldest)
