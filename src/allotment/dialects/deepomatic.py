# SPDX-License-Identifier: Apache-2.0
"""Deepomatic's dialect: `deepomatic.com/shared-gpu`, so many slots of a GPU.

Its plugin gives each slot of a GPU to anybody who asks, and limits nobody. Here a slot is a part of
the GPU: that part of its memory, and as a guarantee of its time. How many slots a GPU has, that
plugin's variable `DP_NUMBER_CONTAINERS_PER_GPU` says; it is a setting here.
(Deepomatic/shared-gpu-nvidia-k8s-device-plugin, README.)
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign import (
    ForeignPod,
    Translated,
    Translation,
    WithoutRecord,
)
from allotment.dialects.foreign_amounts import Name, amount_of
from allotment.dialects.protocol import refusal
from allotment.dialects.quantities import keys_of
from allotment.model.requests import replicas_of

__all__ = ["SHARED_GPU", "DeepomaticDialect", "DeepomaticSettings"]

SHARED_GPU: Final = "deepomatic.com/shared-gpu"


class DeepomaticSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    resource: Name = SHARED_GPU
    containers_per_gpu: Annotated[int, Meta(ge=1, le=1000)] = 100
    """Of how many parts of a GPU a slot is one; as in its manifest, which sets that variable."""


class DeepomaticDialect(WithoutRecord):
    """`deepomatic.com/shared-gpu`."""

    name: Final = "deepomatic"
    title: Final = "Deepomatic's"

    def __init__(self, settings: DeepomaticSettings | None = None) -> None:
        """Take how many slots a GPU has."""
        its = settings or DeepomaticSettings()
        self._slots, self._resource = its.containers_per_gpu, its.resource
        self.resources = (self._resource,)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return its resource, if a container has it."""
        return (
            self.resources if any(keys_of(each, self.resources) for each in pod.containers) else ()
        )

    def translate(self, pod: ForeignPod) -> Translation:
        """Say what the pod means. Raises `UsageError`."""
        found = []
        for container in pod.containers:
            slots = amount_of(pod, container, self._resource)
            if slots > self._slots:
                problem = f"{self._resource} is {slots}, and a GPU has {self._slots} of them"
                hint = f"ask for at most {self._slots}, or for whole GPUs by nvidia.com/gpu"
                raise refusal(pod, container.name, problem, hint=hint)
            if slots:
                request = replicas_of(self._slots).times(slots)
                found.append(
                    Translated(container=container.name, request=request, removes=(self._resource,))
                )
        return Translation(dialect=self.name, containers=tuple(found))
