# SPDX-License-Identifier: Apache-2.0
"""A cluster's SharePods with who serves them beside a test, at its pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sharepods_twin import ClusterTwin

from allotment.kube.events import Reference
from allotment.kube.sharepods import SharePods
from allotment.scheduler.sharepods import SharePodKeeper, SharePodTimes

ASKS = {
    "kubeshare/gpu_request": "0.5",
    "kubeshare/gpu_limit": "1.0",
    "kubeshare/gpu_mem": "1073741824",
}
SPEC = {"restartPolicy": "Never", "containers": [{"name": "cuda", "image": "x"}]}
TIMES = SharePodTimes(look_s=0.02, again_s=0.04, tick_s=0.002)
PATIENT = SharePodTimes(look_s=1000, again_s=1000, first_s=1000, tick_s=0.002)
Test = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Told:
    """The events."""

    events: list[tuple[Reference, str, str]] = field(default_factory=list)

    def tell(self, about: Reference, *, reason: str, message: str, is_warning: bool) -> None:
        assert is_warning
        self.events.append((about, reason, message))


@dataclass(slots=True)
class Served:
    """A cluster, and who serves its SharePods while `leads`."""

    twin: ClusterTwin = field(default_factory=ClusterTwin)
    told: Told = field(default_factory=Told)
    leads: bool = True
    ignored: frozenset[str] = frozenset({"kube-system"})
    times: SharePodTimes = TIMES

    def keeper(self, api: Any) -> SharePodKeeper:  # noqa: ANN401 - an Api
        return SharePodKeeper(
            SharePods(api),
            leads=lambda: self.leads,
            events=self.told,
            ignored_namespaces=self.ignored,
            times=self.times,
        )

    def run(self, test: Test, *, keepers: int = 1) -> None:
        async def main() -> None:
            async with self.twin.api() as api:
                beside = [asyncio.create_task(self.keeper(api).run()) for _ in range(keepers)]
                try:
                    async with asyncio.timeout(40):
                        await test()
                finally:
                    for each in beside:
                        each.cancel()
                    ends = await asyncio.gather(*beside, return_exceptions=True)
                assert all(isinstance(each, asyncio.CancelledError) for each in ends), ends

        asyncio.run(main())

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)

    async def settled(self, *, rounds: int = 5) -> None:
        """Wait for as long as it takes to look at everything some times over."""
        for _ in range(rounds):
            await asyncio.sleep(TIMES.again_s)
            for _ in range(20):  # where the machine stood still meanwhile, others come to run
                await asyncio.sleep(0)

    async def quiet(self) -> None:
        """Wait until what was begun is over: nothing is asked for, for some time."""
        asked = -1
        while asked != len(self.twin.requests):
            asked = len(self.twin.requests)
            await self.settled()

    def write(self, name: str = "sharepod1", namespace: str = "team", **changes: Any) -> None:  # noqa: ANN401 - JSON
        fields = {"metadata": {"annotations": ASKS}, "spec": SPEC} | changes
        self.twin.put("sharepods", namespace, name, **fields)

    def status(self, name: str = "sharepod1") -> dict[str, Any]:
        found: dict[str, Any] = self.twin.sharepod(name).get("status", {})
        return found


def placed(uid: str, *devices: str) -> str:
    part = {"devices": devices, "memory": 1 << 30, "mode": "soft"}
    return json.dumps({"version": 1, "pod": uid, "node": "n1", "containers": {"cuda": part}})
