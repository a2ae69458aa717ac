# SPDX-License-Identifier: Apache-2.0
"""What the node agent takes of the machine while nothing happens, with 60 shares."""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.harness.options import Options
from bench.harness.results import Result
from bench.node.rig import MIB, SOFT, NodeRig, usage_of
from bench.node.starts import CROWD, GPUS


def footprint(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Ask for memory and processor time of an agent that has been there for a while."""
    count, window_s, settle_s = (4, 5, 2) if rig.is_quick else (CROWD, 60, 20)
    with rig.agent(SOFT, simulated=GPUS) as node:
        rig.crowd(node, count)
        assert node.process is not None
        # Events about the pods go out at a slow rate.
        time.sleep(settle_s)
        before, started = usage_of(node.process.pid), time.monotonic()
        time.sleep(window_s)
        after, seconds = usage_of(node.process.pid), time.monotonic() - started
    rig.log(f"{after.threads} threads")
    yield Result(
        topic="memory",
        name=f"memory of the agent with {count} shares (RSS)",
        seen=f"PSS {after.pss_bytes / MIB:.1f} MiB",
        value=after.rss_bytes / MIB,
        unit="MiB",
        target=60,
        samples=1,
        method="the kernel's smaps_rollup, after the pods' starts",
    )
    used = after.cpu_s - before.cpu_s
    yield Result(
        topic="rest",
        name=f"processor time of the agent at rest with {count} shares",
        seen=f"{used:.2f} s in {seconds:.0f} s",
        value=used / seconds * 100,
        unit="% of a core",
        target=1,
        samples=1,
        method=f"user and system time of all its threads, from {settle_s} s after the last pod's"
        " start",
    )
