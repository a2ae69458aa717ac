# SPDX-License-Identifier: Apache-2.0
"""Which GPUs go together: the kubelet asks before it allocates several."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Final

from stories import NVIDIA

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from bench.harness.options import Options
from bench.harness.quantiles import quantile
from bench.harness.results import Result
from bench.node.rig import PLAIN, NodeRig, two

SIXTEEN: Final = "h100-80gb:16"
_SEED: Final = 7


def preferred(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Ask for 8 of 16 GPUs, with all of them free and with any of them."""
    count = 20 if rig.is_quick else 500
    chance = random.Random(_SEED)  # noqa: S311 - the same questions in each run
    with rig.agent(PLAIN, simulated=SIXTEEN) as node, rig.call(NVIDIA) as channel:
        gpus = node.gpus()
        ask = services.PREFERRED.on(channel)
        all_free = [_asked(ask, gpus, [], 8) for _ in range(count)]
        some_free = []
        for _ in range(count):
            free = chance.sample(gpus, chance.randint(9, 16))
            some_free.append(_asked(ask, free, chance.sample(free, chance.randint(0, 6)), 8))
    for name, values in (("all of them free", all_free), ("any 9 to 16 of them free", some_free)):
        yield Result(
            topic="preferred",
            name=f"`GetPreferredAllocation`, 8 of 16 GPUs: {name}",
            seen=f"{two(values)}, at most {max(values):.3g} ms",
            value=quantile(values, 0.99),
            unit="ms",
            target=10,
            samples=count,
            method=f"a gRPC client on the agent's socket; {SIXTEEN}, joined as the simulator joins"
            f" them; in the second, up to 6 of the 8 are"
            f" given already; p50 / p99 of {count} each",
        )


def _asked(
    ask: Callable[..., messages.PreferredAllocationResponse],
    free: list[str],
    given: list[str],
    size: int,
) -> float:
    request = messages.PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=free, must_include_deviceIDs=given, allocation_size=size
    )
    started = time.perf_counter()
    answer = ask(request, timeout=30)
    took = (time.perf_counter() - started) * 1000
    chosen = answer.container_responses[0].deviceIDs
    assert len(set(chosen)) == size
    assert set(given) <= set(chosen) <= set(free)
    return took
