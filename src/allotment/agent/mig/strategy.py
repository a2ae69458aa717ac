# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's MIG strategies `none`, `single` and `mixed`: the offered devices of a node. Pure.

none    no GPU in MIG mode: CUDA cannot use such a GPU as a whole
single  MIG devices in place of GPUs, if all GPUs of the node are cut alike
mixed   MIG devices by profile, beside whole GPUs

Names and rules are those of NVIDIA's k8s-device-plugin v0.20 (internal/rm/nvml_manager.go,
device_map.go; go-nvlib's AssertAllMigDevicesAreValid), except that `none` does not offer GPUs in
MIG mode.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from allotment.agent.config.schema import GPU, Config, matches_pattern
from allotment.model.devices import Device
from allotment.model.structs import replace

NONE: Final = "none"
SINGLE: Final = "single"
PER_PROFILE: Final = f"{GPU.rpartition('/')[0]}/mig-"
"""The prefix of names in strategy `mixed`."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The offered devices, and why others are not."""

    devices: tuple[Device, ...]
    """Whole GPUs, and MIG devices that have a name."""
    names: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The resource of each MIG device among them, by UUID."""
    is_refused: bool = False
    """`single` does not suit these GPUs: no NVIDIA resource is offered."""
    problems: tuple[str, ...] = ()


def serve(devices: Sequence[Device], config: Config, *, dynamic: Collection[str] = ()) -> Served:
    """Choose from a node's GPUs and their MIG devices.

    `dynamic` are UUIDs of GPUs that Allotment cuts on request. They are served whole; foreign MIG
    devices on them are served as on any other GPU.
    """
    cut = {each.slice_of.gpu for each in devices if each.slice_of is not None}
    whole = tuple(
        each for each in devices if each.slice_of is None and not (each.mig or each.uuid in dynamic)
    )
    split = [
        each for each in devices if each.mig and (each.uuid not in dynamic or each.uuid in cut)
    ]
    found = _served(devices, config, whole=whole, split=split)
    there = {each.uuid for each in found.devices}
    more = (each for each in devices if each.uuid in dynamic and each.uuid not in there)
    return replace(found, devices=(*found.devices, *more))


def _served(
    devices: Sequence[Device],
    config: Config,
    *,
    whole: tuple[Device, ...],
    split: Sequence[Device],
) -> Served:
    if config.mig_strategy == NONE:
        return Served(
            devices=whole,
            problems=tuple(
                f"GPU {each.index} ({each.uuid}) is in MIG mode and is not offered:"
                " migStrategy single or mixed offers its MIG devices"
                for each in split
            ),
        )
    slices = [each for each in devices if each.slice_of is not None]
    if config.mig_strategy == SINGLE:
        problem = _unlike(whole, split, slices)
        if problem is not None:
            text = f"migStrategy single: {problem}: {GPU} is 0 until all GPUs are cut alike"
            return Served(
                devices=whole,
                is_refused=True,
                problems=(f"{text} (mixed serves them as they are)",),
            )
    names = {each.uuid: name for each in slices if (name := resource_of(each, config)) is not None}
    return Served(
        devices=tuple(each for each in devices if not each.mig and _has_name(each, names)),
        names=names,
        problems=(
            *(
                f"GPU {each.index} ({each.uuid}) is in MIG mode and has no MIG devices configured"
                for each in split
                if not _of(each, slices)
            ),
            *(
                f"MIG device {each.index_text} ({each.uuid}) is not offered: MIG profile"
                f" '{_profile(each)}' does not match any resource patterns"
                for each in slices
                if each.uuid not in names
            ),
        ),
    )


def resource_of(device: Device, config: Config) -> str | None:
    """Return the resource of a MIG device; None: its profile has no name.

    By `resources.mig` of the file, then by the strategy. `mixed` has names for GPU instances that
    are used as a whole, and none for parts of their compute (`1c.3g.40gb`).
    """
    profile = _profile(device)
    for each in config.mig_patterns:
        if matches_pattern(each.pattern, profile):
            return each.name
    if config.mig_strategy == SINGLE:
        return GPU
    if "c." in profile:
        return None
    return PER_PROFILE + profile.replace("+", ".")


def inherited(reasons: Mapping[str, str], devices: Sequence[Device]) -> Mapping[str, str]:
    """Add the MIG devices of the GPUs in `reasons`, by UUID: they share the GPU's problem."""
    return {
        **reasons,
        **{
            each.uuid: reasons[each.slice_of.gpu]
            for each in devices
            if each.slice_of is not None and each.slice_of.gpu in reasons
        },
    }


def _unlike(
    whole: Sequence[Device], split: Sequence[Device], slices: Sequence[Device]
) -> str | None:
    """Return why `single` does not suit these GPUs, in NVIDIA's words; None: it does."""
    if not split:
        return None
    if whole:
        return "all devices on the node must be configured with the same migEnabled value"
    for each in split:
        if not _of(each, slices):
            return f"device {each.index} has no MIG devices configured"
    if len({_profile(each) for each in slices}) > 1:
        return "more than one MIG device type present on node"
    return None


def _of(gpu: Device, slices: Sequence[Device]) -> bool:
    return any(each.slice_of is not None and each.slice_of.gpu == gpu.uuid for each in slices)


def _has_name(device: Device, names: Mapping[str, str]) -> bool:
    return device.slice_of is None or device.uuid in names


def _profile(device: Device) -> str:
    return device.slice_of.profile if device.slice_of is not None else ""
