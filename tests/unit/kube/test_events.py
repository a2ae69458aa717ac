# SPDX-License-Identifier: Apache-2.0
"""Events: counted when repeated, bounded in number, never in the way of who tells."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from api_server_twin import Server, answered, refused, run, until
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from allotment.kube import events as events_module
from allotment.kube.clients import Backoff
from allotment.kube.events import EventBook, Events, Happening, Reference
from allotment.model.structs import replace

POD = Reference("Pod", "train", "uid-1", "ml")
NODE = Reference("Node", "n1", "n1")
REFUSED = Happening(POD, "ShareRefused", "need 8Gi, have 4Gi", is_warning=True)


def test_said_again_is_counted_and_after_long_it_is_a_new_one() -> None:
    book = EventBook()
    assert book.add(REFUSED, now=0)
    assert book.add(REFUSED, now=1)
    following = book.next()
    assert following is not None
    assert (following[1].count, following[1].first, following[1].last) == (2, 0, 1)
    book.sent(REFUSED, replace(following[1], name="e1"))
    assert book.next() is None
    assert book.add(REFUSED, now=60)
    again = book.next()
    assert again is not None
    assert (again[1].name, again[1].count, again[1].first) == ("e1", 3, 0)
    book.sent(REFUSED, again[1])
    assert book.add(REFUSED, now=60 + 601)
    anew = book.next()
    assert anew is not None
    assert (anew[1].name, anew[1].count) == ("", 1)


def test_one_object_cannot_flood_and_others_are_heard_nevertheless() -> None:
    book = EventBook(burst=3, refill_s=10)
    told = [book.add(replace(REFUSED, message=str(n)), now=0) for n in range(5)]
    assert told == [True, True, True, False, False]
    assert book.add(Happening(NODE, "GpuUnhealthy", "XID 79", is_warning=True), now=0)
    assert not book.add(replace(REFUSED, message="6"), now=9)
    assert book.add(replace(REFUSED, message="7"), now=11)


class Telling(RuleBasedStateMachine):
    """Whatever the server does: nothing that was accepted is lost or counted twice."""

    things = tuple(Happening(POD, "Word", text, is_warning=False) for text in "abc")

    def __init__(self) -> None:
        super().__init__()
        self.book = EventBook(most_waiting=2, burst=1000, refill_s=1)
        self.now = 0.0
        self.accepted: Counter[Happening] = Counter()
        self.at_server: dict[Happening, dict[str, int]] = {}
        self.names = 0

    @rule(thing=st.sampled_from(things), after_s=st.sampled_from([0.0, 1.0, 700.0]))
    def say(self, thing: Happening, after_s: float) -> None:
        self.now += after_s
        if self.book.add(thing, now=self.now):
            self.accepted[thing] += 1

    @rule(meanwhile=st.booleans(), is_forgotten=st.booleans())
    def tell(self, *, meanwhile: bool, is_forgotten: bool) -> None:
        following = self.book.next()
        if following is None:
            return
        thing, entry = following
        events = self.at_server.setdefault(thing, {})
        if entry.name and is_forgotten:
            self.book.lost(thing)
            self.accepted[thing] -= events.pop(entry.name)
            return
        if not entry.name:
            self.names += 1
            entry = replace(entry, name=str(self.names))
        if meanwhile and self.book.add(thing, now=self.now):
            self.accepted[thing] += 1
        events[entry.name] = entry.count
        self.book.sent(thing, entry)

    @invariant()
    def it_is_bounded(self) -> None:
        following = self.book.next()
        assert following is None or following[1].count >= 1

    def teardown(self) -> None:
        for _ in range(len(self.things)):
            self.tell(meanwhile=False, is_forgotten=False)
        assert self.book.next() is None
        for thing, count in self.accepted.items():
            assert sum(self.at_server.get(thing, {}).values()) >= count


def test_the_server_gets_what_kubectl_shows(server: Server) -> None:
    server.writes.append(answered({}, 201))
    clock = iter([1.8e9, 1.8e9, 1.8e9 + 60])
    events = Events(
        server.client(), component="allotment-agent", node="n1", clock=lambda: next(clock)
    )

    async def test() -> None:
        events.tell(NODE, reason="Labels", message="2 models", is_warning=False)
        events.tell(POD, reason="ShareRefused", message="need 8Gi", is_warning=True)
        await until(lambda: len(server.bodies()) == 2)
        events.tell(POD, reason="ShareRefused", message="need 8Gi", is_warning=True)
        await until(lambda: len(server.bodies()) == 3)

    run(events.run(), test())
    of_node, of_pod, again = server.asked("writes")
    assert of_node.path == "/api/v1/namespaces/default/events"
    assert of_pod.path == "/api/v1/namespaces/ml/events"
    body = server.bodies()[1]
    assert again.path == f"{of_pod.path}/{body['metadata']['name']}"
    assert body["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train",
        "namespace": "ml",
        "uid": "uid-1",
    }
    assert (body["type"], body["reason"], body["message"]) == (
        "Warning",
        "ShareRefused",
        "need 8Gi",
    )
    assert (body["count"], body["firstTimestamp"]) == (1, "2027-01-15T08:00:00Z")
    assert server.bodies()[2] == {"count": 2, "lastTimestamp": "2027-01-15T08:01:00Z"}


@pytest.mark.parametrize("first", [503, 429, 500, None])
def test_a_server_that_cannot_now_is_asked_again(server: Server, first: int | None) -> None:
    answer = refused(first) if first else ConnectionRefusedError("nobody is there")
    server.writes.extend([answer, answered({}, 201)])
    events = _quick(server)

    async def test() -> None:
        events.tell(POD, reason="ShareReady", message="yes", is_warning=False)
        await until(lambda: len(server.bodies()) == 2)

    run(events.run(), test())


def test_what_is_refused_is_given_up_and_counted(server: Server) -> None:
    server.writes.extend([refused(403), refused(404), answered({}, 201)])
    dropped: list[None] = []
    events = _quick(server, on_drop=lambda: dropped.append(None))

    async def test() -> None:
        for text in "abc":
            events.tell(POD, reason="ShareReady", message=text, is_warning=False)
        await until(lambda: len(server.bodies()) == 3)

    run(events.run(), test())
    assert [each["message"] for each in server.bodies()] == ["a", "b", "c"]
    assert len(dropped) == 2


def test_an_event_that_the_server_has_forgotten_is_made_anew(server: Server) -> None:
    made = answered({}, 201)
    server.writes.extend([made, refused(404), made])
    events = _quick(server)

    async def test() -> None:
        events.tell(POD, reason="ShareReady", message="a", is_warning=False)
        await until(lambda: len(server.bodies()) == 1)
        events.tell(POD, reason="ShareReady", message="a", is_warning=False)
        await until(lambda: len(server.bodies()) == 3)

    run(events.run(), test())
    methods = [each.method for each in server.asked("writes")]
    assert methods == ["POST", "PATCH", "POST"]


def test_what_happened_a_while_ago_has_its_own_time(server: Server) -> None:
    server.writes.append(answered({}, 201))
    events = _quick(server)

    async def test() -> None:
        now = 1.8e9 + 60
        events.tell(POD, reason="ShareReady", message="a", is_warning=False, at=now - 30)
        await until(server.bodies)

    run(events.run(), test())
    (body,) = server.bodies()
    assert body["firstTimestamp"] == body["lastTimestamp"] == "2027-01-15T08:00:30Z"


def test_telling_never_waits_and_what_is_too_much_is_counted(server: Server) -> None:
    dropped: list[None] = []
    events = _quick(server, on_drop=lambda: dropped.append(None))
    for number in range(1000):
        pod = Reference("Pod", f"p{number}", str(number), "ml")
        events.tell(pod, reason="ShareReady", message="a", is_warning=False)
    assert len(dropped) == 1000 - events_module._MOST_WAITING  # noqa: SLF001 - the bound itself
    assert not server.requests


def test_long_texts_are_cut_to_what_the_server_takes(server: Server) -> None:
    server.writes.append(answered({}, 201))
    events = _quick(server)

    async def test() -> None:
        pod = Reference("Pod", "p" * 253, "u", "ml")
        events.tell(pod, reason="R" * 500, message="m" * 5000, is_warning=False)
        await until(server.bodies)

    run(events.run(), test())
    (body,) = server.bodies()
    assert len(body["metadata"]["name"]) <= 253
    assert len(body["reason"]) == 128
    assert len(body["message"]) == 1024


def test_at_the_end_what_waits_is_told_in_bounded_time(server: Server) -> None:
    server.writes.append(answered({}, 201))
    events = _quick(server)

    async def test() -> None:
        events.tell(POD, reason="ShareReady", message="a", is_warning=False)
        await events.flush(timeout_s=40)
        assert len(server.bodies()) == 1
        server.writes.clear()
        server.writes.append(ConnectionRefusedError("away"))
        events.tell(POD, reason="ShareReady", message="b", is_warning=False)
        async with asyncio.timeout(40):
            await events.flush(timeout_s=0.05)

    asyncio.run(test())


def _quick(server: Server, on_drop: Callable[[], None] = lambda: None) -> Events:
    return Events(
        server.client(),
        component="allotment-agent",
        node="n1",
        on_drop=on_drop,
        clock=lambda: 1.8e9,
        backoff=Backoff(first_s=0.001, most_s=0.01),
    )


TestTelling = Telling.TestCase
