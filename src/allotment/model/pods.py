# SPDX-License-Identifier: Apache-2.0
"""A pod's identity and its containers' GPU requests. No API objects."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NewType

import msgspec

from allotment.model.mig import MigPlace
from allotment.model.requests import Request

PodUid = NewType("PodUid", str)


class ContainerKind(StrEnum):
    """When a container of a pod runs."""

    INIT = "init"
    """Before the others, one after the other; later containers reuse its devices."""
    SIDECAR = "sidecar"
    """An init container that restarts always and runs beside all later ones."""
    REGULAR = "regular"


class UsedClaim(msgspec.Struct, frozen=True):
    """A ResourceClaim as one container uses it."""

    name: str
    request: str = ""
    """Empty: all of its requests."""


class Container(msgspec.Struct, frozen=True):
    """A container with its resources: its `limits`, in whole numbers.

    For extended resources, requests equal limits. A quantity like `4Gi` is in bytes.
    """

    name: str
    kind: ContainerKind
    resources: Mapping[str, int] = msgspec.field(default_factory=dict)
    has_finished: bool = False
    """It has ended and will not restart."""
    is_started: bool = False
    """It runs, or has run."""
    is_running: bool = False
    restarts: int = 0
    """Number of restarts reported so far."""
    is_privileged: bool = False
    runtime_id: str = ""
    """The runtime's id of its last start, without its scheme; empty: not reported yet."""
    claims: tuple[UsedClaim, ...] = ()


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as reported by the API server."""

    uid: PodUid
    """The kubelet's UID: for a static pod the hash of its file, not the mirror pod's UID."""
    namespace: str
    name: str
    node: str = ""
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Only those with the prefix `allotment.dev/`."""
    containers: tuple[Container, ...] = ()
    """Init containers first, in the order of the specification."""
    has_ended: bool = False
    """Its phase is Succeeded or Failed: nothing of it will run again."""
    is_ending: bool = False
    """It is being deleted."""
    has_controller: bool = False
    """A controller creates its successor; false for a static pod, which its node keeps."""
    is_static: bool = False
    has_host_pids: bool = False
    """Its programs see all processes of the node."""
    created: str = ""
    """RFC 3339 in UTC, in whole seconds; empty: unknown."""
    claims: Mapping[str, bool] = msgspec.field(default_factory=dict)
    """Its ResourceClaims by name; true: made for this pod alone, by a template."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def container(self, name: str) -> Container | None:
        return next((container for container in self.containers if container.name == name), None)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The container that a share is for, and the resource by which it was requested.

    Or a request of a ResourceClaim, which any number of containers and pods may use: `uid` and
    `pod` are the claim's, `container` is the request.
    """

    uid: PodUid
    namespace: str
    pod: str
    container: str
    kind: ContainerKind
    resource: str
    """`nvidia.com/gpu`, `allotment.dev/gpu`, ...; of a claim its driver."""
    place: int | None = None
    """Position among the pod's containers, init containers first; decides which sidecars run beside
    an init container. None: unknown, treated as no sidecar."""
    is_claim: bool = False

    @property
    def part(self) -> str:
        """`container NAME`, or `request NAME` of a claim, for messages."""
        return f"{'request' if self.is_claim else 'container'} {self.container}"

    @property
    def users_of_claim(self) -> str:
        """The command that lists the pods of a claim, for hints."""
        return f"kubectl -n {self.namespace} describe resourceclaim {self.pod}"

    @property
    def name(self) -> str:
        """Its container's, by which its phases are known (`model.accounting`)."""
        return self.container

    def __str__(self) -> str:
        """`namespace/pod/container`."""
        return f"{self.namespace}/{self.pod}/{self.container}"


class ContainerAsk(msgspec.Struct, frozen=True, kw_only=True):
    """One container's request, independent of dialect."""

    container: str
    kind: ContainerKind
    resource: str
    """The resource that the kubelet allocates for it, and so the plugin."""
    count: int
    request: Request | None
    """None: the kubelet's ids name the devices, and the mode sets the part of each."""
    own: Request | None = None
    """The same without `allotment.dev/resize` and placement."""
    mode: str | None = None
    """None: the device's own."""
    devices: tuple[str, ...] = ()
    """UUIDs chosen by a scheduler; empty: not chosen yet."""
    slices: tuple[MigPlace, ...] = ()
    """In mode `mig`, the slice of each of `devices`; empty: not chosen yet."""


class ForeignContainer(msgspec.Struct, frozen=True, kw_only=True):
    """A container as its author wrote it; quantities are texts."""

    name: str
    kind: ContainerKind = ContainerKind.REGULAR
    limits: Mapping[str, str] = msgspec.field(default_factory=dict)
    requests: Mapping[str, str] = msgspec.field(default_factory=dict)
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Variables with a literal value."""
    is_privileged: bool = False


class ForeignPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as its author wrote it."""

    namespace: str
    name: str
    """May be only a name prefix before the API server generates the name."""
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    containers: tuple[ForeignContainer, ...] = ()
    """Init containers first."""
    scheduler: str = ""
    node: str = ""
    node_selector: Mapping[str, str] = msgspec.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
