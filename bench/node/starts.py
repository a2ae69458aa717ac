# SPDX-License-Identifier: Apache-2.0
"""What the node agent adds to the start of a container: its two calls, and fifty pods at once."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Final

from stories import GPU, NodeAgent, part

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.ledger import read
from bench.harness.options import Options
from bench.harness.quantiles import quantile
from bench.harness.results import Result
from bench.node.rig import MIB, SOFT, NodeRig, two

GPUS: Final = "a100-80gb:8"
CROWD: Final = 60
_ALLOCATE_S: Final = "kubelet_device_plugin_alloc_duration_seconds"


# ---- calls ---------------------------------------------------------------------------------------


def plugin_calls(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Ask for the two calls with 60 pods on the node: by the kubelet, and by a client of ours."""
    count = 6 if rig.is_quick else CROWD
    with rig.agent(SOFT, simulated=GPUS) as node:
        rig.crowd(node, count)
        seen_by_kubelet, preparing = _one_by_one(rig, node)
        allocated, repeated = _directly(rig, node)
    where = f"with {count} pods on the node"
    yield _figure("Allocate", f"`Allocate`, {where}: as the kubelet sees it", seen_by_kubelet, 5)
    yield _figure("calls", f"`Allocate`, {where}: a client of the socket", allocated, 5)
    yield _figure("PreStartContainer", f"`PreStartContainer`, {where}: a new share", preparing, 50)
    yield _figure("calls", f"`PreStartContainer`, {where}: a restart, by the socket", repeated, 50)


_METHODS: Final = {
    "Allocate": "pods are created one after the other, beside those 60; how much the sum"
    " of the kubelet's kubelet_device_plugin_alloc_duration_seconds grows with each is the time of"
    " its call",
    "PreStartContainer": "the same pods, by allotment_agent_prepare_seconds: from the call to the"
    " share and its CDI spec being there",
    "calls": "a gRPC client on the front's own socket, one call at a time; a restart finds the"
    " share made",
}


def _figure(question: str, name: str, values: list[float], target: float | None = None) -> Result:
    return Result(
        topic=question,
        name=name,
        seen=two(values),
        value=quantile(values, 0.99),
        unit="ms",
        target=target,
        samples=len(values),
        method=f"{_METHODS[question]}; p50 / p99 of {len(values)}",
    )


def _one_by_one(rig: NodeRig, node: NodeAgent) -> tuple[list[float], list[float]]:
    """Start pods in turn; milliseconds of each one's calls."""
    found: tuple[list[float], list[float]] = ([], [])
    batches, size = (1, 4) if rig.is_quick else (5, 20)
    for batch in range(batches):
        names = [f"one-{batch}-{number:02}" for number in range(size)]
        before = _sums(rig, node)
        for number, name in enumerate(names):
            rig.create([rig.body(name, part(f"{(700 + number) * MIB}"))])
            rig.pods.wait_ready(name)
            after = _sums(rig, node)
            for values, then, now in zip(found, before, after, strict=True):
                values.append((now - then) * 1000)
            before = after
            # Not beside the bench's own reading, which is a lot of work for the kubelet.
            time.sleep(0.3)
        # Nor beside the ends of pods, which are work for the runtime.
        rig.pods.delete(*names)
        time.sleep(2)
    assert node.figure("refusals") == 0
    for what, values in zip(("kubelet", "prepare"), found, strict=True):
        longest = " ".join(f"{value:.3g}" for value in sorted(values)[-8:])
        rig.log(f"{what}: mean {statistics.mean(values):.3g}, longest {longest} ms")
    return found


def _sums(rig: NodeRig, node: NodeAgent) -> tuple[float, float]:
    return (
        rig.kubelet_figure(f"{_ALLOCATE_S}_sum", GPU),
        node.figure("prepare_seconds_sum"),
    )


def _directly(rig: NodeRig, node: NodeAgent) -> tuple[list[float], list[float]]:
    # Pods that stay, and not those of the question before, which are going.
    there = {each.owner.uid for each in node.shares() if each.owner and "/s" in each.name}
    held = [each.ids for each in node.entries() if each.pod in there]
    count = 50 if rig.is_quick else 1000
    with rig.call(GPU) as channel:
        allocate = services.ALLOCATE.on(channel)
        prepare = services.PRE_START.on(channel)
        # An answer is only a name: these calls allocate nothing.
        ask = messages.AllocateRequest()
        ask.container_requests.add(devices_ids=["share::0"])
        allocated, repeated = [], []
        for number in range(count):
            started = time.perf_counter()
            allocate(ask, timeout=5)
            allocated.append((time.perf_counter() - started) * 1000)
            ids = held[number % len(held)]
            started = time.perf_counter()
            prepare(messages.PreStartContainerRequest(devices_ids=ids), timeout=30)
            repeated.append((time.perf_counter() - started) * 1000)
    return allocated, repeated


# ---- fifty at once -------------------------------------------------------------------------------


def many_pods(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Ask how much longer fifty pods take when each has a share of a GPU."""
    count, rounds = (8, 1) if rig.is_quick else (50, 4)
    bare: list[float] = []
    shared: list[float] = []
    wrong = 0
    with rig.agent(SOFT, simulated=GPUS) as node:
        _round(rig, node, {f"warm-{number}": number for number in range(4)}, has_shares=True)
        before = _buckets(node)
        for number in range(rounds):
            # Each kind goes first as often: what the node remembers of the last round is fair.
            for has_shares in (False, True) if number % 2 == 0 else (True, False):
                names = {f"r{number}-{each:02}": each for each in range(count)}
                seconds, mistakes = _round(rig, node, names, has_shares=has_shares)
                (shared if has_shares else bare).append(seconds)
                wrong += mistakes
        during = _buckets(node)
        refusals = node.figure("refusals")
    ratio = statistics.median(shared) / statistics.median(bare)
    method = (
        f"{rounds} rounds of each kind in turn, of the same image and command, on an empty node;"
        " from the first request to the API server until all are Ready; ratio of the medians"
    )
    yield Result(
        topic="at once",
        name=f"{count} pods created at once, until all are Ready",
        beside=_seconds(bare),
        seen=_seconds(shared),
        value=ratio,
        unit="x",
        target=1.15,
        samples=rounds,
        method=method,
    )
    yield Result(
        topic="identities",
        name="of these, pods whose container has another's share, or none; refusals",
        seen=f"{wrong} of {count * rounds}; {refusals:.0f}",
        value=wrong + refusals,
        unit="pods",
        target=0,
        samples=count * rounds,
        method="each pod asks for an amount that no other has; compared with the policy that its"
        " own process sees at its place, and with its share's record",
    )
    bound, mean = _crowded(before, during)
    yield Result(
        topic="crowded",
        name="`PreStartContainer` of these, while all of them start",
        seen=f"mean {mean * 1000:.3g} ms",
        value=bound * 1000,
        unit="ms",
        target=None,
        samples=count * rounds,
        method="allotment_agent_prepare_seconds over all these rounds; worst is the histogram's"
        " bound that holds 99 of 100; the processors are busy with the kubelet, the runtime and"
        " the containers' own starts",
    )


def _seconds(values: list[float]) -> str:
    listed = " ".join(f"{value:.1f}" for value in values)
    return f"{statistics.median(values):.1f} s ({listed})"


def _round(
    rig: NodeRig, node: NodeAgent, names: Mapping[str, int], *, has_shares: bool
) -> tuple[float, int]:
    """Start pods at once and end them; seconds until all were Ready, and how many were wrong."""
    sizes = {name: (512 + number) * MIB for name, number in names.items()}
    limits = {name: part(f"{size}") if has_shares else None for name, size in sizes.items()}
    bodies = [rig.body(name, limits[name]) for name in names]
    before = rig.processors(node)
    started = time.monotonic()
    rig.create(bodies)
    found = rig.wait_ready(list(names))
    seconds = time.monotonic() - started
    after = rig.processors(node)
    used = " ".join(f"{name} {after[name] - before[name]:.1f}" for name in after)
    rig.log(f"{len(names)} {'shares' if has_shares else 'bare'} {seconds:.2f} s; CPU s: {used}")
    wrong = 0
    if has_shares:
        inside = rig.seen_inside(found)
        shares = node.cluster.node.path("/run/allotment/shares")
        records = {each.name.split("/")[1]: each for each in node.shares(rig.pods.namespace)}
        for name, size in sizes.items():
            record = records.get(name)
            folder = shares / (record.id if record else "")
            is_right = (
                record is not None
                and record.devices[0].memory_bytes == size
                and read(folder).policy.devices[0].memory_limit == size
                and (folder / "policy").read_bytes() == inside[name]
            )
            wrong += not is_right
    rig.empty(node)
    # The kubelet and the runtime still clean up after pods that are gone.
    time.sleep(1 if rig.is_quick else 4)
    return seconds, wrong


def _buckets(node: NodeAgent) -> dict[float, float]:
    """Read the histogram: calls up to each bound, and under 0 the sum of seconds."""
    found: dict[float, float] = {}
    for line in (node.http("/metrics") or "").splitlines():
        if line.startswith("allotment_agent_prepare_seconds_sum"):
            found[0.0] = float(line.rpartition(" ")[2])
        elif line.startswith("allotment_agent_prepare_seconds_bucket"):
            bound = re.search(r'le="([^"]+)"', line)
            assert bound is not None
            found[float(bound[1])] = float(line.rpartition(" ")[2])
    return found


def _crowded(before: Mapping[float, float], after: Mapping[float, float]) -> tuple[float, float]:
    """Return the bound that holds 99 of 100 calls, and the mean; seconds."""
    grown = {bound: value - before.get(bound, 0.0) for bound, value in after.items()}
    calls_made = grown[math.inf]
    bound = min(each for each in grown if each and grown[each] >= 0.99 * calls_made)
    return bound, grown[0.0] / calls_made
