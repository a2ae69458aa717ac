# SPDX-License-Identifier: Apache-2.0
"""The interface of other systems' dialects: pods in, the same pods in Allotment's dialect out.

A dialect translates a pod once, at creation, into `allotment.dev/...` resources and annotations.
The scheduler and the agent never read the dialect. The author's keys stay, except resources of
other device plugins. At binding, `result_annotations` writes what the system's own tools read.
"""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import ClassVar

import msgspec

from allotment.dialects.foreign.parsing import PLACE_ANEW, is_asked, keys_of, number_of
from allotment.dialects.own.protocol import refusal
from allotment.model.clusters import PlacedDevice, PodBooking
from allotment.model.errors import UsageError
from allotment.model.mig import MigPlace, MigProfile
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod
from allotment.model.requests import Request

DIALECT = "allotment.dev/dialect"
"""The annotation with the dialect that a pod was translated from."""

PASSED_OVER = "webhook.allotment.dev/not-honoured"
"""Ignored keys, each with the reason: written by the webhook, reported as an event."""


class Translated(msgspec.Struct, frozen=True, kw_only=True):
    """One container's request, and the resources to remove."""

    container: str
    request: Request
    removes: tuple[str, ...] = ()
    """Resources for which the kubelet would ask another device plugin."""
    names_mode: bool = False
    """The author chose the mode; else mode soft is a default."""


class Translation(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of a pod."""

    dialect: str
    """The dialect's short name in configuration and metrics: `hami`."""
    containers: tuple[Translated, ...]
    passed_over: tuple[str, ...] = ()
    """Ignored keys, each with the reason: reported as an event. A key whose loss would weaken
    isolation is refused instead."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node's devices by UUID, for `result_annotations`."""

    indexes: Mapping[str, int]
    models: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    profiles: Mapping[str, tuple[MigProfile, ...]] = msgspec.field(default_factory=dict)
    """Only devices with slices."""
    foreign_slices: Mapping[str, tuple[MigPlace, ...]] = msgspec.field(default_factory=dict)
    """Foreign MIG instances of these."""
    in_mig_mode: frozenset[str] = frozenset()
    """Devices used only for slices."""


class GivenSlice(msgspec.Struct, frozen=True):
    """A MIG device, or a part of a GPU, that another system assigned."""

    uuid: str
    """UUID of the whole GPU."""
    profile: str = ""
    """Profile; empty: unknown."""
    start: int | None = None
    """Start slot; None: unknown."""
    rank: int = 0
    """Without a start: its rank by start among the GPU's slices of this profile."""
    memory_bytes: int = 0
    """Recorded memory, which counts if it is more than the request; 0: unknown."""
    guarantee: int = 0
    """Recorded compute in basis points, likewise."""


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Marks that identify a system's pods if its keys are generic."""

    schedulers: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()

    def are_on(self, pod: ForeignPod) -> bool:
        return pod.scheduler in self.schedulers or not self.labels.isdisjoint(pod.labels)


class ForeignDialect(ABC):
    """Another system's syntax of requests. It has settings, but no state.

    The defaults suit a system whose pods ask by resources, and whose tools read no annotations.
    """

    name: ClassVar[str]
    """In configuration and metrics: `hami`."""
    title: ClassVar[str]
    """Possessive, for messages: `HAMi's`."""
    settings_type: ClassVar[type[msgspec.Struct] | None] = None
    """The type of its section in a cluster's settings."""
    resources: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    """Keys by a pod's author; a trailing `*` marks a prefix."""
    records: tuple[str, ...] = ()
    """Annotations that `given` reads; `*` marks a prefix or a suffix."""
    result_keys: tuple[str, ...] = ()
    """Annotations that `result_annotations` may write, likewise: the API server refuses others."""
    marks: Marks | None = None

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """The keys by which the pod asks for GPUs; empty: it does not.

        Selectors, labels and policies alone ask for nothing.
        """
        return tuple(name for name in self.resources if is_asked(pod, name))

    def keeps_resources(self, pod: ForeignPod) -> bool:  # noqa: ARG002
        """The kubelet allocates the pod's resources: the pod is not translated."""
        return False

    @abstractmethod
    def translate(self, pod: ForeignPod) -> Translation:
        """Raises `UsageError` with the place and the next step."""

    def translation(
        self,
        pod: ForeignPod,
        requests: Mapping[str, Request],
        *,
        notes: Iterable[str] = (),
        named_modes: Container[str] = (),
    ) -> Translation:
        """`requests` by container, and the containers whose author chose the mode.

        Another plugin may offer the containers' resources to the kubelet, so they are removed.
        """
        return Translation(
            dialect=self.name,
            containers=tuple(
                Translated(
                    container=container.name,
                    request=requests[container.name],
                    removes=keys_of(container, self.resources),
                    names_mode=container.name in named_modes,
                )
                for container in pod.containers
                if container.name in requests
            ),
            passed_over=tuple(dict.fromkeys(notes)),
        )

    def result_annotations(
        self,
        pod: ForeignPod,  # noqa: ARG002
        booking: PodBooking,  # noqa: ARG002
        node: NodeView,  # noqa: ARG002
        *,
        now: float,  # noqa: ARG002
    ) -> Mapping[str, str]:
        """The annotations in which this system records an assignment. Unix seconds."""
        return {}

    def given(
        self,
        pod: ForeignPod,  # noqa: ARG002
        node: NodeView,  # noqa: ARG002
    ) -> Mapping[str, Sequence[str | GivenSlice]]:
        """The GPUs that the system assigned to a running pod's containers, as UUIDs.

        Empty: none, or the agent reads the kubelet's assignments instead. Amounts come from the
        pod's immutable request, unless a `GivenSlice` has more. Raises `UsageError` for invalid
        records.
        """
        return {}

    def ignores(self, container: ForeignContainer) -> bool:
        """The system assigns nothing to such a container: several ignore init containers."""
        return container.kind is not ContainerKind.REGULAR


def unproven(pod: ForeignPod, problem: str) -> UsageError:
    """The error for a running pod whose GPUs are unknown, or recorded where users can forge it."""
    hint = "end it before the node is adopted, or wait until it ends"
    return refusal(pod, None, problem, hint=hint)


# ---- GPUs by index -------------------------------------------------------------------------------


def index_list(devices: Sequence[PlacedDevice], node: NodeView) -> str:
    """`0,1`; empty if the node lacks one of the devices."""
    if not all(device.uuid in node.indexes for device in devices):
        return ""
    return ",".join(str(node.indexes[device.uuid]) for device in devices)


def uuids_by_container(
    pod: ForeignPod, keys: Mapping[str, str], *, node: NodeView
) -> Mapping[str, Sequence[str]]:
    """Read annotations like `0,1`, each for a container; `keys` maps annotations to containers."""
    return {
        container: uuids_by_index(pod, key, pod.annotations[key], node=node)
        for key, container in keys.items()
        if key in pod.annotations
    }


def uuids_by_index(pod: ForeignPod, name: str, text: str, *, node: NodeView) -> list[str]:
    uuids: list[str] = []
    for part in text.split(","):
        uuid = uuid_at(pod, name, part, node=node)
        if uuid in uuids:
            problem = f"the annotation {name} names GPU {part.strip()} twice"
            raise refusal(pod, None, problem, hint=PLACE_ANEW)
        uuids.append(uuid)
    return uuids


def uuid_at(pod: ForeignPod, name: str, text: str, *, node: NodeView) -> str:
    uuids = {index: uuid for uuid, index in node.indexes.items()}
    index = number_of(pod, None, f"the annotation {name}", text)
    if index in uuids:
        return uuids[index]
    problem = f"the annotation {name} names GPU {index}, which is not on the node"
    indexes = ", ".join(map(str, sorted(uuids))) or "none"
    raise refusal(pod, None, problem, hint=f"the node has the GPUs: {indexes}")
