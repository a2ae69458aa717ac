# SPDX-License-Identifier: Apache-2.0
"""Lists shares, removes them, and cleans up after dead processes.

Every command recovers: it removes shares whose runner and processes have ended, and drafts of
killed processes. `lifecycle` creates and ends shares on top of this.
"""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from allotment.devices.sources import Problem, Reading
from allotment.ledger import read, reap
from allotment.ledger.leases import DeviceFiles
from allotment.model.errors import LedgerError, StateError
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.modes import turns
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder, explained
from allotment.shares.process_tree import (
    attached,
    census,
    is_alive,
    is_in_pod,
    is_running,
    living_runner,
    named,
)
from allotment.shares.record import (
    RECORD,
    LoadedShare,
    is_ours,
    note_damage,
    note_event,
    read_share,
    read_traces,
    write_traces,
)

DRAFT = ".new-"
"""The prefix of a share's folder while it is built."""
_REMOVED = ".old-"


def list_shares(folder: StateFolder) -> list[LoadedShare]:
    """Return every share, oldest first. Only dead processes' use is reclaimed."""
    try:
        names = folder.share_names()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise explained(error, folder.shares, "list the shares") from error
    files = DeviceFiles()
    loaded = [
        read_share(folder.share(ShareId(name)), files=files)
        for name in names
        if not name.startswith(".")
    ]
    return sorted((share for share in loaded if share is not None), key=LoadedShare.age_key)


def recover(folder: StateFolder) -> list[LoadedShare]:
    """Remove ended shares whose runner died; return the remaining shares.

    Those of another user remain, too: this user sees not all of their processes, and may not remove
    them. The caller holds the folder's lock: so each unfinished folder is abandoned.
    """
    for name in os.listdir(folder.shares):  # noqa: PTH208 - names are all
        path = f"{folder.shares}/{name}"
        if name.startswith((DRAFT, _REMOVED)) or _is_mount_point(path):
            shutil.rmtree(path, ignore_errors=True)  # another user's stays
    shares = list_shares(folder)
    note_damage(folder, shares)
    turns.sweep(folder.devices, {share.id: tuple(share.limits()) for share in shares})
    orphans = [
        loaded
        for loaded in shares
        if loaded.share and loaded.share.runner and not is_alive(loaded.share.runner)
    ]
    if not orphans:
        return shares
    members = census((loaded.share, loaded.directory) for loaded in orphans if loaded.share)
    ended = set()
    for loaded in orphans:
        if members[loaded.id] or (loaded.ledger and loaded.ledger.processes):
            remember_members(loaded.directory, members[loaded.id])
        elif is_ours(loaded):
            ended.add(loaded.id)
            remove(folder, loaded)
    return [loaded for loaded in shares if loaded.id not in ended]


def _is_mount_point(path: str) -> bool:
    """True for a folder made by a container runtime: some create missing sources of mounts.

    It has directories in place of a share's files, and would block the share with that id.
    """
    try:
        if os.path.exists(f"{path}/{RECORD}"):  # noqa: PTH110 - for each share
            return False
        folder = Path(path)
        return not (folder / "policy").is_file() and folder.is_dir() and not folder.is_symlink()
    except PermissionError:  # another user's
        return False


def remember_members(directory: Path, members: Iterable[int]) -> None:
    """Record the processes of a share without a runner: they may not be identified otherwise."""
    before = read_traces(directory)
    after = replace(before, members=tuple(map(named, sorted(members))))
    if after != before:
        with suppress(StateError):  # another user's share: its owner records them
            write_traces(directory, after)


def users_of(loaded: LoadedShare) -> set[int]:
    """Return a share's processes: pids here, or inside the share if these are unknown.

    A pod's program could hand its ledger's file to another pod, whose programs then hold slots. So
    on a node only what the kernel shows to be in the share, or the pod, counts.
    """
    processes = loaded.ledger.processes if loaded.ledger else ()
    if loaded.share is None:
        return {process.pid for process in processes}
    if members := census([(loaded.share, loaded.directory)])[loaded.id]:
        return members
    if owner := loaded.owner:
        found = attached(processes, loaded.directory, ())
        return {pid for pid in found if is_in_pod(pid, owner.uid)}
    users = {process.pid for process in processes}
    if runner := living_runner(loaded.share, loaded.directory):
        users.add(runner.pid)
    return users


def remove(folder: StateFolder, loaded: LoadedShare) -> None:
    """Hide a share in one step, then delete it. The caller holds the folder's lock.

    Its CDI spec is removed first, while the share still names it.
    """
    if loaded.share and loaded.share.cdi_spec:
        _remove_spec(loaded, Path(loaded.share.cdi_spec))
    failpoint("remove.unpublished")
    # A name that no other user could take before.
    hidden = f"{_REMOVED}{loaded.id}-"
    grave = loaded.directory.with_name(f"{hidden}{os.urandom(6).hex()}")
    try:
        loaded.directory.rename(grave)
    except FileNotFoundError:
        return
    except OSError as error:
        raise explained(error, loaded.directory, "remove the share") from error
    failpoint("remove.hidden")
    note_event(folder, "ended", share=loaded.name, share_id=loaded.id)
    turns.free_seats(folder.devices, loaded.id)
    failpoint("remove.freed")
    for each in folder.shares.glob(f"{hidden}*"):  # also a former one, cut off in its removal
        shutil.rmtree(each, ignore_errors=True)
    failpoint("remove.cleared")


def _remove_spec(loaded: LoadedShare, spec: Path) -> None:
    """Remove a share's CDI spec, unless it is another share's or user's.

    In a folder for all users each can write a record, and any path into it.
    """
    from allotment.shares.cdi import remove_spec, spec_name

    if spec.name == spec_name(loaded.id):
        with suppress(FileNotFoundError, NotADirectoryError):
            owner = loaded.directory.stat().st_uid
            if owner == 0 or spec.lstat().st_uid == owner:
                remove_spec(spec)


def without_freed(found: LoadedShare, readings: Mapping[str, Reading | Problem]) -> LoadedShare:
    """The share without the use of dead processes, if the driver has freed all of their memory.

    The driver lists a process until then. Entries of processes that end later are left.
    """
    if found.ledger is None or not found.ledger.has_leaving:
        return found
    asked = []
    for device in found.devices():
        reading = readings.get(device.driver_uuid)
        if not isinstance(reading, Reading):
            return found
        if not all(is_running(each.pid) for each in reading.processes):
            return found
        asked.append(reading.asked_ns)
    with suppress(LedgerError):
        reap(found.directory, asked_ns=min(asked, default=0))
        return replace(found, ledger=read(found.directory))
    return found
