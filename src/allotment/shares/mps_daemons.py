# SPDX-License-Identifier: Apache-2.0
"""MPS on one machine: who keeps a GPU's control daemon where no daemon of ours runs.

`ready` is called for a share of mode `mps` that has been made, and returns when its programs can
start. Where nobody supervises the GPU's daemon it starts a small process of its own that does
(`python -m allotment.shares.mps_daemons`), which outlives `allot run`, serves the shares that come
after it, and ends when there has been no share for a while. There is one for each GPU: it holds a
lock for as long. docs/designs/mps.md has the alternatives.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from allotment.devices.compute_modes import GpuSettings
from allotment.libraries import SIMULATED, library_path
from allotment.model.compute import WHOLE
from allotment.model.errors import AllotError, BusyError, PrerequisiteError, StateError
from allotment.model.requests import MPS
from allotment.model.shares import Injection, Share
from allotment.modes.mps import (
    Control,
    Limits,
    Loss,
    MpsPlace,
    MpsStatus,
    Supervisor,
    client_environment,
    limits_of,
)
from allotment.modes.mps.controls import PROGRAM
from allotment.modes.mps.namespaces import folder_of
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.lives import look, recover
from allotment.shares.processes import children_of

__all__ = [
    "STOPS",
    "await_way",
    "control_of",
    "losses",
    "needed_otherwise",
    "part_of",
    "part_of_percent",
    "parts",
    "parts_there",
    "pipes_of",
    "place_of",
    "ready",
    "release",
    "servers",
    "statuses",
    "still_held",
    "users",
]

STOPS: Final = "its MPS daemon, which no share needs any more, is about to stop"
"""Why a GPU is not to be had in another mode for some seconds."""
_PATIENCE_S: Final = 40.0
_RECOVER_EVERY: Final = 5
_WAY_S: Final = 15.0


def place_of(folder: StateFolder, uuid: str) -> MpsPlace:
    """Return where a GPU's control daemon has its files."""
    return MpsPlace(folder.root / "mps" / uuid)


def control_of(folder: StateFolder, uuid: str, *, machine: Path | None) -> Control:
    """Return the control program for a GPU's daemon; of a simulated machine its own one.

    That is the installed one and no copy in the state folder, which may be mounted noexec.
    """
    place = place_of(folder, uuid)
    if machine is None:
        return Control(place.pipes, place.logs, uuid)
    program = str(library_path(SIMULATED) / PROGRAM)
    environment = {"ALLOTMENT_SIMULATED_MACHINE": str(machine)}
    return Control(place.pipes, place.logs, uuid, program, environment)


def part_of(share: Share) -> str:
    """Return the name of a share's part, which is its namespace's where the daemon has such.

    A container without CDI is answered before anybody knows its share: its part is by its size, and
    others' who have as much.
    """
    if share.injection is Injection.MOUNTS:
        return part_of_percent(share.devices[0].compute.ceiling * 100 // WHOLE)
    return share.id


def part_of_percent(percent: int) -> str:
    """Return the name of the part of all containers without CDI that have so much of a GPU."""
    return f"part_{percent}"


def parts(shares: Iterable[Found], uuid: str) -> Mapping[str, Limits]:
    """Return what shares may have of a GPU's daemon, by the names of their parts.

    Of a part that is more than one share's the memory is left to the shares' ledgers.
    """
    found = (
        (each.share, device)
        for each in shares
        if each.share is not None and each.mode == MPS
        for device in each.share.devices
        if device.uuid == uuid
    )
    return {
        part_of(share): limits_of(
            replace(device, is_oversubscribed=True)
            if share.injection is Injection.MOUNTS
            else device
        )
        for share, device in found
    }


def parts_there(
    folder: StateFolder, read: Callable[[], Iterable[Found]], uuid: str
) -> Mapping[str, Limits | None] | None:
    """Return the same with the parts of shares that are there and cannot be read now, as None.

    None for all: nothing can be read. `read` returns all shares.
    """
    try:
        shares = list(read())
        there = {path.name for path in folder.shares.iterdir() if not path.name.startswith(".")}
    except (StateError, OSError):
        return None
    unread = there - {each.id for each in shares if each.share is not None}
    if unread:  # containers without CDI, perhaps
        unread.update(map(part_of_percent, range(101)))
    return {**dict.fromkeys(unread), **parts(shares, uuid)}


def users(shares: Iterable[Found], uuid: str) -> tuple[str, ...]:
    """Return the names of the shares that need a GPU's daemon."""
    return tuple(
        each.name
        for each in shares
        if each.mode == MPS and any(device.uuid == uuid for device in each.devices())
    )


def pipes_of(folder: StateFolder, share: Share) -> Path:
    """Return the folder that is mounted as the pipe directory of a share's programs."""
    return place_of(folder, share.devices[0].uuid).part(part_of(share))


def statuses(folder: StateFolder) -> dict[str, MpsStatus]:
    """Return what is known of every control daemon of a state folder, by the GPU's UUID."""
    try:
        places = sorted((folder.root / "mps").iterdir())
    except OSError:
        return {}
    return {path.name: MpsPlace(path).status() for path in places}


def servers(folder: StateFolder) -> frozenset[int]:
    """Return the process ids of the MPS servers, which have contexts and are in no share."""
    daemons = (status.daemon for status in statuses(folder).values() if status.daemon is not None)
    return frozenset(pid for daemon in daemons for pid in children_of(daemon))


def losses(folder: StateFolder) -> dict[str, tuple[Loss, ...]]:
    """Return what programs lost by the end of their daemon, by the GPU's UUID, oldest first."""
    return {uuid: status.losses for uuid, status in statuses(folder).items()}


def ready(folder: StateFolder, share: Share, *, pipes: str | None = None) -> Mapping[str, str]:
    """Wait until the share's daemon is ready; return what its programs need in the environment.

    `pipes` is where the programs see the pipe directory, if elsewhere. Raises `AllotError` saying
    why there is no daemon.
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
                    status.problem or f"nobody keeps the control daemon at {place.root}",
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
    """Return the pipe directory of programs that see the machine's files as they are."""
    place = place_of(folder, share.devices[0].uuid)
    if place.status().has_namespaces:
        return folder_of(place.pipes, part_of(share))
    return place.pipes


def release(folder: StateFolder, share: Share) -> None:
    """Wait until the GPUs of a share of another mode are no longer kept for MPS clients.

    The daemon outlives its last share for a while, and gives way to one that is in the state folder
    already. Where nobody keeps it any more it is stopped by who is started for that. Raises
    `BusyError`.
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
    """Have a GPU's daemon stop that no share needs; return when it has, or after some seconds."""
    place = place_of(folder, uuid)
    deadline = time.monotonic() + _WAY_S
    while place.status().holds_gpu and place.is_owned() and not _users(folder, uuid):
        if time.monotonic() > deadline:
            return
        place.ask_for_way()
        time.sleep(0.05)


def still_held(place: MpsPlace, uuid: str) -> BusyError:
    """Say that a GPU cannot be had in another mode yet."""
    return BusyError(
        f"GPU {uuid} is still kept for MPS clients",
        hint=f"see {place.root}/events.log; if no daemon runs: nvidia-smi -i {uuid} -c DEFAULT, and"
        f" remove {place.root}",
    )


def _start_one(folder: StateFolder, uuid: str, machine: str | None) -> None:
    """Start a supervisor, and wait until it has a daemon, has failed, or there is another one.

    It outlives this process: in a session and with files of its own, and as nobody's child, since
    what descends from `allot run` is in its share. It holds a pipe open for as long as it begins.
    """
    command = [sys.executable, "-m", __name__, str(folder.root), uuid]
    if machine is not None:
        command.append(machine)
    log = place_of(folder, uuid).root / "supervisor.log"
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
        return users(look(folder), uuid)
    except StateError:  # it stays for as long as without a share
        return ()


def needed_otherwise(shares: Iterable[Found], uuid: str) -> bool:
    """Tell whether a GPU is some share's of another mode."""
    return any(
        uuid in {device.uuid, device.gpu}
        for each in shares
        if each.share is not None and each.mode != MPS
        for device in each.share.devices
    )


def _is_wanted(folder: StateFolder, uuid: str) -> bool:
    try:
        return needed_otherwise(look(folder), uuid)
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
            parts=lambda: parts_there(folder, lambda: look(folder), uuid),
            gives_way=lambda: _is_wanted(folder, uuid),
        )
        if not _users(folder, uuid):
            supervisor.clear()
            return 0
        try:
            supervisor.begin()
        except AllotError:
            return 1  # the status says why
        os.dup2(2, 1)  # whoever waits need wait no longer
        looks = 0
        while (pause := supervisor.step()) is not None:
            supervisor.wait(pause)
            looks += 1
            if looks % _RECOVER_EVERY == 0:
                # Shares whose `allot run` was killed are nobody's to remove until someone looks.
                with suppress(AllotError), folder.locked():
                    recover(folder)
    return 0


def main() -> int:
    """Supervise one GPU's daemon: STATE UUID [MACHINE]."""
    if os.fork() > 0:
        os._exit(0)  # the child is nobody's, and the pipe is still open
    root, uuid, *simulated = sys.argv[1:]
    machine = Path(simulated[0]) if simulated else None
    return _supervise(StateFolder(Path(root)), uuid, machine)


if __name__ == "__main__":
    sys.exit(main())
