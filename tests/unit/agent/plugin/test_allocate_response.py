# SPDX-License-Identifier: Apache-2.0
"""Every strategy's answer, as NVIDIA's plugin gives it; and our own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from gpus import gpu, mig_slice
from kubelet_twin import ReportsTwin

from allotment.agent.config.schema import Config, DeviceListStrategy, PluginConfig
from allotment.agent.configuring import CdiUse
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages
from allotment.agent.node_state import NodeState
from allotment.agent.plugin.allocate_response import AllocateAnswers, DriverNodes, describe
from allotment.agent.plugin.serving import FIRST, SHARE_PLACE
from allotment.agent.protocols import SHARE_ANNOTATION, AllocateAnswer, DeviceNode
from allotment.agent.resources import Offer, Resource, Slot
from allotment.model.devices import Device
from allotment.model.errors import StateError, UsageError
from allotment.model.structs import replace
from allotment.shares.cdi import HostMount
from allotment.shares.folders import StateFolder
from allotment.shares.pods import PodShares

if TYPE_CHECKING:
    from allotment.kube.nodes import OwnNode

MARK = {SHARE_ANNOTATION: SHARE_PLACE}
OWN = AllocateAnswer(annotations=MARK, cdi_devices=(f"allotment.dev/share={SHARE_PLACE}",))
MOUNTS = (HostMount(f"/run/allotment/shares/{SHARE_PLACE}/policy", "/run/allotment/share/policy"),)
NODES = (DeviceNode("/dev/nvidia0", "/dev/nvidia0"),)
BY_MOUNTS = AllocateAnswer(mounts=MOUNTS, devices=NODES)


DEVICES = {each.uuid: each for each in (gpu(0), gpu(1))}
WHOLE = Resource(
    name="nvidia.com/gpu",
    mode="exclusive",
    slots=tuple(Slot(uuid, uuid) for uuid in DEVICES),
)
SHARED = Resource(
    name="nvidia.com/gpu.shared",
    mode="timeslice",
    slots=tuple(Slot(f"{uuid}::{n}", uuid) for uuid in DEVICES for n in range(2)),
    replicas=2,
)
SOFT = Resource(name="allotment.dev/gpu", mode="soft", slots=(Slot("share::0", None),))


def config(*strategies: str, **plugin: object) -> Config:
    named = tuple(map(DeviceListStrategy, strategies)) or None
    changed = replace(PluginConfig(device_list_strategies=named), **plugin)  # type: ignore[arg-type]
    return Config(plugin=changed)


def ask(
    resource: Resource,
    *ids: str,
    config: Config,
    by_mounts: AllocateAnswer | None = None,
    devices: Mapping[str, Device] = DEVICES,
    driver: DriverNodes | None = None,
    extras: Collection[str] = (),
) -> AllocateAnswer:
    """What the front answers, with the place of the share's id in place of the id."""
    offered = describe(
        resource,
        config=config,
        devices=devices,
        by_mounts=None if by_mounts is None else {FIRST: by_mounts},
        driver=driver,
        extras=extras,
    )
    return read(offered.answer(ids))


def read(response: messages.ContainerAllocateResponse) -> AllocateAnswer:
    share = response.annotations[SHARE_ANNOTATION]
    assert len(share) == 12
    assert share != SHARE_PLACE
    place = response.SerializeToString().replace(share.encode(), SHARE_PLACE.encode())
    response = messages.ContainerAllocateResponse.FromString(place)
    return AllocateAnswer(
        envs=dict(response.envs),
        mounts=tuple(
            HostMount(each.host_path, each.container_path, is_read_only=each.read_only)
            for each in response.mounts
        ),
        devices=tuple(
            DeviceNode(each.host_path, each.container_path, each.permissions)
            for each in response.devices
        ),
        annotations=dict(response.annotations),
        cdi_devices=tuple(each.name for each in response.cdi_devices),
    )


def test_where_nobody_named_a_strategy_it_is_the_shares_own_device() -> None:
    for resource in (WHOLE, SHARED, SOFT):
        assert ask(resource, resource.slots[0].id, config=config()) == OWN


def test_every_answer_has_a_name_of_its_own(tmp_path: Path) -> None:
    offered = answering(tmp_path, CdiUse.ON).offered(SOFT)
    names = {offered.answer(["share::0"]).annotations[SHARE_ANNOTATION] for _ in range(100)}
    assert len(names) == 100
    assert all(len(each) == 12 for each in names)


def answering(folder: Path, cdi: CdiUse, *, simulated: bool = True) -> AllocateAnswers:
    return AllocateAnswers(
        cdi,
        cdi_folder=folder,
        node=cast("OwnNode", None),
        state=NodeState(devices=DEVICES, offer=Offer(shared=dict.fromkeys(DEVICES, ("soft",)))),
        shares=PodShares(StateFolder(folder), machine=folder / "machine" if simulated else None),
        reports=ReportsTwin(),
    )


@pytest.mark.parametrize("count", [1, 2])
def test_without_cdi_a_container_of_any_devices_gets_the_files_of_as_many(
    tmp_path: Path, count: int
) -> None:
    two = replace(SOFT, slots=tuple(Slot(f"share::{n}", None) for n in range(3)))
    offered = answering(tmp_path, CdiUse.OFF).offered(two)
    got = read(offered.answer([f"share::{n}" for n in range(count)]))
    seats = [each for each in got.mounts if "/seat-" in each.container_path]
    assert len(seats) == count
    assert all(SHARE_PLACE in each.host_path for each in seats)


def test_without_cdi_replicas_by_mps_get_their_part_of_the_daemon(tmp_path: Path) -> None:
    by_mps = replace(SHARED, mode="mps")
    offered = answering(tmp_path, CdiUse.OFF).offered(by_mps)
    one = read(offered.answer(["GPU-1::0"]))
    both = read(offered.answer(["GPU-1::0", "GPU-1::1"]))
    assert one.envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert both.envs.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE") in {None, "100"}
    assert "/GPU-1/" in one.envs["CUDA_MPS_PIPE_DIRECTORY"]


def test_devices_that_no_container_can_get_are_unhealthy_so_that_pods_wait(tmp_path: Path) -> None:
    offered = answering(tmp_path, CdiUse.OFF, simulated=False).offered(WHOLE)
    listed = offered.listed(is_withdrawn=False).devices
    assert [each.health for each in listed] == ["Unhealthy"] * 2
    with pytest.raises(StateError, match="/dev/nvidia0 does not exist"):
        offered.answer(["GPU-0"])


def test_soft_shares_come_by_their_own_device_whatever_was_named() -> None:
    assert ask(SOFT, "share::0", config=config("envvar", "cdi-cri")) == OWN


def test_without_cdi_soft_shares_come_by_files() -> None:
    expected = AllocateAnswer(annotations=MARK, mounts=MOUNTS, devices=NODES)
    assert ask(SOFT, "share::0", config=config("cdi-cri"), by_mounts=BY_MOUNTS) == expected


def test_without_cdi_whole_gpus_come_by_the_environment_too() -> None:
    expected = AllocateAnswer(
        envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, annotations=MARK, mounts=MOUNTS, devices=NODES
    )
    assert ask(WHOLE, "GPU-1", config=config(), by_mounts=BY_MOUNTS) == expected


def test_envvar() -> None:
    got = ask(WHOLE, "GPU-1", "GPU-0", config=config("envvar"))
    assert got == AllocateAnswer(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-0"}, annotations=MARK)


def test_envvar_by_index() -> None:
    got = ask(WHOLE, "GPU-1", "GPU-0", config=config("envvar", device_id_strategy="index"))
    assert got.envs == {"NVIDIA_VISIBLE_DEVICES": "1,0"}


def test_replicas_of_one_gpu_are_one_gpu() -> None:
    got = ask(SHARED, "GPU-0::1", "GPU-1::0", "GPU-0::0", config=config("envvar"))
    assert got.envs == {"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"}


def test_volume_mounts() -> None:
    got = ask(WHOLE, "GPU-0", config=config("volume-mounts"))
    folder = "/var/run/nvidia-container-devices"
    assert got.envs == {"NVIDIA_VISIBLE_DEVICES": folder}
    assert got.mounts == (HostMount("/dev/null", f"{folder}/GPU-0", is_read_only=False),)


def test_cdi_cri() -> None:
    got = ask(WHOLE, "GPU-0", config=config("cdi-cri"))
    assert got == AllocateAnswer(
        annotations=MARK, cdi_devices=("k8s.device-plugin.nvidia.com/gpu=GPU-0",)
    )


def test_cdi_annotations() -> None:
    got = ask(
        WHOLE,
        "GPU-0",
        "GPU-1",
        config=config("cdi-annotations", cdi_annotation_prefix="custom.cdi.k8s.io/"),
    )
    vendor = "k8s.device-plugin.nvidia.com"
    assert got.annotations == {
        **MARK,
        f"custom.cdi.k8s.io/nvidia-device-plugin_{SHARE_PLACE}": ",".join(
            f"{vendor}/gpu=GPU-{n}" for n in range(2)
        ),
    }
    assert got == AllocateAnswer(annotations=got.annotations)


def test_extras_come_with_every_strategy() -> None:
    on = replace(
        config("envvar", "cdi-cri"),
        gds_enabled=True,
        mofed_enabled=True,
        gdrcopy_enabled=True,
        imex_channel_ids=(0,),
    )
    got = ask(WHOLE, "GPU-0", config=on, extras=("gdrcopy", "gds", "mofed"))
    assert got.envs == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "NVIDIA_IMEX_CHANNELS": "0",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    vendor = "k8s.device-plugin.nvidia.com"
    assert got.cdi_devices == tuple(
        f"{vendor}/{name}"
        for name in ("gpu=GPU-0", "imex-channel=0", "gdrcopy=all", "gds=all", "mofed=all")
    )


def test_with_cdi_alone_there_are_no_device_nodes_but_the_variables_of_the_extras() -> None:
    on = replace(config("cdi-cri", pass_device_specs=True), gds_enabled=True)
    got = ask(WHOLE, "GPU-0", config=on, extras=("gds",))
    vendor = "k8s.device-plugin.nvidia.com"
    assert got == AllocateAnswer(
        envs={"NVIDIA_GDS": "enabled"},
        annotations=MARK,
        cdi_devices=(f"{vendor}/gpu=GPU-0", f"{vendor}/gds=all"),
    )


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
def test_an_extra_without_a_spec_is_not_named(strategy: str) -> None:
    on = replace(config(strategy), gds_enabled=True, mofed_enabled=True)
    got = ask(WHOLE, "GPU-0", config=on, extras=("mofed", "gdrcopy"))
    named = ",".join((*got.cdi_devices, *got.annotations.values()))
    assert "/mofed=all" in named
    assert "/gds=all" not in named
    assert "/gdrcopy=all" not in named
    assert got.envs == {"NVIDIA_GDS": "enabled", "NVIDIA_MOFED": "enabled"}


def test_device_nodes_are_passed_from_the_drivers_root() -> None:
    wanted = replace(config("envvar", pass_device_specs=True), nvidia_dev_root="/run/nvidia/driver")
    driver = DriverNodes(control=("/dev/nvidiactl",), minors={"GPU-1": 5})
    got = ask(SHARED, "GPU-1::0", "GPU-1::1", config=wanted, driver=driver)
    assert got.devices == (
        DeviceNode("/run/nvidia/driver/dev/nvidiactl", "/dev/nvidiactl"),
        DeviceNode("/run/nvidia/driver/dev/nvidia5", "/dev/nvidia5"),
    )


def test_unknown_ids_are_refused_in_nvidias_words() -> None:
    with pytest.raises(UsageError) as raised:
        ask(WHOLE, "GPU-7", config=config("envvar"))
    assert raised.value.message == (
        'invalid allocation request for "nvidia.com/gpu": invalid request: unknown device: GPU-7'
    )
    assert raised.value.hint


def test_more_than_one_is_refused_in_nvidias_words_where_that_is_asked_for() -> None:
    ids = ("GPU-0::0", "GPU-1::0")
    assert ask(SHARED, *ids, config=config()) == OWN
    strict = replace(SHARED, fails_above_one=True)
    with pytest.raises(UsageError) as raised:
        ask(strict, *ids, config=config())
    assert raised.value.message == (
        'invalid allocation request for "nvidia.com/gpu.shared": invalid request: maximum request'
        " size for shared resources is 1; found 2"
    )
    assert ask(strict, ids[0], config=config()) == OWN


def test_a_device_that_does_not_answer_is_no_device() -> None:
    gone = replace(WHOLE, slots=(Slot("GPU-9", "GPU-9"),))
    with pytest.raises(UsageError, match="unknown device: GPU-9"):
        ask(gone, "GPU-9", config=config("envvar"))


def test_mig_devices_are_answered_as_nvidias_plugin_does() -> None:
    whole = gpu(0, mig=True)
    slices = {each.uuid: each for each in (mig_slice(whole, 0), mig_slice(whole, 1))}
    small = Resource(
        name="nvidia.com/mig-1g.10gb",
        mode="exclusive",
        slots=tuple(Slot(uuid, uuid) for uuid in slices),
    )
    driver = DriverNodes(
        control=("/dev/nvidiactl",),
        minors=dict.fromkeys(slices, 5),
        capabilities={
            "MIG-00": ("/dev/nvidia-caps/nvidia-cap66", "/dev/nvidia-caps/nvidia-cap67"),
            "MIG-01": ("/dev/nvidia-caps/nvidia-cap75", "/dev/nvidia-caps/nvidia-cap76"),
        },
    )

    def asked(config: Config, *ids: str) -> AllocateAnswer:
        return ask(small, *ids, config=config, devices=slices, driver=driver)

    by_name = asked(config("envvar"), "MIG-01")
    assert by_name.envs == {"NVIDIA_VISIBLE_DEVICES": "MIG-01"}
    by_number = asked(config("envvar", device_id_strategy="index"), "MIG-00", "MIG-01")
    assert by_number.envs == {"NVIDIA_VISIBLE_DEVICES": "0:0,0:1"}
    with_nodes = asked(config("envvar", pass_device_specs=True), "MIG-01", "MIG-00")
    assert [node.host_path for node in with_nodes.devices] == [
        "/dev/nvidiactl",
        "/dev/nvidia5",
        "/dev/nvidia-caps/nvidia-cap75",
        "/dev/nvidia-caps/nvidia-cap76",
        "/dev/nvidia-caps/nvidia-cap66",
        "/dev/nvidia-caps/nvidia-cap67",
    ]
    assert asked(config("cdi-cri"), "MIG-00").cdi_devices == (
        "k8s.device-plugin.nvidia.com/gpu=MIG-00",
    )
    assert asked(config(), "MIG-00") == OWN


def test_a_resource_that_was_given_up_has_no_ids() -> None:
    with pytest.raises(UsageError, match="unknown device: share::0"):
        ask(replace(SOFT, slots=()), "share::0", config=config())
