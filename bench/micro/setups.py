# SPDX-License-Identifier: Apache-2.0
"""What the benches of this room call in a loop: each setup returns the call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from allotment.devices.packing import read_machine
from allotment.model.structs import replace

GIB: Final = 1 << 30


def parse() -> Callable[[], object]:
    """Parse an amount of memory."""
    from allotment.model.quantities import parse_memory

    return lambda: parse_memory("3500Mi")


def read_request() -> Callable[[], object]:
    """Read what a pod asks for, from the bytes that kube-scheduler sends."""
    from allotment.dialects.own.registry import need_of
    from allotment.kube.cluster_feed import to_cluster_pod
    from allotment.scheduler.extender.wire import read_filter
    from bench.scheduler.cluster_shape import Spec
    from bench.scheduler.filter import body

    asked = body("pod", Spec(1, 16, 30, 2000), ["node-1"])
    return lambda: need_of(to_cluster_pod(read_filter(asked).pod))


def choose() -> Callable[[], object]:
    """Choose a GPU of eight, each with another part taken."""
    from allotment.devices import simulated
    from allotment.model.placements import DeviceState, Placement
    from allotment.model.quantities import parse_memory
    from allotment.model.requests import Request
    from allotment.placement import choose as choose_device

    with tempfile.TemporaryDirectory(prefix="allotment-bench-") as folder:
        machine = simulated.machine_path(Path(folder), "a100-80gb:8")
        devices = read_machine(machine).devices
    states = [DeviceState(device, 9 * index * GIB) for index, device in enumerate(devices)]
    request = Request(parse_memory("4Gi"))
    assert isinstance(choose_device(states, request), Placement)
    return lambda: choose_device(states, request)


def choose_slice() -> Callable[[], object]:
    """Choose a place for a slice on eight GPUs of which each has one."""
    from allotment.model.mig import MigLayout, MigRequest, MigSlice
    from allotment.placement.mig import MigRefusal
    from allotment.placement.mig import choose as choose_place
    from bench.mig.arrivals import profiles_of

    profiles = profiles_of("H100-80GB")
    small = next(each for each in profiles if each.name == "1g.10gb")
    one = MigSlice(profile=small.number, start=0, size=small.size)
    empty = MigLayout(gpu="0", profiles=profiles)
    layouts = [
        replace(empty, gpu=str(number), slices=(replace(one, start=number % 7),))
        for number in range(8)
    ]
    request = MigRequest(profile="3g.40gb")
    assert not isinstance(choose_place(layouts, request), MigRefusal)
    return lambda: choose_place(layouts, request)


def read_ledger() -> Callable[[], object]:
    """Read the ledger of a share without programs."""
    from allotment import ledger

    folder = tempfile.TemporaryDirectory(prefix="allotment-bench-")
    share = Path(folder.name) / "share"
    share.mkdir()
    device = ledger.DevicePolicy(uuid="GPU-0", memory_limit=GIB, context_bytes=0)
    ledger.create(share, ledger.LedgerPolicy(share_id="s", share_name="s", devices=(device,)))

    def call() -> object:
        assert folder.name  # the folder is there as long as the call
        return ledger.read(share)

    return call


SETUPS: Final[Mapping[str, Callable[[], Callable[[], object]]]] = {
    "parse": parse,
    "read-request": read_request,
    "choose": choose,
    "choose-slice": choose_slice,
    "read-ledger": read_ledger,
}
