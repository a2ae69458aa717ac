# SPDX-License-Identifier: Apache-2.0
"""What the agent's parts ask of one another. Each is implemented by one of them and its test twin.

kubelet ── device_plugin ──► Tenancy ──► shares
                              │  │  └──► Reports (events, metrics)
              checkpoint ◄────┘  └─────► Pods (this node's, from the API server)
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from allotment.agent.resources import Resource
from allotment.model.pods import Owner, Pod, PodUid
from allotment.model.shares import Injection, ShareId

__all__ = [
    "SHARE_ANNOTATION",
    "Answer",
    "Checkpoint",
    "CheckpointEntry",
    "DeviceNode",
    "Mount",
    "Pods",
    "Reports",
    "Tenancy",
]

SHARE_ANNOTATION = "allotment.dev/share"
"""In every answer to `Allocate`, as an annotation of the container: the id of its share to be.

The kubelet keeps the answer in its checkpoint, and hands it to the runtime alone.
"""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount, as the device plugin API has it."""

    host_path: str
    container_path: str
    is_read_only: bool = True


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node, likewise; permissions are of `r`, `w` and `m`."""

    host_path: str
    container_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What `Allocate` says of one container (ContainerAllocateResponse)."""

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    """Qualified names: `allotment.dev/share=ID`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One container's part of one resource, as the kubelet has written it down."""

    pod: PodUid
    container: str
    resource: str
    ids: frozenset[str]
    share: ShareId | None
    """From its answer's `SHARE_ANNOTATION`; None: another plugin answered."""
    injection: Injection | None = None
    """How its answer hands the share in: as the CDI device `allotment.dev/share=ID`, as mounts of
    files below the share's directory, or not at all (`NONE`). None: nobody looked, and it is as the
    configuration in force has it, which may have changed since the answer."""


class Checkpoint(Protocol):
    """The kubelet's device checkpoint (`kubelet_internal_checkpoint`)."""

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """Read it. Raises `StateError` when it cannot be read or is of no known shape."""
        ...


class Pods(Protocol):
    """The pods of this node, as far as they have been heard of."""

    @property
    def is_synced(self) -> bool:
        """All pods of the node have been listed once since the start."""
        ...

    def get(self, uid: PodUid) -> Pod | None:
        """Return a pod; None: not heard of, or gone."""
        ...

    def all(self) -> tuple[Pod, ...]:
        """Return every pod that is there."""
        ...

    async def wait_for(self, uid: PodUid, *, timeout_s: float) -> Pod | None:
        """Return a pod as soon as it is heard of."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield when pods came, changed or went since the last time; several changes at once."""
        ...


class Reports(Protocol):
    """Where the agent tells people what happened: events, the log and metrics. Never fails."""

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        """Make an event on a pod. `reason` is a word in UpperCamelCase."""
        ...

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        """Make an event on this node."""
        ...

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter of `metrics`."""
        ...

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value (seconds) to a histogram of `metrics`."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of `metrics`."""
        ...


class Tenancy(Protocol):
    """Who has what: the device plugin's two questions."""

    def answer(self, resource: Resource, ids: Sequence[str]) -> Answer:
        """Answer `Allocate` for one container; at once, and without knowing whose it is.

        Raises `AllotError` where these ids cannot be had together.
        """
        ...

    async def prepare(self, resource: str, ids: frozenset[str]) -> None:
        """Make the shares of whoever holds these ids (`PreStartContainer`). May be repeated.

        Raises `AllotError`, with need and have where it does not fit: the container waits, and the
        kubelet asks again.
        """
        ...
