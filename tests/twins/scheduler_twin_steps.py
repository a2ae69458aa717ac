# SPDX-License-Identifier: Apache-2.0
"""What can happen to two replicas of the scheduler and their API server, in steps, and the judge.

Judged by what the server has bound, by placements that count. All parts are the real ones, from the
bytes that kube-scheduler sends to the Binding: `scheduler_twin_world`.
"""

from __future__ import annotations

import copy
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from scheduler_twin_world import (
    BROKEN,
    BUSY,
    MEMORY,
    MEMORY_NOTE,
    NODES,
    QUOTA,
    REFUSED,
    Call,
    World,
    inventory,
)

from allotment.dialects.own.placement import PLACEMENT
from allotment.kube.bindings import Binding
from allotment.kube.errors import KubeError
from allotment.model.pods import PodUid
from allotment.scheduler.core.reservations import HELD, ReservationState

FORGED = '{"version": 1, "pod": "another", "node": "b", "containers": {}}'
parts = st.sampled_from(["100%", "100%", "37.5%", "12.5%"])
some_nodes = st.lists(st.sampled_from(sorted(NODES)), min_size=1, unique=True)
places = st.integers(0, 5)
"""Which of the pods, or of the requests: counted around."""


FATES = ["answer", "answer", "carry out", "lose", "lose", "wait", "fail"]


class SchedulerSteps(RuleBasedStateMachine):
    """Few rules, so that each comes often; what matters most is most of what each draws from."""

    @initialize(asked=st.lists(st.tuples(parts, st.integers(0, 2)), min_size=3, max_size=3))
    def begin(self, asked: list[tuple[str, int]]) -> None:
        self.world = World()
        self.server = self.world.server
        self.is_bound_by_hand = False
        for part, thirds in asked:
            self.create(part, thirds)

    def create(self, part: str, thirds: int) -> None:
        uid = PodUid(f"pod-{len(self.server.remembered)}")
        number = 2 if thirds == 1 else 1
        limits = {"allotment.dev/gpu": str(number)}
        if thirds:
            limits["allotment.dev/gpu-compute"] = str(33 * thirds * number)
        resources = {"limits": limits}
        self.server.pods[uid] = {
            "metadata": {
                "name": uid,
                "namespace": "ns",
                "uid": uid,
                "annotations": {MEMORY_NOTE: part},
            },
            "spec": {"containers": [{"name": "main", "resources": resources}]},
            "status": {"phase": "Pending"},
        }
        self.server.changed(uid)

    # ---- kube-scheduler --------------------------------------------------------------------------

    def _asked_about(self, place: int, *, is_late: bool = False) -> PodUid | None:
        """One that waits, as far as kube-scheduler knows; late: or is bound, or gone."""
        waits = [uid for uid, pod in self.server.pods.items() if not pod["spec"].get("nodeName")]
        uids = list(self.server.remembered) if is_late else waits
        return uids[place % len(uids)] if uids else None

    @rule(
        place=places,
        between=st.sampled_from(["", "", "", "touch", "touch", "edit", "pretend", "delete"]),
        heard=st.sampled_from(["before", "between", "after"]),
        fates=st.lists(st.sampled_from(FATES), min_size=1, max_size=3),
        after=st.sampled_from(["", "", "touch", "touch", "edit", "delete", "cut off", "ended"]),
        part=parts,
    )
    def schedule(
        self, place: int, between: str, heard: str, fates: list[str], after: str, part: str
    ) -> None:
        """All that kube-scheduler does for a pod, with what may come between it, and after."""
        self.world.leader.hear()
        uid = self._asked_about(place)
        if uid is None:
            return
        pod = copy.deepcopy(self.server.remembered[uid])
        found = self.world.filter(pod, list(NODES))
        if between == "pretend":
            self._pretend(pod, part, "")
        elif between:
            self._write(uid, between, part)
        if heard == "between":
            self.world.leader.hear()
        if found:
            self.world.bind(uid, found[0])
            self._follow(uid, fates)
        if after in {"cut off", "ended"}:
            self.world.change_leader(after, Random(place))  # noqa: S311 - the same each time
        elif after:
            self._write(uid, after, part)
        if heard == "after":
            self.world.leader.hear()

    @rule(seconds=st.sampled_from([1.0, 8.0, 70.0]))
    def be_calm(self, seconds: float) -> None:
        """The server answers all that it is asked, and what is late arrives, for a while."""
        for _ in range(4):
            self._answer_all()
            self.world.pass_time(seconds / 4)

    @rule(
        place=places,
        names=some_nodes,
        late=st.sampled_from(["", "late"]),
        what=st.sampled_from(["filter", "prioritize", "bind", "pretend"]),
        pretended=st.tuples(parts, st.sampled_from(["", "1", "999999"])),
    )
    def ask(
        self, place: int, names: list[str], late: str, what: str, pretended: tuple[str, str]
    ) -> None:
        """One question by itself, in any order; or by somebody else who reaches the port."""
        uid = self._asked_about(place, is_late=bool(late))
        if uid is None:
            return
        pod = copy.deepcopy(self.server.remembered[uid])
        if what == "filter":
            self.world.filter(pod, names)
        elif what == "prioritize":
            self.world.prioritize(pod, names)
        elif what == "bind":
            self.world.bind(uid, names[0])
        else:
            self._pretend(pod, *pretended)

    def _pretend(self, pod: dict[str, Any], part: str, version: str) -> None:
        pod["metadata"]["annotations"][MEMORY_NOTE] = part
        pod["metadata"]["resourceVersion"] = version
        self.world.filter(pod, list(NODES))

    # ---- people ----------------------------------------------------------------------------------

    @rule(
        place=places,
        what=st.sampled_from(["touch", "edit", "delete", "finish", "by hand"]),
        part=parts,
    )
    def write(self, place: int, what: str, part: str) -> None:
        """Somebody writes to a pod."""
        uids = list(self.server.pods)
        self._write(uids[place % len(uids)], what, part)

    def _write(self, uid: PodUid, what: str, part: str) -> None:
        pod = self.server.pods.get(uid)
        if pod is None:
            return
        notes, spec = pod["metadata"]["annotations"], pod["spec"]
        is_bound = bool(spec.get("nodeName"))
        if what == "delete":
            del self.server.pods[uid]
            self.create(part, len(self.server.remembered) % 3)
        elif what == "finish" and is_bound:
            pod["status"]["phase"] = "Succeeded"
        elif what == "edit" and not is_bound:
            notes[MEMORY_NOTE] = part
        elif what == "by hand" and not is_bound:
            other = next(iter(self.server.pods.values()))["metadata"]
            stolen = other["annotations"].get(PLACEMENT) if other["uid"] != uid else None
            spec["nodeName"], notes[PLACEMENT] = "a", stolen or FORGED
            self.is_bound_by_hand = True
        self.server.changed(uid)

    @rule(name=st.sampled_from(sorted(NODES)), devices=st.integers(0, 2))
    def change_node(self, name: str, devices: int) -> None:
        number = min(devices, NODES[name])
        self.server.set_node(name, inventory(name, number) if number else None)

    # ---- the network -----------------------------------------------------------------------------

    @precondition(lambda self: self.server.calls)
    @rule(place=places, fate=st.sampled_from(FATES), error=st.sampled_from([BUSY, REFUSED, BROKEN]))
    def treat(self, place: int, fate: str, error: KubeError) -> None:
        """The server and the network do something about one thing that was asked."""
        self._treat(self.server.calls[place % len(self.server.calls)], fate, error)

    def _treat(self, call: Call, fate: str, error: KubeError) -> None:
        if fate == "answer" or (fate == "fail" and call.is_carried_out and error is not BROKEN):
            self.server.answer(call)
        elif fate == "carry out":
            self.server.carry_out(call)
        elif fate == "lose":
            self.server.lose(call)
        elif fate == "fail":
            # An error of the server's own says nothing of what it has done.
            self.server.fail(call, error)
        self.world.loop.settle()

    def _follow(self, uid: PodUid, fates: list[str]) -> None:
        """Treat what is asked for a pod, one time after the other; what is only read, is read."""
        for fate in fates:
            for call in list(self.server.calls):
                if isinstance(call.asked, Binding) and call.asked.uid == uid:
                    self._treat(call, fate, BROKEN)
            for call in list(self.server.calls):
                if call.asked == uid:
                    self.server.answer(call)
            self.world.pass_time(0.3)

    def _answer_all(self) -> None:
        for call in list(self.server.calls):
            self.server.answer(call)
        self.world.loop.settle()

    @rule(replica=st.integers(0, 1), number=st.sampled_from([None, 1, 2]))
    def hear(self, replica: int, number: int | None) -> None:
        self.world.replicas[replica].hear(number)

    @rule(seconds=st.sampled_from([0.3, 0.3, 1.0, 6.0, 30.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)
        for replica in self.world.replicas:
            replica.tick()

    @rule(how=st.sampled_from(["", "", "", "cut off", "killed", "ended"]), seed=st.integers(0, 7))
    def change_leader(self, how: str, seed: int) -> None:
        if how:
            self.world.change_leader(how, Random(seed))  # noqa: S311 - the same each time

    # ---- the judge -------------------------------------------------------------------------------

    @invariant()
    def nothing_is_given_twice(self) -> None:
        for uuid, (memory, compute) in self.server.given().items():
            assert memory <= MEMORY, uuid
            assert compute <= 10_000, uuid

    @invariant()
    def everybody_has_what_it_asked_for(self) -> None:
        assert not self.server.wrong

    @invariant()
    def no_namespace_has_more_than_it_may(self) -> None:
        given = sum(len(c.devices) for each in self.server.bookings() for c in each.containers)
        assert self.is_bound_by_hand or given <= QUOTA

    @invariant()
    def the_books_are_right(self) -> None:
        for replica in self.world.replicas:
            book = replica.book
            book.cluster.check_invariants()
            replica.quotas.check_invariants()
            for uid in self.server.remembered:
                state, booking = book.state(uid), book.booking(uid)
                assert (booking is not None) == (
                    state is ReservationState.EXPECTED or state in HELD
                )
                if booking is not None:
                    assert book.cluster.booking(uid) == booking
                if state in {ReservationState.RESERVED, ReservationState.UNKNOWN}:
                    # Whoever has reserved is at work on the end of that.
                    assert uid in replica.binder._tasks  # noqa: SLF001 - to say which

    @invariant()
    def who_is_bound_has_a_booking(self) -> None:
        for replica in self.world.replicas:
            if replica.heard == len(self.server.events):
                for booking in self.server.bookings():
                    assert replica.book.cluster.booking(booking.uid) == booking

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._settle()
            given = sum(
                1
                for each in self.server.pods.values()
                if each["spec"].get("nodeName") and each["status"]["phase"] == "Pending"
            )
            for replica in self.world.replicas:
                counts = replica.book.counts()
                assert not counts[ReservationState.RESERVED]
                assert not counts[ReservationState.UNKNOWN]
                assert not replica.binder._tasks  # noqa: SLF001
                bound = [each for each in replica.quotas._entries.values() if each.is_bound]  # noqa: SLF001
                assert len(bound) == given
            self.nothing_is_given_twice()
            for uid in list(self.server.pods):
                del self.server.pods[uid]
                self.server.changed(uid)
            self._settle()
            for replica in self.world.replicas:
                assert not any(replica.book.counts().values())
                assert not replica.quotas._entries  # noqa: SLF001 - nothing is counted
                for uid in self.server.remembered:
                    assert replica.book.cluster.booking(uid) is None
        finally:
            self.world.close()

    def _settle(self) -> None:
        """Everything that was asked for is answered, and everything is heard."""
        for _ in range(12):
            self._answer_all()
            for replica in self.world.replicas:
                replica.hear()
                replica.tick()
            self.world.pass_time(100.0)
