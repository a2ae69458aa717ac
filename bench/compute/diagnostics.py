# SPDX-License-Identifier: Apache-2.0
"""What --verbose shows of a scene: GPU time of each part, idle time, and leases a second."""

from __future__ import annotations

import os
import sys

from bench.compute.rig import Rig
from bench.compute.scene import Recording
from bench.harness.quantiles import quantile


def show(rig: Rig, recording: Recording, from_ns: int, to_ns: int) -> None:
    """Write a scene's diagnostics to stderr, one line a part and one a GPU."""
    if not rig.verbose:
        return
    for number, part in enumerate(recording.parts):
        terms = "bare" if part.terms is None else " ".join(part.terms.options())
        percent = recording.percent(number, from_ns=from_ns, to_ns=to_ns)
        charged = max(int(each.get("charged_ns", 0)) for each in recording.answers[number])
        truth = recording.true_ns(number)
        ledger = f"ledger {(charged / truth - 1) * 100:+.2f} %" if charged and truth else ""
        gaps = recording.answers[number][0].get("gap_ns")
        waits = ""
        if gaps:
            waits = "ends apart p50 {p50:.2f} p99 {p99:.2f} max {max:.2f} ms".format(
                **{name: gaps[name] / 1e6 for name in ("p50", "p99", "max")}
            )
        latencies = sorted(recording.answers[number][0].get("latencies_ns", ()))
        if latencies:
            waits = "latency " + " ".join(
                f"p{percentile} {quantile(latencies, percentile / 100) / 1e6:.2f}"
                for percentile in (50, 90, 95, 98, 99, 100)
            )
        print(
            f"    gpu {part.gpu} {part.name or number:<12} {percent:6.2f} %  {waits}  {ledger}"
            f"  [{terms}]",
            file=sys.stderr,
        )
    for gpu in sorted({part.gpu for part in recording.parts}):
        idle = recording.idle_percent(gpu, from_ns=from_ns, to_ns=to_ns)
        turns = recording.handovers_per_second(gpu, from_ns=from_ns, to_ns=to_ns)
        load = os.getloadavg()[0]
        print(
            f"    gpu {gpu} idle {idle:.2f} %, {turns:.0f} leases/s (load {load:.1f})",
            file=sys.stderr,
        )
