# SPDX-License-Identifier: Apache-2.0
"""A share: one workload's placed part of one or more devices, and what is known about it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from allotment.model.compute import Compute
from allotment.model.pods import Owner

__all__ = [
    "Injection",
    "Runner",
    "Share",
    "ShareDevice",
    "ShareId",
    "SuspendedBy",
    "Suspension",
]

ShareId = NewType("ShareId", str)


class Injection(StrEnum):
    """How the shim gets into the processes of a share."""

    NAMESPACE = "namespace"
    """A mount namespace with its own `ld.so.preload`: children, scrubbed environments and all."""
    ENVIRONMENT = "environment"
    """`LD_PRELOAD` in the environment: what scrubs its environment runs without a limit."""
    CDI = "cdi"
    """A container runtime mounts it, from a CDI device."""
    MOUNTS = "mounts"
    """A container runtime mounts it, file by file, as the device plugin's answer says."""
    NONE = "none"
    """Nothing of Allotment is in the container: its share is only booked."""


@dataclass(frozen=True, slots=True)
class ShareDevice:
    """A device of a share, and what of it the share may use."""

    uuid: str
    name: str
    memory_bytes: int
    """The limit as it was booked; the limit in force is the ledger's."""
    compute: Compute = field(default=Compute())
    """As it was booked; what is in force is the contract's."""
    is_oversubscribed: bool = False
    """Its memory may live on the host, within the host's budget."""
    gpu: str = ""
    """Of a MIG device, the UUID of the GPU that it is cut from; empty: it is a whole GPU."""
    profile: str = ""
    """Of a MIG device, by name: `1g.10gb`."""
    begun_bytes: int | None = None
    """The limit that its programs began with, where `allot resize` has made it another since."""

    @property
    def driver_uuid(self) -> str:
        """The GPU under whose UUID the driver lists its processes: a MIG device's are its GPU's."""
        return self.gpu or self.uuid


@dataclass(frozen=True, slots=True)
class Runner:
    """The process that a share lives for, named so that a later process of its number is not it."""

    pid: int
    start_time: int
    """Field 22 of `/proc/PID/stat`: clock ticks after boot."""
    boot_id: str = ""
    """Which boot: ticks after boot and process ids begin anew with each."""


class SuspendedBy(StrEnum):
    """How the memory of a suspended share left its devices."""

    CHECKPOINT = "checkpoint"
    """By the driver, all of it."""
    EVICTION = "eviction"
    """By the shim, what may live on the host; contexts stay."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """That a share is suspended, or on its way there or back."""

    since: float
    """Seconds after the epoch."""
    by: SuspendedBy
    is_complete: bool = False
    """All of its programs are stopped and their memory is off the devices."""
    stopped: tuple[Runner, ...] = ()
    """Who of it was stopped before already, and stays so when it is resumed."""


@dataclass(frozen=True, slots=True)
class Share:
    """What is written down about a share when it is made (`share.json`)."""

    id: ShareId
    name: str
    created: float
    """Seconds after the epoch."""
    mode: str
    devices: tuple[ShareDevice, ...]
    injection: Injection
    machine: str | None = None
    """Path of the simulated machine's file; None: real devices."""
    spec: str | None = None
    """What the simulated machine was described by."""
    runner: Runner | None = None
    """None: the share stays until someone removes it."""
    command: tuple[str, ...] = field(default=())
    user_id: int = 0
    cdi_spec: str | None = None
    """Path of the CDI spec file that names the share, which goes with it."""
    suspension: Suspension | None = None
    owner: Owner | None = None
    """The container that it is for, on Kubernetes. Its name says which, and is not its alone."""

    @property
    def device_name(self) -> str:
        """Its name as a CDI device: an owned share's is its id, which is used for nothing else."""
        return self.id if self.owner else self.name

    @property
    def is_off_device(self) -> bool:
        """Has it given its memory back to the devices until it is resumed?"""
        suspended = self.suspension
        return (
            suspended is not None
            and suspended.is_complete
            and suspended.by is SuspendedBy.CHECKPOINT
        )
