# SPDX-License-Identifier: Apache-2.0
"""Following: a list that was asked for is made, and one object's trouble stays its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from api_server_twin import Server, listed, pod, refused, run, until

from allotment.kube.clients import Backoff
from allotment.kube.objects import PodObject
from allotment.kube.watching import Following, Subject


class Pauses(Backoff):
    """Pauses as the test says, and none after that."""

    pauses_s: deque[float] = msgspec.field(default_factory=deque)

    def next(self, *, at_least_s: float | None = None) -> float:  # noqa: ARG002 - not obeyed here
        return self.pauses_s.popleft() if self.pauses_s else 0.0


def name_of(item: PodObject) -> str:
    if item.metadata.name == "bad":
        raise OverflowError("more than it can hold")
    return f"{item.metadata.name}@{item.metadata.resource_version}"


def following(
    server: Server,
    *,
    convert: Callable[[PodObject], str] = name_of,
    **more: Any,  # noqa: ANN401 - the rest of it
) -> Following[PodObject, str]:
    subject = Subject(
        name="pods",
        path="/api/v1/pods",
        item=PodObject,
        convert=convert,
    )
    return Following(server.client(), subject, **more)


def test_a_list_that_somebody_waits_for_is_made_though_the_first_try_fails(
    server: Server,
) -> None:
    # Between two watches, when nothing is to be interrupted: the server went with the leader.
    followed = following(server, backoff=Pauses(pauses_s=deque([60.0])))
    server.lists.extend([listed(), refused(503), listed(pod("a"))])
    server.new_watch().end()
    server.new_watch()

    async def test() -> None:
        await until(lambda: followed.is_synced and not followed.values)
        await until(lambda: not followed._backoff.pauses_s)  # type: ignore[attr-defined]  # noqa: SLF001
        async with asyncio.timeout(30):
            await followed.list_anew()
        assert list(followed.values.values()) == ["a@1"]

    run(followed.run(), test())


def test_a_list_that_had_begun_before_is_not_the_one_that_is_waited_for(
    server: Server,
) -> None:
    asked: list[asyncio.Task[None]] = []

    def doubting(item: PodObject) -> str:
        if item.metadata.name == "first":
            asked.append(asyncio.ensure_future(followed.list_anew()))
        return name_of(item)

    followed = following(server, convert=doubting, backoff=Pauses())
    server.lists.extend([listed(pod("first"), next_page="2"), listed(), listed(pod("a"))])
    server.new_watch()

    async def test() -> None:
        await until(lambda: asked)
        async with asyncio.timeout(30):
            await asked[0]
        assert list(followed.values.values()) == ["a@1"]

    run(followed.run(), test())


def test_an_object_that_cannot_be_read_stays_as_it_was_known(
    server: Server,
) -> None:
    told: list[tuple[str, str | None]] = []
    followed = following(
        server, backoff=Pauses(), on_change=lambda uid, value: told.append((uid, value))
    )
    bad = pod("bad")
    server.lists.append(listed(bad, pod("good")))
    watch = server.new_watch()

    async def test() -> None:
        await until(lambda: followed.is_synced)
        assert followed.values == {"uid-good": "good@1"}
        assert followed.unread == {"uid-bad": "OverflowError: more than it can hold"}
        spoilt = pod("bad", version="2", metadata={"uid": "uid-good"})
        watch.send({"type": "MODIFIED", "object": spoilt})
        watch.send({"type": "MODIFIED", "object": pod("other", version="3")})
        await until(lambda: "uid-other" in followed.values)
        assert followed.values["uid-good"] == "good@1"
        assert followed.unread.keys() == {"uid-bad", "uid-good"}
        watch.send({"type": "MODIFIED", "object": pod("good", version="4")})
        watch.send({"type": "DELETED", "object": bad})
        await until(lambda: not followed.unread)
        assert told == [
            ("uid-good", "good@1"),
            ("uid-other", "other@3"),
            ("uid-good", "good@4"),
        ]

    run(followed.run(), test())


@pytest.mark.parametrize("is_known", [True, False])
def test_an_object_that_another_list_cannot_read_is_not_gone(
    server: Server,
    is_known: bool,  # noqa: FBT001 - a parameter
) -> None:
    told: list[tuple[str, str | None]] = []
    followed = following(
        server, backoff=Pauses(), on_change=lambda uid, value: told.append((uid, value))
    )
    spoilt = pod("bad", metadata={"uid": "uid-good"})
    server.lists.extend([listed(pod("good")) if is_known else listed(), listed(spoilt)])
    server.new_watch()
    server.new_watch()

    async def test() -> None:
        await until(lambda: followed.is_synced)
        await followed.list_anew()
        assert followed.unread.keys() == {"uid-good"}
        assert followed.values == ({"uid-good": "good@1"} if is_known else {})
        assert told == ([("uid-good", "good@1")] if is_known else [])

    run(followed.run(), test())


def test_whoever_is_told_and_fails_of_one_object_is_told_of_all_others(
    server: Server,
) -> None:
    told: list[str] = []

    def on_change(uid: str, value: str | None) -> None:
        if uid.startswith("uid-odd"):
            raise KeyError(value)
        told.append(uid)

    followed = following(server, backoff=Pauses(), on_change=on_change)
    server.lists.append(listed(pod("odd"), pod("a")))
    watch = server.new_watch()

    async def test() -> None:
        await until(lambda: followed.is_synced)
        watch.send({"type": "ADDED", "object": pod("odd2", version="2")})
        watch.send({"type": "ADDED", "object": pod("b", version="3")})
        await until(lambda: told == ["uid-a", "uid-b"])

    run(followed.run(), test())
