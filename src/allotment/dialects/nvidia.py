# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's dialect: `nvidia.com/gpu`, `nvidia.com/gpu.shared`, and whatever else they are named.

How many is all that a container can say: the kubelet chooses the devices, and the node's
configuration says what is had of each. (k8s-device-plugin v0.20, README.)
"""

from collections.abc import Collection
from typing import Final

from allotment.dialects.annotations import MODE
from allotment.dialects.modes import STRONGEST
from allotment.dialects.protocol import refusal
from allotment.dialects.wishes import Wishes
from allotment.model.pods import Container, ContainerAsk, Pod
from allotment.model.quantities import MAX_BYTES

__all__ = ["NvidiaDialect"]


class NvidiaDialect:
    """The resources of that family that a node offers, by their names."""

    name: Final = "NVIDIA's"
    takes: Final = frozenset({MODE})

    def __init__(self, names: Collection[str]) -> None:
        """Take the names: configuration may change them."""
        self._names = frozenset(names)

    def resources(self, container: Container) -> tuple[str, ...]:
        """Zero of it is not asked for."""
        return tuple(sorted(each for each in self._names if container.resources.get(each)))

    def asks(self, pod: Pod, container: Container, wishes: Wishes) -> tuple[ContainerAsk, ...]:
        """One ask for each resource: NVIDIA's plugin answers for each by itself, too."""
        found = []
        for resource in self.resources(container):
            count = container.resources[resource]
            if not 0 < count <= MAX_BYTES:
                problem = f"{resource} is {count}"
                raise refusal(pod, container.name, problem, hint="ask for at least 1")
            if len(wishes.modes) > 1 or STRONGEST in wishes.modes:
                problem = f"{MODE} has several modes, and the kubelet chooses the devices of"
                hint = "name one mode for it, or ask by allotment.dev/gpu"
                raise refusal(pod, container.name, f"{problem} {resource}", hint=hint)
            found.append(
                ContainerAsk(
                    container=container.name,
                    kind=container.kind,
                    resource=resource,
                    count=count,
                    request=None,
                    mode=wishes.modes[0] if wishes.modes else None,
                )
            )
        return tuple(found)
