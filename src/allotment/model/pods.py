# SPDX-License-Identifier: Apache-2.0
"""A pod as far as it concerns GPUs: who it is, and what its containers ask for. No API objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from allotment.model.mig import MigPlace
from allotment.model.requests import Request

__all__ = [
    "Container",
    "ContainerAsk",
    "ContainerKind",
    "Owner",
    "Pod",
    "PodUid",
]

PodUid = NewType("PodUid", str)


class ContainerKind(StrEnum):
    """When a container of a pod runs."""

    INIT = "init"
    """Before the others, one after the other; its devices go on to those that follow."""
    SIDECAR = "sidecar"
    """An init container that restarts always: beside all that follow."""
    REGULAR = "regular"


@dataclass(frozen=True, slots=True)
class Container:
    """A container, with the resources that it may have: its `limits`, in whole numbers.

    Of extended resources requests are the same. A quantity like `4Gi` is in bytes.
    """

    name: str
    kind: ContainerKind
    resources: Mapping[str, int] = field(default_factory=dict)
    has_finished: bool = False
    """It has ended and will not be started again."""
    is_started: bool = False
    """It runs, or has run."""
    restarts: int = 0
    """How often it was started again, as far as that has been told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod as the API server has it."""

    uid: PodUid
    """As the kubelet knows it: of a static pod that is the hash of its file, not the mirror's."""
    namespace: str
    name: str
    node: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Those of `allotment.dev/` alone."""
    containers: tuple[Container, ...] = ()
    """Init containers first, in the order of the specification."""
    has_ended: bool = False
    """Its phase is Succeeded or Failed: nothing of it will run again."""

    def __str__(self) -> str:
        """Name it as people do."""
        return f"{self.namespace}/{self.name}"

    def container(self, name: str) -> Container | None:
        """Return the container of that name."""
        return next((each for each in self.containers if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The container that a share is for, and the resource by which it got it."""

    uid: PodUid
    namespace: str
    pod: str
    container: str
    kind: ContainerKind
    resource: str
    """`nvidia.com/gpu`, `allotment.dev/gpu`, ..."""
    place: int | None = None
    """Its place among the pod's containers, init containers first, as specified: which sidecars
    run beside an init container goes by it. None: not known; then none is taken to."""

    @property
    def name(self) -> str:
        """Its container's, by which its phases are known (`model.phases`)."""
        return self.container

    def __str__(self) -> str:
        """Name it as people do: `namespace/pod/container`."""
        return f"{self.namespace}/{self.pod}/{self.container}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAsk:
    """What one container asks for, from whatever syntax: the result of a dialect."""

    container: str
    kind: ContainerKind
    resource: str
    """The resource that the kubelet allocates for it: whose plugin is asked."""
    count: int
    request: Request | None
    """None: the ids that the kubelet chose say which devices, and the mode how much of each."""
    mode: str | None = None
    """None: the device's own."""
    devices: tuple[str, ...] = ()
    """UUIDs that a scheduler chose; empty: nobody has chosen yet."""
    slices: tuple[MigPlace, ...] = ()
    """In mode `mig`, which slice of each of `devices`; empty where nobody has chosen yet."""
