# SPDX-License-Identifier: Apache-2.0
"""A node between twins, on which a test tells one story of containers and their shares."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager

from kubelet_twin import (
    NVIDIA_GPU,
    OFFER,
    ContainerTwin,
    KubeletTwin,
    PodsTwin,
    PodTwin,
    ReportsTwin,
    StoreTwin,
    any_policy,
)

from allotment.agent.allocation import Patience, Tenants
from allotment.agent.evictions import Evictions
from allotment.agent.resources import GPU_SHARE
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.shares import ShareId

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR
HASTE = Patience(
    deadline=30,
    pod=0.05,
    room=(0.0, 0.05),
    departure=(0.05,) * 10,
    look=0.05,
    retry=0.02,
    pause=0.001,
    checkpoint=(0.001, 0.001),
)


class Scene:
    """A node on which everything is heard at once, unless the story says otherwise."""

    def __init__(self, patience: Patience = HASTE) -> None:
        self.kubelet = KubeletTwin()
        self.store = StoreTwin(self.kubelet.uses)
        self.patience = patience
        self.resized: dict[PodUid, int] = {}
        self.released: dict[str, int] = {}
        self.offer = OFFER
        self.start_agent()

    def start_agent(self, *, is_synced: bool = True) -> None:
        self.pods = PodsTwin()
        self.pods.is_synced = is_synced
        self.reports = ReportsTwin()
        self.evictions = Evictions(
            pods=self.pods, reports=self.reports, clock=lambda: self.store.clock
        )
        self.tenants = Tenants(
            checkpoint=self.kubelet,
            pods=self.pods,
            evictions=self.evictions,
            offer=lambda: self.offer,
            reports=self.reports,
            store=self.store,
            policy=any_policy,
            renew=self.kubelet.write_checkpoint,
            clock=lambda: self.store.clock,
            patience=self.patience,
            on_resized=self._on_resized,
        )

    def _on_resized(self, resized: Mapping[PodUid, int], released: Mapping[str, int]) -> None:
        self.resized, self.released = dict(resized), dict(released)

    def change(self, pod: PodTwin, **annotations: str) -> None:
        """Change annotations of a pod, without their prefix, as the agent hears."""
        pod.annotations = {f"allotment.dev/{key}": text for key, text in annotations.items()}
        self.pods.hear(pod.uid, pod.seen())

    def hear(self) -> None:
        while self.kubelet.news:
            self.pods.hear(*self.kubelet.news.popleft())

    def admit(self, uid: str, *containers: ContainerTwin, by_other: bool = False) -> PodTwin:
        pod = PodTwin(PodUid(uid), list(containers))
        assert self.kubelet.admit(pod, None if by_other else self.tenants)
        self.hear()
        return pod

    async def start(self, pod: PodTwin, name: str = "main") -> str:
        return await self.kubelet.start(
            pod, self.container(pod, name), self.tenants, self.store.shares.__contains__
        )

    async def lose(self, pod: PodTwin, name: str) -> None:
        """The share of a container that has ended is gone, as after somebody removed it."""
        del self.store.shares[ShareId(str(self.share_of(pod, name)))]
        await self.tenants.adopt()

    def container(self, pod: PodTwin, name: str) -> ContainerTwin:
        return next(each for each in pod.containers if each.name == name)

    def share_of(self, pod: PodTwin, name: str = "main") -> ShareId | None:
        return self.kubelet.entry(pod, self.container(pod, name)).share


def part(name: str = "main", kind: ContainerKind = REGULAR, *, memory: int = 4) -> ContainerTwin:
    return ContainerTwin(name, kind, resource=GPU_SHARE, memory=memory)


def whole(name: str = "main", kind: ContainerKind = REGULAR) -> ContainerTwin:
    return ContainerTwin(name, kind, resource=NVIDIA_GPU)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """A node whose agent has just started."""
    made = Scene()
    await made.tenants.adopt()
    try:
        yield made
    finally:
        await made.tenants.close()


def story(tell: Callable[[Scene], Coroutine[object, object, None]]) -> Callable[[], None]:
    """Make a test of a story, which is told in a scene."""

    def test() -> None:
        async def main() -> None:
            async with scene() as node:
                await tell(node)

        asyncio.run(main())

    test.__name__, test.__doc__ = tell.__name__, tell.__doc__
    return test
