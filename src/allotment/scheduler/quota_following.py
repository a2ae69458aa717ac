# SPDX-License-Identifier: Apache-2.0
"""From the cluster's ResourceQuotas to the book that holds namespaces to them.

A book that has been told of no quota lets everything pass. So it is known whether it has been told
of them all: until then nobody is answered.
"""

from typing import NoReturn

import structlog

from allotment.kube.errors import KubeError
from allotment.kube.quotas import FollowedQuotas
from allotment.scheduler.quota import QuotaBook

__all__ = ["QuotaFeed"]

_log = structlog.get_logger(__name__)


class QuotaFeed:
    """Hands every change of a quota to the book. `run` and `followed.run` have to be running."""

    def __init__(self, followed: FollowedQuotas, book: QuotaBook) -> None:
        """Have told the book nothing yet."""
        self._followed = followed
        self._book = book
        self.is_synced = False
        """The book has been told of all quotas once."""

    @property
    def problem(self) -> KubeError | None:
        """Why nothing is heard of quotas at present: those that are known are held on."""
        return self._followed.problem

    async def wait_synced(self) -> None:
        """Return when the book has been told of all quotas."""
        async for _ in self._followed.changes():
            # Told in this very step, whichever of the two is woken first.
            if self._followed.is_synced:
                self._hand_over()
                return

    async def run(self) -> NoReturn:
        """Follow for ever. What cannot be held is told once, when it comes."""
        told: tuple[str, ...] = ()
        async for _ in self._followed.changes():
            if not self._followed.is_synced:
                continue
            self._hand_over()
            for problem in self._book.problems:
                if problem not in told:
                    _log.warning("a quota is not held as it is written", why=problem)
            told = self._book.problems
        raise AssertionError("changes do not end")

    def _hand_over(self) -> None:
        self._book.set_quotas(self._followed.all())
        self.is_synced = True
