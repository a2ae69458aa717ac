# SPDX-License-Identifier: Apache-2.0
"""A part that fails begins anew, and is counted."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from allotment.kube.clients import Backoff
from allotment.scheduler.supervise import restart_on_failure


def test_whatever_a_part_fails_of_it_begins_anew() -> None:
    ends = iter([ValueError("a"), RecursionError(), ExceptionGroup("b", [KeyError("c")]), None])
    failed: list[str] = []

    async def part() -> None:
        error = next(ends, asyncio.CancelledError())
        if error is not None:
            raise error

    async def test() -> None:
        await restart_on_failure(
            part, "events", on_failure=failed.append, backoff=Backoff(first_s=0.0)
        )

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(test())
    assert failed == ["events"] * 4


def test_who_is_told_to_end_ends() -> None:
    async def test() -> list[str]:
        failed: list[str] = []
        forever = asyncio.Event().wait
        task = asyncio.create_task(restart_on_failure(forever, "events", on_failure=failed.append))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return failed

    assert asyncio.run(test()) == []
