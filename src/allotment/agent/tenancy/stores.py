# SPDX-License-Identifier: Apache-2.0
"""What makes and ends shares: the node's state folder, or its twin in tests."""

from typing import Protocol

from allotment.agent.tenancy.orders import ShareOrder
from allotment.model.shares import Share, ShareId

__all__ = ["ShareStore"]


class ShareStore(Protocol):
    """The shares of pods on this node. All calls may block, and are made in threads."""

    def prepare(self, order: ShareOrder) -> Share:
        """Make a share with all that its container needs to start, or find it made.

        May be repeated with the same id at any time: what is there is left as it is, and what is
        missing of it is made. Raises `AllotError`: `DoesNotFitError` with need and have.
        """
        ...

    def end(self, share: ShareId) -> None:
        """Remove a share and what was made with it; one that is gone already is no error.

        Raises `BusyError` while any process is in it, `StateError`.
        """
        ...

    def owned(self) -> tuple[Share, ...]:
        """Return the shares that have an owner. Raises `StateError`."""
        ...
