# SPDX-License-Identifier: Apache-2.0
"""What does a compute limit add to a launch that has nobody to wait for?"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

from asked import Asked
from findings import Finding
from grounds import Ground, Terms

_KERNEL_NS = 5000
_BURST = 16


def launching(ground: Ground, asked: Asked) -> Iterator[Finding]:
    """Measure launches through the shim and past it, in pairs, alone on a device."""
    for terms, name in (
        (Terms(compute="50:100"), "no ceiling"),
        (Terms(compute="90"), "a ceiling of 90"),
    ):
        done = subprocess.run(
            [
                *ground.shared(terms, 0, "launching"),
                *ground.program("launches", _KERNEL_NS, _BURST, asked.pairs),
            ],
            env=ground.outside(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        pairs, calls = (json.loads(line) for line in done.stdout.splitlines()[1:])
        yield Finding(
            question="launches",
            name=f"added to a launch, p50: {name}",
            without=f"{pairs['bare']['p50']:.0f} / {pairs['bare']['p99']:.0f} ns",
            seen=f"{pairs['wrapped']['p50']:.0f} / {pairs['wrapped']['p99']:.0f} ns",
            reached=pairs["added"]["p50"],
            unit="ns",
            target=300.0,
            samples=pairs["samples"],
            method="one process alone on a GPU; bursts of 16 launches of 5us kernels on an idle "
            "stream, through the shim and past it in alternating order in one process; p50 / p99; "
            "the median of the differences within pairs, per launch, with the shim's event records",
        )
        with_calls = calls["with_system_calls"]
        if with_calls >= 0:
            yield Finding(
                question="system calls",
                name=f"launches with a system call on their way: {name}",
                without="",
                seen=f"{with_calls} of {calls['launches']}",
                reached=with_calls / calls["launches"] * 100,
                unit="%",
                target=1.0,
                samples=calls["launches"],
                method="counted by the kernel (PR_SET_SYSCALL_USER_DISPATCH), the same bursts; "
                "the common path has none when only rare launches have one",
            )
