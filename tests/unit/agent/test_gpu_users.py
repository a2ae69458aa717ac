# SPDX-License-Identifier: Apache-2.0
"""Who uses a node's GPUs beside its shares: by the kubelet's list, and by control groups."""

from __future__ import annotations

from typing import Any

import pytest

from allotment.agent.gpu_users import Users, share_processes
from allotment.agent.kubelet.podresources import Held, HeldClaim
from allotment.devices.sources import DeviceProcess, Reading
from allotment.metrics.use import ShareUse
from allotment.metrics.users import GpuHolder, OutsideUse
from allotment.model.devices import Device, DeviceSlice
from allotment.model.pods import Container, ContainerKind, Pod, PodUid
from allotment.shares.process_tree import PodGroup
from allotment.shares.status import LiveState, OutsideView, ProcessView, ShareView

GI = 1 << 30
A, B, CUT = "GPU-aaaa-0000", "GPU-bbbb-0001", "MIG-cccc-0002"


def device(uuid: str, index: int, slice_of: DeviceSlice | None = None) -> Device:
    return Device(
        uuid=uuid, name="NVIDIA A100", index=index, memory_bytes=80 * GI, sm_count=108,
        compute_capability=(8, 0), numa_node=None, pci_bus_id=f"00000000:0{index}:00.0",
        simulated=True, mig=False, slice_of=slice_of,
    )  # fmt: skip


DEVICES = (
    device(A, 0),
    device(B, 1),
    device(CUT, 1, DeviceSlice(gpu=B, number=0, profile="1g.10gb", gpu_instance=7,
                               compute_instance=0)),
)  # fmt: skip


def held(pod: str = "p", container: str = "main", **ids: str) -> Held:
    return Held(
        namespace="ml",
        pod=pod,
        container=container,
        ids={name.replace("__", "/").replace("_", "."): frozenset([ids[name]]) for name in ids},
    )


def share(**more: Any) -> ShareUse:  # noqa: ANN401 - its fields
    usual = {"namespace": "ml", "share": "s1", "gpu": A, "device": A, "mode": "soft"}
    return ShareUse(**{**usual, **more})


def holders(*listed: Held, shares: tuple[ShareUse, ...] = ()) -> list[GpuHolder]:
    return Users(devices=DEVICES, shares=shares, pods=(), held=listed).holders


@pytest.mark.parametrize(
    ("name", "gpu", "mig", "replica"),
    [
        (A, A, "", ""),
        (f"{A}::3", A, "", "3"),
        (f"{A}-3", A, "", "3"),
        (f"{A}-_-12", A, "", "12"),
        (CUT, B, CUT, ""),
        (f"{CUT}::0", B, CUT, "0"),
        ("nvidia1", B, "", ""),
        ("nvidia1/gi7", B, "", ""),
        ("nvidia0/vgpu2", A, "", "2"),
    ],
)
def test_ids_of_other_plugins_name_a_gpu(name: str, gpu: str, mig: str, replica: str) -> None:
    (found,) = holders(held(nvidia_com__gpu=name))
    assert (found.gpu, found.device, found.replica) == (gpu, mig, replica)
    assert (found.namespace, found.pod, found.container) == ("ml", "p", "main")
    assert (found.resource, found.share, found.mode) == ("nvidia.com/gpu", "", "")


@pytest.mark.parametrize("name", ["GPU-other", f"{A}::", f"{A}::x", "nvidia9", "", "::1", "1"])
def test_other_ids_are_no_gpu_of_this_node(name: str) -> None:
    assert holders(held(nvidia_com__gpu=name)) == []
    assert holders(held(example_com__nic="nvidia0")) == []


def test_a_share_names_its_own_devices() -> None:
    """The kubelet's ids of a share may be of any GPU."""
    own = share(pod="p", container="main", gpu=B, device=CUT, mode="mig")
    (found,) = holders(held(allotment_dev__gpu=f"{A}::3"), shares=(own,))
    assert (found.gpu, found.device, found.share, found.mode) == (B, CUT, "s1", "mig")
    assert found.resource == ""


def test_the_containers_of_a_claim_hold_its_devices() -> None:
    def with_claim(pod: str, claim: str, driver: str, name: str) -> Held:
        one = HeldClaim(namespace="ml", claim=claim, driver=driver, device=name)
        return Held(namespace="ml", pod=pod, container="main", claims=(one,))

    own = share(claim="common", request="gpu", gpu=B, device=B)
    found = holders(
        with_claim("a", "common", "gpu.allotment.dev", "gpu-bbbb"),
        with_claim("b", "common", "gpu.allotment.dev", "gpu-bbbb"),
        with_claim("c", "whole", "gpu.nvidia.com", "gpu-0"),
        with_claim("d", "cut", "gpu.nvidia.com", "gpu-1-mig-1g10gb-19-0"),
        with_claim("e", "nic", "nic.example.com", "eth-0"),
        shares=(own,),
    )
    assert [(each.pod, each.gpu, each.claim, each.share, each.resource) for each in found] == [
        ("c", A, "whole", "", "gpu.nvidia.com"),
        ("a", B, "common", "s1", "gpu.allotment.dev"),
        ("b", B, "common", "s1", "gpu.allotment.dev"),
        ("d", B, "cut", "", "gpu.nvidia.com"),
    ]


def pod(name: str, **ids: str) -> Pod:
    return Pod(
        uid=PodUid(f"uid-{name}"),
        namespace="ml",
        name=name,
        containers=tuple(
            Container(name=each, kind=ContainerKind.REGULAR, runtime_id=ids[each]) for each in ids
        ),
    )


def outside(
    groups: dict[int, PodGroup], *pods: Pod, listed: tuple[Held, ...] = ()
) -> dict[tuple[str, str], OutsideUse]:
    users = Users(devices=DEVICES, shares=(), pods=pods, held=listed, group_of=groups.get)
    views = [OutsideView(pid, "python", A, GI) for pid in (1, 2, 3, 4)]
    reading = Reading(
        used_bytes=4 * GI, gpu_percent=50, memory_percent=None, temperature_c=40, power_mw=1,
        processes=tuple(DeviceProcess(pid, GI, 10 if pid < 3 else None) for pid in (1, 2, 3, 4)),
    )  # fmt: skip
    containers, processes = users.outside(views, {A: reading})
    assert sorted(each.pid for each in processes) == [1, 2, 3, 4]
    assert sum(each.processes for each in containers) == 4
    return {(each.pod, each.container): each for each in containers}


def test_processes_are_of_the_container_of_their_control_group() -> None:
    groups = {
        1: PodGroup(PodUid("uid-a"), "id-1"),
        2: PodGroup(PodUid("uid-a"), "id-1"),
        3: PodGroup(PodUid("uid-a"), "id-2"),
        4: PodGroup(PodUid("uid-gone"), "id-9"),
    }
    found = outside(groups, pod("a", main="id-1", side="id-2"))
    assert found["a", "main"].memory_used == 2 * GI
    assert found["a", "main"].utilization == pytest.approx(0.2)
    assert found["a", "side"].memory_used == GI
    assert found["a", "side"].utilization is None
    assert found["", ""].processes == 1  # an unknown pod's


def test_without_the_runtimes_id_the_only_holder_is_the_one() -> None:
    groups = {pid: PodGroup(PodUid("uid-a"), "") for pid in (1, 2)}
    two = pod("a", main="", side="")
    only = held("a", "side", nvidia_com__gpu=A)
    assert set(outside(groups, two, listed=(only,))) == {("a", "side"), ("", "")}
    assert set(outside(groups, two)) == {("a", ""), ("", "")}
    assert set(outside(groups, pod("a", main=""))) == {("a", "main"), ("", "")}


def test_a_shares_processes_have_their_part_of_each_device() -> None:
    one = ProcessView(
        pid=5, pid_inside=1, command="x", is_enforced=True, used=(GI, 2 * GI), context=(0, 0),
        peak=(0, 0), refusals=0, gpu_ns=7,
    )  # fmt: skip
    unknown = ProcessView(None, 2, "y", True, (GI, GI), (0, 0), (0, 0), 0)
    view = ShareView("s1", "s1", LiveState.RUNNING, None, (), (one, unknown), None)
    uses = [
        share(pod="p", memory_used=GI, gpu_ns=7),
        share(pod="p", memory_used=GI, gpu_ns=7, gpu=B, device=CUT, place=1),
    ]
    first, second = share_processes(view, uses, {})
    assert (first.pid, first.memory_used, first.gpu_ns, first.device) == (5, GI, 7, "")
    assert (second.gpu, second.device, second.memory_used, second.gpu_ns) == (B, CUT, 2 * GI, None)
