# SPDX-License-Identifier: Apache-2.0
"""All labels of a node: facts, offer and configuration in, keys and values out. Pure.

NVIDIA's keys and values are as its gpu-feature-discovery v0.20 writes them, with two promises
more: the same node always has the same labels (where several models contend for one label, the
last in NVML's order has it), and what cannot be told leaves out its own labels, not all.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from allotment.agent.config.effective import Config
from allotment.agent.labels.gpus import (
    WHOLE_AS_MIG,
    gpu_labels,
    invalid_labels,
    mig_labels,
    sharing_of,
)
from allotment.agent.labels.values import fitting, sanitised
from allotment.agent.resources import Offer
from allotment.devices.facts import DeviceFacts, MigFacts, NodeFacts

__all__ = ["OWNED_PREFIXES", "UNKNOWN_MACHINE", "Features", "node_features"]

OWNED_PREFIXES: Final = ("nvidia.com/", "allotment.dev/")
"""What the keys of all labels begin with that the agent ever sets."""

UNKNOWN_MACHINE: Final = "unknown"
"""The machine type of a node whose firmware does not tell."""

_GPU: Final = "nvidia.com/gpu"
_NVIDIA: Final = "nvidia.com/"
_VERSION_PARTS: Final = (2, 3)

_PCI_MODES: Final[Mapping[int | None, str]] = {0x0300: "graphics", 0x0302: "compute"}


@dataclass(frozen=True, slots=True)
class Features:
    """A node's labels, in order of their keys, and what a person should know about them."""

    labels: Mapping[str, str]
    notes: tuple[str, ...] = ()


def node_features(
    facts: NodeFacts,
    *,
    offer: Offer,
    config: Config,
    machine_type: str,
    timestamp_s: int | None = None,
) -> Features:
    """Return the labels of a node.

    `machine_type` is the text of the machine type file; `timestamp_s` (Unix seconds) is when the
    labels were first made, None: without.
    """
    labels: dict[str, str] = {}
    notes: list[str] = []
    if timestamp_s is not None:
        labels["nvidia.com/gfd.timestamp"] = str(timestamp_s)
    labels["nvidia.com/gpu.machine"] = sanitised(machine_type)
    labels.update(_vgpu(facts.devices))
    if facts.devices:
        for more, remarks in (
            _versions(facts),
            _capabilities(facts.devices, config),
            _whole_gpus(facts.devices, offer=offer, config=config),
            _named_gpus(facts.devices, offer=offer, config=config),
            _mig_devices(facts.devices, offer=offer, config=config),
            _clique(facts.devices),
        ):
            labels.update(more)
            notes += remarks
        labels["nvidia.com/gpu.mode"] = _pci_mode(facts.devices)
        labels.update(_own(facts.devices, offer))
    notes += [
        f"GPU {each.index} ({each.uuid or 'not known yet'}): {each.message};"
        f" its labels are {'as they were' if each.uuid else 'missing'}"
        for each in facts.problems
    ]
    fitted, changes = fitting(labels)
    return Features(fitted, (*notes, *changes))


_Part = tuple[dict[str, str], Sequence[str]]


def _versions(facts: NodeFacts) -> _Part:
    major, minor = (str(part) for part in facts.cuda_version)
    labels = {
        "nvidia.com/cuda.runtime.major": major,
        "nvidia.com/cuda.runtime.minor": minor,
        "nvidia.com/cuda.runtime-version.major": major,
        "nvidia.com/cuda.runtime-version.minor": minor,
        "nvidia.com/cuda.runtime-version.full": f"{major}.{minor}",
    }
    parts = facts.driver_version.split(".")
    if len(parts) not in _VERSION_PARTS:
        problem = f'Version "{facts.driver_version}" does not match format "X.Y[.Z]"'
        return labels, [f"{problem}: the driver's labels are missing"]
    first, second, third = (*parts, "")[:3]
    return {
        **labels,
        "nvidia.com/cuda.driver.major": first,
        "nvidia.com/cuda.driver.minor": second,
        "nvidia.com/cuda.driver.rev": third,
        "nvidia.com/cuda.driver-version.major": first,
        "nvidia.com/cuda.driver-version.minor": second,
        "nvidia.com/cuda.driver-version.revision": third,
        "nvidia.com/cuda.driver-version.full": facts.driver_version,
    }, ()


def _capabilities(devices: Sequence[DeviceFacts], config: Config) -> _Part:
    has_mps = config.mps is not None and any(each.replicas > 1 for each in config.mps.resources)
    has_mig = any(each.is_mig_enabled for each in devices)
    labels = {
        "nvidia.com/mig.capable": _flag(each.is_mig_capable for each in devices),
        "nvidia.com/mps.capable": _flag((has_mps and not has_mig,)),
    }
    return labels, ["MPS sharing is not supported for mig devices"] if has_mps and has_mig else ()


# ---- GPUs ----------------------------------------------------------------------------------------


def _whole_gpus(devices: Sequence[DeviceFacts], *, offer: Offer, config: Config) -> _Part:
    """Return the labels of `nvidia.com/gpu`.

    There is one set of them: models overwrite one another, and any model with a GPU that is not
    split by MIG overwrites those without.
    """
    models = Counter(each.name for each in devices)
    labels: dict[str, str] = {}
    for device in sorted(devices, key=lambda each: not each.is_mig_enabled):  # stable: last wins
        same = frozenset(each.uuid for each in devices if each.name == device.name)
        sharing = (
            WHOLE_AS_MIG
            if device.is_mig_enabled
            else sharing_of(_GPU, offer=offer, config=config, devices=same)
        )
        labels.update(gpu_labels(_GPU, device, count=models[device.name], sharing=sharing))
    if len(models) == 1:
        return labels, ()
    found = f"Multiple device types detected: [{' '.join(sorted(models))}]"
    told = f"nvidia.com/gpu.* tell of {labels['nvidia.com/gpu.product']}"
    return labels, [f"{found}; {told}, allotment.dev/gpu.model.* count each model"]


def _named_gpus(devices: Sequence[DeviceFacts], *, offer: Offer, config: Config) -> _Part:
    """Return the labels of GPUs that are offered under names of their own (`nvidia.com/a100`)."""
    labels: dict[str, str] = {}
    families = {each.family for each in offer.resources if each.family.startswith(_NVIDIA)}
    for family in sorted(families - {_GPU}):
        given = {
            slot.device
            for resource in offer.resources
            if resource.family == family
            for slot in resource.slots
        }
        mine = [each for each in devices if each.uuid in given]
        sharing = sharing_of(family, offer=offer, config=config)
        for device in mine:
            labels.update(gpu_labels(family, device, count=len(mine), sharing=sharing))
    return labels, ()


def _own(devices: Sequence[DeviceFacts], offer: Offer) -> dict[str, str]:
    """Return what NVIDIA's labels cannot say: GPUs by mode, and by model on a mixed node."""
    modes = Counter(offer.modes[each.uuid] for each in devices if each.uuid in offer.modes)
    models = Counter(sanitised(each.name) for each in devices)
    return {
        **{f"allotment.dev/gpu.mode.{mode}": str(count) for mode, count in modes.items()},
        **{f"allotment.dev/gpu.model.{model}": str(count) for model, count in models.items()},
    }


def _pci_mode(devices: Sequence[DeviceFacts]) -> str:
    classes = {each.pci_class for each in devices}
    return _PCI_MODES.get(classes.pop(), "unknown") if len(classes) == 1 else "unknown"


# ---- MIG -----------------------------------------------------------------------------------------


def _mig_devices(devices: Sequence[DeviceFacts], *, offer: Offer, config: Config) -> _Part:
    """Return what the MIG strategy adds to, or puts in place of, the labels of whole GPUs."""
    if config.mig_strategy == "none":
        return {}, ()
    labels = {"nvidia.com/mig.strategy": config.mig_strategy}
    split = [each for each in devices if each.is_mig_enabled]
    if any(each.migs is None for each in split):
        return labels, ["MIG devices are not read: labels tell of whole GPUs only"]
    by_profile: dict[str, list[tuple[str, MigFacts]]] = {}
    for device in split:
        for mig in device.migs or ():
            by_profile.setdefault(mig.profile, []).append((device.name, mig))
    if config.mig_strategy == "mixed":
        for profile, found in by_profile.items():
            family = f"nvidia.com/mig-{profile.replace('+', '.')}"
            labels.update(_profile(family, found, offer=offer, config=config))
        return labels, ()
    if not split:
        return labels, ()
    problem = _single_problem(devices, split, profiles=len(by_profile))
    if problem is not None:
        return {**labels, **invalid_labels(_GPU, split[0].name)}, [
            f"Invalid configuration detected for mig-strategy=single: {problem}"
        ]
    (found,) = by_profile.values()
    return {**labels, **_profile(_GPU, found, offer=offer, config=config)}, ()


def _profile(
    family: str, found: Sequence[tuple[str, MigFacts]], *, offer: Offer, config: Config
) -> dict[str, str]:
    model = found[0][0]
    sharing = sharing_of(family, offer=offer, config=config)
    return mig_labels(family, model, [mig for _, mig in found], sharing=sharing)


def _single_problem(
    devices: Sequence[DeviceFacts], split: Sequence[DeviceFacts], *, profiles: int
) -> str | None:
    """Say why the strategy `single` does not go with these GPUs, in NVIDIA's words."""
    if not all(each.migs for each in split):
        return "at least one MIG device is enabled but empty"
    if len(split) < len(devices):
        return "devices with MIG enabled and disable detected"
    return None if profiles == 1 else "more than one MIG device type present on node"


# ---- fabric and virtual machines -----------------------------------------------------------------


def _clique(devices: Sequence[DeviceFacts]) -> _Part:
    """Return the clique, if all GPUs that are in a fabric are in the same."""
    places = [each.fabric for each in devices if each.fabric is not None]
    clusters = sorted({place.cluster for place in places})
    cliques = sorted({place.clique for place in places})
    if len(clusters) > 1:
        return {}, [f"Cluster UUIDs are non-unique: [{' '.join(clusters)}]"]
    if len(cliques) > 1:
        return {}, [f"Clique IDs are non-unique: {cliques}"]
    return {"nvidia.com/gpu.clique": f"{clusters[0]}.{cliques[0]}"} if places else {}, ()


def _vgpu(devices: Sequence[DeviceFacts]) -> dict[str, str]:
    hosts = [each.vgpu_host for each in devices if each.vgpu_host is not None]
    labels = {"nvidia.com/vgpu.present": _flag((bool(hosts),))}
    if hosts:
        labels["nvidia.com/vgpu.host-driver-version"] = hosts[-1].driver_version
        labels["nvidia.com/vgpu.host-driver-branch"] = hosts[-1].driver_branch
    return labels


def _flag(values: Iterable[bool]) -> str:
    return "true" if any(values) else "false"
