# SPDX-License-Identifier: Apache-2.0
"""What the agent's parts ask of one another. Each is implemented by one of them and its test twin.

kubelet ── plugin ──► Tenants ──► ShareStore
                        │  │  └──► Reports (events, metrics)
        Checkpoint ◄────┘  └─────► Pods (this node's, from the API server)
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from allotment.model.pods import Owner, Pod, PodUid
from allotment.model.requests import Request
from allotment.model.shares import Injection, Share, ShareId
from allotment.shares.cdi import HostMount
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodePolicy

SHARE_ANNOTATION = "allotment.dev/share"
"""An annotation in every answer to `Allocate`: the id of the share that will be made.

The kubelet keeps the answer in its checkpoint, and passes it to the runtime only.
"""


class DeviceNode(msgspec.Struct, frozen=True):
    """A device node in a container; permissions are of `r`, `w` and `m`."""

    host_path: str
    container_path: str
    permissions: str = "rw"


class AllocateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `Allocate` for one container (ContainerAllocateResponse)."""

    envs: Mapping[str, str] = msgspec.field(default_factory=dict)
    mounts: tuple[HostMount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
    """Qualified names: `allotment.dev/share=ID`."""


class CheckpointEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One container's ids of one resource, as the kubelet recorded them."""

    pod: PodUid
    container: str
    resource: str
    ids: frozenset[str]
    share: ShareId | None
    """From its answer's `SHARE_ANNOTATION`; None: another plugin answered."""
    injection: Injection | None = None
    """How the answer hands over the share: as the CDI device `allotment.dev/share=ID`, as mounts of
    files below the share's directory, or not at all (`NONE`). None: unknown; the configuration in
    force counts, which may have changed since the answer."""


class Checkpoint(Protocol):
    """The kubelet's device checkpoint (`kubelet_internal_checkpoint`)."""

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """Read it. Raises `StateError` if it cannot be read or has an unknown format."""
        ...


class ShareStore(Protocol):
    """The shares of pods on this node (`shares.pods`). All calls may block; they run in threads."""

    def prepare(self, order: ShareOrder, policy: NodePolicy) -> Share:
        """Create a share with all that its container needs, or complete an existing one.

        May be repeated with the same id at any time. Raises `AllotError`: `DoesNotFitError` with
        need and have.
        """
        ...

    def resize(self, share: ShareId, request: Request, policy: NodePolicy) -> Share:
        """Give a live share the amounts of a request. May be repeated. Raises `AllotError`."""
        ...

    def end(self, share: ShareId) -> None:
        """Remove a share if it exists. Raises `BusyError` while it has processes, `StateError`."""
        ...

    def owned(self) -> tuple[Share, ...]:
        """Return the shares that have an owner. Raises `StateError`."""
        ...


class Pods(Protocol):
    """The pods of this node, as far as the API server has reported them."""

    @property
    def is_synced(self) -> bool:
        """All pods of the node have been listed once since the start."""
        ...

    def get(self, uid: PodUid) -> Pod | None:
        """Return a pod; None: not reported yet, or gone."""
        ...

    def all(self) -> tuple[Pod, ...]:
        """Return every pod."""
        ...

    async def wait_for(self, uid: PodUid, *, timeout_s: float) -> Pod | None:
        """Return a pod as soon as it is reported."""
        ...

    async def delete(self, pod: Pod) -> None:
        """Delete a pod, which ends its programs. Raises `AllotError`."""
        ...

    async def annotate(self, pod: Pod, annotations: Mapping[str, str]) -> None:
        """Write annotations of a pod. Raises `AllotError`."""
        ...

    def changes(self) -> AsyncIterator[None]:
        """Yield after pods were added, changed or deleted; once for several changes."""
        ...


class Reports(Protocol):
    """Events, log and metrics of the agent. Never fails."""

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
