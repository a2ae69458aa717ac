# SPDX-License-Identifier: Apache-2.0
"""How soon a node's ResourceSlices follow: they are deleted, a GPU is sick, and well again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from claims import API, DRIVER, claim, claiming, install_classes, published, share
from testbed.waiting import wait_until

from allotment.devices.faults import set_fault
from allotment.devices.simulated import machine_path, reset_gpu
from bench.harness.options import Options
from bench.harness.quantiles import quantile, summarize
from bench.harness.results import Result
from bench.node.rig import SLEEP, SOFT, NodeRig, two

GPUS: Final = "h100-80gb:8"
_XID: Final = 79
_HEALED_S: Final = 1.0
_TAINTED_S: Final = 2.0


def pool(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Delete the slices, and break and mend a GPU, with the agent's own intervals."""
    # A GPU that fails again has to pass more tests: each round takes another one, and none the
    # first, which has the shares.
    gpus = range(7, 5 if rig.is_quick else 0, -1)
    healed, tainted, cleared = [], [], []
    install_classes(rig.cluster)
    with rig.agent(SOFT, simulated=GPUS) as node:
        devices = wait_until(lambda: published(rig.cluster), "slices", explain=node.log_tail)
        machine = machine_path(rig.cluster.node.path("/run/allotment"), GPUS)
        for gpu in gpus:
            fields = {"fieldSelector": f"spec.driver={DRIVER}"}
            rig.cluster.api.delete(f"{API}/resourceslices", **fields)
            healed.append(_until(lambda: len(published(rig.cluster)) == len(devices)))
            # A share begins: the agent has just published, and gathers what comes next.
            name = f"pool-{gpu}"
            claim(rig.pods, name, share(memory="1Gi"))
            rig.pods.create(claiming(name, SLEEP, name))
            rig.pods.wait_ready(name)
            set_fault(machine, gpu, xid=_XID)
            tainted.append(_until(lambda: _has_taint(rig)))
            reset_gpu(machine, gpu)
            cleared.append(_until(lambda: bool(published(rig.cluster)) and not _has_taint(rig)))
    yield _result("all slices are deleted, until all are there again", healed, _HEALED_S)
    yield _result(f"XID {_XID}, until the GPU's devices have a taint", tainted, _TAINTED_S)
    yield _result("the GPU's reset, until they have none", cleared)


def _has_taint(rig: NodeRig) -> bool:
    return any(
        each["key"] == "allotment.dev/unusable"
        for device in published(rig.cluster)
        for each in device.get("taints", ())
    )


def _until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    wait_until(condition, "change of the pool", every_s=0.02)
    return time.monotonic() - began


def _result(name: str, values: list[float], target: float | None = None) -> Result:
    return Result(
        topic="pool",
        name=name,
        seen=two(values, "s"),
        value=quantile(values, 0.99),
        unit="s",
        summary=summarize(values),
        target=target,
        samples=len(values),
        method=f"{GPUS}; the usual intervals of the agent; a pod with a claim starts right before"
        " the XID; a client of the API server lists the slices every 20 ms; p50 / p99",
    )
