# SPDX-License-Identifier: Apache-2.0
"""The trace of a pod's start, as a collector receives it from the agent of a real node."""

from __future__ import annotations

from spans import collector
from stories import TWO_GPUS, NodeAgent, burn, part
from testbed.cluster import Cluster
from testbed.pods import Pods, container, pod
from testbed.waiting import wait_until

from allotment.metrics.tracing import trace_ids

CONFIG = "version: v1\nallotment: {devices: [{mode: soft}]}\n"
STEPS = ("Allocate", "PreStartContainer", "program start", "first launch", "pod start")


def test_a_collector_gets_each_step_from_allocate_to_the_first_launch(
    cluster: Cluster, pods: Pods
) -> None:
    node = NodeAgent(cluster, simulated=TWO_GPUS)
    link = cluster.node.link
    try:
        with collector(address=link.outer) as received:
            node.start(CONFIG, environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
            })  # fmt: skip
            computes = burn("1Gi", seconds=1000)
            pods.create(pod("traced", container(computes, limits=part("4Gi", compute=30))))
            wait_until(
                lambda: "allotment-agent: pod start" in received.spans,
                "the whole trace",
                explain=lambda: f"{sorted(received.spans)}\n{node.log_tail()}",
            )
            spans = {name: received.spans[f"allotment-agent: {name}"] for name in STEPS}
    finally:
        node.close()
    trace, first = trace_ids(pods.get("traced")["metadata"]["uid"])
    assert {int.from_bytes(span.trace_id) for span in spans.values()} == {trace}
    *parts, whole = spans.values()
    assert int.from_bytes(whole.span_id) == first
    assert {int.from_bytes(span.parent_span_id) for span in parts} == {first}
    times = [whole.start_time_unix_nano]
    for span in parts:
        times += [span.start_time_unix_nano, span.end_time_unix_nano]
    # The program's start lies between the share and the first launch, which lies at the end.
    assert times == sorted(times)
    assert whole.end_time_unix_nano == times[-1]
