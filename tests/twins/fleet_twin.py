# SPDX-License-Identifier: Apache-2.0
"""A made-up fleet of any size, in place of a machine or a cluster that is read."""

from __future__ import annotations

from collections.abc import Callable

from allotment.cost.bills import Bill
from allotment.cost.splitting import OUTSIDE, GpuHour, ShareHour, accounts
from allotment.model.errors import AllotError
from allotment.model.structs import replace
from allotment.web.fleet import Fleet, FleetGpu, FleetNode, FleetShare, Happened, WaitingPod

GI = 1 << 30


def share(number: int, device: str, *, namespace: str = "ml", part: float = 0.5) -> FleetShare:
    return FleetShare(
        id=f"share-{number}",
        name=f"train-{number}",
        namespace=namespace,
        pod=f"train-{number}",
        container="main",
        mode="soft",
        state="running",
        device=device,
        memory_limit=20 * GI,
        memory_used=round(20 * GI * part),
        memory_peak=18 * GI,
        refusals=number % 3,
        guarantee=0.25,
        ceiling=0.5,
        gpu_time=part / 2,
        is_enforced=True,
    )


def gpu(node: str, index: int, shares: tuple[FleetShare, ...]) -> FleetGpu:
    used = sum(each.memory_used or 0 for each in shares)
    return FleetGpu(
        uuid=f"GPU-{node}-{index}",
        index=index,
        model="NVIDIA A100-SXM4-80GB",
        mode="soft" if shares else "",
        memory_total=80 * GI,
        memory_used=used,
        memory_allocated=sum(each.memory_limit for each in shares),
        guaranteed=0.25 * len(shares),
        utilization=min(1.0, used / (80 * GI)),
        temperature_c=40 + index,
        power_mw=250_000,
        shares=shares,
    )


def fleet(nodes: int = 3, gpus: int = 2, *, tick: int = 0) -> Fleet:
    """Nodes whose GPUs have 0 to 3 shares; the namespaces are `ml` and `web` in turn."""
    made = []
    for node in range(nodes):
        name = f"node-{node:04}"
        made.append(
            FleetNode(
                name=name,
                gpus=tuple(
                    gpu(
                        name,
                        index,
                        tuple(
                            share(
                                10 * (node * gpus + index) + place,
                                f"GPU-{name}-{index}",
                                namespace=("ml", "web")[place % 2],
                                part=((node + index + place + tick) % 10) / 10,
                            )
                            for place in range((node + index) % 4)
                        ),
                    )
                    for index in range(gpus)
                ),
            )
        )
    return Fleet(
        nodes=tuple(made),
        waiting=(
            WaitingPod(namespace="ml", name="big", request="1 GPU, 70Gi", nominated="node-0001"),
            WaitingPod(namespace="web", name="small", request="1 GPU, 10Gi"),
        ),
        events=(
            Happened(time=1.7e9, kind="created", subject="train-10", share="share-10"),
            Happened(time=1.6e9, kind="refused", subject="=cmd()", text="<b>no room</b>"),
        ),
        read_at=1.7e9,
    )


class FleetTwin:
    """A source whose fleet a test sets; `problem`: what a reading raises."""

    def __init__(self, make: Callable[[int], Fleet], *, pace_s: float = 0.2) -> None:
        self.pace_s = pace_s
        self.problem: AllotError | None = None
        self._make = make
        self.readings = 0

    async def read(self) -> Fleet:
        self.readings += 1
        if self.problem is not None:
            raise self.problem
        return replace(self._make(self.readings), read_at=1.7e9 + self.readings)


class OneBill:
    """A bill of two namespaces that is computed already."""

    days = ()

    async def bill(self, days: int) -> Bill:
        del days
        parts = {"ml": 0.5, "web": 0.25, OUTSIDE: 0.125}
        shares = tuple(ShareHour(namespace=name, memory=part) for name, part in parts.items())
        return Bill(
            accounts=accounts([GpuHour(model="A100", price=2_000_000, shares=shares)]),
            models={"A100": 1},
            currency="EUR",
            is_present=True,
            begin=1.7e9,
            end=1.7e9,
        )
