# SPDX-License-Identifier: Apache-2.0
"""A preemption by itself: how long it takes, and how long it blocks other requests.

kube-scheduler asks about a tenth of the nodes at once: here those are full of small shares, eight
on each of eight GPUs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

from allotment.kube.cluster_feed import to_cluster_pod
from allotment.model.clusters import (
    ClusterPod,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.pods import PodUid
from allotment.model.structs import replace
from allotment.scheduler.core.nominations import NominatedCluster
from allotment.scheduler.extender.preemption import Preemption
from allotment.scheduler.extender.wire import read_preemption
from allotment.scheduler.supervise import freeze_objects
from bench.harness.options import Options
from bench.harness.quantiles import quantile, summarize
from bench.harness.results import Result
from bench.harness.runner import NoRig
from bench.scheduler.cluster_shape import GIB, Scale, nodes

_NODES = 1213
_ASKED = 121
_ON_EACH = 8
_WHOLE_MS = 100.0
_TARGET_MS = 20.0
"""Of the loop: a Lease is renewed every second, and a webhook waits for five."""


def preemption(_rig: NoRig, options: Options) -> Iterator[Result]:
    """Preempt for all GPUs of a node, for one, and where no node has enough lower priorities."""
    scale = Scale.chosen(options)
    for gpus, is_hopeless, what in (
        (8, False, "8 GPUs"),
        (1, False, "1 GPU"),
        (8, True, "8 GPUs, in vain"),
    ):
        yield from _preemption(scale, gpus=gpus, is_hopeless=is_hopeless, what=what)


def _preemption(scale: Scale, *, gpus: int, is_hopeless: bool, what: str) -> Iterator[Result]:
    cluster = NominatedCluster(node_policies=(scale.policy,), device_policies=(scale.policy,))
    pods: dict[str, ClusterPod] = {}
    inventories = nodes(_NODES)
    asked = [each for each in inventories if len(each.devices) == 8][:_ASKED]
    for each in inventories:
        cluster.put(each)
    for each in asked:
        _fill(cluster, pods, each, is_hopeless=is_hopeless)
    body = _body(gpus, asked)
    heard = to_cluster_pod(read_preemption(body).pod)
    pods[heard.uid] = heard
    freeze_objects()  # as the service does
    took, held = [], []
    for _ in range(max(3, scale.of(20))):
        preemption = Preemption(cluster, pods=pods.get)
        seconds, longest, victims = asyncio.run(_asked(preemption, body))
        took.append(seconds * 1000)
        held.append(longest * 1000)
        preemption.nominations.gone(heard.uid)
        assert victims == (0 if is_hopeless else gpus * _ON_EACH), victims
    name = f"preempt, {what}, {_ASKED} nodes of {8 * _ON_EACH} shares"
    yield Result(
        name=f"{name}: p50",
        value=quantile(took, 0.5),
        unit="ms",
        summary=summarize(took),
        target=_WHOLE_MS,
        samples=len(took),
    )
    yield Result(
        name=f"{name}: others wait at most",
        value=max(held),
        unit="ms",
        summary=summarize(held),
        target=_TARGET_MS,
        samples=len(held),
    )


async def _asked(preemption: Preemption, body: bytes) -> tuple[float, float, int]:
    """Return how long it took, how long the loop was held at most, and how many are to end."""
    longest = 0.0
    began = last = time.perf_counter()
    asking = asyncio.create_task(preemption.preempt(body))
    while not asking.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    answer = json.loads(asking.result())["NodeNameToMetaVictims"]
    return last - began, longest, sum(len(each["Pods"]) for each in answer.values())


def _fill(
    cluster: NominatedCluster,
    pods: dict[str, ClusterPod],
    node: NodeInventory,
    *,
    is_hopeless: bool,
) -> None:
    for device in node.devices:
        for number in range(_ON_EACH):
            uid = PodUid(f"{device.uuid}-{number}")
            part = PlacedContainer(
                name="main", devices=(PlacedDevice(device.uuid, 10 * GIB, 1200),)
            )
            booking = PodBooking(uid=uid, node=node.name, cpu_milli=100, containers=(part,))
            cluster.book(booking)
            pod = ClusterPod(uid=uid, namespace="bench", name=uid, node=node.name, booking=booking)
            stays = is_hopeless and number == 0
            pods[uid] = replace(pod, priority=1000) if stays else pod


def _body(gpus: int, asked: list[NodeInventory]) -> bytes:
    """What kube-scheduler sends: as many victims as its sums need."""
    resources = {"limits": {"allotment.dev/gpu": str(gpus)}}
    pod = {
        "metadata": {"name": "wants", "namespace": "bench", "uid": "u", "resourceVersion": "5"},
        "spec": {"priority": 100, "containers": [{"name": "main", "resources": resources}]},
    }
    victims = {
        each.name: {
            "Pods": [{"UID": f"{each.devices[n % 8].uuid}-{1 + n % 7}"} for n in range(8)],
            "NumPDBViolations": 0,
        }
        for each in asked
    }
    return json.dumps({"Pod": pod, "NodeNameToMetaVictims": victims}).encode()
