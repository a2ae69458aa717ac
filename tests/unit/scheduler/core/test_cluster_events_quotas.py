# SPDX-License-Identifier: Apache-2.0
"""What the books count of pods that the watch tells of: what is gone leaves no count."""

from __future__ import annotations

from scheduler_twin import cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod, NamespaceQuota
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook


class Office:
    def __init__(self, key: str = "limits.allotment.dev/gpu") -> None:
        self.now = 10.0
        self.quota = QuotaBook()
        self.quota.set_quotas([NamespaceQuota(namespace="ml", name="q", hard={key: "2"})])
        quotas = self.quota
        self.book = Book(Cluster(), quotas=quotas)
        self.keeper = ClusterEventHandler(self.book, quotas, clock=lambda: self.now)
        self.keeper.node_put(node("a", 4))

    def begin(self, pod: ClusterPod) -> BindOrder | Refusal:
        found = self.book.begin_bind(need_of(pod), "a", now=self.now, version=pod.version)
        assert isinstance(found, BindOrder | Refusal)
        return found

    def used(self) -> int:
        (used,) = (each.used for each in self.quota.usage("ml"))
        return used

    def may_another(self) -> bool:
        return self.quota.check_new(need_of(cluster_pod("another"))) is None


def test_who_is_being_bound_counts_as_bound_and_as_waiting_again_where_it_is_refused() -> None:
    office, pod = Office(), cluster_pod()
    office.keeper.pod_put(pod)
    order = office.begin(pod)
    assert isinstance(order, BindOrder)
    assert office.used() == 1
    office.book.refused(order.booking, now=office.now)
    assert office.used() == 0
    assert office.quota.check_new(need_of(cluster_pod("b"))) is None
    office.keeper.pod_put(cluster_pod("second"))
    assert not office.may_another()  # two that wait are as many as there may be
    office.keeper.pod_gone(pod.uid)
    assert office.may_another()


def test_a_pod_that_is_bound_late_and_gone_long_since_leaves_no_count() -> None:
    """The watch has told that it is gone; kube-scheduler was in the middle of its cycle."""
    for end in ("refused", "gone"):
        office, pod = Office(), cluster_pod()
        office.keeper.pod_put(pod)
        office.keeper.pod_gone(pod.uid)
        order = office.begin(pod)
        assert isinstance(order, BindOrder)
        assert office.used() == 1
        if end == "refused":
            office.book.refused(order.booking, now=office.now)
        else:
            office.book.pod_gone(pod.uid)
        assert office.used() == 0
        office.keeper.pod_put(cluster_pod("second"))
        assert office.may_another()
        office.quota.check_invariants()


def test_a_pod_that_goes_while_it_is_being_bound_leaves_no_count() -> None:
    office, pod = Office(), cluster_pod()
    office.keeper.pod_put(pod)
    order = office.begin(pod)
    assert isinstance(order, BindOrder)
    office.keeper.pod_gone(pod.uid)
    office.book.refused(order.booking, now=office.now)
    assert office.used() == 0
    assert office.book.booking(pod.uid) is None


def test_a_quota_of_another_systems_names_counts_pods_in_its_words_all_the_way() -> None:
    office = Office("limits.nvidia.com/gpu")
    for name in ("one", "two", "three"):
        pod = replace(cluster_pod(name), dialect="hami")
        office.keeper.pod_put(pod)
        found = office.begin(pod)
        if name == "three":
            assert isinstance(found, Refusal)
            assert "limits.nvidia.com/gpu" in found.text
        else:
            assert isinstance(found, BindOrder)
            office.keeper.pod_put(replace(pod, version="8"))  # the watch tells of a change
    assert office.used() == 2
