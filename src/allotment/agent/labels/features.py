# SPDX-License-Identifier: Apache-2.0
"""GPU feature discovery's labels, from facts about the GPUs and their sharing. Pure.

NVIDIA's keys and values are those of gpu-feature-discovery v0.20, with two additions: the labels of
a node are stable (of several models the last in NVML's order wins), and an unknown fact omits only
its own labels.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from allotment.agent.config.schema import Config
from allotment.agent.resources import Offer
from allotment.devices.facts import DeviceFacts, MigFacts, NodeFacts

OWNED_PREFIXES: Final = ("nvidia.com/", "allotment.dev/")
"""The prefixes of all labels that the agent sets."""

UNKNOWN_MACHINE: Final = "unknown"
"""The machine type if the firmware does not report it."""

_GPU: Final = "nvidia.com/gpu"
_NVIDIA: Final = "nvidia.com/"
_VERSION_PARTS: Final = (2, 3)

_PCI_MODES: Final[Mapping[int | None, str]] = {0x0300: "graphics", 0x0302: "compute"}


class Features(msgspec.Struct, frozen=True):
    """A node's labels, sorted by key, and notes about them."""

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

    `machine_type` is the text of the machine type file. `timestamp_s` (Unix seconds) is the time of
    the first labels; None: no such label.
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
        f"GPU {each.index} ({each.uuid or 'unknown'}): {each.message};"
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
    """Return the labels of `nvidia.com/gpu`: one set, of the last model.

    Models with a GPU outside MIG mode come last.
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
    models_found = f"Multiple device types detected: [{' '.join(sorted(models))}]"
    shown = f"nvidia.com/gpu.* describe {labels['nvidia.com/gpu.product']}"
    return labels, [f"{models_found}; {shown}, allotment.dev/gpu.model.* count each model"]


def _named_gpus(devices: Sequence[DeviceFacts], *, offer: Offer, config: Config) -> _Part:
    """Return the labels of GPUs with their own resource names (`nvidia.com/a100`)."""
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
    """Return labels that NVIDIA does not have: GPUs by mode and by model."""
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
    """Return the labels that the MIG strategy adds or replaces."""
    if config.mig_strategy == "none":
        return {}, ()
    labels = {"nvidia.com/mig.strategy": config.mig_strategy}
    split = [each for each in devices if each.is_mig_enabled]
    if any(each.mig_devices is None for each in split):
        return labels, ["MIG devices are unknown: labels describe whole GPUs only"]
    by_profile: dict[str, list[tuple[str, MigFacts]]] = {}
    for device in split:
        for mig in device.mig_devices or ():
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
    """Return why strategy `single` does not suit these GPUs, in NVIDIA's words."""
    if not all(each.mig_devices for each in split):
        return "at least one MIG device is enabled but empty"
    if len(split) < len(devices):
        return "devices with MIG enabled and disable detected"
    return None if profiles == 1 else "more than one MIG device type present on node"


# ---- fabric and virtual machines -----------------------------------------------------------------


def _clique(devices: Sequence[DeviceFacts]) -> _Part:
    """Return the clique, if all GPUs of a fabric are in the same one."""
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


MAX_LABEL: Final = 63
"""Characters of a value, and of a key after its `/` (apimachinery pkg/util/validation)."""

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9\-_. ]")
_NOT_IN_VALUES: Final = re.compile(r"[^A-Za-z0-9\-_.]+")
_EDGES: Final = "-_."
_PREFIX: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_PREFIX: Final = 253
_NAME: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def sanitised(text: str) -> str:
    """Return a model's or machine's name as in NVIDIA's labels: `Tesla T4` becomes `Tesla-T4`.

    Invalid characters are removed, spaces become one dash (k8s-device-plugin
    internal/lm/resource.go, v0.20).
    """
    return "-".join(_NOT_IN_NAMES.sub("", text).split())


def fitting(labels: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return valid labels, sorted by key, and notes about changes.

    Invalid values are cut and cleaned; a label with an invalid key is left out.
    """
    valid: dict[str, str] = {}
    notes: list[str] = []
    for key, value in sorted(labels.items()):
        if not _is_key(key):
            notes.append(f"{key!r} is not a valid label key: the label is left out")
            continue
        valid[key] = _value(value)
        if valid[key] != value:
            notes.append(f"{key}: {value!r} is not a valid label value: {valid[key]!r} is used")
    return valid, tuple(notes)


def _value(value: str) -> str:
    return _NOT_IN_VALUES.sub("-", value).strip(_EDGES)[:MAX_LABEL].rstrip(_EDGES)


def _is_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (len(prefix) > _MAX_PREFIX or not _PREFIX.fullmatch(prefix)):
        return False
    return len(name) <= MAX_LABEL and _NAME.fullmatch(name) is not None


_SHARED: Final = "SHARED"
_MIG: Final = "MIG"

_FAMILIES: Final[Mapping[int, str]] = {
    1: "tesla",
    2: "fermi",
    3: "kepler",
    5: "maxwell",
    6: "pascal",
    9: "hopper",
    10: "blackwell",
    12: "blackwell",
    13: "rubin",
}
_FIRST_TURING: Final = (7, 5)
_FIRST_ADA: Final = (8, 9)


class SharingFacts(msgspec.Struct, frozen=True):
    """How a resource is shared. `strategy` is none, time-slicing or mps."""

    replicas: int
    strategy: str
    is_renamed: bool = False

    @property
    def suffix(self) -> tuple[str, ...]:
        """The suffix of the product name, which marks a shared GPU."""
        return (_SHARED,) if self.replicas > 1 and not self.is_renamed else ()


UNSHARED: Final = SharingFacts(1, "none")
WHOLE_AS_MIG: Final = SharingFacts(0, "none")
"""For a GPU in MIG mode, which cannot be allocated as a whole."""


def sharing_of(
    family: str, *, offer: Offer, config: Config, devices: frozenset[str] | None = None
) -> SharingFacts:
    """Return how the resource `family` is shared on `devices` (UUIDs; None: on any).

    By the offer; without an offer of that name, by the configuration.
    """
    offered = [
        (resource.replicas, resource.name != family)
        for resource in offer.resources
        if resource.family == family
        and (devices is None or any(slot.device in devices for slot in resource.slots))
    ]
    if not offered:
        offered = _configured(family, config) if _is_nowhere(family, offer) else []
    replicas, is_renamed = max(offered, default=(1, False))
    if replicas <= 1:
        return UNSHARED
    return SharingFacts(replicas, "time-slicing" if config.mps is None else "mps", is_renamed)


def _is_nowhere(family: str, offer: Offer) -> bool:
    return not any(resource.family == family for resource in offer.resources)


def _configured(family: str, config: Config) -> list[tuple[int, bool]]:
    sharing = config.mps or config.time_slicing
    if sharing is None:
        return []
    return [
        (each.replicas, each.rename is not None or sharing.rename_by_default)
        for each in sharing.resources
        if each.name == family
    ]


def gpu_labels(
    family: str, device: DeviceFacts, *, count: int, sharing: SharingFacts
) -> dict[str, str]:
    """Return the labels of `count` GPUs of one model, of which `device` is one."""
    labels = {
        **_base(family, (device.name,), count=count, sharing=sharing),
        **({f"{family}.memory": str(device.memory_mib)} if device.memory_mib else {}),
    }
    if device.compute_capability is not None:
        major, minor = device.compute_capability
        labels[f"{family}.family"] = architecture_family(major, minor)
        labels[f"{family}.compute.major"] = str(major)
        labels[f"{family}.compute.minor"] = str(minor)
    return labels


def mig_labels(
    family: str, model: str, mig_devices: Sequence[MigFacts], *, sharing: SharingFacts
) -> dict[str, str]:
    """Return the labels of MIG devices of one profile on GPUs of a model; at least one device."""
    first = mig_devices[0]
    figures = {
        "memory": first.memory_mib,
        "multiprocessors": first.multiprocessors,
        "slices.gi": first.gi_slices,
        "slices.ci": first.ci_slices,
        "engines.copy": first.copy_engines,
        "engines.decoder": first.decoders,
        "engines.encoder": first.encoders,
        "engines.jpeg": first.jpeg_engines,
        "engines.ofa": first.ofa_engines,
    }
    profile = first.profile.replace("+", ".")
    return {
        **_base(family, (model, _MIG, profile), count=len(mig_devices), sharing=sharing),
        **{f"{family}.{suffix}": str(figure) for suffix, figure in figures.items()},
    }


def invalid_labels(family: str, model: str) -> dict[str, str]:
    """Return the labels of a node whose MIG devices do not suit the strategy `single`."""
    return {
        f"{family}.product": "-".join((sanitised(model), _MIG, "INVALID")),
        f"{family}.count": "0",
        f"{family}.replicas": "0",
        f"{family}.sharing-strategy": "",
        f"{family}.memory": "0",
    }


def architecture_family(major: int, minor: int) -> str:
    """Name the family of chips with that compute capability, as NVIDIA's label does."""
    capability = (major, minor)
    if major == _FIRST_TURING[0]:
        return "turing" if capability >= _FIRST_TURING else "volta"
    if major == _FIRST_ADA[0]:
        return "ada-lovelace" if capability >= _FIRST_ADA else "ampere"
    return _FAMILIES.get(major, "undefined")


def _base(
    family: str, names: Sequence[str], *, count: int, sharing: SharingFacts
) -> dict[str, str]:
    product = (*(sanitised(name) for name in names if name), *sharing.suffix)
    return {
        f"{family}.product": "-".join(product),
        f"{family}.count": str(count),
        f"{family}.replicas": str(sharing.replicas),
        f"{family}.sharing-strategy": sharing.strategy,
    }
