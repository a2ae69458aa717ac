# SPDX-License-Identifier: Apache-2.0
"""Doubtful pods are read a few at a time, and nobody waits for them."""

from __future__ import annotations

import asyncio

from allotment.kube.errors import UnreachableError
from allotment.model.pods import PodUid
from allotment.scheduler.core.reservations import Reread
from allotment.scheduler.feed import PodRefresh

PODS = [Reread(PodUid(f"u{number}"), "ns", f"p{number}") for number in range(20)]


def test_a_slow_api_server_has_no_more_than_a_few_at_a_time_and_nobody_waits() -> None:
    async def work() -> None:
        asked: list[PodUid] = []
        free = asyncio.Event()

        async def read(uid: PodUid, *_: str) -> None:
            asked.append(uid)
            await free.wait()

        rereading = PodRefresh(read, most_at_once=8)
        for now in range(3):
            rereading.want(PODS, now=float(now))
            await asyncio.sleep(0)
        assert asked == [each.uid for each in PODS[:8]]
        free.set()
        for now in range(3, 10):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            rereading.want(PODS, now=float(now))
        # Those that waited came before those that were read already.
        assert set(asked) == {each.uid for each in PODS}
        assert len(asked[:20]) == len(set(asked[:20]))
        rereading.close()

    asyncio.run(work())


def test_a_pod_that_stays_doubtful_is_read_less_and_less_often() -> None:
    async def work() -> None:
        count = 0

        async def read(*_: str) -> None:
            nonlocal count
            count += 1
            raise UnreachableError("cannot get pod")

        rereading = PodRefresh(read)
        for tick in range(240):
            rereading.want(PODS[:1], now=tick / 2)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert 8 <= count <= 16
        # Once nobody doubts it, it begins anew.
        before = count
        rereading.want([], now=120.0)
        rereading.want(PODS[:1], now=120.0)
        await asyncio.sleep(0)
        assert count == before + 1

    asyncio.run(work())
