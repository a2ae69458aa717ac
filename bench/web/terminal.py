# SPDX-License-Identifier: Apache-2.0
"""`allot inspect` of the cluster of the page, over HTTP, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cluster_page_twin import large
from served_cluster import served_http

from bench.harness.options import Options
from bench.harness.quantiles import summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig

_NODES: Final = 1200
_GPUS: Final = 8
_TARGET_MS: Final = 1500.0
_KINDS: Final = {"a line for each node": (), "as JSON": ("-o", "json")}
_OTHERS: Final = [{"manager": "kubelet", "fieldsV1": {f"f:field-{at}": {} for at in range(150)}}]
"""About as much as a pod has that `allot inspect` does not read."""


def inspect(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Run it again and again, its output into nothing."""
    nodes, runs = options.pick(_NODES, 20), options.pick(5, 3)
    made, pods = large(nodes, _GPUS)
    for each in pods:
        each["metadata"]["managedFields"] = _OTHERS
    with (
        tempfile.TemporaryDirectory(prefix="allotment-bench-") as work,
        served_http(Path(work)) as served,
    ):
        served.texts = {"/api/v1/nodes": _listed(made), "/api/v1/pods": _listed(pods)}
        size = sum(map(len, served.texts.values())) / 1e6
        for kind, words in _KINDS.items():
            command = ("inspect", "--kubeconfig", str(served.kubeconfig), *words)
            yield _result(kind, command, runs, f"{size:.0f} MB from the API server")


def _listed(items: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"metadata": {}, "items": items})


def _result(kind: str, command: Sequence[str], runs: int, what: str) -> Result:
    walls, used = [], []
    for _ in range(runs):
        began = time.perf_counter()
        running = subprocess.Popen(
            [sys.executable, "-m", "allotment", *command], stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        if running.returncode:
            raise RuntimeError(f"allot {command[0]}: status {running.returncode}")
        walls.append(1000 * (time.perf_counter() - began))
        used.append(1000 * (usage.ru_utime + usage.ru_stime))
    summary = summarize(used)
    wall = summarize(walls)
    return Result(
        name=f"`allot inspect`, {kind}",
        topic="inspect",
        unit="ms",
        value=summary.p50,
        seen=f"{summary.p50:.0f} / {summary.p99:.0f} ms, wall clock {wall.p50:.0f} ms",
        summary=summary,
        samples=runs,
        target=_TARGET_MS,
        method=f"processor time of the whole command, {what}; p50 / p99, `figure` is the median",
    )
