# SPDX-License-Identifier: Apache-2.0
"""From the choice of devices to the bind: they stay as chosen unless others took them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scheduler_twin import GIB, cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import ClusterPod, PlacedContainer, PlacedDevice, PodBooking
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.placement.explain import Refusal
from allotment.scheduler.core.book import BindOrder, Book
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.core.reservations import ReservationState

FIRST, SECOND = "GPU-a0", "GPU-a1"


def pod_of(name: str, memory: str = "20Gi") -> ClusterPod:
    return cluster_pod(name, limits={"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": memory})


class Scene:
    """A pod is expected on the second of two GPUs: a larger pod fills the first, and ends."""

    def __init__(self) -> None:
        self.book = Book(NominatedCluster(node_policies=("binpack",), device_policies=("binpack",)))
        self.book.node_put(node("a", 2))
        self.bound("large", FIRST, memory=70 * GIB)
        self.train = need_of(pod_of("train"))
        self.expect("train")
        self.book.pod_gone(PodUid("uid-large"))

    def expect(self, name: str, memory: str = "20Gi") -> str:
        need = need_of(pod_of(name, memory))
        assert self.book.filter(need, ["a"], now=1.0, version="7").best == ("a",)
        return self.devices(name)

    def bound(self, name: str, uuid: str, *, memory: int) -> None:
        """The watch reports a pod that this book did not bind."""
        placed = PlacedContainer(name="main", devices=(PlacedDevice(uuid, memory),))
        booking = PodBooking(uid=PodUid(f"uid-{name}"), node="a", containers=(placed,))
        self.book.pod_put(replace(pod_of(name), node="a", booking=booking), now=1.0)

    def devices(self, name: str) -> str:
        booking = self.book.booking(PodUid(f"uid-{name}"))
        assert booking is not None
        return booking.containers[0].devices[0].uuid

    def bind(self, name: str = "train", memory: str = "20Gi") -> str:
        need = need_of(pod_of(name, memory))
        order = self.book.begin_bind(need, "a", now=1.5, version="7")
        assert isinstance(order, BindOrder), order
        self.book.cluster.check_invariants()
        return self.devices(name)


def test_a_pod_is_bound_to_the_devices_that_were_chosen_for_it() -> None:
    """A search at its bind would find the first GPU, which is free again."""
    scene = Scene()
    assert scene.devices("train") == SECOND
    assert scene.bind() == SECOND


def test_pods_that_are_expected_and_bound_beside_it_change_nothing() -> None:
    scene = Scene()
    assert scene.expect("other", "50Gi") == SECOND
    assert scene.bind("other", "50Gi") == SECOND
    other = scene.book.booking(PodUid("uid-other"))
    assert other is not None
    scene.book.bound(other, now=1.5)
    assert scene.bind() == SECOND


def with_problem(scene: Scene) -> None:
    whole = node("a", 2)
    first, second = whole.devices
    scene.book.node_put(replace(whole, devices=(first, replace(second, problem="XID 79"))))


def taken_by_another(scene: Scene) -> None:
    scene.bound("foreign", SECOND, memory=70 * GIB)


def kept_for_preemption(scene: Scene) -> None:
    need = replace(need_of(pod_of("urgent", "80Gi")), priority=100)
    placed = PlacedContainer(name="main", devices=(PlacedDevice(SECOND, 80 * GIB),))
    cluster = scene.book.cluster
    assert isinstance(cluster, NominatedCluster)
    cluster.keep(need, PodBooking(uid=need.uid, node="a", containers=(placed,)))


def gone_and_back(scene: Scene) -> None:
    scene.book.node_dropped("a")
    first, _ = node("a", 2).devices
    scene.book.node_put(replace(node("a", 2), devices=(first,)))


@pytest.mark.parametrize(
    "change", [with_problem, taken_by_another, kept_for_preemption, gone_and_back]
)
def test_devices_are_chosen_again_where_those_expected_may_be_taken(
    change: Callable[[Scene], None],
) -> None:
    scene = Scene()
    change(scene)
    assert scene.bind() == FIRST


def test_a_pod_on_a_node_that_is_gone_is_not_bound() -> None:
    scene = Scene()
    scene.book.node_dropped("a")
    assert isinstance(scene.book.begin_bind(scene.train, "a", now=1.5, version="7"), Refusal)
    assert scene.book.state(scene.train.uid) is not ReservationState.RESERVED


def test_a_pod_that_fits_nowhere_moves_no_pods_that_are_expected_on_other_nodes() -> None:
    """Their bookings would be dropped and made again, for each question about such a pod."""
    scene = Scene()
    scene.book.node_put(node("b", 1))
    changes = scene.book.cluster.arrays.changes
    large = need_of(pod_of("too-large", "90Gi"))
    assert not scene.book.filter(large, ["b"], now=1.0, version="7").best
    assert scene.book.cluster.arrays.changes == changes
    assert not scene.book.filter(large, ["a", "b"], now=1.0, version="7").best
    assert scene.book.cluster.arrays.changes > changes
    assert scene.devices("train") == SECOND
