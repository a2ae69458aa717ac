# SPDX-License-Identifier: Apache-2.0
"""What happens to shares that have more than their limit by the driver."""

import asyncio
import fcntl
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kubelet_twin import ReportsTwin
from patience import wait_until
from pod_node import Node, order

from allotment import ledger
from allotment.agent.config.schema import AllotmentConfig, Config
from allotment.agent.maintenance import Maintenance
from allotment.agent.node_state import NodeState
from allotment.cli.run import stop_excess
from allotment.devices.sources import DeviceProcess, Reading
from allotment.dialects.own.placement import write_booking
from allotment.ledger.leases import change
from allotment.model.clusters import AcceptedResize, PlacedContainer, PlacedDevice, PodBooking
from allotment.model.compute import Compute, ComputeClass
from allotment.model.modes import TIMESLICE
from allotment.model.pods import Container, ContainerKind, Pod
from allotment.model.quantities import parse_memory
from allotment.model.reported import Reported
from allotment.model.requests import Request, whole_devices
from allotment.model.shares import Excess, Share
from allotment.model.structs import replace
from allotment.shares.folders import StateFolder
from allotment.shares.process_tree import is_running, named
from allotment.shares.record import Traces, write_record, write_traces

GI = 1 << 30
Make = Callable[..., tuple[Share, Path]]
Sleeper = Callable[..., "subprocess.Popen[bytes]"]


def test_a_share_beyond_its_limit_is_reported_once(tmp_path: Path, sleeper: Sleeper) -> None:
    node = Node(tmp_path)
    limited = node.prepare(order(1, memory="1Gi"))
    first, second = (device.uuid for device in node.devices)
    node.prepare(order(2, request=whole_devices(1, mode=TIMESLICE), devices=(second,)))
    assert limited.devices[0].uuid == first
    shares = {each.id: node.folder.share(each.id) for each in node.shares.owned()}
    pids = [sleeper().pid for _ in shares]
    for directory, pid in zip(shares.values(), pids, strict=True):
        write_traces(directory, Traces(members=(named(pid),)))
    used = 8 * GI

    def readings(_machine: Path | None) -> Mapping[str, Reading]:
        reading = Reading(
            used_bytes=0, gpu_percent=0, memory_percent=0, temperature_c=None, power_mw=None,
            processes=tuple(DeviceProcess(pid, used) for pid in pids),
        )  # fmt: skip
        return {first: reading, second: reading}

    reports, state = ReportsTwin(), NodeState()
    keeper = Maintenance(
        machine=node.machine, cdi_folder=node.cdi, state=state, shares=node.shares,
        reports=reports, ask=readings,
    )  # fmt: skip
    reported = Reported[str]()
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(reported))
    ((subject, reason, message),) = reports.events
    assert (subject, reason) == ("pod-1", "LimitExceeded")
    assert "have 16Gi of GPU-" not in message
    assert "8Gi" in message
    assert reports.gauges[("shares_exceeding",)] == 1
    used = GI
    asyncio.run(keeper.report_exceeding(reported))
    assert reports.gauges[("shares_exceeding",)] == 0
    used = 8 * GI
    asyncio.run(keeper.report_exceeding(reported))
    assert len(reports.events) == 2
    assert all(is_running(pid) for pid in pids)

    state.config = Config(allotment=AllotmentConfig(on_excess=Excess.STOP))
    asyncio.run(keeper.report_exceeding(Reported[str]()))
    assert "its programs were killed (onExcess: stop)" in reports.events[-1][2]
    wait_until(lambda: [is_running(pid) for pid in pids] == [False, True])


def test_a_stranger_that_names_a_share_does_not_end_its_programs(
    tmp_path: Path, sleeper: Sleeper
) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(1, memory="1Gi"))
    directory = node.folder.share(share.id)
    member, stranger = sleeper(), sleeper(ALLOTMENT_SHARE=str(directory))
    write_traces(directory, Traces(members=(named(member.pid),)))
    reading = Reading(
        used_bytes=0, gpu_percent=0, memory_percent=0, temperature_c=None, power_mw=None,
        processes=(DeviceProcess(member.pid, GI // 2), DeviceProcess(stranger.pid, 8 * GI)),
    )  # fmt: skip
    reports, state = ReportsTwin(), NodeState()
    state.config = Config(allotment=AllotmentConfig(on_excess=Excess.STOP))
    keeper = Maintenance(
        machine=node.machine, cdi_folder=node.cdi, state=state, shares=node.shares,
        reports=reports, ask=lambda _: {share.devices[0].uuid: reading},
    )  # fmt: skip
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(Reported[str]()))
    assert reports.events == []
    assert is_running(member.pid)
    assert is_running(stranger.pid)


def raise_memory(node: Node, share: Share) -> None:
    write_record(
        node.folder.share(share.id),
        replace(share, devices=(replace(share.devices[0], memory_bytes=60 * GI),)),
    )
    ledger.set_limit(node.folder.share(share.id), 0, 60 * GI)


RAISED = Compute(6000, is_governed=True)


def raise_contract(node: Node, share: Share, compute: Compute = RAISED) -> None:
    device = node.folder.devices / share.devices[0].uuid
    (taken,) = ledger.read_contract(device / "contract").seats
    change(device, taken.seat, replace(taken.terms, compute=compute))


def raise_compute(node: Node, share: Share, compute: Compute = RAISED) -> None:
    raise_contract(node, share, compute)
    write_record(
        node.folder.share(share.id),
        replace(share, devices=(replace(share.devices[0], compute=compute),)),
    )


def test_a_contract_that_was_changed_is_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(1, guarantee=20))
    raise_contract(node, share)
    reports = ReportsTwin()
    keeper = Maintenance(
        machine=node.machine, cdi_folder=node.cdi, state=NodeState(), shares=node.shares,
        reports=reports, ask=lambda _: {},
    )  # fmt: skip
    asyncio.run(keeper.report_exceeding(Reported[str]()))
    ((subject, reason, message),) = reports.events
    assert (subject, reason) == ("pod-1", "LimitExceeded")
    assert "its contract's compute of GPU-" in message
    assert "is 60:100 (weight 100, class normal), not 20:100 (weight" in message


def pod_of(share: Share, annotations: Mapping[str, str], **more: int) -> Pod:
    """The pod of a share of 1 GiB."""
    assert share.owner is not None
    limits = {"allotment.dev/gpu": 1, "allotment.dev/gpu-memory": GI, **more}
    main = Container(share.owner.container, ContainerKind.REGULAR, limits)
    return Pod(
        uid=share.owner.uid,
        namespace="ml",
        name="pod-1",
        containers=(main,),
        node="n1",
        annotations=annotations,
    )


def kept(node: Node, pod: Pod) -> tuple[ReportsTwin, Maintenance]:
    reports = ReportsTwin()
    keeper = Maintenance(
        machine=node.machine, cdi_folder=node.cdi, state=NodeState(), shares=node.shares,
        reports=reports, pod=lambda _: pod, ask=lambda _: {},
    )  # fmt: skip
    return reports, keeper


@pytest.mark.parametrize(
    ("raise_promise", "texts"),
    [
        (raise_memory, ("allows 60Gi of GPU-", "placement or request allows 1Gi")),
        (
            raise_compute,
            (
                "allows compute 60:100 (weight 100, class normal) of GPU-",
                "placement or request allows 0:100 without turns",
            ),
        ),
    ],
)
def test_a_record_that_was_changed_with_its_files_is_compared_with_the_pod(
    tmp_path: Path, raise_promise: Callable[[Node, Share], None], texts: tuple[str, str]
) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(1, memory="1Gi"))
    reports, keeper = kept(node, pod_of(share, {"allotment.dev/resize": "memory:60Gi"}))
    reported = Reported[str]()
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(reported))
    assert reports.events == []
    raise_promise(node, share)
    asyncio.run(keeper.report_exceeding(reported))
    assert reports.events == []  # a resize changes one before the other
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(reported))
    ((subject, reason, message),) = reports.events
    assert (subject, reason) == ("pod-1", "LimitExceeded")
    assert all(text in message for text in texts)
    assert reports.gauges[("shares_exceeding",)] == 1


ASKED = Compute(2000, 5000, 50, is_governed=True)


def placement(share: Share, resize: AcceptedResize) -> str:
    """The placement of a share's pod."""
    assert share.owner is not None
    placed = PlacedDevice(share.devices[0].uuid, GI, ASKED.guarantee)
    container = PlacedContainer(name=share.owner.container, devices=(placed,))
    booking = PodBooking(uid=share.owner.uid, node="n1", containers=(container,), resize=resize)
    return write_booking(booking)


@pytest.mark.parametrize(
    "more",
    [
        {"guarantee": 3000},
        {"ceiling": 8000},
        {"weight": 200},
        {"kind": ComputeClass.LATENCY},
        {"is_governed": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "not placed"])
def test_each_amount_of_compute_is_compared_with_the_pod(
    tmp_path: Path, more: dict[str, Any], *, is_placed: bool
) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(request=Request(parse_memory("1Gi"), compute=ASKED)))
    annotations = {"allotment.dev/compute": "20:50", "allotment.dev/weight": "50"}
    if is_placed:
        annotations["allotment.dev/placement"] = placement(share, AcceptedResize())
    more_of_pod = {"allotment.dev/gpu-compute": 20}
    reports, keeper = kept(node, pod_of(share, annotations, **more_of_pod))
    reported = Reported[str]()
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(reported))
    assert reports.events == []
    raise_compute(node, share, replace(ASKED, **more))
    for _ in range(2):
        asyncio.run(keeper.report_exceeding(reported))
    ((_, reason, message),) = reports.events
    assert reason == "LimitExceeded"
    assert "placement or request allows 20:50 (weight 50, class normal)" in message


@pytest.mark.parametrize(
    ("wish", "most"),
    # Its node refuses a resize to less while more memory is in use.
    [("weight:80", 80), ("weight:20", 50)],
)
@pytest.mark.parametrize("is_placed", [True, False], ids=["placed", "not placed"])
def test_a_resize_changes_what_a_pod_may_have(
    tmp_path: Path, wish: str, most: int, *, is_placed: bool
) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(request=Request(parse_memory("1Gi"), compute=ASKED)))
    annotations = {"allotment.dev/compute": "20:50", "allotment.dev/weight": "50"}
    annotations["allotment.dev/resize"] = wish
    if is_placed:
        annotations["allotment.dev/placement"] = placement(share, AcceptedResize(wish, 1))
    more_of_pod = {"allotment.dev/gpu-compute": 20}
    reports, keeper = kept(node, pod_of(share, annotations, **more_of_pod))
    for weight, events in ((most, 0), (most + 1, 1)):
        raise_compute(node, share, replace(ASKED, weight=weight))
        for _ in range(2):
            asyncio.run(keeper.report_exceeding(Reported[str]()))
        assert len(reports.events) == events, reports.events


def test_the_driver_is_asked_without_the_lock_and_a_resize_meanwhile_counts(
    folder: StateFolder, make: Make, sleeper: Sleeper
) -> None:
    share, directory = make("1Gi", runner=None)
    pid = sleeper(ALLOTMENT_SHARE=str(directory)).pid
    (device,) = share.devices
    asked = 0

    def ask(_machine: Path | None) -> Mapping[str, Reading]:
        nonlocal asked
        asked += 1
        with (folder.root / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if asked == 2:
            more = replace(device, memory_bytes=8 * GI)
            write_record(directory, replace(share, devices=(more,)))
        reading = Reading(
            used_bytes=0, gpu_percent=0, memory_percent=0, temperature_c=None, power_mw=None,
            processes=(DeviceProcess(pid, 4 * GI),),
        )  # fmt: skip
        return {device.uuid: reading}

    stop_excess(ask, folder, share)
    assert (asked, is_running(pid)) == (2, True)
    write_record(directory, share)
    stop_excess(ask, folder, share)
    assert asked == 4
    wait_until(lambda: not is_running(pid))
