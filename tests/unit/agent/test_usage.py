# SPDX-License-Identifier: Apache-2.0
"""The reader of use: whose a share is, what is missing, and that a scrape is answered in time."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from api_server_twin import api_of, refused
from held_ports import held_port
from pod_node import Node, order, owner
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from allotment.agent import running
from allotment.agent.config.schema import AllotmentConfig, Config
from allotment.agent.configuring import AgentSettings
from allotment.agent.gpu_users import HeldDevices
from allotment.agent.inventory import Sighting
from allotment.agent.kubelet.podresources import Held
from allotment.agent.node_state import NodeState
from allotment.agent.usage import GpuReports, Readings, SharesRead, UseReader, shares_in
from allotment.cost.prices import prices_of
from allotment.devices.events import EventKind, GpuEvent
from allotment.devices.gauges import Gauges
from allotment.devices.sources import DeviceProcess, Reading
from allotment.devices.watching import Report, Vitals
from allotment.ledger import DeviceUse, SeatAccount
from allotment.metrics.use import Use
from allotment.model.compute import Compute
from allotment.model.devices import DeviceSlice
from allotment.model.errors import StateError
from allotment.model.modes import EXCLUSIVE
from allotment.model.pods import Pod, PodUid
from allotment.model.requests import whole_devices
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.booking import Booking
from allotment.shares.compute_view import ComputeView
from allotment.shares.status import DeviceView, LiveState, ShareStatus, ShareView

GI = 1 << 30


class GpusTwin:
    """GPUs that answer, but those of `hung`."""

    def __init__(self, *uuids: str) -> None:
        self.uuids = uuids
        self.hung: set[str] = set()
        self.processes: tuple[DeviceProcess, ...] = ()
        self.observers: list[Callable[[str, Sighting], None]] = []
        self.asked = 0

    def subscribe(self, observer: Callable[[str, Sighting], None]) -> None:
        self.observers.append(observer)

    def reports(self, *, patience_s: float) -> Mapping[str, Report]:
        assert patience_s > 0
        self.asked += 1
        reading = Reading(
            used_bytes=3 * GI, gpu_percent=50, memory_percent=None, temperature_c=41,
            power_mw=70_000, processes=self.processes,
        )  # fmt: skip
        report = Report(reading, Vitals(ecc_corrected=2), Gauges(sm_clock_mhz=1410))
        return {uuid: report for uuid in self.uuids if uuid not in self.hung}


class Scene:
    """A reader of a node's shares, with a clock that is set."""

    def __init__(self, node: Node, shares: SharesRead | None = None) -> None:
        self.now = 100.0
        self.pods: list[Pod] = []
        self.held: HeldDevices = tuple
        self.shows_processes = False
        self.gpus = GpusTwin(*(device.uuid for device in node.devices))
        self.state = NodeState(
            devices={device.uuid: device for device in node.devices},
            unhealthy={node.devices[1].uuid: "XID 79"},
        )
        gpus: GpuReports = self.gpus
        self.reader = UseReader(
            node="n1",
            gpus=gpus,
            state=self.state,
            shares=shares or shares_in(node.folder, node.machine),
            pods=lambda: self.pods,
            held=self._ask_kubelet,
            shows_processes=lambda: self.shows_processes,
            patience_s=0.05 if shares else 60,
            clock=lambda: self.now,
        )

    def _ask_kubelet(self) -> Sequence[Held]:
        return self.held()

    def read(self) -> Use:
        self.now += 15
        return self.reader.read()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_shares_and_gpus_are_read_together(node: Node) -> None:
    shares = [node.prepare(order(number, "2Gi", guarantee=20)) for number in (1, 2)]
    scene = Scene(node)
    use = scene.read()
    assert use.are_shares_read
    assert [each.pod for each in use.shares] == ["pod-1", "pod-2"]
    first = use.shares[0]
    assert (first.namespace, first.container, first.mode) == ("lab", "train", "soft")
    assert (first.memory_limit, first.memory_used, first.refusals) == (2 * GI, 0, 0)
    assert (first.guarantee, first.ceiling, first.kind) == (0.2, 1.0, "normal")
    assert first.is_enforced
    assert not first.is_suspended
    assert first.gpu_ns == first.borrowed_ns == first.lent_ns == 0
    assert sum(first.waits) == 0
    assert len(first.waits) == 16
    gpu, other = use.gpus
    placed = [each.devices[0].uuid for each in shares].count(gpu.uuid)
    assert gpu.shares == placed
    assert gpu.memory_allocated == placed * 2 * GI
    assert gpu.guaranteed == pytest.approx(placed * 0.2)
    assert (gpu.memory_used, gpu.utilization, gpu.temperature_c) == (3 * GI, 0.5, 41)
    assert (gpu.ecc_corrected, gpu.sm_clock_mhz, gpu.power_mw) == (2, 1410, 70_000)
    assert (gpu.is_healthy, other.is_healthy) == (True, False)


def test_a_gpus_mig_devices_and_their_shares_are_its_own(node: Node) -> None:
    gpu, other = node.devices
    slices = {
        f"MIG-{number}": replace(
            gpu,
            uuid=f"MIG-{number}",
            slice_of=DeviceSlice(
                gpu=gpu.uuid, number=number, profile="1g.10gb", gpu_instance=number,
                compute_instance=0,
            ),
        )
        for number in range(3)
    }  # fmt: skip
    bookings = {
        "MIG-0": Booking(memory=GI, shares=1, mode="mig"),
        "MIG-2": Booking(memory=2 * GI, shares=1, mode="mig"),
        other.uuid: Booking(memory=7, oversubscribed=3, guaranteed=2500, shares=2, mode="soft"),
    }
    record = ShareDevice("MIG-0", "A100", GI, gpu=gpu.uuid, profile="1g.10gb")
    share = Share(
        id=ShareId("1"), name="a", created=0, mode="mig", devices=(record,),
        injection=Injection.CDI, owner=owner(),
    )  # fmt: skip
    device = DeviceView("MIG-0", "A100", GI, GI, GI, 0)
    view = ShareView("1", "a", LiveState.RUNNING, share, (device,), (), None)
    scene = Scene(node, lambda _: (ShareStatus((view,), ()), bookings))
    scene.state.devices = {**scene.state.devices, **slices}
    use = scene.read()
    cut, whole = use.gpus
    assert (cut.slices, cut.mode, cut.shares) == ({"1g.10gb": 3}, "mig", 2)
    assert (cut.memory_allocated, cut.guaranteed) == (3 * GI, 0)
    assert (whole.mode, whole.shares, whole.guaranteed) == ("soft", 2, 0.25)
    assert (whole.memory_allocated, whole.memory_oversubscribed) == (7, 3)
    (found,) = use.shares
    assert (found.gpu, found.device, found.memory_used) == (gpu.uuid, "MIG-0", GI)
    assert found.utilization is None


def test_a_gpu_has_the_price_of_its_model(node: Node) -> None:
    scene = Scene(node)
    prices = prices_of({"no-such": 4, node.devices[0].name: 2.5}, "EUR")
    scene.state.config = Config(allotment=AllotmentConfig(prices=prices))
    assert {(gpu.price, gpu.currency) for gpu in scene.read().gpus} == {(2.5, "EUR")}
    scene.state.config = None
    assert {gpu.price for gpu in scene.read().gpus} == {None}


def test_a_share_without_compute_has_no_gpu_time(node: Node) -> None:
    node.prepare(order(1, "2Gi"))
    (share,) = Scene(node).read().shares
    assert share.gpu_ns is None
    assert share.waits == ()
    assert share.memory_used == 0


def test_without_the_shim_there_is_the_drivers_figure_alone(node: Node) -> None:
    uuid = node.devices[1].uuid
    node.prepare(order(1, request=whole_devices(1, mode=EXCLUSIVE), devices=(uuid,)))
    scene = Scene(node)
    scene.gpus.processes = (DeviceProcess(os.getpid(), 3 * GI, 25),)
    (share,) = scene.read().shares
    assert (share.mode, share.memory_used, share.processes) == ("exclusive", 3 * GI, 1)
    assert share.memory_peak is share.refusals is share.guarantee is None
    assert share.utilization == 0.25
    assert not share.is_enforced


def test_what_another_plugin_gave_out_is_its_containers(node: Node) -> None:
    uuid = node.devices[0].uuid
    node.prepare(order(1, "2Gi", devices=(uuid,)))
    scene = Scene(node)
    ids = {"nvidia.com/gpu": frozenset({f"{uuid}::1"})}
    scene.held = lambda: [Held(namespace="old", pod="p", container="main", ids=ids)]
    scene.gpus.processes = (DeviceProcess(os.getpid(), 2 * GI, 25),)
    scene.shows_processes = True
    use = scene.read()
    assert use.are_pods_read
    own, other = sorted(use.holders, key=lambda each: each.namespace)
    assert (own.namespace, own.pod, own.share) == ("lab", "pod-1", use.shares[0].share)
    assert (other.namespace, other.gpu, other.replica, other.share) == ("old", uuid, "1", "")
    outside = [each for each in use.outside if each.gpu == uuid]
    assert [(each.memory_used, each.utilization, each.processes) for each in outside] == [
        (2 * GI, 0.25, 1)
    ]
    assert {each.pid for each in use.processes or ()} == {os.getpid()}
    scene.shows_processes = False
    assert scene.read().processes is None


def test_a_kubelet_that_fails_or_hangs_leaves_all_else(node: Node) -> None:
    """The socket is not there, the kubelet is too old, or it does not answer."""
    node.prepare(order(1, "2Gi"))
    scene = Scene(node)

    def fail() -> list[Held]:
        raise StateError("the kubelet does not answer")

    scene.held = fail
    with capture_logs() as logs:
        use = [scene.read(), scene.read()][1]
    assert not use.are_pods_read
    assert [each.pod for each in use.shares] == [each.pod for each in use.holders] == ["pod-1"]
    assert len(logs) == 1
    scene.held = list
    assert scene.read().are_pods_read


def test_a_kubelet_that_hangs_is_not_asked_again(node: Node) -> None:
    over, asked = threading.Event(), list[int]()
    scene = Scene(node, lambda _: (ShareStatus((), ()), {}))

    def hang() -> list[Held]:
        asked.append(1)
        over.wait(60)
        return []

    scene.held = hang
    assert [scene.read().are_pods_read for _ in range(2)] == [False, False]
    assert len(asked) == 1
    over.set()


def test_a_claims_share_is_its_claims(node: Node) -> None:
    node.prepare(order(1, whose=replace(owner("gpu", pod="my-claim"), is_claim=True)))
    (share,) = Scene(node).read().shares
    assert (share.namespace, share.claim, share.request) == ("lab", "my-claim", "gpu")
    assert (share.pod, share.container) == ("", "")


def test_a_claims_pods_are_named(node: Node) -> None:
    for number, claim in enumerate(("made", "common"), start=1):
        node.prepare(order(number, whose=replace(owner("gpu", pod=claim), is_claim=True)))
    scene = Scene(node)

    def pod(name: str, **more: Any) -> Pod:  # noqa: ANN401 - its fields
        return Pod(uid=PodUid(name), name=name, **{"namespace": "lab", **more})

    scene.pods = [
        pod("b", claims={"common": False, "made": True}),
        pod("a", claims={"common": False, "of-another-driver": False}),
        pod("c", claims={"common": False}, has_ended=True),
        pod("d", claims={"common": False}, namespace="other"),
    ]
    use = scene.read()
    assert {each.claim: each.pod for each in use.shares} == {"made": "b", "common": ""}
    assert [(each.claim, each.pod) for each in use.claim_users] == [
        ("common", "a"),
        ("common", "b"),
        ("made", "b"),
    ]


def test_a_gpu_that_does_not_answer_keeps_what_is_known_of_it(node: Node) -> None:
    node.prepare(order(1, "2Gi", devices=(node.devices[0].uuid,)))
    scene = Scene(node)
    scene.gpus.hung.add(node.devices[0].uuid)
    hung, other = scene.read().gpus
    assert (hung.answers, other.answers) == (False, True)
    assert hung.memory_used is hung.temperature_c is hung.utilization is None
    assert (hung.memory_allocated, hung.shares) == (2 * GI, 1)


def test_shares_that_cannot_be_read_in_time_do_not_hold_a_scrape(node: Node) -> None:
    is_free = threading.Event()
    calls = []

    def hangs(readings: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        calls.append(readings)
        is_free.wait(60)
        return ShareStatus((), ()), {}

    scene = Scene(node, hangs)
    for _ in range(3):  # of later scrapes none waits, or asks again
        use = scene.read()
        assert not use.are_shares_read
        assert use.shares == ()
        assert use.gpus[0].memory_allocated is None
        assert use.gpus[0].memory_used == 3 * GI
    assert len(calls) == 1
    is_free.set()
    deadline = time.monotonic() + 60
    while not scene.read().are_shares_read:
        assert time.monotonic() < deadline


def test_a_damaged_share_is_counted_and_has_its_limit(node: Node) -> None:
    share = node.prepare(order(1, "2Gi"))
    (node.folder.share(share.id) / "usage").write_bytes(b"nothing")
    use = Scene(node).read()
    assert use.unreadable_shares == 1
    (found,) = use.shares
    assert (found.memory_limit, found.memory_used, found.is_enforced) == (2 * GI, None, False)


def test_an_error_of_the_shares_leaves_the_gpus(node: Node) -> None:
    def fails(_: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        raise ValueError

    use = Scene(node, fails).read()
    assert not use.are_shares_read
    assert use.gpus[0].answers


def test_scrapes_at_once_share_a_reading(node: Node) -> None:
    scene = Scene(node)
    scene.read()
    scene.reader.read()
    assert scene.gpus.asked == 1
    scene.read()
    assert scene.gpus.asked == 2


def test_the_last_xid_is_remembered(node: Node) -> None:
    scene = Scene(node)
    (hear,) = scene.gpus.observers
    uuid = node.devices[0].uuid
    hear(uuid, GpuEvent(uuid=uuid, kind=EventKind.XID, xid=48, at=0))
    hear(uuid, GpuEvent(uuid=uuid, kind=EventKind.SINGLE_BIT_ECC, xid=None, at=0))
    assert [each.last_xid for each in scene.read().gpus] == [48, 0]


def lending(uuid: str, accounts: Iterator[SeatAccount], gpu_ns: int = 0) -> SharesRead:
    """A share that has such an account at each look."""

    def read(_: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        compute = ComputeView(
            promised=Compute(2500, is_governed=True),
            is_suspended=False,
            is_measured=True,
            use=DeviceUse(0, 0, 0, gpu_ns=gpu_ns),
            account=next(accounts),
            driver_percent=None,
            read_ns=0,
        )
        device = DeviceView(uuid, "T4", GI, 0, 0, 0, compute=compute)
        view = ShareView("1", "a", LiveState.KEPT, None, (device,), (), None)
        return ShareStatus((view,), ()), {}

    return read


@pytest.mark.parametrize(
    ("seen", "shown"),
    [
        # A neighbour that ends takes along what it had used: the rest must not count again.
        ((70, 100, 40, 45, 50), [0, 30, 30, 35, 40]),
        # Its file could not be read once.
        ((70, 100, 40, 101), [0, 30, 30, 31]),
    ],
)
def test_what_was_lent_never_falls(node: Node, seen: tuple[int, ...], shown: list[int]) -> None:
    accounts = (SeatAccount(lent_ns=each) for each in seen)
    scene = Scene(node, lending(node.devices[0].uuid, accounts))
    assert [each.lent_ns for _ in seen for each in scene.read().shares] == shown


def test_counters_of_an_unreadable_account_are_left_out(node: Node) -> None:
    accounts = iter((SeatAccount(leases=5, borrowed_ns=7, lent_ns=1), SeatAccount()))
    scene = Scene(node, lending(node.devices[0].uuid, accounts, gpu_ns=9))
    (known,), (unknown,) = scene.read().shares, scene.read().shares
    assert (known.turns, known.borrowed_ns, known.lent_ns) == (5, 7, 0)
    assert (unknown.turns, unknown.borrowed_ns, unknown.lent_ns) == (None, None, None)
    assert unknown.gpu_ns == 9


def test_a_forged_ledger_has_no_more_than_its_limit(node: Node) -> None:
    """Or than the driver reports: what it claims must not be taken from its neighbours."""
    uuid = node.devices[0].uuid
    used = [
        DeviceView(uuid, "T4", 2 * GI, 70 * GI, 70 * GI, 0),
        DeviceView(uuid, "T4", 2 * GI, 3 * GI, 3 * GI, 0, driver_used=3 * GI),
    ]

    def read(_: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        views = [
            ShareView(str(number), "a", LiveState.KEPT, None, (device,), (), None)
            for number, device in enumerate(used)
        ]
        return ShareStatus(tuple(views), ()), {}

    assert [each.memory_used for each in Scene(node, read).read().shares] == [2 * GI, 3 * GI]


def test_memory_on_the_host_is_not_on_the_device(node: Node) -> None:
    uuid = node.devices[0].uuid

    def read(_: Readings) -> tuple[ShareStatus, Mapping[str, Booking]]:
        views = [
            ShareView(str(number), "a", LiveState.KEPT, None, (device,), (), None)
            for number, device in enumerate(
                (
                    DeviceView(uuid, "T4", 9, 8, 8, 0, is_oversubscribed=True, host_bytes=6),
                    DeviceView(
                        uuid, "T4", 9, 8, 8, 0,
                        is_oversubscribed=True, host_bytes=6, driver_used=5,
                    ),
                )
            )
        ]  # fmt: skip
        return ShareStatus(tuple(views), ()), {}

    assert [each.memory_used for each in Scene(node, read).read().shares] == [2, 5]


def test_the_agent_serves_it_beside_its_own_metrics(tmp_path: Path) -> None:
    """Before it reaches an API server, too: its GPUs are there."""

    async def story(address: str) -> None:
        settings = AgentSettings(
            node="n1", state=tmp_path, simulated="t4:2", metrics_address=address,
            kubelet_socket=tmp_path / "kubelet.sock", cdi_folder=tmp_path / "cdi",
            starts_front=False,
        )  # fmt: skip
        agent = running._Agent(  # noqa: SLF001 - its parts meet there
            settings, api_of(lambda _: refused(503))
        )
        task = asyncio.create_task(agent.run())

        def scraped() -> dict[str, list[float]]:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                families = text_string_to_metric_families(answer.read().decode())
            return {each.name: [sample.value for sample in each.samples] for each in families}

        try:
            found: dict[str, list[float]] = {}
            while found.get("allotment_gpu_answers") != [1, 1]:
                with suppress(OSError):  # it does not listen yet
                    found = await asyncio.to_thread(scraped)
                await asyncio.sleep(0.1)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert "allotment_agent_config_valid" in found
        assert found["allotment_use_read"] == [1, 1, 0]  # no kubelet
        assert not any(name.startswith(("DCGM", "hami")) for name in found)

    with held_port() as port:
        asyncio.run(asyncio.wait_for(story(f"127.0.0.1:{port}"), 100))
