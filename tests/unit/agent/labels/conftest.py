# SPDX-License-Identifier: Apache-2.0
"""GPUs, offers and configurations to make labels of, without a machine to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from allotment.agent.config.schema import Config
from allotment.agent.labels.features import Features, node_features
from allotment.agent.resources import Offer, Resource, Slot
from allotment.devices.facts import DeviceFacts, MigFacts, NodeFacts
from allotment.devices.model_facts import Brand
from allotment.devices.models import MODELS
from allotment.model.structs import replace

_BESIDE = frozenset({"nvidia.com/gpu.machine", "nvidia.com/gpu.mode", "nvidia.com/mig.capable"})


@dataclass(frozen=True, slots=True)
class Scene:
    """A node to be: makes GPUs and offers, and the labels of them."""

    timestamp_s: int = 1594644571
    mock: DeviceFacts = field(
        default=DeviceFacts(
            uuid="GPU-mock", name="MOCKMODEL", memory_mib=300, compute_capability=(8, 0)
        )
    )
    """NVIDIA's own mock of a GPU, whose labels its tests write out."""

    def gpus(self, key: str, count: int = 1, *, first: int = 0) -> tuple[DeviceFacts, ...]:
        """GPUs of a model that can be simulated, as `FactReader` tells of them."""
        model = MODELS[key]
        is_geforce = model.brand in {Brand.GEFORCE, Brand.GEFORCE_RTX}
        return tuple(
            DeviceFacts(
                uuid=f"GPU-{first + index}",
                name=model.name,
                memory_mib=model.memory_mib,
                compute_capability=model.core.compute_capability,
                pci_class=0x0300 if is_geforce else 0x0302,
                is_mig_capable=model.mig is not None,
            )
            for index in range(count)
        )

    def split(self, device: DeviceFacts, *mig_devices: MigFacts) -> DeviceFacts:
        """The GPU with MIG on, and these MIG devices."""
        return replace(device, is_mig_capable=True, is_mig_enabled=True, mig_devices=mig_devices)

    def mig(self, profile: str, memory_mib: int, *, gi: int, ci: int, figures: str) -> MigFacts:
        """A MIG device; `figures` are multiprocessors, copy, decoder, encoder, jpeg, ofa."""
        multiprocessors, copy, decoder, encoder, jpeg, ofa = (int(each) for each in figures.split())
        return MigFacts(
            profile=profile,
            memory_mib=memory_mib,
            multiprocessors=multiprocessors,
            gi_slices=gi,
            ci_slices=ci,
            copy_engines=copy,
            decoders=decoder,
            encoders=encoder,
            jpeg_engines=jpeg,
            ofa_engines=ofa,
        )

    def offer(
        self,
        devices: Sequence[DeviceFacts],
        *,
        replicas: int = 1,
        name: str = "nvidia.com/gpu",
        family: str = "nvidia.com/gpu",
        mode: str | None = None,
    ) -> Offer:
        """What a node offers whose GPUs are all used alike."""
        mode = mode or ("timeslice" if replicas > 1 else "exclusive")
        slots = tuple(
            Slot(each.uuid if replicas == 1 else f"{each.uuid}::{index}", each.uuid)
            for each in devices
            for index in range(replicas)
        )
        resource = Resource(name=name, mode=mode, slots=slots, replicas=replicas, family=family)
        return Offer(resources=(resource,), modes={each.uuid: mode for each in devices})

    def features(
        self,
        *devices: DeviceFacts,
        offer: Offer | None = None,
        config: Config | None = None,
        facts: NodeFacts | None = None,
        machine_type: str = "unknown",
    ) -> Features:
        """All labels, of GPUs on a node with the driver 580.95.05 unless it has other facts."""
        return node_features(
            facts or NodeFacts(driver_version="580.95.05", cuda_version=(13, 0), devices=devices),
            offer=offer or Offer(),
            config=config or Config(),
            machine_type=machine_type,
            timestamp_s=self.timestamp_s,
        )

    def resource_labels(
        self, *devices: DeviceFacts, offer: Offer | None = None, config: Config | None = None
    ) -> dict[str, str]:
        """Only those that NVIDIA's tests of resources write out."""
        labels = self.features(*devices, offer=offer, config=config).labels
        return {
            key: value
            for key, value in labels.items()
            if key.startswith(("nvidia.com/gpu.", "nvidia.com/mig")) and key not in _BESIDE
        }


@pytest.fixture
def scene() -> Scene:
    return Scene()
