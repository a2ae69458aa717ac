# SPDX-License-Identifier: Apache-2.0
"""Which pods are to end for another one: kube-scheduler chooses by sums, this by single GPUs.

kube-scheduler asks about up to a tenth of all nodes, and for each of them says which pods it would
end: the fewest of a lower priority with which its sums come out. These are rarely on one GPU. So
the victims are chosen anew: as few as are enough, whom no budget protects, of the lowest priority,
on the GPUs that take the fewest. Those of kube-scheduler's that have no GPU are kept, as it has its
reasons for them.

One node is answered, the best by kube-scheduler's own rules: the pod's devices there are kept from
then on (`nominations`), and it is for that node that kube-scheduler nominates it.

kube-scheduler looked some time before it asks: where a pod has ended since, and the other one fits
by now, nobody is ended, and the pod is tried again with that event. Once: whoever is asked about
again is kept out by something that kube-scheduler alone knows, and its choice stands.

A node's search takes milliseconds, and there are many nodes: between two steps whoever else waits
for this loop has its turn, and it ends with the first few nodes where the pod fits, or when as much
has been looked at as is for one question.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, Protocol

from allotment.kube.budgets import Protected
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.placement.selections import Effort
from allotment.scheduler import wire
from allotment.scheduler.extender import NotLeadingError
from allotment.scheduler.needs import NeedSettings, need_of
from allotment.scheduler.nominations import NominatedCluster, Nominations, without_host

__all__ = ["Preemption"]

_ENOUGH: Final = 8
"""Nodes on which the pod fits, before the best of them is taken."""
_MOST_EFFORT: Final = 100_000
"""Sets of devices that are looked at for all nodes together: seconds. kube-scheduler waits for
30 s, and for nothing else meanwhile."""
_PART_OF_EFFORT: Final = 8
"""One look at a node may take one part in so many of what is left: some 0.1 s at most."""
_EFFORT_OF_A_LOOK: Final = 20
"""What it takes without any choice."""
_MOST_FITTED: Final = 1000
_TURN_S: Final = 0.003
"""Of looking, before others have their turn."""
_ECHO_S: Final = 2.0
"""The watch tells of a pod within milliseconds of kube-scheduler's, on a busy machine later. A pod
that is answered that nothing helps is not asked about again for minutes."""
_STEP_S: Final = 0.01


class Budgets(Protocol):
    """Which pods are better left alone: `kube.budgets.FollowedBudgets`."""

    def against(self, pods: Sequence[Protected]) -> Sequence[bool] | None:
        """Tell of each whether it goes against one, when they go in this order.

        None: no budget is known.
        """


class Quotas(Protocol):
    """What a namespace may have."""

    def check(
        self,
        need: PodNeed,
        *,
        booking: PodBooking | None = None,
        without: Collection[PodUid] = (),
    ) -> object | None:
        """Return why a pod may not have this, once these others are gone; None: it may."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Pods that are to end on a node, and what the pod gets then."""

    victims: tuple[PodUid, ...]
    booking: PodBooking
    violations: int = 0
    """Of them, so many go against a budget."""
    cost: tuple[float, ...] = ()
    """The smaller, the better: as kube-scheduler compares nodes (`pickOneNodeForPreemption`)."""


@dataclass(slots=True)
class _Turns:
    """Lets others have their turn, every few milliseconds, and counts what is looked at."""

    since: float = field(default_factory=time.perf_counter)
    effort: Effort = field(default_factory=lambda: Effort(_MOST_EFFORT))

    async def take(self) -> None:
        """Return at once, or when the others have had theirs."""
        if time.perf_counter() - self.since >= _TURN_S:
            await asyncio.sleep(0)
            self.since = time.perf_counter()


class Preemption:
    """The fourth question, and what follows from its answer."""

    def __init__(
        self,
        cluster: NominatedCluster,
        *,
        pods: Callable[[str], ClusterPod | None],
        quotas: Quotas | None = None,
        budgets: Budgets | None = None,
        leads: Callable[[], bool] = lambda: True,
        needs: NeedSettings = NeedSettings(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        echo_s: float = _ECHO_S,
    ) -> None:
        """`pods` finds a pod by its uid among all that have been heard of.

        `echo_s`: how long one is waited for of which nobody has heard.
        """
        self._cluster = cluster
        self._pods = pods
        self._quotas = quotas
        self._budgets = budgets
        self._leads = leads
        self._needs = needs
        self._clock = clock
        self._echo_s = echo_s
        self.nominations = Nominations(cluster, clock=clock)
        self._fitted: dict[PodUid, None] = {}
        """Pods for which there was room when they were asked about last."""

    async def preempt(self, body: bytes) -> bytes:
        """Answer on which node the pod fits once which pods have ended, and keep that for it.

        No node: on none of them, whoever ends; or the watch does not know the pod. Raises
        `UsageError` for a body that is none, `NotLeadingError`.
        """
        if not self._leads():
            raise NotLeadingError
        arguments = wire.read_preemption(body)
        asked = _asked(arguments)
        pod = await self._heard(arguments.pod.metadata.uid)
        if pod is None or pod.node:
            return _answer({})
        if pod.asks is None:
            return _answer(asked)
        try:
            need = need_of(pod, self._needs)
        except UsageError:
            return _answer({})
        found = None if self._fits_by_now(need, asked) else await self._best(need, asked)
        if found is None:
            return _answer({})
        self.nominations.made(need, found.booking)
        node = found.booking.node
        return _answer(
            {
                node: wire.MetaVictims(
                    pods=[wire.MetaPod(uid=uid) for uid in found.victims],
                    num_pdb_violations=found.violations,
                )
            }
        )

    def _fits_by_now(self, need: PodNeed, asked: Mapping[str, wire.MetaVictims]) -> bool:
        """Tell, once for a pod, whether it has room where pods with devices are to end for it.

        Others, without devices, kube-scheduler ends for what it knows better.
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
        there = self._cluster.on(node)
        chosen = [there.get(PodUid(each.uid)) for each in victims.pods or ()]
        return bool(chosen) and all(each is not None and each.containers for each in chosen)

    async def _heard(self, uid: str) -> ClusterPod | None:
        """Wait until the watch has told of a pod. What the body says of it, anybody can say."""
        late = self._clock() + self._echo_s
        while (pod := self._pods(uid)) is None and self._clock() < late:  # noqa: ASYNC110 - a dict
            await asyncio.sleep(_STEP_S)
        return pod

    async def tick(self) -> None:
        """Let lapse what is over of what is kept, and see to it that all of it can be of use."""
        await self.nominations.tick(self._choose)

    async def _choose(self, need: PodNeed, node: str) -> PodBooking | None:
        """Return what a pod gets on a node where others are being ended for it already."""
        plan = await self._planned(need, node, (), _Turns())
        return None if plan is None else plan.booking

    async def _best(self, need: PodNeed, asked: Mapping[str, wire.MetaVictims]) -> _Plan | None:
        """Look at the nodes, the cheapest first, until there are enough to take the best of."""
        turns = _Turns()
        plans: list[_Plan] = []
        chosen = {
            node: [PodUid(each.uid) for each in victims.pods or ()]
            for node, victims in asked.items()
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
        """Tell whether the quota lets the pod be bound: else pods would be ended for nothing."""
        if self._quotas is None:
            return True
        return self._quotas.check(need, booking=plan.booking, without=plan.victims) is None

    def _violations(
        self, victims: Sequence[PodUid], chosen: Sequence[PodUid], asked: wire.MetaVictims
    ) -> int:
        """Return how many of them go against a budget: as was sent, of those that were chosen."""
        sent = int(asked.num_pdb_violations)
        if set(victims) == set(chosen):
            return sent
        found = self._against(victims)
        return sent if found is None else len(found)

    def _against(self, uids: Iterable[PodUid]) -> set[PodUid] | None:
        """Return who goes against a budget when these go in this order; None: no budget is known.

        Who ends anyway uses nothing up: a budget does not count on him any more.
        """
        going = {
            uid: Protected(namespace=pod.namespace, name=pod.name, labels=pod.labels)
            for uid in uids
            if (pod := self._pods(uid)) is not None and not pod.is_ending
        }
        found = self._budgets.against(tuple(going.values())) if self._budgets is not None else None
        return None if found is None else set(compress(going, found))

    def _cost(self, violations: float, victims: Sequence[PodUid]) -> tuple[float, ...]:
        ranks = [each.priority for uid in victims if (each := self._pods(uid)) is not None]
        return violations, max(ranks, default=0), sum(ranks), len(victims)

    async def _planned(
        self, need: PodNeed, node: str, chosen: Sequence[PodUid], turns: _Turns
    ) -> _Plan | None:
        """Return as few pods as are enough, where any are; those chosen by sums to begin with."""
        there = self._cluster.on(node)
        lower = self._lower(need, node, there, chosen)
        fixed = [uid for uid in chosen if uid not in lower]
        if not await self._fits(need, node, {*fixed, *lower}, turns):
            # Of CPU and memory kube-scheduler knows more: then its choice is not to be doubted.
            need = without_host(need)
            fixed = list(chosen)
            if not await self._fits(need, node, {*fixed, *lower}, turns):
                return None
        placed = await self._fits(need, node, fixed, turns)
        if placed is not None:
            # Nothing that is known here is in the way.
            return _Plan(tuple(chosen), placed)
        others = [uid for uid in lower if uid not in fixed]
        victims = [*fixed, *await self._fewest(need, node, fixed, others, turns)]
        placed = await self._fits(need, node, victims, turns)
        return None if placed is None else _Plan(tuple(victims), placed)

    def _lower(
        self,
        need: PodNeed,
        node: str,
        there: Mapping[PodUid, PodBooking],
        chosen: Collection[PodUid],
    ) -> dict[PodUid, None]:
        """Return the pods with devices that may be ended for another one, whom first first.

        Those that are ending anyway; then those who go against no budget, as kube-scheduler
        (`SelectVictimsOnNode`) gives back first who does, whatever his priority; then by priority;
        of equals those that kube-scheduler chose, who are the youngest; then those whose device has
        the fewest of them, so that one device after the other becomes free. Some have been bound of
        which the watch has not told yet: they count, after the others.

        Of those among whom a budget allows some, these are on the devices with the fewest beyond.
        """
        found = {
            uid: pod
            for uid, booking in there.items()
            if booking.containers
            and (pod := self._pods(uid)) is not None
            and pod.node in {"", node}
            and pod.priority < need.priority
        }
        devices = {uid: _devices(there[uid]) for uid in found}
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
        fixed = [uid for uid in chosen if uid not in found]
        allowed_first = sorted(found, key=lambda uid: (crowd[uid], found[uid].priority, uid))
        beyond = self._against([*fixed, *allowed_first]) or set()

        def rank(uid: PodUid) -> tuple[object, ...]:
            pod = found[uid]
            first = not pod.is_ending, uid in beyond, pod.priority
            return *first, not pod.node, uid not in wanted, crowd[uid], uid

        return dict.fromkeys(sorted(found, key=rank))

    async def _fewest(
        self,
        need: PodNeed,
        node: str,
        fixed: Sequence[PodUid],
        others: Sequence[PodUid],
        turns: _Turns,
    ) -> list[PodUid]:
        """Return of `others` such that, without any one of them, it would not be enough.

        What fits grows with what goes: the shortest beginning that is enough is found by halving.
        Of that, those that have nothing on the devices that the pod gets are given back at once,
        and the others one by one, the most important first.
        """
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
            wanted, there = _devices(placed), self._cluster.on(node)
            few = [uid for uid in kept if uid in there and _devices(there[uid]) & wanted]
            if len(few) < len(kept) and await self._fits(need, node, [*fixed, *few], turns):
                kept = few
        for uid in reversed(kept[:]):
            fewer = [each for each in kept if each != uid]
            if await self._fits(need, node, [*fixed, *fewer], turns):
                kept = fewer
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
    return {each.uuid for container in booking.containers for each in container.devices}


def _asked(arguments: wire.PreemptionArguments) -> Mapping[str, wire.MetaVictims]:
    if arguments.node_name_to_meta_victims is not None:
        return arguments.node_name_to_meta_victims
    return {
        node: wire.MetaVictims(
            pods=[wire.MetaPod(uid=each.metadata.uid) for each in victims.pods or ()],
            num_pdb_violations=int(victims.num_pdb_violations),
        )
        for node, victims in (arguments.node_name_to_victims or {}).items()
    }


def _answer(victims: Mapping[str, wire.MetaVictims]) -> bytes:
    return wire.encode(wire.PreemptionResult(node_name_to_meta_victims=dict(victims)))
