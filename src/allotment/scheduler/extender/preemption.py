# SPDX-License-Identifier: Apache-2.0
"""Chooses victims by single GPUs; kube-scheduler's own choice goes by sums per node.

Per node: the fewest pods of the lowest priority that no budget protects. One node is answered and
its devices are reserved (`nominations`). If the pod fits already, nothing is evicted. The search
yields to the event loop every few milliseconds and stops at a limit.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Final, Protocol

import msgspec

from allotment.model.clusters import ClusterPod, PodBooking, PodNeed, Protected
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.placement.selections import Effort
from allotment.scheduler.core.nominations import NominatedCluster, Nominations, without_host
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.reservations import PodNeeds
from allotment.scheduler.extender import wire
from allotment.scheduler.extender.extender import NotLeadingError

_ENOUGH: Final = 8
"""Nodes where the pod fits, before the best of them is taken."""
_MOST_EFFORT: Final = 100_000
"""Sets of devices to examine on all nodes: takes seconds. kube-scheduler blocks for up to 30 s."""
_PART_OF_EFFORT: Final = 8
"""One node may use this fraction of the remaining effort: at most some 0.1 s."""
_EFFORT_OF_A_LOOK: Final = 20
"""Cost of a node without any choice."""
_MOST_FITTED: Final = 1000
_TURN_S: Final = 0.003
"""Search time before the event loop gets a turn."""
_ECHO_S: Final = 2.0
"""The watch reports a pod within milliseconds of kube-scheduler, later on a busy machine. After an
answer without a node, kube-scheduler does not ask again for minutes."""
_STEP_S: Final = 0.01


class Budgets(Protocol):
    """PodDisruptionBudgets: `kube.quotas.FollowedBudgets`."""

    def against(self, pods: Sequence[Protected]) -> Sequence[bool] | None:
        """Return for each pod whether its eviction violates a budget, in this order.

        None if budgets are not loaded.
        """


class _Plan(msgspec.Struct, frozen=True):
    """Victims on a node, and the devices that the pod then gets."""

    victims: tuple[PodUid, ...]
    booking: PodBooking
    violations: int = 0
    """The number of victims whose eviction violates a budget."""
    cost: tuple[float, ...] = ()
    """Lower is better: kube-scheduler's order of nodes (`pickOneNodeForPreemption`)."""


class _Turns(msgspec.Struct):
    """Yields to the event loop every few milliseconds, and counts the effort."""

    since: float = msgspec.field(default_factory=time.perf_counter)
    effort: Effort = msgspec.field(default_factory=lambda: Effort(_MOST_EFFORT))

    async def take(self) -> None:
        if time.perf_counter() - self.since >= _TURN_S:
            await asyncio.sleep(0)
            self.since = time.perf_counter()


class Preemption:
    """The fourth request, preempt, and the reservations that follow from it."""

    def __init__(
        self,
        cluster: NominatedCluster,
        *,
        pods: Callable[[str], ClusterPod | None],
        quotas: QuotaBook | None = None,
        budgets: Budgets | None = None,
        leads: Callable[[], bool] = lambda: True,
        needs: PodNeeds | None = None,
        clock: Callable[[], float] = time.monotonic,
        echo_s: float = _ECHO_S,
    ) -> None:
        """`pods` returns a pod by uid, as the watch reported it.

        `echo_s`: how long to wait for a pod that the watch has not reported.
        """
        self._cluster = cluster
        self._pods = pods
        self._quotas = quotas
        self._budgets = budgets
        self._leads = leads
        self._needs = needs or PodNeeds()
        self._clock = clock
        self._echo_s = echo_s
        self.nominations = Nominations(cluster, clock=clock)
        self._fitted: dict[PodUid, None] = {}
        """Pods that fitted at their last request."""

    async def preempt(self, body: bytes) -> bytes:
        """Answer with one node and its victims, and reserve the devices there.

        No node: no eviction helps, or the watch does not report the pod. Raises `UsageError` for an
        invalid body, `NotLeadingError`.
        """
        if not self._leads():
            raise NotLeadingError
        arguments = wire.read_preemption(body)
        asked = _asked(arguments)
        pod = await self._reported(arguments.pod.metadata.uid)
        if pod is None or pod.node:
            return _answer({})
        if pod.asks is None:
            return _answer(asked)
        try:
            need = self._needs.of(pod)
        except UsageError:
            return _answer({})
        plan = None if self._fits_by_now(need, asked) else await self._best(need, asked)
        if plan is None:
            return _answer({})
        self.nominations.made(need, plan.booking)
        node = plan.booking.node
        return _answer(
            {
                node: wire.MetaVictims(
                    pods=[wire.MetaPod(uid=uid) for uid in plan.victims],
                    num_pdb_violations=plan.violations,
                )
            }
        )

    def _fits_by_now(self, need: PodNeed, asked: Mapping[str, wire.MetaVictims]) -> bool:
        """Return, once per pod, whether it fits already where victims have devices.

        Victims without devices are kube-scheduler's decision.
        """
        names = {node for node, victims in asked.items() if self._have_devices(node, victims)}
        was_there = need.uid in self._fitted
        self._fitted.pop(need.uid, None)
        if was_there or not names or not self._cluster.rank(need, names, most=1).best:
            return False
        self._fitted[need.uid] = None
        if len(self._fitted) > _MOST_FITTED:
            del self._fitted[next(iter(self._fitted))]
        return True

    def _have_devices(self, node: str, victims: wire.MetaVictims) -> bool:
        bookings = self._cluster.on(node)
        chosen = [bookings.get(PodUid(pod.uid)) for pod in victims.pods or ()]
        return bool(chosen) and all(each is not None and each.containers for each in chosen)

    async def _reported(self, uid: str) -> ClusterPod | None:
        """Wait until the watch reports a pod: the body is not trusted."""
        late = self._clock() + self._echo_s
        while (pod := self._pods(uid)) is None and self._clock() < late:  # noqa: ASYNC110 - a dict
            await asyncio.sleep(_STEP_S)
        return pod

    async def tick(self) -> None:
        await self.nominations.tick(self._choose)

    async def _choose(self, need: PodNeed, node: str) -> PodBooking | None:
        """Return the pod's devices on a node where its victims are already ending."""
        plan = await self._planned(need, node, (), _Turns())
        return None if plan is None else plan.booking

    async def _best(self, need: PodNeed, asked: Mapping[str, wire.MetaVictims]) -> _Plan | None:
        """Examine nodes, cheapest first, until enough of them fit; return the best."""
        turns = _Turns()
        plans: list[_Plan] = []
        chosen = {
            node: [PodUid(pod.uid) for pod in victims.pods or ()] for node, victims in asked.items()
        }
        cost = {
            node: self._cost(asked[node].num_pdb_violations, uids) for node, uids in chosen.items()
        }
        for node in sorted(chosen, key=lambda name: (cost[name], name)):
            plan = await self._planned(need, node, chosen[node], turns)
            if plan is not None and plan.victims and self._may_have(need, plan):
                number = self._violations(plan.victims, chosen[node], asked[node])
                worth = self._cost(number, plan.victims)
                plans.append(_Plan(plan.victims, plan.booking, number, worth))
            if len(plans) >= _ENOUGH or turns.effort.is_spent:
                break
        return min(plans, key=lambda plan: plan.cost, default=None)

    def _may_have(self, need: PodNeed, plan: _Plan) -> bool:
        """Return whether the quota allows the bind: otherwise evictions are useless."""
        if self._quotas is None:
            return True
        return self._quotas.check(need, booking=plan.booking, without=plan.victims) is None

    def _violations(
        self, victims: Sequence[PodUid], chosen: Sequence[PodUid], asked: wire.MetaVictims
    ) -> int:
        """Return how many victims violate a budget; kube-scheduler's count if unknown."""
        sent = int(asked.num_pdb_violations)
        if set(victims) == set(chosen):
            return sent
        violating = self._against(victims)
        return sent if violating is None else len(violating)

    def _against(self, uids: Iterable[PodUid]) -> set[PodUid] | None:
        """Return the pods whose eviction violates a budget, in this order; None if unknown.

        Pods that are ending anyway use up no budget.
        """
        going = {
            uid: Protected(namespace=pod.namespace, name=pod.name, labels=pod.labels)
            for uid in uids
            if (pod := self._pods(uid)) is not None and not pod.is_ending
        }
        violates = (
            self._budgets.against(tuple(going.values())) if self._budgets is not None else None
        )
        return None if violates is None else set(compress(going, violates))

    def _cost(self, violations: float, victims: Sequence[PodUid]) -> tuple[float, ...]:
        ranks = [each.priority for uid in victims if (each := self._pods(uid)) is not None]
        return violations, max(ranks, default=0), sum(ranks), len(victims)

    async def _planned(
        self, need: PodNeed, node: str, chosen: Sequence[PodUid], turns: _Turns
    ) -> _Plan | None:
        """Return a minimal set of victims, if any suffices; kube-scheduler's set first."""
        bookings = self._cluster.on(node)
        lower = self._lower(need, node, bookings, chosen)
        fixed = [uid for uid in chosen if uid not in lower]
        if not await self._fits(need, node, {*fixed, *lower}, turns):
            # kube-scheduler knows more about CPU and memory: trust its choice for these.
            need = without_host(need)
            fixed = list(chosen)
            if not await self._fits(need, node, {*fixed, *lower}, turns):
                return None
        placed = await self._fits(need, node, fixed, turns)
        if placed is not None:
            # No pod with devices has to end.
            return _Plan(tuple(chosen), placed)
        others = [uid for uid in lower if uid not in fixed]
        victims = [*fixed, *await self._fewest(need, node, fixed, others, turns)]
        placed = await self._fits(need, node, victims, turns)
        return None if placed is None else _Plan(tuple(victims), placed)

    def _lower(
        self,
        need: PodNeed,
        node: str,
        bookings: Mapping[PodUid, PodBooking],
        chosen: Collection[PodUid],
    ) -> dict[PodUid, None]:
        """Return the pods with devices that may be evicted, in order of eviction.

        Ending pods first; then those that violate no budget (as kube-scheduler's
        `SelectVictimsOnNode`); then by priority; then kube-scheduler's choice (the youngest); then
        those on the least crowded device. Pods whose bind the watch has not reported come after the
        others.
        """
        lower = {
            uid: pod
            for uid, booking in bookings.items()
            if booking.containers
            and (pod := self._pods(uid)) is not None
            and pod.node in {"", node}
            and pod.priority < need.priority
        }
        devices = {uid: _devices(bookings[uid]) for uid in lower}
        wanted = frozenset(chosen)
        tenants: dict[str, list[PodUid]] = {}
        for uid, uuids in devices.items():
            for uuid in uuids:
                tenants.setdefault(uuid, []).append(uid)
        crowds = {
            uuid: (len(self._against(uids) or ()), len(uids), uuid)
            for uuid, uids in tenants.items()
        }
        crowd = {uid: min(crowds[uuid] for uuid in uuids) for uid, uuids in devices.items()}
        fixed = [uid for uid in chosen if uid not in lower]
        allowed_first = sorted(lower, key=lambda uid: (crowd[uid], lower[uid].priority, uid))
        beyond = self._against([*fixed, *allowed_first]) or set()

        def rank(uid: PodUid) -> tuple[object, ...]:
            pod = lower[uid]
            first = not pod.is_ending, uid in beyond, pod.priority
            return *first, not pod.node, uid not in wanted, crowd[uid], uid

        return dict.fromkeys(sorted(lower, key=rank))

    async def _fewest(
        self,
        need: PodNeed,
        node: str,
        fixed: Sequence[PodUid],
        others: Sequence[PodUid],
        turns: _Turns,
    ) -> list[PodUid]:
        """Return a minimal subset of `others` that suffices.

        Room grows with each eviction, so bisection finds the shortest prefix. Pods outside the
        chosen devices are spared at once, the others one by one, the most important first. Of pods
        with equal amounts on the same devices none can be spared after one cannot.
        """
        bookings = self._cluster.on(node)
        too_few, enough = 0, len(others)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if await self._fits(need, node, [*fixed, *others[:middle]], turns):
                enough = middle
            else:
                too_few = middle
        kept = list(others[:enough])
        placed = await self._fits(need, node, [*fixed, *kept], turns)
        if placed is not None:
            wanted = _devices(placed)
            few = [uid for uid in kept if uid in bookings and _devices(bookings[uid]) & wanted]
            if len(few) < len(kept) and await self._fits(need, node, [*fixed, *few], turns):
                kept = few
        amounts: dict[PodUid, object] = {
            uid: (each.cpu_milli, each.memory_bytes, each.containers)
            for uid, each in bookings.items()
        }
        needed: set[object] = set()
        for uid in reversed(kept[:]):
            amount = amounts.get(uid, uid)
            if amount in needed:
                continue
            fewer = [each for each in kept if each != uid]
            if await self._fits(need, node, [*fixed, *fewer], turns):
                kept = fewer
            else:
                needed.add(amount)
        return kept

    async def _fits(
        self, need: PodNeed, node: str, gone: Collection[PodUid], turns: _Turns
    ) -> PodBooking | None:
        await turns.take()
        turns.effort.left -= _EFFORT_OF_A_LOOK
        with turns.effort.part(turns.effort.left // _PART_OF_EFFORT) as lent:
            placed = self._cluster.place(need, node, without=gone, effort=lent)
        return placed if isinstance(placed, PodBooking) else None


def _devices(booking: PodBooking) -> set[str]:
    return {device.uuid for container in booking.containers for device in container.devices}


def _asked(arguments: wire.PreemptionArguments) -> Mapping[str, wire.MetaVictims]:
    if arguments.node_name_to_meta_victims is not None:
        return arguments.node_name_to_meta_victims
    return {
        node: wire.MetaVictims(
            pods=[wire.MetaPod(uid=pod.metadata.uid) for pod in victims.pods or ()],
            num_pdb_violations=int(victims.num_pdb_violations),
        )
        for node, victims in (arguments.node_name_to_victims or {}).items()
    }


def _answer(victims: Mapping[str, wire.MetaVictims]) -> bytes:
    return wire.encode(wire.PreemptionResult(node_name_to_meta_victims=dict(victims)))
