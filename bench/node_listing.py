# SPDX-License-Identifier: Apache-2.0
"""How soon the kubelet knows what the node has: a GPU that hangs, a configuration that changes.

And which GPUs go together, which the kubelet asks for before it gives some.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc
from findings import Finding
from node_grounds import PLAIN, SOFT, NodeGround, quantile, two
from stories import NVIDIA, NodeAgent
from testbed.waiting import wait_until

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages

SIXTEEN: Final = "h100-80gb:16"
_SEED: Final = 7
_LOOK_S: Final = 0.005


# ---- which GPUs go together ----------------------------------------------------------------------


def preferred(ground: NodeGround) -> Iterator[Finding]:
    """Ask for 8 of 16 GPUs, with all of them free and with any of them."""
    count = 20 if ground.is_quick else 500
    chance = random.Random(_SEED)  # noqa: S311 - the same questions in each run
    with ground.agent(PLAIN, simulated=SIXTEEN) as node, ground.call(NVIDIA) as channel:
        gpus = node.gpus()
        ask = services.PREFERRED.on(channel)
        all_free = [_asked(ask, gpus, [], 8) for _ in range(count)]
        some_free = []
        for _ in range(count):
            free = chance.sample(gpus, chance.randint(9, 16))
            some_free.append(_asked(ask, free, chance.sample(free, chance.randint(0, 6)), 8))
    for name, values in (("all of them free", all_free), ("any 9 to 16 of them free", some_free)):
        yield Finding(
            question="preferred",
            name=f"`GetPreferredAllocation`, 8 of 16 GPUs: {name}",
            without="",
            seen=f"{two(values)}, at most {max(values):.3g} ms",
            reached=quantile(values, 0.99),
            unit="ms",
            target=10,
            samples=count,
            method=f"a gRPC client on the agent's socket; {SIXTEEN}, joined as the simulator joins"
            f" them; in the second, up to 6 of the 8 are"
            f" given already; p50 / p99 of {count} each",
        )


def _asked(
    ask: Callable[..., messages.PreferredAllocationResponse],
    free: list[str],
    given: list[str],
    size: int,
) -> float:
    request = messages.PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=free, must_include_deviceIDs=given, allocation_size=size
    )
    started = time.perf_counter()
    answer = ask(request, timeout=30)
    took = (time.perf_counter() - started) * 1000
    chosen = answer.container_responses[0].deviceIDs
    assert len(set(chosen)) == size
    assert set(given) <= set(chosen) <= set(free)
    return took


# ---- a GPU that hangs ----------------------------------------------------------------------------


def hanging(ground: NodeGround) -> Iterator[Finding]:
    """Ask when 15 of 16 GPUs are there while one hangs in every call, and who waits later."""
    rounds = 1 if ground.is_quick else 5
    calm: list[_Start] = []
    hung: list[_Start] = []
    stalls: list[float] = []
    for number in range(rounds):
        calm.append(_started(ground, hangs=False)[0])
        start, waits = _started(ground, hangs=True, then=number == rounds - 1)
        hung.append(start)
        stalls += waits
    for name, key, target in (
        ("listed to the kubelet", "listed", 2.0),
        ("allocatable in the node's object", "allocatable", None),
    ):
        without = [getattr(each, key) for each in calm]
        seen = [getattr(each, key) for each in hung]
        yield Finding(
            question="hang",
            name=f"16 GPUs, one hangs in every call: the others are {name}",
            without=f"{statistics.median(without):.2f} s (16, none hangs)",
            seen=f"{statistics.median(seen):.2f} s",
            reached=max(seen),
            unit="s",
            target=target,
            samples=rounds,
            method="from the start of the agent's process, the start of Python included; calls on"
            " the GPU take an hour; agents with and without it in turn; median, and the worst."
            " The testbed's kubelet writes the node's status each second, the usual one each 10 s",
        )
    yield Finding(
        question="stalls",
        name="the same, a second one begins to hang: longest `Allocate` and `PreStartContainer`",
        without="",
        seen=f"p50 / p99 {two(stalls)}",
        reached=max(stalls),
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


def _started(ground: NodeGround, *, hangs: bool, then: bool = False) -> tuple[_Start, list[float]]:
    """Start an agent on a node where a GPU hangs, or none; and ask it things, if `then`."""
    cluster = ground.cluster
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
        with _watching(lambda: ground.allocatable(NVIDIA)) as seen:
            _wait_listed(ground, wanted)
            found.listed = time.monotonic() - began
            wait_until(lambda: seen.get(wanted), "allocatable GPUs", timeout_s=60, every_s=0.02)
            found.allocatable = seen[wanted] - began
        ground.tell(
            f"{'one hangs' if hangs else 'none hangs'}: listed {found.listed:.2f} s,"
            f" allocatable {found.allocatable:.2f} s"
        )
        waits = _asked_meanwhile(ground, node, gpus) if then else []
    finally:
        ground.empty(node)
        node.fault("--clear")
        node.close()
    return found, waits


def _wait_listed(ground: NodeGround, wanted: int) -> None:
    """Listen as the kubelet does, until so many healthy GPUs are listed."""
    socket = ground.socket(NVIDIA)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if not socket.exists():
            time.sleep(_LOOK_S)
            continue
        with ground.call(NVIDIA) as channel:
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


def _asked_meanwhile(ground: NodeGround, node: NodeAgent, gpus: list[str]) -> list[float]:
    """Call the agent all the time, let another GPU hang, and say how long each call took (ms)."""
    seconds = 6 if ground.is_quick else 30
    body = ground.body("held", {NVIDIA: "1"})
    ground.create([body])
    ground.wait_ready(["held"])
    held = next(each.ids for each in node.entries() if each.resource == NVIDIA)
    other = next(each for each in gpus[4:] if each not in held)
    waits = []
    with ground.call(NVIDIA) as channel:
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
    wait_until(lambda: ground.registered(NVIDIA) == 14, "a second sick GPU", timeout_s=30)
    return waits


@contextmanager
def _watching(look: Callable[[], int]) -> Iterator[dict[int, float]]:
    """Look all the time; when each value was seen first, in monotonic seconds."""
    seen: dict[int, float] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            seen.setdefault(look(), time.monotonic())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


# ---- a configuration that changes ----------------------------------------------------------------

_MAP: Final = "/api/v1/namespaces/allotment-system/configmaps"
_NAME: Final = "allotment-config"
_LABEL: Final = "nvidia.com/device-plugin.config"
_REPLICAS: Final = """\
version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: {count}
"""


def changing(ground: NodeGround) -> Iterator[Finding]:
    """Ask how soon the kubelet goes by another configuration."""
    count = 2 if ground.is_quick else 12
    cluster = ground.cluster
    api = cluster.api
    cluster.allow_agent()
    data = {
        "plain": PLAIN,
        "ten": _REPLICAS.format(count=10),
        "parts": SOFT,
        "edited": _REPLICAS.format(count=4),
    }
    api.post(
        _MAP,
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": _NAME, "namespace": "allotment-system"},
            "data": data,
        },
    )
    flags = ("--config-map", f"allotment-system/{_NAME}", "--default-config", "plain")

    def choose(name: str | None) -> None:
        api.patch(cluster.node_path, {"metadata": {"labels": {_LABEL: name}}})

    def edit(replicas: int) -> None:
        body = {"data": {"edited": _REPLICAS.format(count=replicas)}}
        api.patch(f"{_MAP}/{_NAME}", body)

    labelled, edited = _Changes(ground), _Changes(ground)
    try:
        with ground.agent(None, *flags, simulated="a100-40gb:8"):
            wait_until(lambda: ground.allocatable(NVIDIA) == 8, "8 GPUs", timeout_s=30)
            for number in range(count):
                is_ten = number % 2 == 0
                labelled.time(lambda: choose("ten" if is_ten else "plain"), 80 if is_ten else 8)  # noqa: B023
            choose("edited")
            wait_until(lambda: ground.allocatable(NVIDIA) == 32, "32 GPUs", timeout_s=30)
            for number in range(count):
                edited.time(lambda: edit(5 + number), 8 * (5 + number))  # noqa: B023
            choose(None)
    finally:
        api.delete(f"{_MAP}/{_NAME}")
        choose(None)
    for name, changes in (("the node's label", labelled), ("the ConfigMap", edited)):
        yield changes.finding(f"{name} changes, until the kubelet has the new number of GPUs", 2)


class _Changes:
    """Times from a change to the kubelet's own books and to the node's object."""

    def __init__(self, ground: NodeGround) -> None:
        self._ground = ground
        self._chance = random.Random(_SEED)  # noqa: S311 - nobody guesses
        self.booked: list[float] = []
        self.shown: list[float] = []

    def time(self, change: Callable[[], None], amount: int) -> None:
        """Make a change, and wait for what it leads to."""
        ground = self._ground
        with (
            _watching(lambda: ground.registered(NVIDIA)) as booked,
            _watching(lambda: ground.allocatable(NVIDIA)) as shown,
        ):
            # The node's status is written in a rhythm; changes are not to follow it.
            time.sleep(0.3 + self._chance.random())
            began = time.monotonic()
            change()
            both = "both accounts of a new configuration"
            wait_until(lambda: amount in booked and amount in shown, both, timeout_s=30)
        self.booked.append(booked[amount] - began)
        self.shown.append(shown[amount] - began)
        ground.tell(f"{amount}: {self.booked[-1]:.3f} s, in the node {self.shown[-1]:.3f} s")

    def finding(self, name: str, target: float) -> Finding:
        """Say what was found."""
        return Finding(
            question="change",
            name=name,
            without="",
            seen=f"{two(self.booked, 's')} (in the node's object {two(self.shown, 's')})",
            reached=quantile(self.booked, 0.99),
            unit="s",
            target=target,
            samples=len(self.booked),
            method="from before the request to the API server until the number stands in the"
            f" kubelet's own checkpoint; p50 / p99 of {len(self.booked)}; the node's object follows"
            " with the kubelet's next status: each second in the testbed, each 10 s by default",
        )
