# SPDX-License-Identifier: Apache-2.0
"""The pods of one node, followed. Never those of another: each request names the node.

A node's agent has no business with other nodes' pods, and a cluster of thousands of nodes could not
bear thousands of watches over all of them.
"""

import asyncio

from allotment.kube.backoff import Backoff
from allotment.kube.clients import Api
from allotment.kube.objects import ObjectList, PodObject, to_pod
from allotment.kube.watching import Followed, Subject
from allotment.model.pods import Pod, PodUid

__all__ = ["NodePods"]

_DOUBT_S = 2.0
"""A watch tells of a pod within milliseconds: after so long without, it may be dead."""


class NodePods(Followed[PodObject, Pod]):
    """The pods of a node."""

    def __init__(self, api: Api, *, node: str, backoff: Backoff | None = None) -> None:
        """Know nothing yet."""
        super().__init__(
            api,
            Subject(
                name=f"pods of node {node}",
                path="/api/v1/pods",
                fields={"spec.nodeName": node},
                item=PodObject,
                items=ObjectList[PodObject],
                convert=to_pod,
            ),
            backoff=backoff,
        )

    def get(self, uid: PodUid) -> Pod | None:
        """Return a pod; None: not heard of, or gone.

        A mirror's annotations name a uid that anyone could write: a pod that has it by itself goes
        first.
        """
        values = self._following.values
        own = values.get(uid)
        if own is not None and own.uid == uid:
            return own
        return next((each for each in values.values() if each.uid == uid), None)

    def all(self) -> tuple[Pod, ...]:
        """Return every pod that is there."""
        return tuple(self._following.values.values())

    async def wait_for(self, uid: PodUid, *, timeout_s: float) -> Pod | None:
        """Return a pod as soon as it is heard of; None: not within `timeout_s`.

        Does not trust a silent connection for long: the pods are then listed anew.
        """
        found = self.get(uid)
        if found is not None:
            return found
        found = await self._heard_within(uid, min(timeout_s, _DOUBT_S))
        if found is None and timeout_s > _DOUBT_S:
            self._following.recheck()
            found = await self._heard_within(uid, timeout_s - _DOUBT_S)
        return found

    async def _heard_within(self, uid: PodUid, timeout_s: float) -> Pod | None:
        try:
            async with asyncio.timeout(timeout_s):
                async for _ in self.changes():
                    found = self.get(uid)
                    if found is not None:
                        return found
        except TimeoutError:
            return None
        return None
