# SPDX-License-Identifier: Apache-2.0
"""What happens to shares that have more than their limit by the driver."""

import asyncio
import fcntl
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

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
from allotment.ledger.leases import change
from allotment.model.compute import Compute
from allotment.model.modes import TIMESLICE
from allotment.model.pods import Container, ContainerKind, Pod
from allotment.model.reported import Reported
from allotment.model.requests import whole_devices
from allotment.model.shares import Excess, Share
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


def raise_contract(node: Node, share: Share) -> Compute:
    compute = Compute(6000, is_governed=True)
    device = node.folder.devices / share.devices[0].uuid
    (taken,) = ledger.read_contract(device / "contract").seats
    change(device, taken.seat, replace(taken.terms, compute=compute))
    return compute


def raise_compute(node: Node, share: Share) -> None:
    compute = raise_contract(node, share)
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


@pytest.mark.parametrize(
    ("raise_promise", "texts"),
    [
        (raise_memory, ("allows 60Gi of GPU-", "placement or request allows 1Gi")),
        (raise_compute, ("allows 60 % of the compute of GPU-", "allows 0 % of the compute")),
    ],
)
def test_a_record_that_was_changed_with_its_files_is_compared_with_the_pod(
    tmp_path: Path, raise_promise: Callable[[Node, Share], None], texts: tuple[str, str]
) -> None:
    node = Node(tmp_path)
    share = node.prepare(order(1, memory="1Gi"))
    assert share.owner is not None
    limits = {"allotment.dev/gpu": 1, "allotment.dev/gpu-memory": GI}
    main = Container(share.owner.container, ContainerKind.REGULAR, limits)
    pod = Pod(uid=share.owner.uid, namespace="ml", name="pod-1", containers=(main,))
    pod = replace(pod, node="n1", annotations={"allotment.dev/resize": "memory:60Gi"})
    reports = ReportsTwin()
    keeper = Maintenance(
        machine=node.machine, cdi_folder=node.cdi, state=NodeState(), shares=node.shares,
        reports=reports, pod=lambda _: pod, ask=lambda _: {},
    )  # fmt: skip
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

    stop_excess(folder, share, ask)
    assert (asked, is_running(pid)) == (2, True)
    write_record(directory, share)
    stop_excess(folder, share, ask)
    assert asked == 4
    wait_until(lambda: not is_running(pid))
