# SPDX-License-Identifier: Apache-2.0
"""The figures of the dashboards beside what pods of five modes say that they use.

A real Prometheus scrapes the real agent. It takes some seconds, and is asked for their middle.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import pytest
from prometheus_server import MONITORING, Dashboard, Prometheus, Target, prometheus
from stories import GIB, GPU, NVIDIA, Burnt, NodeAgent, burn, burnt, node_agent, part
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

MACHINE: Final = "h100-80gb:5"
FOUR: Final = """\
version: v1
allotment:
  devices:
    - {match: {index: [0]}, mode: soft}
    - {match: {index: [1]}, mode: mps}
    - {match: {index: [2, 3]}, mode: exclusive}
    - {match: {index: [4]}, mode: mig, mig: {keep: 2s}}
"""
SLICED: Final = """\
version: v1
sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}
allotment:
  devices:
    - {match: {index: [0]}, mode: soft}
    - {mode: timeslice}
"""
"""Replicas of MPS would be another kind, of which a node has one."""
MODE: Final = "allotment.dev/mode"
MEMORY: Final = "30Gi"
"""So much that a context of half a GiB is less than the tolerance."""
KERNEL_S: Final = 0.005
TOLERANCE: Final = 0.02
BUSY_TOLERANCE: Final = 0.05
"""The driver's figure is of the last second, in which a busy machine may let a pod start late."""
DOOR: Final = "/run/door"

Json = dict[str, Any]


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[NodeAgent]:
    with node_agent(cluster, FOUR, simulated=MACHINE) as agent:
        yield agent


@pytest.fixture
def server(node: NodeAgent, tmp_path: Path) -> Iterator[Prometheus]:
    address = f"{node.cluster.address}:9446"
    with prometheus(tmp_path, [Target("allotment-agent", address, "node-1")]) as made:
        yield made


def working(name: str, limits: Mapping[str, str], annotations: Mapping[str, str]) -> Json:
    """A pod that computes until the door opens, says what it did, and stays."""
    program = " ".join(burn(MEMORY, "--kernel", "5ms", "--rate", "100", seconds=1000))
    waits = "until [ -e /door/open ]; do sleep 0.1; done"
    script = f"{program} & {waits}; kill -TERM $!; wait $!; exec sleep 1000"
    mounts = [{"name": "door", "mountPath": "/door"}]
    main = container(["sh", "-c", script], limits=limits, volumeMounts=mounts)
    volume = {"name": "door", "hostPath": {"path": DOOR}}
    return pod(name, main, annotations=annotations, volumes=[volume])


BODIES: Final = {
    "soft": working("soft", part("32Gi", compute=60), {MODE: "soft"}),
    "mps": working("mps", part("32Gi"), {MODE: "mps"}),
    "mig": working("mig", {GPU: "1"}, {"allotment.dev/mig-profile": "3g.40gb"}),
    "exclusive": working("exclusive", {NVIDIA: "1"}, {}),
    "timeslice": working("timeslice", {NVIDIA: "1"}, {}),
}


@pytest.mark.parametrize(
    ("config", "whole", "modes"),
    [(FOUR, 2, {"soft", "mps", "mig", "exclusive"}), (SLICED, 8, {"soft", "timeslice"})],
    ids=["four modes", "time slicing"],
)
def test_figures_are_what_the_pods_say(
    node: NodeAgent,
    server: Prometheus,
    pods: Pods,
    config: str,
    whole: int,
    modes: set[str],
) -> None:
    node.configure(config)
    node.cluster.wait_allocatable(NVIDIA, whole)
    door = node.cluster.node.path(DOOR)
    door.mkdir(exist_ok=True)
    (door / "open").unlink(missing_ok=True)
    for mode in modes:
        pods.create(json.loads(json.dumps(BODIES[mode])))
    mine = f'namespace="{pods.namespace}"'
    wait_until(
        lambda: (
            len(server.query(f"allotment_share_memory_used_bytes{{{mine}}} >= 30 * 2^30"))
            == len(modes)
        ),
        "memory of all pods",
        explain=lambda: "\n".join(map(pods.explain, modes)),
    )
    measured = f'allotment_share_gpu_seconds_total{{pod="soft", {mine}}}'
    busy = f"allotment_share_utilization_ratio{{{mine}}}"
    wait_until(
        lambda: len(server.query(f"{busy} > 0.4")) == len(modes - {"mig"}),
        "a second of kernels",
        explain=lambda: str(server.query(busy)),
    )
    begun = at = time.time()
    (first,) = server.query(measured)
    wait_until(lambda: server.query(f"{measured} > {first.value + 3}"), "more kernels")
    ended = time.time()
    (door / "open").touch()
    said = {name: burnt(pods, name) for name in modes}
    assert {name: each.errors for name, each in said.items()} == dict.fromkeys(modes, ())
    check_memory(server, pods.namespace, said, at)
    check_busy(server, pods.namespace, said, [at + second for second in range(int(ended - at))])
    check_time(server, pods.namespace, said["soft"], begun)


def dashboard(server: Prometheus, name: str, **choices: str) -> Dashboard:
    return Dashboard(MONITORING / "dashboards" / f"allotment-{name}.json", server, choices)


def check_memory(server: Prometheus, namespace: str, said: Mapping[str, Burnt], at: float) -> None:
    """Of each pod, each GPU, the namespace and the node."""
    board = dashboard(server, "share", namespace=namespace)

    def shown(title: str, ref: str = "A") -> dict[str, float]:
        panel = board.titled(title, "timeseries")
        return {each.labels["pod"]: each.value for each in board.ask(panel, ref, at=at)}

    told = {name: each.got_bytes for name, each in said.items()}
    assert shown("Memory in use") == pytest.approx(told, rel=TOLERANCE)
    limits = {name: each.total_bytes for name, each in said.items()}
    assert shown("Memory in use", "B") == pytest.approx(limits, rel=TOLERANCE)
    for title, figure in (("Memory limit", sum(limits.values())), ("Processes", len(said))):
        (value,) = board.ask(board.titled(title, "stat"), at=at)
        assert value.value == pytest.approx(figure, rel=TOLERANCE), title
    # Nothing counts the allocations of programs that have a GPU, or its time, as it is.
    counted = said.keys() - {"exclusive", "timeslice"}
    peaks = {name: told[name] / limits[name] for name in counted}
    assert shown("Peak as a part of the limit") == pytest.approx(peaks, rel=TOLERANCE)
    # Each pod has the name of its mode.
    shown_modes = {each.labels["mode"] for each in board.ask(board.titled("Shares"), at=at)}
    assert shown_modes == set(said)
    total = pytest.approx(sum(told.values()), rel=TOLERANCE)
    board = dashboard(server, "namespace", namespace=namespace)
    (value,) = board.ask(board.titled("Memory in use"), at=at)
    assert value.value == total
    board = dashboard(server, "fleet")
    (value,) = board.ask(board.titled("Memory", "timeseries"), "C", at=at)
    assert value.value == total
    board = dashboard(server, "node", node="node-1")
    by_gpu = board.ask(board.titled("Memory in use", "timeseries"), at=at)
    assert len(by_gpu) == 5
    assert sum(each.value for each in by_gpu) == total
    gpu = next(
        each.labels["gpu"]
        for each in server.query(
            f'allotment_share_memory_used_bytes{{namespace="{namespace}", pod="soft"}}', at
        )
    )
    board = dashboard(server, "gpu", gpu=gpu)
    (value,) = board.ask(board.titled("Memory by share"), at=at)
    assert value.value == pytest.approx(30 * GIB, rel=TOLERANCE)


def check_busy(
    server: Prometheus, namespace: str, said: Mapping[str, Burnt], times: Sequence[float]
) -> None:
    """Of each pod and its GPU, by the driver: the mean of some seconds. Of MIG nothing."""
    holders = server.query(f'allotment_gpu_pod_info{{namespace="{namespace}"}}', times[0])
    assert {each.labels["pod"] for each in holders} == set(said)
    for holder in holders:
        pod = holder.labels["pod"]
        board = dashboard(server, "gpu", gpu=holder.labels["gpu"])
        panel = board.titled("Busy by share")
        shown = [[board.ask(panel, ref, at=each) for each in times] for ref in "AB"]
        if pod == "mig":
            assert not any(chain(*shown))
            continue
        assert {each.labels["pod"] for one in shown[0] for each in one} == {pod}
        told = said[pod].kernels * KERNEL_S / said[pod].wall_seconds
        means = [fmean(each.value for (each,) in some) for some in shown]
        assert means == pytest.approx([told] * 2, rel=BUSY_TOLERANCE), pod
    # GPU time is measured in one mode alone, and has no number in the others.
    board = dashboard(server, "share", namespace=namespace)
    for title, pods in (("Busy", said.keys() - {"mig"}), ("GPU time", {"soft"})):
        panel = board.titled(title, "timeseries")
        assert {each.labels["pod"] for each in board.ask(panel, at=times[-1])} == pods


def check_time(server: Prometheus, namespace: str, said: Burnt, begun: float) -> None:
    """The panel's rate, times the time between its samples, and what there was before."""
    told = said.kernels * KERNEL_S
    series = f'allotment_share_gpu_seconds_total{{pod="soft", namespace="{namespace}"}}'
    wait_until(lambda: server.query(f"{series} >= {told * (1 - TOLERANCE)}"), "all of its time")
    now = time.time()
    board = dashboard(server, "share", namespace=namespace, pod="soft")
    board.values["__rate_interval"] = window = f"{int(now - begun)}s"
    (shown,) = board.ask(board.titled("GPU time", "timeseries"), at=now)
    samples = server.samples(series, window, now)
    (first, before), (last, _) = samples[0], samples[-1]
    assert before + shown.value * (last - first) == pytest.approx(told, rel=TOLERANCE)
