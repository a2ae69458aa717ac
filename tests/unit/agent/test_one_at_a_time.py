# SPDX-License-Identifier: Apache-2.0
"""One agent works on a node at a time; the next one stands by until the former has ended."""

# ruff: noqa: SLF001 - its parts meet in a class that nothing else makes

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from api_server_twin import api_of, refused, until

from allotment.agent import running
from allotment.agent.configuring import AgentSettings


def agent(folder: Path) -> running._Agent:
    settings = AgentSettings(
        node="n1", state=folder, simulated="t4", kubelet_socket=folder / "kubelet.sock",
        cdi_folder=folder / "cdi", metrics_address=None, starts_front=False,
    )  # fmt: skip
    return running._Agent(settings, api_of(lambda _: refused(503)))


def is_locked(folder: Path) -> bool:
    with (folder / "agent.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The lock as another agent has it."""
    with (folder / "agent.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def test_an_agent_that_stands_by_is_alive_and_ready(tmp_path: Path) -> None:
    async def story() -> None:
        waiting = agent(tmp_path)
        with held(tmp_path):
            task = asyncio.create_task(waiting.run())
            await until(lambda: waiting._stands_by)
            waiting._beat = time.monotonic() - 3600
            assert waiting._liveness_problems()
            await until(lambda: not waiting._liveness_problems())
            assert not waiting._readiness_problems()
            await ended(task)

    asyncio.run(story())


def test_the_next_agent_begins_when_the_former_changes_nothing_any_more(tmp_path: Path) -> None:
    async def story() -> None:
        former = agent(tmp_path)
        locked: list[bool] = []
        close_tenants, close_mps = former._tenants.close, former._mps.close

        async def close() -> None:
            await close_tenants()
            locked.append(is_locked(tmp_path))

        def close_daemons() -> None:
            close_mps()
            locked.append(is_locked(tmp_path))

        former._tenants.close = close  # type: ignore[method-assign]
        former._mps.close = close_daemons  # type: ignore[method-assign]
        task = asyncio.create_task(former.run())
        await until(lambda: is_locked(tmp_path))
        await ended(task)
        assert locked == [True, True]
        assert not is_locked(tmp_path)

    asyncio.run(story())
