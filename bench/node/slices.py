# SPDX-License-Identifier: Apache-2.0
"""How long a pod takes from its creation to its program, where a MIG slice is cut for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final

from stories import GPU, part
from testbed.api import ApiError, Json
from testbed.images import BUSYBOX
from testbed.pods import container, pod
from testbed.waiting import wait_until

from bench.harness.options import Options
from bench.harness.quantiles import quantile
from bench.harness.results import Result
from bench.node.rig import MIB, NodeRig, two

_CONFIG: Final = """\
version: v1
allotment:
  devices:
    - {match: {index: [0]}, mode: mig, mig: {keep: 0s}}
    - {mode: soft}
"""
_TARGET_MS: Final = 500
# The kubelet reports a container up to a second after it runs, so the program reports it itself.
_COMMAND: Final = ("sh", "-c", "cat /proc/uptime; exec sleep 10000")
_METHOD: Final = (
    "pods one after the other, of each kind in turn, on a node that is otherwise empty; from before"
    " the request to the API server to the program's own first reading of /proc/uptime; placed by"
    " kube-scheduler alone, so that the agent chooses the slice; a 1g.10gb of an H100 that stays in"
    " MIG mode, cut anew for each pod: the simulated driver's calls take a millisecond in all"
)


def slice_pods(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Start pods without a GPU, with a part of one, and with a fresh slice."""
    kinds: Mapping[str, tuple[dict[str, str] | None, dict[str, str]]] = {
        "plain": (None, {}),
        "soft": (part(f"{700 * MIB}"), {"allotment.dev/mode": "soft"}),
        "slice": ({GPU: "1"}, {"allotment.dev/mig-profile": "1g.10gb"}),
    }
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    with rig.agent(_CONFIG, simulated="h100-80gb:2") as node:
        # One slice stays all the time, so that the GPU stays in MIG mode.
        rig.create([_body("stays", *kinds["slice"])])
        rig.wait_ready(["stays"])
        for number in range(2 if rig.is_quick else 12):
            for kind, (limits, annotations) in kinds.items():
                name = f"{kind}-{number:02}"
                took[kind].append(_started(rig, _body(name, limits, annotations)) * 1000)
                rig.pods.delete(name)
                wait_until(lambda: len(node.shares()) == 1, "end of the share", timeout_s=30)
                time.sleep(0.5)  # what the runtime does after a pod's end
    slices = took["slice"]
    yield Result(
        topic="slices",
        name="a pod's creation to its program, on a fresh MIG slice",
        beside=f"{two(took['plain'])} (a soft share: {two(took['soft'])})",
        seen=two(slices),
        value=quantile(slices, 0.99),
        unit="ms",
        target=_TARGET_MS,
        samples=len(slices),
        method=f"{_METHOD}; p50 / p99 of {len(slices)}",
    )


def _body(name: str, limits: dict[str, str] | None, annotations: dict[str, str]) -> Json:
    return pod(name, container(_COMMAND, image=BUSYBOX, limits=limits), annotations=annotations)


def _started(rig: NodeRig, body: Json) -> float:
    """Create a pod; seconds until its program ran."""
    name = body["metadata"]["name"]
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    rig.pods.create(body)

    def said() -> float | None:
        try:
            return float(rig.pods.logs(name).split()[0])
        except (ApiError, IndexError, ValueError):  # not yet
            return None

    # Not often: the asking is work for the kubelet that is measured.
    first = wait_until(said, f"first word of {name}", timeout_s=60, every_s=0.3)
    return float(first) - began
