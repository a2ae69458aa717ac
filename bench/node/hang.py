# SPDX-License-Identifier: Apache-2.0
"""How soon the kubelet knows the other GPUs while one hangs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Final

import grpc
from stories import NVIDIA, NodeAgent
from testbed.waiting import wait_until

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from bench.harness.options import Options
from bench.harness.results import Result
from bench.node.rig import PLAIN, NodeRig, two, watching

SIXTEEN: Final = "h100-80gb:16"
_LOOK_S: Final = 0.005


def hang(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Measure when 15 of 16 GPUs are listed while one hangs in every call, and later stalls."""
    rounds = 1 if rig.is_quick else 5
    calm: list[_Start] = []
    hung: list[_Start] = []
    stalls: list[float] = []
    for number in range(rounds):
        calm.append(_started(rig, hangs=False)[0])
        start, waits = _started(rig, hangs=True, then=number == rounds - 1)
        hung.append(start)
        stalls += waits
    for name, key, target in (
        ("listed to the kubelet", "listed", 2.0),
        ("allocatable in the node's object", "allocatable", None),
    ):
        without = [getattr(each, key) for each in calm]
        seen = [getattr(each, key) for each in hung]
        yield Result(
            topic="hang",
            name=f"16 GPUs, one hangs in every call: the others are {name}",
            beside=f"{statistics.median(without):.2f} s (16, none hangs)",
            seen=f"{statistics.median(seen):.2f} s",
            value=max(seen),
            unit="s",
            target=target,
            samples=rounds,
            method="from the start of the agent's process, the start of Python included; calls on"
            " the GPU take an hour; agents with and without it in turn; median, and the worst."
            " The testbed's kubelet writes the node's status each second, the usual one each 10 s",
        )
    yield Result(
        topic="stalls",
        name="the same, a second one begins to hang: longest `Allocate` and `PreStartContainer`",
        seen=f"p50 / p99 {two(stalls)}",
        value=max(stalls),
        unit="ms",
        target=50,
        samples=len(stalls),
        method="from the agent's start on, a call each 20 ms by a client of the socket, of a"
        " restarting container in turn with a new one; the second hangs after a third of the time",
    )


class _Start:
    """When what was there after an agent's start, in seconds."""

    def __init__(self) -> None:
        self.listed = 0.0
        self.allocatable = 0.0


def _started(rig: NodeRig, *, hangs: bool, then: bool = False) -> tuple[_Start, list[float]]:
    """Start an agent on a node where a GPU hangs, or none; and ask it things, if `then`."""
    cluster = rig.cluster
    node = NodeAgent(cluster, simulated=SIXTEEN)
    cluster.allow_agent()
    gpus = node.gpus()
    node.configure(PLAIN)
    if hangs:
        node.fault("--gpu", gpus[3], "--hang", "1h")
    wanted = 15 if hangs else 16
    found = _Start()
    began = time.monotonic()
    try:
        process = cluster.start_agent(
            *("--config-file", str(node.config), "--metrics-address", "0.0.0.0:9446"),
            simulated=SIXTEEN,
        )
        node.process = process
        with watching(lambda: rig.allocatable(NVIDIA)) as seen:
            _wait_listed(rig, wanted)
            found.listed = time.monotonic() - began
            wait_until(lambda: seen.get(wanted), "allocatable GPUs", timeout_s=60, every_s=0.02)
            found.allocatable = seen[wanted] - began
        rig.log(
            f"{'one hangs' if hangs else 'none hangs'}: listed {found.listed:.2f} s,"
            f" allocatable {found.allocatable:.2f} s"
        )
        waits = _asked_meanwhile(rig, node, gpus) if then else []
    finally:
        rig.empty(node)
        node.fault("--clear")
        node.close()
    return found, waits


def _wait_listed(rig: NodeRig, wanted: int) -> None:
    """Listen as the kubelet does, until so many healthy GPUs are listed."""
    socket = rig.socket(NVIDIA)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not socket.exists():
            time.sleep(_LOOK_S)
            continue
        with rig.call(NVIDIA) as channel:
            listen = channel.unary_stream(
                services.LIST_AND_WATCH.path,
                request_serializer=messages.Empty.SerializeToString,
                response_deserializer=messages.ListAndWatchResponse.FromString,
            )
            try:
                for listing in listen(messages.Empty(), timeout=30):
                    if sum(each.health == "Healthy" for each in listing.devices) >= wanted:
                        return
            except grpc.RpcError:  # the socket of the agent before it
                time.sleep(_LOOK_S)
    message = f"{wanted} GPUs were not listed within 60 s"
    raise RuntimeError(message)


def _asked_meanwhile(rig: NodeRig, node: NodeAgent, gpus: list[str]) -> list[float]:
    """Call the agent all the time, let another GPU hang; return the time of each call (ms)."""
    seconds = 6 if rig.is_quick else 30
    body = rig.body("held", {NVIDIA: "1"})
    rig.create([body])
    rig.wait_ready(["held"])
    held = next(each.ids for each in node.entries() if each.resource == NVIDIA)
    other = next(each for each in gpus[4:] if each not in held)
    waits = []
    with rig.call(NVIDIA) as channel:
        allocate = services.ALLOCATE.on(channel)
        prepare = services.PRE_START.on(channel)
        ask = messages.AllocateRequest()
        ask.container_requests.add(devices_ids=[gpus[0]])
        again = messages.PreStartContainerRequest(devices_ids=held)
        began = time.monotonic()
        has_more = False
        while time.monotonic() - began < seconds:
            if not has_more and time.monotonic() - began > seconds / 3:
                node.fault("--gpu", other, "--hang", "1h")
                has_more = True
            started = time.perf_counter()
            allocate(ask, timeout=30)
            between = time.perf_counter()
            prepare(again, timeout=30)
            waits += [(between - started) * 1000, (time.perf_counter() - between) * 1000]
            time.sleep(0.02)
    # It has been noticed, which is what could have cost time.
    wait_until(lambda: rig.registered(NVIDIA) == 14, "a second sick GPU", timeout_s=30)
    return waits
