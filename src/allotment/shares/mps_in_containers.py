# SPDX-License-Identifier: Apache-2.0
"""What the container of a share of mode `mps` gets beside its ledger, so that it finds its daemon.

The pipe directory has the daemon's path inside as well, as in NVIDIA's device plugin and DRA
driver: nothing documents that the driver's programs agree where it has two. What is mounted there
is the share's part (`modes.mps.parts`): the daemon's own folder, or one with the socket of the
share's namespace and of no other, whichever protocol its daemon will have. It is read-only inside:
clients connect to the sockets in it and make nothing there, for they may be of any user.

`/dev/shm` is the machine's, where the daemon and its servers have what they share with their
clients (docs.nvidia.com/deploy/mps: containers with MPS need the host's IPC). It takes the place of
the pod's own, as with NVIDIA's plugin.
"""

from collections.abc import Mapping
from dataclasses import replace

from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import PrerequisiteError
from allotment.model.requests import MPS
from allotment.model.shares import Injection, Share, ShareDevice
from allotment.modes.mps import client_environment
from allotment.shares.cdi import CdiContent, HostMount
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import part_of_percent, pipes_of, place_of
from allotment.shares.placing import Order

__all__ = ["check_injection", "known_before", "with_daemon"]

_NVIDIA = "nvidia.com/"

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the driver's place, not one for files of ours


def check_injection(order: Order) -> None:
    """Raise `PrerequisiteError` where a container could not be told of its daemon.

    Without CDI all that a container gets is answered before anybody knows which share it will have.
    Of NVIDIA's replicas the GPU and the part are known then (`known_before`).
    """
    is_replica = order.owner is not None and order.owner.resource.startswith(_NVIDIA)
    if order.request.mode == MPS and order.injection is Injection.MOUNTS and not is_replica:
        raise PrerequisiteError(
            f"mode {MPS} needs a container runtime with CDI: a container's part is told by its"
            " environment, and without CDI that is made before its share",
            hint="use containerd 2 or CRI-O 1.28, or turn CDI on in the runtime and start the agent"
            " with --cdi on; GPUs of `mode: soft` need none, nor do replicas by sharing.mps",
        )


def known_before(
    folder: StateFolder, uuid: str, *, percent: int
) -> tuple[Mapping[str, str], tuple[HostMount, ...]]:
    """Return environment and mounts of a container that will have so much of a GPU.

    The driver's own limit of memory is left out, which is a second line behind the share's.
    """
    place = place_of(folder, uuid)
    pipes = str(place.pipes)
    compute = Compute(ceiling=percent * (WHOLE // 100), is_governed=True)
    device = ShareDevice(uuid, "", 0, compute=compute, is_oversubscribed=True)
    part = place.part(part_of_percent(percent))
    return client_environment(device, pipes), _folders(str(part), pipes)


def with_daemon(content: CdiContent, folder: StateFolder, share: Share) -> CdiContent:
    """Add pipe directory, shared memory and limits to what the container of a share gets."""
    (device,) = share.devices
    pipes = str(place_of(folder, device.uuid).pipes)
    return replace(
        content,
        environment=client_environment(device, pipes),
        folders=_folders(str(pipes_of(folder, share)), pipes),
    )


def _folders(part: str, pipes: str) -> tuple[HostMount, ...]:
    return (
        HostMount(part, pipes),
        HostMount(_SHARED_MEMORY, _SHARED_MEMORY, is_read_only=False),
    )
