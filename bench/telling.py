# SPDX-License-Identifier: Apache-2.0
"""What --verbose shows of a scene: who had what, what nobody had, and how often turns changed."""

from __future__ import annotations

import sys

from disturbances import load_average
from grounds import Ground
from scenes import Recording


def tell(ground: Ground, recording: Recording, from_ns: int, to_ns: int) -> None:
    """Write a scene's diagnostics to stderr, one line a part and one a GPU."""
    if not ground.verbose:
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
            last = len(latencies) - 1
            waits = "latency " + " ".join(
                f"p{percentile} {latencies[round(percentile / 100 * last)] / 1e6:.2f}"
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
        print(
            f"    gpu {gpu} idle {idle:.2f} %, {turns:.0f} leases/s (load {load_average():.1f})",
            file=sys.stderr,
        )
