# SPDX-License-Identifier: Apache-2.0
"""The labels of one resource: `nvidia.com/gpu.product`, `.count`, `.replicas` and so on. Pure.

Rules are those of NVIDIA's k8s-device-plugin v0.20 (internal/lm/resource.go, mig-strategy.go): a
key is the resource's name, before any renaming, and a suffix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from allotment.agent.config.effective import Config
from allotment.agent.labels.values import sanitised
from allotment.agent.resources import Offer
from allotment.devices.facts import DeviceFacts, MigFacts

__all__ = [
    "UNSHARED",
    "WHOLE_AS_MIG",
    "SharingFacts",
    "architecture_family",
    "gpu_labels",
    "invalid_labels",
    "mig_labels",
    "sharing_of",
]

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


@dataclass(frozen=True, slots=True)
class SharingFacts:
    """How a resource is shared. `strategy` is none, time-slicing or mps."""

    replicas: int
    strategy: str
    is_renamed: bool = False

    @property
    def suffix(self) -> tuple[str, ...]:
        """What a product's name gets, so that nobody takes a shared GPU for a whole one."""
        return (_SHARED,) if self.replicas > 1 and not self.is_renamed else ()


UNSHARED: Final = SharingFacts(1, "none")
WHOLE_AS_MIG: Final = SharingFacts(0, "none")
"""Of a GPU that is split by MIG: as a whole it can be given to nobody."""


def sharing_of(
    family: str, *, offer: Offer, config: Config, devices: frozenset[str] | None = None
) -> SharingFacts:
    """Return how the resource `family` is shared on `devices` (UUIDs; None: on any).

    What is offered counts; where none of that name is, what the configuration says of the name.
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
    family: str, model: str, migs: Sequence[MigFacts], *, sharing: SharingFacts
) -> dict[str, str]:
    """Return the labels of MIG devices of one profile on GPUs of a model; at least one device."""
    first = migs[0]
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
        **_base(family, (model, _MIG, profile), count=len(migs), sharing=sharing),
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
