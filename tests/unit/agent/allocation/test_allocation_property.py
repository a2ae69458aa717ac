# SPDX-License-Identifier: Apache-2.0
"""Whatever happens, in whatever order: every running container has exactly its share, no share is
without an owner, no device is given out twice, and nothing is left once it is quiet.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from kubelet_twin import (
    NVIDIA_GPU,
    OFFER,
    ROOM,
    SOFT_DEVICES,
    ContainerTwin,
    KubeletTwin,
    PodsTwin,
    PodTwin,
    ReportsTwin,
    State,
    StoreTwin,
    any_policy,
)

from allotment.agent.allocation import Patience, Tenants
from allotment.agent.evictions import Evictions
from allotment.agent.resources import GPU_SHARE
from allotment.model.errors import AllotError
from allotment.model.pods import ContainerKind, PodUid
from allotment.model.shares import ShareId

HASTE = Patience(deadline=10, pod=0.002, room=(0.0,), departure=(), look=0, retry=0.01, pause=0)
POINTS = (
    "tenancy.adopted",
    "tenancy.claimed",
    "tenancy.decided",
    "tenancy.prepared",
    "tenancy.adopting",
    "tenancy.ending",
    "tenancy.ended",
)


class Killed(BaseException):
    """The agent's process is killed."""


KILLS = st.none() | st.tuples(st.sampled_from(POINTS), st.integers(1, 3))
HEARD = st.sampled_from([True, True, False])
"""Whether the API server tells the agent at once."""
SOFT = st.builds(
    lambda count, memory: (GPU_SHARE, count, memory),
    st.integers(1, 2),
    st.sampled_from([1, 1, 2, 3, 6, ROOM, None]),
)
NEEDS = SOFT | st.just((NVIDIA_GPU, 1, None)) | st.none()
EARLY = st.tuples(st.sampled_from([ContainerKind.INIT, ContainerKind.SIDECAR]), NEEDS)
HANDED_ON = st.integers(2, ROOM).map(
    lambda first: (
        [
            (ContainerKind.INIT, (GPU_SHARE, 1, first)),
            (ContainerKind.SIDECAR, (GPU_SHARE, 1, 1)),
        ],
        [None],
    )
)
"""A sidecar that has the ids of a greater init container."""
PODS = HANDED_ON | st.tuples(st.lists(EARLY, max_size=2), st.lists(NEEDS, min_size=1, max_size=2))


class Node(RuleBasedStateMachine):
    """A node: a kubelet, an agent, and an API server between them that lags or is away."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.kubelet = KubeletTwin()
        self.store = StoreTwin(self.kubelet.uses)
        self.admitted: set[PodUid] = set()
        self.is_away = False
        self.kill_at: tuple[str, int] | None = None

    def teardown(self) -> None:
        self.loop.run_until_complete(self.tenants.close())
        self.loop.close()

    # -- the agent

    @initialize()
    def agent_starts(self) -> None:
        self.pods = PodsTwin()
        self.reports = ReportsTwin()
        self.kill_at = None
        self.tenants = Tenants(
            checkpoint=self.kubelet,
            pods=self.pods,
            evictions=Evictions(pods=self.pods, reports=self.reports),
            offer=lambda: OFFER,
            reports=self.reports,
            store=self.store,
            policy=any_policy,
            clock=lambda: self.store.clock,
            patience=HASTE,
            step=self.step,
        )
        self.run(self.tenants.adopt())
        if not self.is_away:
            self.list_pods()

    def list_pods(self) -> None:
        """All that the API server knows is heard: as it is, or was when it last heard itself."""
        self.kubelet.news.clear()
        for pod in self.kubelet.pods.values():
            self.pods.hear(pod.uid, pod.seen())
        for known in self.pods.all():
            if known.uid not in self.kubelet.pods:
                self.pods.hear(known.uid, None)
        self.pods.is_synced = True

    def step(self, point: str) -> None:
        if self.kill_at is None:
            return
        name, left = self.kill_at
        if name == point:
            self.kill_at = (name, left - 1)
            if left == 1:
                raise Killed

    def run(self, *calls: Coroutine[object, object, object]) -> list[object]:
        """Run coroutines side by side; the agent may be killed by any of them."""

        async def gathered() -> list[object]:
            return await asyncio.gather(*calls, return_exceptions=True)

        results = self.loop.run_until_complete(gathered())
        killed = any(isinstance(each, Killed) for each in results)
        for each in results:
            if isinstance(each, BaseException) and not isinstance(each, Killed):
                raise each
        if killed:
            self.restart_agent()
        return results

    def restart_agent(self) -> None:
        self.loop.run_until_complete(self.tenants.close())
        self.agent_starts()

    @rule(looks=st.booleans(), without_api=st.booleans())
    def agent_restarts(self, *, looks: bool, without_api: bool) -> None:
        self.is_away = self.is_away or without_api
        self.restart_agent()
        if looks:
            self.run(self.tenants.look())

    @rule(seconds=st.integers(0, 200), news=st.integers(0, 5), kill_at=KILLS)
    def agent_looks(self, seconds: int, news: int, kill_at: tuple[str, int] | None) -> None:
        """Some of the news come, and time passes."""
        self.kill_at = kill_at
        self.store.clock += seconds
        for _ in range(0 if self.is_away else min(news, len(self.kubelet.news))):
            self.pods.hear(*self.kubelet.news.popleft())
        self.run(self.tenants.look())

    # -- the kubelet

    @rule(
        wanted=PODS,
        by_other=st.sampled_from([False, False, False, True]),
        is_heard=HEARD,
        rounds=st.integers(0, 3),
        kill_at=KILLS,
    )
    def pod_comes(
        self,
        wanted: tuple[
            list[tuple[ContainerKind, tuple[str, int, int | None] | None]],
            list[tuple[str, int, int | None] | None],
        ],
        *,
        by_other: bool,
        is_heard: bool,
        rounds: int,
        kill_at: tuple[str, int] | None,
    ) -> None:
        if self.is_away:
            return  # the kubelet does not hear of it
        early, late = wanted
        kinds = [*early, *((ContainerKind.REGULAR, need) for need in late)]
        containers = []
        for number, (kind, need) in enumerate(kinds):
            if by_other and need is not None:
                need = (NVIDIA_GPU, 1, None)  # noqa: PLW2901 - what the other plugin has
            resource, count, memory = need or (None, 0, None)
            containers.append(
                ContainerTwin(f"c{number}", kind, resource=resource, count=count, memory=memory)
            )
        pod = PodTwin(PodUid(f"uid-{len(self.admitted)}"), containers)
        self.admitted.add(pod.uid)
        self.kill_at = kill_at
        self.kubelet.admit(pod, None if by_other else self.tenants)
        self.maybe_hear(is_heard=is_heard)
        for _ in range(rounds):
            for container in [] if pod.has_ended else pod.next_to_start():
                self.run(self.kubelet.start(pod, container, self.tenants, self.resolves))
                if container.kind is ContainerKind.INIT and container.state is State.RUNNING:
                    self.kubelet.finish(pod, container, for_good=True)
                self.maybe_hear(is_heard=is_heard)

    def ready(self) -> list[tuple[PodTwin, ContainerTwin]]:
        return [
            (pod, container)
            for pod in self.kubelet.pods.values()
            if not pod.has_ended
            for container in pod.next_to_start()
        ]

    def resolves(self, share: ShareId) -> bool:
        return share in self.store.shares

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), is_repeated=st.booleans(), is_heard=HEARD)
    def containers_start(self, data: st.DataObject, *, is_repeated: bool, is_heard: bool) -> None:
        ready = self.ready()
        numbers = data.draw(
            st.lists(st.integers(0, len(ready) - 1), min_size=1, max_size=4, unique=True)
        )
        calls = [
            self.kubelet.start(*ready[number], self.tenants, self.resolves) for number in numbers
        ]
        if is_repeated:
            # The kubelet was killed in the middle, and asks again while it is still being done.
            pod, container = ready[numbers[0]]
            if container.resource is not None:
                ids = self.kubelet.entry(pod, container).ids
                calls.append(self.again(container.resource, ids))
        self.run(*calls)
        self.maybe_hear(is_heard=is_heard)

    async def again(self, resource: str, ids: frozenset[str]) -> str:
        try:
            await self.tenants.pre_start(resource, ids)
        except AllotError as error:
            return error.message
        return ""

    @precondition(lambda self: any(self.kubelet.running()))
    @rule(data=st.data(), for_good=st.booleans(), is_heard=HEARD)
    def container_ends(self, data: st.DataObject, *, for_good: bool, is_heard: bool) -> None:
        running = list(self.kubelet.running())
        pod, container = running[data.draw(st.integers(0, len(running) - 1))]
        for_good = for_good and container.kind is not ContainerKind.SIDECAR
        self.kubelet.finish(pod, container, for_good=for_good)
        self.maybe_hear(is_heard=is_heard)

    @precondition(lambda self: self.kubelet.pods)
    @rule(data=st.data(), is_heard=HEARD)
    def pod_goes(self, data: st.DataObject, *, is_heard: bool) -> None:
        uids = sorted(self.kubelet.pods)
        self.kubelet.delete(self.kubelet.pods[data.draw(st.sampled_from(uids))])
        self.maybe_hear(is_heard=is_heard)

    @precondition(lambda self: self.kubelet.pods)
    @rule(data=st.data())
    def sandbox_is_made_anew(self, data: st.DataObject) -> None:
        uids = sorted(self.kubelet.pods)
        pod = self.kubelet.pods[data.draw(st.sampled_from(uids))]
        if not pod.has_ended:
            self.kubelet.new_sandbox(pod)

    @rule()
    def checkpoint_is_lost(self) -> None:
        # What another plugin gave would be given by this one then, to another container maybe.
        if all(each.share is not None for each in self.kubelet.table):
            self.kubelet.forget(self.tenants)

    # -- the API server

    @rule()
    def api_goes_or_comes(self) -> None:
        self.is_away = not self.is_away
        if not self.is_away:
            self.list_pods()

    def maybe_hear(self, *, is_heard: bool) -> None:
        while is_heard and not self.is_away and self.kubelet.news:
            self.pods.hear(*self.kubelet.news.popleft())

    # -- what has to hold

    @precondition(lambda self: self.ready())
    @rule(data=st.data())
    def a_container_starts_in_the_end(self, data: st.DataObject) -> None:
        """Nothing but a lack of room keeps a container waiting, however little has been heard."""
        self.kill_at = None
        ready = self.ready()
        pod, container = ready[data.draw(st.integers(0, len(ready) - 1))]
        if self.pods.get(pod.uid) is None:
            if self.is_away:
                return
            self.pods.hear(pod.uid, pod.seen())
        said = ""
        for _ in range(3):
            waits = container.state is State.WAITING and container.resource is not None
            share = self.kubelet.entry(pod, container).share if waits else None
            is_there = share in self.store.shares
            (outcome,) = self.run(self.kubelet.start(pod, container, self.tenants, self.resolves))
            said = str(outcome)
            assert not (is_there and said), f"its share was there, and it was refused: {said}"
        if said == "unresolvable CDI devices":
            # There was room for all of its pod but for itself, and its owner is told so.
            told = [each for each in self.reports.events if each[0] == f"pod-{pod.uid}"]
            assert any(f"container {container.name}: need" in each[2] for each in told), told
            return
        assert said == "" or said.startswith("need"), said

    @precondition(lambda self: any(self.sidecars()))
    @rule(
        data=st.data(),
        restarts=st.integers(1, 4),
        is_heard=HEARD,
        loses=st.booleans(),
        fills=st.booleans(),
    )
    def sidecar_restarts_on_a_full_node(
        self, data: st.DataObject, *, restarts: int, is_heard: bool, loses: bool, fills: bool
    ) -> None:
        """It was asked for with ids of a container that has ended, and its own share is there."""
        self.kill_at = None
        found = list(self.sidecars())
        pod, container = found[data.draw(st.integers(0, len(found) - 1))]
        if loses:
            self.lose(pod)
        if fills:
            self.fill()
        for _ in range(restarts):
            self.kubelet.finish(pod, container, for_good=False)
            self.maybe_hear(is_heard=is_heard)
            is_there = self.kubelet.entry(pod, container).share in self.store.shares
            (said,) = self.run(self.kubelet.start(pod, container, self.tenants, self.resolves))
            assert not is_there or said == "", said
            if container.state is not State.RUNNING:
                break
            self.maybe_hear(is_heard=is_heard)

    def lose(self, pod: PodTwin) -> None:
        """Somebody removes by hand what a pod's ended containers had."""
        ended = {each.name for each in pod.containers if each.state is State.FINISHED}
        for share in tuple(self.store.shares.values()):
            if share.owner and share.owner.uid == pod.uid and share.owner.container in ended:
                del self.store.shares[share.id]
        self.run(self.tenants.adopt())

    def sidecars(self) -> Iterator[tuple[PodTwin, ContainerTwin]]:
        for pod, container in self.kubelet.running():
            if container.kind is ContainerKind.SIDECAR:
                yield pod, container

    def fill(self) -> None:
        """Let pods take all that is left of the node."""
        for uuid in SOFT_DEVICES:
            left = ROOM - self.store.booked(uuid)
            if not left or self.is_away:
                continue
            filler = ContainerTwin("c0", ContainerKind.REGULAR, resource=GPU_SHARE, memory=left)
            pod = PodTwin(PodUid(f"uid-{len(self.admitted)}"), [filler])
            self.admitted.add(pod.uid)
            if self.kubelet.admit(pod, self.tenants):
                self.maybe_hear(is_heard=True)
                self.run(self.kubelet.start(pod, filler, self.tenants, self.resolves))

    @rule()
    def it_is_quiet(self) -> None:
        self.is_away = False
        self.kill_at = None
        self.list_pods()
        self.store.clock += 60
        for _ in range(3):
            self.run(self.tenants.look())
        expected = set()
        kept = set()
        for pod in self.kubelet.pods.values():
            for container in pod.containers:
                if container.resource is None or pod.has_ended:
                    continue
                entry = self.kubelet.entry(pod, container)
                if container.state is State.FINISHED:
                    if container.kind is ContainerKind.INIT:
                        kept.add((pod.uid, container.name))
                    continue
                # It may run with what it was given before the checkpoint was lost.
                expected.add((pod.uid, container.name, container.share or entry.share))
        found = {
            (share.owner.uid, share.owner.container, share.id)
            for share in self.store.shares.values()
            if share.owner
        }
        names = {(uid, container) for uid, container, _ in expected} | kept
        assert {(uid, container) for uid, container, _ in found} <= names, "something is left over"
        booked = {(uid, container) for uid, container, _ in found}
        for uid, name, share in expected:
            twin = next(each for each in self.kubelet.pods[uid].containers if each.name == name)
            if share is None:
                # Another plugin's container is booked as soon as it is heard of.
                assert (uid, name) in booked, "what another plugin gave is not booked"
            elif twin.state is State.RUNNING:
                assert (uid, name, share) in found

    @invariant()
    def every_running_container_has_exactly_its_share(self) -> None:
        used = Counter[ShareId]()
        for pod, container in self.kubelet.running():
            if container.share is None:
                continue  # another plugin gave it what it has
            used[container.share] += 1
            share = self.store.shares.get(container.share)
            assert share is not None, f"{container.share} of {pod.uid}/{container.name} is gone"
            assert share.owner is not None
            assert (share.owner.uid, share.owner.container) == (pod.uid, container.name)
            assert len(share.devices) == container.count
        assert all(number == 1 for number in used.values())

    @invariant()
    def no_share_is_without_an_owner(self) -> None:
        for share in self.store.shares.values():
            assert share.owner is not None
            assert share.owner.uid in self.admitted

    @invariant()
    def bookings_never_pass_the_device(self) -> None:
        for uuid in SOFT_DEVICES:
            assert self.store.booked(uuid) <= ROOM


TestNode = Node.TestCase
TestNode.settings = settings(stateful_step_count=30, deadline=None)
