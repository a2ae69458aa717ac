# SPDX-License-Identifier: Apache-2.0
"""MPS on one machine: the supervisor of a GPU's control daemon without our agent.

`ready` waits until the programs of a new share of mode `mps` can start. If the GPU's daemon has no
supervisor, it starts one (`python -m allotment.shares.mps_daemons`), which outlives `allot run`,
serves later shares, and ends after a while without shares. It holds a lock: one runs per GPU.
docs/designs/mps.md has the alternatives.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from allotment.devices.compute_modes import GpuSettings
from allotment.libraries import SIMULATED, library_path
from allotment.model.compute import WHOLE, Compute
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, StateError
from allotment.model.modes import MPS
from allotment.model.shares import Injection, Share, ShareDevice
from allotment.model.structs import replace
from allotment.modes import traits_of
from allotment.modes.mps.control import PROGRAM, Control, folder_of
from allotment.modes.mps.mode import Limits, client_environment, limits_of
from allotment.modes.mps.state import Loss, MpsPlace, MpsStatus
from allotment.modes.mps.supervisor import Supervisor
from allotment.shares.cdi import CdiContent, HostMount
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder
from allotment.shares.process_tree import children_of
from allotment.shares.record import LoadedShare
from allotment.shares.recovery import list_shares, recover

STOPS: Final = "its MPS daemon, which no share needs any more, is about to stop"
"""Why a GPU is not available in another mode for some seconds."""
_PATIENCE_S: Final = 40.0
_RECOVER_EVERY: Final = 5
_WAY_S: Final = 15.0


def place_of(folder: StateFolder, uuid: str) -> MpsPlace:
    """Return the files of a GPU's control daemon."""
    return MpsPlace(folder.mps / uuid)


def control_of(folder: StateFolder, uuid: str, *, machine: Path | None) -> Control:
    """Return the control program for a GPU's daemon; for a simulated machine our own.

    Not the copy in the state folder, which may be mounted noexec.
    """
    place = place_of(folder, uuid)
    if machine is None:
        return Control(place.pipes, place.logs, uuid)
    program = str(library_path(SIMULATED) / PROGRAM)
    environment = {"ALLOTMENT_SIMULATED_MACHINE": str(machine)}
    return Control(place.pipes, place.logs, uuid, program, environment)


def part_of(share: Share) -> str:
    """Return the name of a share's part, and of its namespace, if the daemon has these.

    A container without CDI gets its answer before its share is known: its part is named by its
    size, and common to all containers of that size.
    """
    if share.injection is Injection.MOUNTS:
        return part_of_percent(share.devices[0].compute.ceiling * 100 // WHOLE)
    return share.id


def part_of_percent(percent: int) -> str:
    """Return the name of the part of all containers without CDI with that percentage of a GPU."""
    return f"part_{percent}"


def parts(shares: Iterable[LoadedShare], uuid: str) -> Mapping[str, Limits]:
    """Return the shares' limits in a GPU's daemon, by the names of their parts.

    A part common to several shares has no memory limit: their ledgers have it.
    """
    clients = (
        (loaded.share, device)
        for loaded in shares
        if loaded.share is not None and traits_of(loaded.mode).needs_daemon
        for device in loaded.share.devices
        if device.uuid == uuid
    )
    return {
        part_of(share): limits_of(
            replace(device, is_oversubscribed=True)
            if share.injection is Injection.MOUNTS
            else device
        )
        for share, device in clients
    }


def parts_there(
    folder: StateFolder, read: Callable[[], Iterable[LoadedShare]], uuid: str
) -> Mapping[str, Limits | None] | None:
    """Return the same, with None for the parts of unreadable shares.

    None for all: nothing can be read. `read` returns all shares.
    """
    try:
        shares = list(read())
        names = {path.name for path in folder.shares.iterdir() if not path.name.startswith(".")}
    except (StateError, OSError):
        return None
    unread = names - {loaded.id for loaded in shares if loaded.share is not None}
    if unread:  # perhaps containers without CDI
        unread.update(map(part_of_percent, range(101)))
    return {**dict.fromkeys(unread), **parts(shares, uuid)}


def users(shares: Iterable[LoadedShare], uuid: str) -> tuple[str, ...]:
    """Return the names of the shares that need a GPU's daemon."""
    return tuple(
        loaded.name
        for loaded in shares
        if traits_of(loaded.mode).needs_daemon
        and any(device.uuid == uuid for device in loaded.devices())
    )


def pipes_of(folder: StateFolder, share: Share) -> Path:
    """Return the folder that a share's programs see as MPS's pipe directory."""
    return place_of(folder, share.devices[0].uuid).part(part_of(share))


def statuses(folder: StateFolder) -> dict[str, MpsStatus]:
    """Return the status of every control daemon of a state folder, by the GPU's UUID."""
    try:
        places = sorted(folder.mps.iterdir())
    except OSError:
        return {}
    return {path.name: MpsPlace(path).status() for path in places}


def servers(folder: StateFolder) -> frozenset[int]:
    """Return the process ids of the MPS servers: they have contexts, but no share."""
    daemons = (status.daemon for status in statuses(folder).values() if status.daemon is not None)
    return frozenset(pid for daemon in daemons for pid in children_of(daemon))


def losses(folder: StateFolder) -> dict[str, tuple[Loss, ...]]:
    """Return the losses of programs by the end of their daemon, by the GPU's UUID, oldest first."""
    return {uuid: status.losses for uuid, status in statuses(folder).items()}


def ready(folder: StateFolder, share: Share, *, pipes: str | None = None) -> Mapping[str, str]:
    """Wait until the share's daemon is ready; return the variables that its programs need.

    `pipes` is the programs' path of the pipe directory, if different. Raises `AllotError` if no
    daemon can run.
    """
    (device,) = share.devices
    place = place_of(folder, device.uuid)
    place.prepare(simulated=share.machine is not None)
    deadline = time.monotonic() + _PATIENCE_S
    has_started_one = False
    pause_s = 0.01
    place.wake()
    while not place.serves(part_of(share)):
        if not place.is_owned():
            if has_started_one:
                status = place.status()
                kind = BusyError if status.is_busy else PrerequisiteError
                raise kind(
                    status.problem or f"no MPS control daemon is running at {place.root}",
                    hint=status.hint or f"see {place.root}/supervisor.log",
                )
            _start_one(folder, device.uuid, share.machine)
            has_started_one = True
        elif time.monotonic() > deadline:
            raise PrerequisiteError(
                place.status().problem
                or f"the control daemon of {device.uuid} was not ready within {_PATIENCE_S:.0f} s",
                hint=f"see {place.root}/events.log and the files in {place.logs}",
            )
        else:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.1)
    return client_environment(device, pipes or str(_seen(folder, share)))


def _seen(folder: StateFolder, share: Share) -> Path:
    """Return the pipe directory of programs outside of containers and namespaces."""
    place = place_of(folder, share.devices[0].uuid)
    if place.status().has_namespaces:
        return folder_of(place.pipes, part_of(share))
    return place.pipes


def release(folder: StateFolder, share: Share) -> None:
    """Wait until the GPUs of a share of another mode are not reserved for MPS clients.

    A daemon outlives its last share for a while, but stops for a booked share of another mode. One
    without a supervisor is stopped by a new one. Raises `BusyError`.
    """
    for device in share.devices:
        uuid = device.gpu or device.uuid
        place = place_of(folder, uuid)
        deadline = time.monotonic() + _PATIENCE_S
        is_cleared = False
        while place.status().holds_gpu:
            is_owned = place.is_owned()
            if time.monotonic() > deadline or (is_cleared and not is_owned):
                raise still_held(place, uuid)
            if not is_owned:
                _start_one(folder, uuid, share.machine)
                is_cleared = True
            time.sleep(0.05)


def await_way(folder: StateFolder, uuid: str) -> None:
    """Stop a GPU's unused daemon; return when it has stopped, or after some seconds."""
    place = place_of(folder, uuid)
    deadline = time.monotonic() + _WAY_S
    while place.status().holds_gpu and place.is_owned() and not _users(folder, uuid):
        if time.monotonic() > deadline:
            return
        place.ask_for_way()
        time.sleep(0.05)


def still_held(place: MpsPlace, uuid: str) -> BusyError:
    return BusyError(
        f"GPU {uuid} is still kept for MPS clients",
        hint=f"see {place.root}/events.log; if no daemon runs: nvidia-smi -i {uuid} -c DEFAULT, and"
        f" remove {place.root}",
    )


def _start_one(folder: StateFolder, uuid: str, machine: str | None) -> None:
    """Start a supervisor, and wait until it has a daemon, has failed, or another one runs.

    It outlives this process: it has its own session and files, and is not a descendant of `allot
    run`, which would be in the share. It holds a pipe open until then.
    """
    command = [sys.executable, "-m", __name__, str(folder.root), uuid]
    if machine is not None:
        command.append(machine)
    place = place_of(folder, uuid)
    place.check_owner()
    log = place.root / "supervisor.log"
    with log.open("ab") as output, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            timeout=_PATIENCE_S,
            check=False,
        )


def _users(folder: StateFolder, uuid: str) -> tuple[str, ...]:
    try:
        return users(list_shares(folder), uuid)
    except StateError:  # then it ends as without a share
        return ()


def needed_otherwise(shares: Iterable[LoadedShare], uuid: str) -> bool:
    """Whether a share of another mode is on a GPU."""
    return any(
        uuid in {device.uuid, device.gpu}
        for loaded in shares
        if loaded.share is not None and not traits_of(loaded.mode).needs_daemon
        for device in loaded.share.devices
    )


def _is_wanted(folder: StateFolder, uuid: str) -> bool:
    try:
        return needed_otherwise(list_shares(folder), uuid)
    except StateError:
        return False


def _supervise(folder: StateFolder, uuid: str, machine: Path | None) -> int:
    place = place_of(folder, uuid)
    with place.owned() as mine:
        if not mine:
            return 0
        supervisor = Supervisor(
            place,
            control_of(folder, uuid, machine=machine),
            GpuSettings(uuid, machine=machine),
            shares=lambda: _users(folder, uuid),
            parts=lambda: parts_there(folder, lambda: list_shares(folder), uuid),
            gives_way=lambda: _is_wanted(folder, uuid),
        )
        if not _users(folder, uuid):
            supervisor.clear()
            return 0
        try:
            supervisor.begin()
        except AllotError:
            return 1  # the status has the reason
        os.dup2(2, 1)  # closes the pipe: the waiting process continues
        steps = 0
        while (pause := supervisor.step()) is not None:
            supervisor.wait(pause)
            steps += 1
            if steps % _RECOVER_EVERY == 0:
                # Shares whose `allot run` was killed stay until a process recovers.
                with suppress(AllotError), folder.locked():
                    recover(folder)
    return 0


def main() -> int:
    """Supervise one GPU's daemon: STATE UUID [MACHINE]."""
    if os.fork() > 0:
        os._exit(0)  # the child has no parent to wait for it, and the pipe is still open
    root, uuid, *simulated = sys.argv[1:]
    machine = Path(simulated[0]) if simulated else None
    return _supervise(StateFolder(Path(root)), uuid, machine)


if __name__ == "__main__":
    sys.exit(main())


_NVIDIA = "nvidia.com/"

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the driver's folder


def check_injection(order: ShareOrder) -> None:
    """Raise `PrerequisiteError` for a container whose environment cannot name its daemon.

    Without CDI a container's environment is fixed before its share is known. For NVIDIA's replicas
    the GPU and the part are known before (`known_before`).
    """
    is_replica = order.owner is not None and order.owner.resource.startswith(_NVIDIA)
    if order.injection is Injection.MOUNTS and not is_replica:
        raise PrerequisiteError(
            f"mode {MPS} needs a container runtime with CDI: a container's environment names its"
            " part, and without CDI it is fixed before the share is known",
            hint="use containerd 2 or CRI-O 1.28, or turn CDI on in the runtime and start the agent"
            " with --cdi on; GPUs of `mode: soft` need none, nor do replicas by sharing.mps",
        )


def known_before(
    folder: StateFolder, uuid: str, *, percent: int
) -> tuple[Mapping[str, str], tuple[HostMount, ...]]:
    """Return environment and mounts of a container that will get that percentage of a GPU.

    Without the driver's own memory limit, which only backs up the share's.
    """
    place = place_of(folder, uuid)
    pipes = str(place.pipes)
    compute = Compute(ceiling=percent * (WHOLE // 100), is_governed=True)
    device = ShareDevice(uuid, "", 0, compute=compute, is_oversubscribed=True)
    part = place.part(part_of_percent(percent))
    return client_environment(device, pipes), _folders(str(part), pipes)


def with_daemon(content: CdiContent, folder: StateFolder, share: Share) -> CdiContent:
    """Add pipe directory, shared memory and limits to a container's content."""
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
