# SPDX-License-Identifier: Apache-2.0
"""A share: a workload's part of one or more devices, and its stored state."""

from enum import StrEnum
from typing import NewType

import msgspec

from allotment.model.compute import Compute
from allotment.model.pods import Owner

ShareId = NewType("ShareId", str)


class Injection(StrEnum):
    """How the shim gets into the processes of a share."""

    NAMESPACE = "namespace"
    """A mount namespace with its own `ld.so.preload`: covers children and scrubbed environments."""
    ENVIRONMENT = "environment"
    """`LD_PRELOAD` in the environment: a program that scrubs its environment runs without a limit.
    """
    CDI = "cdi"
    """A container runtime mounts it, from a CDI device."""
    MOUNTS = "mounts"
    """A container runtime mounts it, file by file, from the device plugin's answer."""
    NONE = "none"
    """The container has no shim: its share is only booked."""


class Excess(StrEnum):
    """What happens to a share that has more memory than its limit by the driver."""

    WARN = "warn"
    """It is reported."""
    STOP = "stop"
    """Its programs on the device are killed, too."""


class Amounts(msgspec.Struct, frozen=True):
    """Amounts of a device: bytes, and basis points of its time."""

    memory_bytes: int
    guarantee: int
    ceiling: int


class ShareDevice(msgspec.Struct, frozen=True):
    """A device of a share, and the share's part of it."""

    uuid: str
    name: str
    memory_bytes: int
    """The booked limit; the limit in force is in the ledger."""
    compute: Compute = msgspec.field(default=Compute())
    """As booked; the compute in force is in the contract."""
    is_oversubscribed: bool = False
    """Its memory may live on the host, within the host's budget."""
    gpu: str = ""
    """For a MIG device, the UUID of its GPU; empty: a whole GPU."""
    profile: str = ""
    """For a MIG device, its profile name: `1g.10gb`."""
    begun_bytes: int | None = None
    """The limit at the start of its programs, if `allot resize` has changed it since."""
    most_bytes: int | None = None
    """The use that `allot resize --force` found and left above the limit, if any."""
    asked: Amounts | None = None
    """What its pod asked for at its start, if no scheduler placed it: it never gets more, whatever
    its annotations say later. None: only the device limits it."""

    @property
    def driver_uuid(self) -> str:
        """The UUID under which the driver lists its processes: for a MIG device, the GPU's."""
        return self.gpu or self.uuid


class Runner(msgspec.Struct, frozen=True):
    """The process that a share belongs to, identified safely against pid reuse."""

    pid: int
    start_time: int
    """Field 22 of `/proc/PID/stat`: clock ticks after boot."""
    boot_id: str = ""
    """The boot's id: start ticks and pids repeat after each boot."""


class SuspendedBy(StrEnum):
    """How the memory of a suspended share left its devices."""

    CHECKPOINT = "checkpoint"
    """By the driver, all of it."""
    EVICTION = "eviction"
    """By the shim: memory that may live on the host; contexts stay."""


class Suspension(msgspec.Struct, frozen=True):
    """State of a share that is suspended, or in transition."""

    since: float
    """Seconds after the epoch."""
    by: SuspendedBy
    is_complete: bool = False
    """All its programs are stopped and their memory is off the devices."""
    stopped: tuple[Runner, ...] = ()
    """Pids already stopped before; they stay stopped after resume."""


class Share(msgspec.Struct, frozen=True):
    """The stored record of a share (`share.json`)."""

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
    """The description of the simulated machine."""
    runner: Runner | None = None
    """None: the share stays until it is removed."""
    command: tuple[str, ...] = msgspec.field(default=())
    cdi_spec: str | None = None
    """Path of the CDI spec file of the share, removed with it."""
    suspension: Suspension | None = None
    is_resized: bool = False
    """Its amounts may differ from those of its start."""
    owner: Owner | None = None
    """The Kubernetes container that it is for. The share's name repeats it and need not be unique.
    """

    @property
    def device_name(self) -> str:
        """CDI device name: the id of a share with an owner, because ids are never reused."""
        return self.id if self.owner else self.name

    @property
    def is_off_device(self) -> bool:
        """True if its memory is off the devices until it is resumed."""
        suspended = self.suspension
        return (
            suspended is not None
            and suspended.is_complete
            and suspended.by is SuspendedBy.CHECKPOINT
        )
