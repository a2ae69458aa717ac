# SPDX-License-Identifier: Apache-2.0
"""What a share's programs are told of MPS, and what the mode makes of a share."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.ledger.leases import DeviceFiles
from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.devices import Device
from allotment.model.errors import NotInModeError, UsageError
from allotment.model.modes import MPS
from allotment.model.placements import Placed, Placement
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.model.shares import ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.modes.mps.mode import MpsMode, client_environment

GI = 1 << 30
DEVICE = Device(
    uuid="GPU-0",
    name="NVIDIA A100-SXM4-80GB",
    index=0,
    memory_bytes=80 * GI,
    sm_count=108,
    compute_capability=(8, 0),
    numa_node=0,
    pci_bus_id="0000:07:00.0",
    simulated=True,
    mig=False,
)


def environment(compute: Compute, memory: int = 4 * GI) -> dict[str, str]:
    device = ShareDevice("GPU-0", "a100", memory, compute=compute)
    return dict(client_environment(device, "/pipe"))


def test_a_program_is_told_where_how_much_and_how_urgent() -> None:
    told = environment(Compute(3000, 3000, kind=ComputeClass.BESTEFFORT, is_governed=True))
    assert told == {
        "CUDA_MPS_PIPE_DIRECTORY": "/pipe",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }


def test_who_may_have_all_is_told_no_part() -> None:
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment(Compute())


def test_memory_that_may_lie_on_the_host_has_no_limit_of_the_drivers() -> None:
    device = ShareDevice("GPU-0", "a100", GI, is_oversubscribed=True)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in client_environment(device, "/pipe")


@given(
    memory=st.integers(1, 200 * GI),
    ceiling=st.integers(100, WHOLE),
    guarantee=st.integers(0, WHOLE),
)
def test_the_drivers_limits_are_never_below_the_shares(
    memory: int, ceiling: int, guarantee: int
) -> None:
    told = environment(Compute(min(guarantee, ceiling), ceiling), memory)
    limit = told["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].removeprefix("0=").removesuffix("M")
    assert memory <= int(limit) << 20 < memory + (1 << 20)
    percentage = float(told.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
    assert round(percentage * 100) == ceiling
    assert 0 < percentage <= 100


def placement(
    *devices: Device, compute: Compute | None = None, may_oversubscribe: bool = False
) -> Placement:
    request = Request(
        MemoryAmount("4Gi", size_bytes=4 * GI),
        mode=MPS,
        compute=compute or Compute(),
        may_oversubscribe=may_oversubscribe,
    )
    return Placement(request, tuple(Placed(each, 4 * GI) for each in devices))


def make(directory: Path, wanted: Placement) -> None:
    MpsMode().create(
        directory, wanted, share=ShareId("ab12"), name="train", devices=directory.parent
    )


def test_a_share_has_a_ledger_and_takes_no_turns(tmp_path: Path, native_dir: Path) -> None:
    assert native_dir.is_dir()
    share = tmp_path / "ab12"
    share.mkdir()
    make(share, placement(DEVICE, compute=Compute(5000, 5000, is_governed=True)))
    snapshot = MpsMode().reconcile(share)
    (device,) = snapshot.policy.devices
    assert (device.memory_limit, device.seat) == (4 * GI, None)
    assert MpsMode().terms(share, snapshot, DeviceFiles()) == {}
    assert sorted(path.name for path in share.iterdir()) == ["policy", "usage"]


@pytest.mark.parametrize(
    ("wanted", "may_oversubscribe"),
    [(2 * GI, False), (4 * GI, False), (6 * GI, True)],
    ids=["less", "the same", "more, on the host"],
)
def test_memory_changes_as_far_as_the_driver_follows(
    wanted: int, *, may_oversubscribe: bool
) -> None:
    device = ShareDevice("GPU-0", "a100", 4 * GI, is_oversubscribed=may_oversubscribe)
    MpsMode().check_change(device, memory_bytes=wanted, of_compute=False)


@pytest.mark.parametrize("now", [4 * GI, 2 * GI], ids=["as it began", "made less"])
def test_more_memory_than_the_driver_lets_programs_have_is_refused(now: int) -> None:
    device = ShareDevice("GPU-0", "a100", now, begun_bytes=4 * GI)
    MpsMode().check_change(device, memory_bytes=4 * GI, of_compute=False)
    with pytest.raises(NotInModeError, match=r"need 6Gi, have 4Gi: .* more than they began with"):
        MpsMode().check_change(device, memory_bytes=6 * GI, of_compute=False)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (placement(DEVICE, replace(DEVICE, uuid="GPU-1")), "is of one GPU, not of 2"),
        (placement(DEVICE, compute=Compute(0, 99)), "0.99 % of a GPU's compute is less"),
    ],
    ids=["two GPUs", "next to nothing"],
)
def test_what_mps_cannot_give_is_refused(tmp_path: Path, wanted: Placement, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(tmp_path, wanted)
    assert list(tmp_path.iterdir()) == []


def test_devices_that_cannot_serve() -> None:
    assert MpsMode().fits(DEVICE) == ""
    assert "Volta" in MpsMode().fits(replace(DEVICE, compute_capability=(6, 1)))
    assert "MIG" in MpsMode().fits(replace(DEVICE, mig=True))


def test_compute_does_not_change_under_a_program() -> None:
    device = ShareDevice("GPU-0", "a100", 4 * GI)
    with pytest.raises(NotInModeError, match="cannot be changed") as caught:
        MpsMode().check_change(device, memory_bytes=4 * GI, of_compute=True)
    assert "--mode mps --compute" in (caught.value.hint or "")
