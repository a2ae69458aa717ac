# SPDX-License-Identifier: Apache-2.0
"""Two shares of half a GPU, on a driver that frees the memory of a killed program late.

One share's program is killed and started again at once, and takes its whole limit again. Its
neighbour never meets an out-of-memory error inside its own limit, and no share has more than its
limit by the driver.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from share_world import GRANULE, World

ROUNDS = 6
RELEASE_US = 150_000


@pytest.fixture
def world() -> Iterator[World]:
    made = World(1 << 30)
    yield made
    made.close()


@pytest.mark.timeout(240)
def test_a_restart_takes_nothing_from_its_neighbour(world: World) -> None:
    half = world.device.allottable_bytes // 2 // GRANULE * GRANULE
    one, other = (world.add_share(name, half) for name in ("one", "other"))
    world.set_release(RELEASE_US)
    most = half - world.device.context_bytes
    neighbour = world.start("dlsym", share=other)
    assert neighbour.ask("open") == {"result": 0}
    restarted = world.start("dlsym", share=one)
    pids: set[str] = set()
    for _ in range(ROUNDS):
        pids.add(str(restarted.pid))
        restarted.send({"do": "open"})
        assert restarted.answer() == {"result": 0}
        restarted.send({"do": "allocate", "api": "plain", "bytes": most // GRANULE * GRANULE})
        took = neighbour.ask("allocate", api="plain", bytes=most // GRANULE * GRANULE)
        assert took["result"] == 0, "the neighbour was refused inside its own limit"
        assert restarted.answer()["result"] == 0
        listed = world.outside()["processes"][2]
        assert sum(listed.get(pid, 0) for pid in pids) <= half, "more than its limit by the driver"
        assert neighbour.ask("free", number=took["number"]) == {"result": 0}
        os.kill(restarted.pid, signal.SIGKILL)
        restarted.wait()
        restarted = world.start("dlsym", share=one)
    for tenant in (restarted, neighbour):
        tenant.send({"do": "exit"})
        tenant.wait()
