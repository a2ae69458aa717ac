# SPDX-License-Identifier: Apache-2.0
"""From the cluster's ResourceQuotas to the book that holds namespaces to them."""

from typing import NoReturn

import structlog

from allotment.kube.quotas import FollowedQuotas
from allotment.scheduler.quota import QuotaBook

__all__ = ["follow_quotas"]

_log = structlog.get_logger(__name__)


async def follow_quotas(followed: FollowedQuotas, book: QuotaBook) -> NoReturn:
    """Hand every change of a quota to the book. `followed.run` has to be running.

    What cannot be held is told once, when it comes.
    """
    told: tuple[str, ...] = ()
    async for _ in followed.changes():
        if not followed.is_synced:
            continue
        book.set_quotas(followed.all())
        for problem in book.problems:
            if problem not in told:
                _log.warning("a quota is not held as it is written", why=problem)
        told = book.problems
    raise AssertionError("changes do not end")
