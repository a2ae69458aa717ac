# SPDX-License-Identifier: Apache-2.0
"""Which pods have to go for another one: kube-scheduler chooses by sums, this by single GPUs."""

from collections.abc import Callable, Sequence

from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.objects import PodObject
from allotment.model.clusters import PodBooking, PodNeed
from allotment.model.errors import UsageError
from allotment.model.pods import PodUid
from allotment.scheduler import wire
from allotment.scheduler.book import Book
from allotment.scheduler.needs import need_of

__all__ = ["Preemption"]


class Preemption:
    """The fourth question."""

    def __init__(self, book: Book, *, pods: Callable[[str], ClusterPod | None]) -> None:
        """`pods` finds a pod by its uid among all that have been heard of."""
        self._book = book
        self._pods = pods

    def preempt(self, body: bytes, *, pod_of: Callable[[PodObject], ClusterPod]) -> bytes:
        """Answer on which of the nodes the pod fits once these pods are gone, and which more.

        Raises `UsageError` for a body that is none.
        """
        arguments = wire.read_preemption(body)
        victims = _victims(arguments)
        pod = pod_of(arguments.pod)
        if pod.asks is None:
            return wire.encode(wire.PreemptionResult(node_name_to_meta_victims=victims))
        try:
            need = need_of(pod)
        except UsageError:
            return wire.encode(wire.PreemptionResult(node_name_to_meta_victims={}))
        found = {}
        there = self._book.by_node()
        for node, each in victims.items():
            chosen = [PodUid(one.uid) for one in each.pods or ()]
            uids = self._enough(pod, need, node, chosen, there.get(node, ()))
            if uids:
                found[node] = wire.MetaVictims(
                    pods=[wire.MetaPod(uid=uid) for uid in uids],
                    num_pdb_violations=int(each.num_pdb_violations),
                )
        return wire.encode(wire.PreemptionResult(node_name_to_meta_victims=found))

    def _enough(
        self,
        pod: ClusterPod,
        need: PodNeed,
        node: str,
        victims: list[PodUid],
        there: Sequence[PodUid],
    ) -> list[PodUid]:
        """Return the victims with which the pod fits: these, and if need be more; or none.

        kube-scheduler has chosen them by what it counts, which are a node's sums. Where no single
        GPU becomes free by that, pods of a lower priority are added, the lowest first, and those
        given back that turn out not to be in the way.
        """
        if isinstance(self._book.preempt(need, node, victims), PodBooking):
            return victims
        lower = sorted(
            (each.priority, each.uid)
            for uid in there
            if uid not in victims
            and (each := self._pods(uid)) is not None
            and each.priority < pod.priority
        )
        added: list[PodUid] = []
        for _, uid in lower:
            added.append(uid)
            if isinstance(self._book.preempt(need, node, [*victims, *added]), PodBooking):
                break
        else:
            return []
        for uid in list(reversed(added)):
            fewer = [each for each in added if each != uid]
            if isinstance(self._book.preempt(need, node, [*victims, *fewer]), PodBooking):
                added = fewer
        return [*victims, *added]


def _victims(arguments: wire.PreemptionArguments) -> dict[str, wire.MetaVictims]:
    if arguments.node_name_to_meta_victims is not None:
        return arguments.node_name_to_meta_victims
    return {
        node: wire.MetaVictims(
            pods=[wire.MetaPod(uid=each.metadata.uid) for each in victims.pods or ()],
            num_pdb_violations=int(victims.num_pdb_violations),
        )
        for node, victims in (arguments.node_name_to_victims or {}).items()
    }
