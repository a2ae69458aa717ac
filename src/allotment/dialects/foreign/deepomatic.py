# SPDX-License-Identifier: Apache-2.0
"""Deepomatic's dialect: `deepomatic.com/shared-gpu`, a number of slots of a GPU.

Its plugin enforces no limits: a slot is a turn on a GPU, with all of its memory. By default the
pods stay as they are, for nodes that offer such slots (`sharing.timeSlicing` under this name). With
the plugin's variable `DP_NUMBER_CONTAINERS_PER_GPU` as a setting, a slot is an equal part of the
GPU's memory and guaranteed time. (Deepomatic/shared-gpu-nvidia-k8s-device-plugin, README.)
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign.base import ForeignDialect, Translation
from allotment.dialects.foreign.parsing import Name, amount_of, resources_in
from allotment.dialects.own.protocol import refusal
from allotment.model.pods import ForeignPod
from allotment.model.requests import Request, replicas_of

SHARED_GPU: Final = "deepomatic.com/shared-gpu"


class DeepomaticSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    resource: Name = SHARED_GPU
    containers_per_gpu: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Slots of a GPU, each a part of it; None: left to the kubelet, without a memory limit."""


class DeepomaticDialect(ForeignDialect):
    """`deepomatic.com/shared-gpu`."""

    name = "deepomatic"
    title = "Deepomatic's"
    settings_type = DeepomaticSettings

    def __init__(self, settings: DeepomaticSettings | None = None) -> None:
        settings = settings or DeepomaticSettings()
        self._slots, self._resource = settings.containers_per_gpu, settings.resource
        self.resources = (self._resource,)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        return resources_in(pod, self.resources)

    def keeps_resources(self, pod: ForeignPod) -> bool:
        del pod
        return self._slots is None

    def translate(self, pod: ForeignPod) -> Translation:
        most = self._slots
        if most is None:
            return self.translation(pod, {})
        requests: dict[str, Request] = {}
        for container in pod.containers:
            slots = amount_of(pod, container, self._resource)
            if slots > most:
                problem = f"{self._resource} is {slots}, and a GPU has {most} of them"
                hint = f"ask for at most {most}, or for whole GPUs with nvidia.com/gpu"
                raise refusal(pod, container.name, problem, hint=hint)
            if slots:
                requests[container.name] = replicas_of(most).times(slots)
        return self.translation(pod, requests)
