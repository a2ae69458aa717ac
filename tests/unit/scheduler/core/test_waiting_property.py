# SPDX-License-Identifier: Apache-2.0
"""Pods come, change and go in any order: none is nominated twice, and none that does not wait."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from scheduler_twin import cluster_pod

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod
from allotment.model.structs import replace
from allotment.scheduler.core.waiting import WaitingPods

_NAMES = st.sampled_from([f"p{number}" for number in range(20)])
_KINDS = st.sampled_from(["any", "zone a", "zone b"])


class WaitingSteps(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 10.0
        self.leads = True
        self.pods: dict[str, ClusterPod] = {}
        self.taken: set[str] = set()
        self.waiting = WaitingPods(clock=lambda: self.now, leads=lambda: self.leads)

    @rule(name=_NAMES, kind=_KINDS, priority=st.integers(0, 2))
    def come_or_change(self, name: str, kind: str, priority: int) -> None:
        pod = cluster_pod(name, limits={"allotment.dev/gpu": "1"})
        self.put(replace(pod, constraints=kind, priority=priority))

    @rule(name=_NAMES, field=st.sampled_from(["node", "tried_first", "nominated_node"]))
    def show_node(self, name: str, field: str) -> None:
        if (pod := self.pods.get(name)) is None:
            return
        match field:
            case "node":
                self.put(replace(pod, node="x"))
            case "tried_first":
                self.put(replace(pod, tried_first="x"))
            case _:
                self.put(replace(pod, nominated_node="x"))

    @rule(name=_NAMES)
    def go(self, name: str) -> None:
        if (pod := self.pods.pop(name, None)) is not None:
            self.waiting.gone(pod.uid)
            self.taken.discard(name)

    @rule(name=_NAMES, nodes=st.lists(st.sampled_from("xyz"), min_size=1, max_size=3))
    def ask(self, name: str, nodes: list[str]) -> None:
        if name in self.pods:
            self.waiting.tried(self.pods[name], nodes)

    @rule()
    def nominate(self) -> None:
        while (found := self.waiting.next()) is not None:
            name = found.pod.name
            assert found.pod == self.pods[name]
            assert (found.pod.node, found.pod.tried_first, found.pod.nominated_node) == ("", "", "")
            assert name not in self.taken
            assert found.allowed
            self.taken.add(name)

    @rule(seconds=st.sampled_from([0.5, 5.0, 15.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(leads=st.booleans())
    def lead(self, leads: bool) -> None:  # noqa: FBT001 - of hypothesis
        self.leads = leads

    @invariant()
    def late_ones_show_a_nomination(self) -> None:
        for pod in self.waiting.late():
            assert pod.tried_first
            assert pod == self.pods[pod.name]

    @invariant()
    def it_is_consistent(self) -> None:
        self.waiting.check_invariants()

    def put(self, pod: ClusterPod) -> None:
        self.pods[pod.name] = pod
        if pod.node:
            self.taken.discard(pod.name)
        self.waiting.put(pod, need_of(pod))


TestWaitingSteps = WaitingSteps.TestCase
