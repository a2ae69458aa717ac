# SPDX-License-Identifier: Apache-2.0
"""How long a DRA driver takes to prepare claims: one after the other, and many at once.

A client plays the kubelet at the driver's own socket: one call for each claim, as for a pod with
one claim. The claims are in a real API server, allocated by the bench in kube-scheduler's place.
NVIDIA's driver is asked in the same way, if its program is there.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import grpc.aio
from claims import (
    API,
    DRIVER,
    NVIDIAS,
    NVIDIAS_STATE,
    nvidias_driver,
    published,
    share,
    written,
)
from others_programs import program_from
from stories import NodeAgent
from testbed.api import Json
from testbed.waiting import wait_until

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.devices.mig_machine import MigDevice, MigMachine
from allotment.devices.nvml import Nvml
from allotment.devices.simulated import machine_path
from allotment.ledger import read
from allotment.model.pods import PodUid
from allotment.model.quantities import parse_bytes
from bench.harness.options import Options
from bench.harness.quantiles import quantile, summarize
from bench.harness.results import Result
from bench.node.rig import SOFT, NodeRig, two

GPUS: Final = "h100-80gb:8"
CROWD: Final = 60
BATCH: Final = 15
PROFILE: Final = "1g.10gb"
_SLICE: Final = "a fresh MIG slice"
_SLICES: Final = f"{BATCH} fresh MIG slices at once"
_METHOD: Final = (
    f"{GPUS}; a gRPC client at the driver's own socket calls `NodePrepareResources`, with one claim"
    " for each call; the claims are allocated in a real API server. Parts have an amount of memory"
    " and 5 % of the time; a whole GPU is in mode exclusive; slices are 1g.10gb, of GPUs without"
    " any other, so that MIG may have to be switched on. NVIDIA's driver has the feature gate"
    " DynamicMIG alone. A driver's first claim is not counted, the client's own time is; p50 / p99,"
    " and of calls at once the median until all are answered"
)
_MIG: Final = "version: v1\nallotment:\n  devices:\n    - {mode: mig, mig: {keep: 0s}}\n"
_PROGRAM: Final = "gpu-kubelet-plugin"
_SOFT_MS: Final = 20
_SLICE_MS: Final = 500
"""Beyond the driver's own calls."""
_CALL_S: Final = 45
"""The kubelet's patience."""
_AT_ONCE: Final = 8
_SERVICE: Final = services.DRA_SERVICES["v1.DRAPlugin"]
_PREPARE: Final = services.prepare_resources(_SERVICE)
_UNPREPARE: Final = services.unprepare_resources(_SERVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A claim of one device: its request, and what a scheduler allocates for it."""

    device: str
    request: Json
    more: Json = field(default_factory=dict)
    """Of the allocation's result."""


@dataclass(slots=True)
class Times:
    """What the calls of one kind took, in milliseconds, and which of them were refused."""

    calls: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    """Of all calls at once, from the first to the last."""
    refused: list[str] = field(default_factory=list)

    def add(self, other: Times) -> None:
        """Take over those of other calls."""
        self.calls += other.calls
        self.rounds += other.rounds
        self.refused += other.refused

    def seen(self) -> str:
        """Write both quantiles, and what went wrong."""
        at_once = f", all {quantile(self.rounds, 0.5):.0f} ms" if self.rounds else ""
        refused = f"; {len(self.refused)} refused: {self.refused[0]}" if self.refused else ""
        return two(self.calls) + at_once + refused


class Kubelet:
    """What a driver sees of a kubelet and a scheduler. A context manager."""

    def __init__(self, rig: NodeRig, driver: str) -> None:
        self._rig = rig
        self._driver = driver
        self._path = f"{API}/namespaces/{rig.pods.namespace}/resourceclaims"
        self._count = 0
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        folder = self._rig.cluster.node.path(f"/var/lib/kubelet/plugins/{self._driver}")
        (socket,) = wait_until(lambda: list(folder.glob("*.sock")), f"socket of {self._driver}")
        self._runner.run(self._connect(str(socket)))
        return self

    async def _connect(self, socket: str) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket}", options=services.CHANNEL_OPTIONS
        )
        await self._channel.channel_ready()

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._channel.close())
        self._runner.close()

    def claims(self, wanted: Sequence[Wanted]) -> list[dra.Claim]:
        """Create allocated claims."""
        numbers = range(self._count, self._count + len(wanted))
        self._count += len(wanted)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._claim, numbers, wanted))

    def _claim(self, number: int, wanted: Wanted) -> dra.Claim:
        name = f"claim-{number:04}"
        api = self._rig.cluster.api
        made = api.post(self._path, written(name, wanted.request, driver=self._driver))
        result = {
            "request": wanted.request["name"],
            "driver": self._driver,
            "pool": self._rig.cluster.node_name,
            "device": wanted.device,
            **wanted.more,
        }
        allocation = {"devices": {"results": [result]}}
        api.patch(f"{self._path}/{name}/status", {"status": {"allocation": allocation}})
        namespace = self._rig.pods.namespace
        return dra.Claim(namespace=namespace, name=name, uid=made["metadata"]["uid"])

    def prepare(self, claims: Sequence[dra.Claim]) -> Times:
        """Prepare claims at once, with one call for each."""
        return self._runner.run(self._ask(_PREPARE, claims))

    def end(self, claims: Sequence[dra.Claim]) -> Times:
        """Likewise, unprepare them, again where that is refused; and delete them."""
        times = self._runner.run(self._ask(_UNPREPARE, claims))
        if times.refused:
            self._rig.log(f"{self._driver}: {len(times.refused)} refused ends: {times.refused[0]}")
            wait_until(
                lambda: not self._runner.run(self._ask(_UNPREPARE, claims)).refused,
                "end of claims",
            )
        api = self._rig.cluster.api
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda each: api.delete(f"{self._path}/{each.name}"), claims))
        return times

    async def _ask(self, method: services.Method[Any, Any], claims: Sequence[dra.Claim]) -> Times:
        times = Times()
        call = method.on_aio(self._channel)

        async def ask(claim: dra.Claim) -> None:
            began = time.perf_counter()
            answers = await call(method.ask(claims=[claim]), timeout=_CALL_S)
            times.calls.append((time.perf_counter() - began) * 1000)
            if error := answers.claims[claim.uid].error:
                times.refused.append(error)

        began = time.perf_counter()
        await asyncio.gather(*map(ask, claims))
        times.rounds.append((time.perf_counter() - began) * 1000)
        return times


def _at_rest() -> None:
    """Wait for nothing: what a claim had is gone with its call."""


def _alone(
    kubelet: Kubelet, wanted: Sequence[Wanted], settle: Callable[[], None] = _at_rest
) -> tuple[Times, Times]:
    """Prepare and end claims in turn, with `settle` in between; the times of both."""
    prepared, ended = Times(), Times()
    for each in wanted:
        present = kubelet.claims([each])
        prepared.add(kubelet.prepare(present))
        ended.add(kubelet.end(present))
        settle()
    prepared.rounds.clear()
    ended.rounds.clear()
    return prepared, ended


def _at_once(
    kubelet: Kubelet,
    wanted: Sequence[Wanted],
    settle: Callable[[], None] = _at_rest,
    *,
    rounds: int,
) -> Times:
    """Prepare claims at once and end them."""
    times = Times()
    for _ in range(rounds):
        present = kubelet.claims(wanted)
        times.add(kubelet.prepare(present))
        kubelet.end(present)
        settle()
    return times


# ---- what is asked for ---------------------------------------------------------------------------


def _parts(devices: Sequence[Json], count: int) -> list[Wanted]:
    """Return parts of GPUs, no two of the same size."""
    names = [each["name"] for each in devices if _text(each, "type") == "share"]
    found = []
    for number in range(count):
        memory = f"{512 + number}Mi"
        amounts = {"memory": memory, "compute": "5"}
        more = {"shareID": str(uuid.uuid4()), "consumedCapacity": amounts}
        request = share(memory=memory, compute="5")
        found.append(Wanted(device=names[number % len(names)], request=request, more=more))
    return found


def _places(devices: Sequence[Json]) -> list[list[Wanted]]:
    """Return the places for slices of each GPU."""
    by_gpu: dict[str, list[Wanted]] = {}
    for each in devices:
        if _text(each, "profile") == PROFILE:
            by_gpu.setdefault(_text(each, "parentUUID"), []).append(_one(each))
    return [sorted(some, key=lambda wanted: wanted.device) for some in by_gpu.values()]


def _one(device: Json) -> Wanted:
    # The class is for the scheduler.
    request = {"name": "gpu", "exactly": {"deviceClassName": "any"}}
    return Wanted(device=device["name"], request=request)


def _text(device: Json, attribute: str) -> str:
    return str(device["attributes"].get(attribute, {}).get("string", ""))


# ---- drivers -------------------------------------------------------------------------------------


def claims(rig: NodeRig, _options: Options) -> Iterator[Result]:
    """Prepare shares, whole GPUs and slices; NVIDIA's driver prepares the last two."""
    theirs: Mapping[str, Times] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = program_from("NVIDIA_PROGRAMS", _PROGRAM, Path(folder))
        if program is not None:
            theirs = _of_nvidias(rig, program)
    yield from _of_parts(rig)
    ours = {**_of_whole(rig), **_of_slices(rig)}
    for name, times in ours.items():
        yield _figure(name, times, base=theirs.get(name))
    yield from _beyond_the_driver(ours, _cuts(3 if rig.is_quick else 30))
    if program is None:
        name = f"the same with NVIDIA's `{_PROGRAM}`"
        yield Result(
            name=name, unit="ms", value=None, seen="NVIDIA_PROGRAMS names no folder with it"
        )


@contextmanager
def _own(rig: NodeRig, config: str) -> Iterator[tuple[NodeAgent, Kubelet, list[Json]]]:
    with rig.agent(config, simulated=GPUS) as node:
        devices = wait_until(lambda: published(rig.cluster), "slices", explain=node.log_tail)
        with Kubelet(rig, DRIVER) as kubelet:
            yield node, kubelet, devices


def _of_parts(rig: NodeRig) -> Iterator[Result]:
    crowd, batch, alone, rounds = (4, 2, 3, 1) if rig.is_quick else (CROWD, BATCH, 100, 4)
    many, wrong = Times(), 0
    with _own(rig, SOFT) as (node, kubelet, devices):
        for number in range(rounds):
            wanted = _parts(devices, crowd)
            present = kubelet.claims(wanted)
            many.add(kubelet.prepare(present))
            wrong += _wrong(node, present, wanted)
            if number + 1 < rounds:
                kubelet.end(present)
        more = _parts(devices, batch)
        single, ended = _alone(kubelet, _parts(devices, alone))
        few = _at_once(kubelet, more, rounds=2 * rounds)
        kubelet.end(present)
    where = f"{crowd} claims on the node"
    yield _figure(f"a part of a GPU, {where}", single, target=_SOFT_MS)
    yield _figure(f"{batch} parts at once, {where}", few)
    yield _figure(f"{crowd} parts at once", many)
    yield Result(
        topic="limits",
        name="of these, claims that were refused or have another limit",
        seen=f"{wrong} of {crowd * rounds}",
        value=wrong,
        unit="claims",
        target=0,
        is_required=True,
        samples=crowd * rounds,
        method="each claim asks for an amount that no other has; compared with its share's record"
        " and with the policy that its programs are held to",
    )
    yield _figure(f"`NodeUnprepareResources` of a part, {where}", ended)


def _wrong(node: NodeAgent, present: Sequence[dra.Claim], wanted: Sequence[Wanted]) -> int:
    shares = node.cluster.node.path("/run/allotment/shares")
    made = {each.owner.uid: each for each in node.shares() if each.owner}
    wrong = 0
    for claim, each in zip(present, wanted, strict=True):
        share_ = made.get(PodUid(claim.uid))
        limit = parse_bytes(each.more["consumedCapacity"]["memory"])
        is_right = (
            share_ is not None
            and share_.devices[0].memory_bytes == limit
            and read(shares / share_.id).policy.devices[0].memory_limit == limit
        )
        wrong += not is_right
    return wrong


def _of_whole(rig: NodeRig) -> Mapping[str, Times]:
    with _own(rig, SOFT) as (_, kubelet, devices):
        return _whole_times(rig, kubelet, devices)


def _of_slices(rig: NodeRig) -> Mapping[str, Times]:
    with _own(rig, _MIG) as (node, kubelet, _):
        devices = wait_until(
            lambda: found if _places(found := published(rig.cluster)) else None,
            "places for slices",
            explain=node.log_tail,
        )
        machine = machine_path(rig.cluster.node.path("/run/allotment"), GPUS)
        return _slice_times(rig, kubelet, devices, machine)


def _of_nvidias(rig: NodeRig, program: Path) -> Mapping[str, Times]:
    with nvidias_driver(rig.cluster, program, GPUS) as devices, Kubelet(rig, NVIDIAS) as kubelet:
        machine = machine_path(rig.cluster.node.path(NVIDIAS_STATE), GPUS)
        whole = _whole_times(rig, kubelet, devices)
        return {**whole, **_slice_times(rig, kubelet, devices, machine)}


def _whole_times(rig: NodeRig, kubelet: Kubelet, devices: Sequence[Json]) -> Mapping[str, Times]:
    wanted = [_one(each) for each in devices if _text(each, "type") == "gpu"]
    rounds = 1 if rig.is_quick else 5
    _alone(kubelet, wanted[:1])  # the first after a driver's start reads its files
    single, _ = _alone(kubelet, wanted * rounds)
    return {
        "a whole GPU": single,
        f"{len(wanted)} whole GPUs at once": _at_once(kubelet, wanted, rounds=rounds),
    }


def _slice_times(
    rig: NodeRig, kubelet: Kubelet, devices: Sequence[Json], machine: Path
) -> Mapping[str, Times]:
    places = _places(devices)

    def settle() -> None:
        wait_until(lambda: not _count_slices(machine), "end of the slices")

    each_gpu, some, rounds = (1, 2, 1) if rig.is_quick else (5, BATCH // 3, 4)
    single, _ = _alone(kubelet, [gpu[at] for at in range(each_gpu) for gpu in places], settle)
    batch = [each for gpu in places[:3] for each in gpu[:some]]
    return {_SLICE: single, _SLICES: _at_once(kubelet, batch, settle, rounds=rounds)}


def _count_slices(machine: Path) -> int:
    with Nvml(machine=machine) as source:
        return sum(len(view.gpu.instances) for view in source.mig_views().values())


def _cuts(count: int) -> list[float]:
    """Milliseconds of the driver's own calls that make a slice, one after the other."""

    def cut(gpu: MigDevice) -> float:
        profile = next(each for each in gpu.driver.look().profiles if each.name == PROFILE)
        began = time.perf_counter()
        made = gpu.driver.create_gpu_instance(profile, profile.starts[0])
        gpu.driver.create_compute_instance(made, profile)
        took = time.perf_counter() - began
        gpu.driver.destroy_compute_instances(made)
        gpu.driver.destroy_gpu_instance(made)
        return took * 1000

    with tempfile.TemporaryDirectory() as folder:
        machine = machine_path(Path(folder), GPUS.replace(":8", "[mig=on]"))
        with MigMachine(machine) as gpus:
            return [gpus.ask_one(0, cut, patience_s=30) for _ in range(count)]


# ---- results -------------------------------------------------------------------------------------


def _figure(
    name: str, times: Times, *, base: Times | None = None, target: float | None = None
) -> Result:
    return Result(
        topic="claims",
        name=name,
        beside="" if base is None else base.seen(),
        seen=times.seen(),
        value=quantile(times.calls, 0.99),
        unit="ms",
        summary=summarize(times.calls),
        base=None if base is None else summarize(base.calls),
        target=target,
        samples=len(times.calls),
        method=_METHOD,
    )


def _beyond_the_driver(ours: Mapping[str, Times], cuts: Sequence[float]) -> Iterator[Result]:
    driver = quantile(cuts, 0.5)
    for name in (_SLICE, _SLICES):
        yield Result(
            topic="beyond the driver",
            name=f"{name}, beyond the driver's own calls",
            value=quantile(ours[name].calls, 0.99) - driver,
            unit="ms",
            target=_SLICE_MS,
            samples=len(ours[name].calls),
            method=f"the p99 without the median of the simulated driver's two calls for a slice"
            f" alone: {two(cuts)} of {len(cuts)}",
        )
