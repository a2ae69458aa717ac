# SPDX-License-Identifier: Apache-2.0
"""Simulated machines that nobody needs go when another one is made, and no others do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from allotment.devices import layout
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.faults import MigCall, MigFault, set_mig_fault
from allotment.devices.mig_machine import MigMachine
from allotment.devices.packing import read_machine
from allotment.devices.simulated import machine_path
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.modes.mig.journal import Journal
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import ModePolicy, write_mode_policy
from allotment.shares.old_machines import remove_old_machines
from allotment.shares.placing import ShareOrder

Allot = Any  # tests/conftest.py: CommandLine
DAYS_S = 86_400.0
SPEC = "h100-80gb"


@pytest.fixture
def folder(allot: Allot) -> StateFolder:
    found = StateFolder(allot.state)
    found.prepare()
    return found


def age(path: Path, days: float = 8) -> None:
    """Lets a machine look as if nobody had named or read it for so long."""
    then = time.time() - days * DAYS_S
    os.utime(path, (then, then))


def uuid_of(path: Path) -> str:
    return read_machine(path).devices[0].uuid


def test_what_nobody_needs_goes_with_the_next_machine_and_comes_again(
    allot: Allot, folder: StateFolder
) -> None:
    old = machine_path(folder.root, SPEC)
    new = machine_path(folder.root, "t4")
    uuid = uuid_of(old)
    age(old)
    age(new, days=1)
    assert allot("devices", "--simulated", SPEC).returncode == 0
    assert old.exists(), "who names it, uses it"
    age(old)
    done = allot("run", "--simulated", "a30", "--memory", "1Gi", "--", "true")
    assert done.returncode == 0, done.stderr
    assert (old.parent.exists(), new.exists()) == (False, True)
    again = machine_path(folder.root, SPEC)
    assert (again, uuid_of(again)) == (old, uuid)


def _cut(path: Path, _: StateFolder) -> None:
    with MigMachine(path) as gpus:
        gpus.ask_one(0, lambda device: device.driver.set_mode(is_on=True), patience_s=30)


def _fault(path: Path, _: StateFolder) -> None:
    set_mig_fault(path, 0, MigCall.CREATE_GPU, MigFault(error=999))


def _compute_mode(path: Path, _: StateFolder) -> None:
    GpuSettings(uuid_of(path), machine=path).set_compute_mode(ComputeMode.PROHIBITED)


def _said(path: Path, folder: StateFolder) -> None:
    with folder.locked():
        write_mode_policy(folder, uuid_of(path), ModePolicy(("soft",)))


def _switched(path: Path, folder: StateFolder) -> None:
    Journal(folder.mig / uuid_of(path)).note_switched()


@pytest.mark.parametrize("touch", [_cut, _fault, _compute_mode, _said, _switched])
def test_what_was_done_to_a_machine_is_not_lost(
    folder: StateFolder, touch: Callable[[Path, StateFolder], None]
) -> None:
    path = machine_path(folder.root, SPEC)
    touch(path, folder)
    age(path)
    assert remove_old_machines(folder) == []
    assert path.exists()


def test_a_machine_of_another_release_stays(folder: StateFolder) -> None:
    path = machine_path(folder.root, SPEC)
    other = path.parent.with_name("0123456789abcdef")
    path.parent.rename(other)
    age(other / "machine")
    assert remove_old_machines(folder) == []


def test_one_that_a_share_is_on_stays(allot: Allot, folder: StateFolder) -> None:
    held = subprocess.Popen(
        allot.command("run", "--simulated", SPEC, "--memory", "1Gi", "--", "sh", "-c", "echo; cat"),
        env=allot.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert held.stdout is not None
        held.stdout.readline()
        path = machine_path(folder.root, SPEC)
        age(path)
        assert remove_old_machines(folder) == []
    finally:
        held.communicate()
    age(path)
    assert remove_old_machines(folder) == [path]


def test_one_whose_lock_somebody_holds_stays(folder: StateFolder) -> None:
    """As a program on it does, also one in a container, whose memory cannot be looked into."""
    path = machine_path(folder.root, SPEC)
    with path.open("r+b") as opened:
        byte = struct.pack(
            "hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.PROCESS_LOCK_BASE + 7, 1, 0
        )
        fcntl.fcntl(opened, fcntl.F_OFD_SETLK, byte)
        age(path)
        assert remove_old_machines(folder) == []
        assert path.exists()


def test_one_that_a_program_without_a_share_is_on_stays(allot: Allot, folder: StateFolder) -> None:
    lines = allot("env", "--simulated", SPEC).stdout
    code = "import pynvml, sys; pynvml.nvmlInit(); print(flush=True); sys.stdin.read()"
    script = f'{lines}\nexec "$0" -c "$1"'
    program = subprocess.Popen(
        ["bash", "-c", script, sys.executable, code],
        env=allot.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == b"\n"
        path = machine_path(folder.root, SPEC)
        age(path)
        assert remove_old_machines(folder) == []
    finally:
        program.communicate()
    age(path)
    assert remove_old_machines(folder) == [path]


def _name(path: Path, folder: StateFolder) -> None:
    assert machine_path(folder.root, SPEC) == path


def _share(path: Path, folder: StateFolder) -> None:
    order = ShareOrder(Request(parse_memory("1Gi")), Injection.ENVIRONMENT, machine=path, spec=SPEC)
    door = lifecycle.FrontDoor(locked=nullcontext)  # who removes machines holds the lock
    lifecycle.create(folder, order, read_machine(path).devices, door=door)
    age(path)


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process are open on a file."""
    count = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        # The other thread may have closed it since it was listed.
        with contextlib.suppress(FileNotFoundError):
            count += descriptor.readlink() == path
    return count


@pytest.mark.parametrize("come", [_name, _share])
def test_one_that_somebody_comes_to_once_it_was_found_old_stays(
    folder: StateFolder, come: Callable[[Path, StateFolder], None]
) -> None:
    path = machine_path(folder.root, SPEC)
    age(path)
    lock = folder.root / "lock"
    with ThreadPoolExecutor() as threads:
        with folder.locked():
            removing = threads.submit(remove_old_machines, folder)
            while descriptors_of(lock) < 2 and not removing.done():
                time.sleep(0.001)
            come(path, folder)
        assert removing.result() == []
    assert path.exists()
