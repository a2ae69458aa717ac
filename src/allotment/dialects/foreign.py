# SPDX-License-Identifier: Apache-2.0
"""What other systems' dialects are: pods in, the same pods in Allotment's own dialect out.

A foreign dialect says what a pod means, once, when the pod is created: a `Translation`. It is
written into the pod as `allotment.dev/...` resources and annotations; nothing after that, neither
the scheduler nor the node's agent, has to know the dialect. What the author wrote stays on the pod,
but for a resource of which another device plugin would give devices. Whose dialect it was stays
too: its own tools read annotations that say what a pod was given, and `receipt` writes these at
binding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from allotment.model.clusters import PodBooking
from allotment.model.mig import MigPlace, MigProfile
from allotment.model.pods import ContainerKind
from allotment.model.requests import Request

__all__ = [
    "DIALECT",
    "PASSED_OVER",
    "ForeignContainer",
    "ForeignDialect",
    "ForeignPod",
    "GivenSlice",
    "Marks",
    "NodeView",
    "Translated",
    "Translation",
    "WithoutReceipt",
    "WithoutRecord",
]

DIALECT = "allotment.dev/dialect"
"""The annotation that names the dialect which a pod was translated from."""

PASSED_OVER = "webhook.allotment.dev/not-honoured"
"""What of that was not honoured, each with the reason: the webhook writes it, an event tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignContainer:
    """A container as its author wrote it; quantities are texts."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    limits: Mapping[str, str] = field(default_factory=dict)
    requests: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with a value in place."""
    is_privileged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignPod:
    """A pod as its author wrote it."""

    namespace: str
    name: str
    """May be the beginning of one: the API server has not made it up yet."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    containers: tuple[ForeignContainer, ...] = ()
    """Init containers first."""
    scheduler: str = ""
    node: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name it as people do."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """One container's request, and what of its resources has to go."""

    container: str
    request: Request
    removes: tuple[str, ...] = ()
    """Resources for which the kubelet would ask another device plugin."""
    names_mode: bool = False
    """Its author said by which mode; else a request of mode soft leaves that open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """What a pod means."""

    dialect: str
    """The short name of the dialect, as configuration and metrics have it: `hami`."""
    containers: tuple[Translated, ...]
    passed_over: tuple[str, ...] = ()
    """What was written and is not honoured, each with the reason: told in an event, refused where
    somebody would get less isolation than was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What a receipt may have to say about devices, by UUID."""

    indexes: Mapping[str, int]
    models: Mapping[str, str]
    memory_bytes: Mapping[str, int]
    profiles: Mapping[str, tuple[MigProfile, ...]] = field(default_factory=dict)
    """Of those alone that are cut into slices."""
    foreign_slices: Mapping[str, tuple[MigPlace, ...]] = field(default_factory=dict)
    """What others than Allotment have cut of these."""
    in_mig_mode: frozenset[str] = frozenset()
    """Those on which nothing is given but slices."""


@dataclass(frozen=True, slots=True)
class GivenSlice:
    """A MIG device that another system has given."""

    uuid: str
    """Of the whole GPU."""
    profile: str = ""
    """Empty: not known."""
    start: int | None = None
    """None: not known."""
    rank: int = 0
    """Where that is not known: which one of its profile on the GPU, by their starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """By what a pod is known to be a system's whose words alone might be anybody's."""

    schedulers: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()

    def are_on(self, pod: ForeignPod) -> bool:
        """Whether a pod has one of them."""
        return pod.scheduler in self.schedulers or not self.labels.isdisjoint(pod.labels)


class WithoutReceipt:
    """Of a system that writes nothing on a pod that its tools would look for."""

    def receipt(
        self,
        pod: ForeignPod,  # noqa: ARG002 - of the protocol
        booking: PodBooking,  # noqa: ARG002
        node: NodeView,  # noqa: ARG002
        *,
        now: float,  # noqa: ARG002
    ) -> Mapping[str, str]:
        """Write nothing."""
        return {}


class WithoutRecord(WithoutReceipt):
    """Of one of whose pods nothing says what they have, either."""

    def given(
        self,
        pod: ForeignPod,  # noqa: ARG002 - of the protocol
        node: NodeView,  # noqa: ARG002
    ) -> Mapping[str, Sequence[str]]:
        """Read nothing: the node's agent reads from the kubelet what it can know."""
        return {}


class ForeignDialect(Protocol):
    """One existing system's way of writing a request. It has no state but its settings."""

    @property
    def name(self) -> str:
        """Its short name: `hami`."""
        ...

    @property
    def title(self) -> str:
        """Whose it is, for messages: `HAMi's`."""
        ...

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return what of the pod is this dialect's: resources, annotations, labels; or nothing."""
        ...

    def translate(self, pod: ForeignPod) -> Translation:
        """Say what the pod means. Raises `UsageError`: what is wrong, where, and the next step."""
        ...

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Return the annotations in which this system says what a pod was given. Unix seconds."""
        ...

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str | GivenSlice]]:
        """Return which GPUs that system itself gave the containers of a running pod, as UUIDs.

        Empty: it gave none. That is where the pod is, and nothing else: how much it has, its own
        request says, which cannot be edited. What is read are the annotations that the dialect
        names in `records`. Raises `UsageError` if they cannot be read.
        """
        ...
