# SPDX-License-Identifier: Apache-2.0
"""Whatever pods there are: victims are enough and none too many, and nothing is given twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from preemption_twin import TENTH, Scene
from scheduler_twin import GIB, cluster_pod, node

from allotment.dialects.own.registry import need_of
from allotment.model.clusters import PodBooking
from allotment.scheduler.core.book import BindOrder
from allotment.scheduler.core.reservations import ReservationState

Pods = list[tuple[int, int, int, bool]]

running = st.lists(
    st.tuples(
        st.integers(min_value=0, max_value=2),  # the device
        st.integers(min_value=1, max_value=40),  # GiB
        st.sampled_from([0, 0, 1, 5, 50]),  # priority
        st.booleans(),  # ends already
    ),
    max_size=14,
)


def place_all(scene: Scene, pods: Pods) -> list[str]:
    """Place as many of them as fit; their names."""
    names = []
    for number, (device, gib, priority, is_ending) in enumerate(pods):
        name = f"low-{number:02}"
        limits = {**TENTH, "allotment.dev/gpu-memory": f"{gib}Gi"}
        if scene.run(name, "a", device=device, limits=limits, priority=priority):
            scene.change(name, is_ending=is_ending)
            names.append(name)
    return names


@given(
    pods=running,
    gib=st.sampled_from([20, 60, 80]),
    gpus=st.integers(min_value=1, max_value=3),
    chosen=st.data(),
)
def test_victims_are_enough_and_none_of_them_could_stay(
    pods: Pods, gib: int, gpus: int, chosen: st.DataObject
) -> None:
    scene = Scene({"a": 3})
    names = place_all(scene, pods)
    limits = {"allotment.dev/gpu": str(gpus), "allotment.dev/gpu-memory": f"{gib * gpus}Gi"}
    need = need_of(scene.wait("wants", limits=limits, priority=10))
    lower = [name for name in names if scene.pods[f"uid-{name}"].priority < 10]
    if not lower:
        return
    first = chosen.draw(st.lists(st.sampled_from(lower), min_size=1, unique=True))

    def fits(gone: Sequence[str]) -> bool:
        uids = [cluster_pod(name).uid for name in gone]
        return isinstance(scene.cluster.place(need, "a", without=uids), PodBooking)

    fits_all, fits_none = fits(lower), fits([])
    needed = {name: fits([each for each in lower if each != name]) for name in lower}
    answer = scene.preempt("wants", {"a": first})
    if not fits_all:
        assert answer == {}
        return
    if fits_none:
        # By now, without anybody: and if kube-scheduler insists, it knows why.
        assert answer == {}
        assert scene.preempt("wants", {"a": first}) == {"a": first}
        return
    victims = answer["a"]
    assert set(victims) <= set(lower)
    assert fits(victims)
    assert {name for name, could_stay in needed.items() if not could_stay} <= set(victims)
    for name in victims:
        assert not fits([each for each in victims if each != name])


class Life(RuleBasedStateMachine):
    """Pods run, wait, are preempted for, bound, refused and ended, in any order."""

    which = st.integers(min_value=0, max_value=30)

    @initialize(pods=running)
    def begin(self, pods: Pods) -> None:
        self.scene = Scene({"a": 3})
        place_all(self.scene, pods)
        for number in range(9):
            limits = {**TENTH, "allotment.dev/gpu-memory": ("8Gi", "30Gi", "80Gi")[number % 3]}
            self.scene.wait(f"wants-{number}", limits=limits, priority=(0, 1, 10, 100)[number % 4])

    def one_of(self, names: list[str], which: int) -> str:
        return sorted(names)[which % len(names)]

    @property
    def waiting(self) -> list[str]:
        return [pod.name for pod in self.scene.pods.values() if not pod.node]

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 700.0]))
    def tick(self, seconds: float) -> None:
        self.scene.tick(after_s=seconds)
        self.scene.book.tick(self.scene.now)

    @rule(returns=st.booleans())
    def lose_the_node(self, *, returns: bool) -> None:
        self.scene.keeper.node_dropped("a")
        if returns:
            self.scene.keeper.node_put(node("a", 3))

    @precondition(lambda self: self.scene.pods)
    @rule(which=which)
    def end(self, which: int) -> None:
        self.scene.end(self.one_of([pod.name for pod in self.scene.pods.values()], which))

    @precondition(lambda self: self.waiting)
    @rule(which=which)
    def filter(self, which: int) -> None:
        self.scene.filter(self.one_of(self.waiting, which))

    @precondition(lambda self: self.waiting)
    @rule(which=which)
    def bind(self, which: int) -> None:
        self.scene.bind(self.one_of(self.waiting, which), "a")

    @precondition(lambda self: self.waiting)
    @rule(which=which)
    def refuse(self, which: int) -> None:
        need = need_of(self.scene.pods[f"uid-{self.one_of(self.waiting, which)}"])
        order = self.scene.book.begin_bind(need, "a", now=self.scene.now, version="7")
        if isinstance(order, BindOrder):
            self.scene.book.refused(order.booking, now=self.scene.now)

    @precondition(lambda self: self.waiting)
    @rule(which=which, is_written=st.booleans())
    def preempt(self, which: int, *, is_written: bool) -> None:
        name = self.one_of(self.waiting, which)
        if self.scene.preempt(name, {"a": ["nobody"]}) and is_written:
            self.scene.change(name, nominated_node="a")

    @precondition(lambda self: self.waiting)
    @rule(which=which, where=st.sampled_from(["", "a", "nowhere"]))
    def say(self, which: int, where: str) -> None:
        self.scene.change(self.one_of(self.waiting, which), nominated_node=where)

    @invariant()
    def nothing_is_given_twice(self) -> None:
        self.scene.cluster.check_invariants()
        sums: dict[str, int] = {}
        for pod in self.scene.pods.values():
            booking = self.scene.book.booking(pod.uid)
            if booking is None or self.scene.book.state(pod.uid) is ReservationState.EXPECTED:
                continue
            for container in booking.containers:
                for device in container.devices:
                    sums[device.uuid] = sums.get(device.uuid, 0) + device.memory
        assert all(each <= 80 * GIB for each in sums.values()), sums

    def teardown(self) -> None:
        if not hasattr(self, "scene"):
            return
        scene = self.scene
        for name in self.waiting:
            scene.end(name)
        scene.keeper.node_put(node("a", 3))
        assert not len(scene.preemption.nominations)
        there = scene.cluster.on("a")
        assert set(there) == set(scene.pods)
        given = [
            device.memory
            for booking in there.values()
            for container in booking.containers
            for device in container.devices
        ]
        # Nothing that was kept is left in the sums, either.
        assert sum(each.memory_allocated for each in scene.cluster.totals().values()) == sum(given)


TestLife = Life.TestCase
