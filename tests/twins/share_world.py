# SPDX-License-Identifier: Apache-2.0
"""Shares of one simulated GPU, and programs in them that do what they are told (gpu_worker.py)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from allotment import ledger
from allotment.devices import simulated
from allotment.devices.faults import set_driver_fault
from allotment.devices.packing import read_machine
from allotment.libraries import SHIM, SIMULATED, library_path

WORKER: Final = Path(__file__).parent.parent / "local" / "gpu_worker.py"
GRANULE: Final = 2 << 20
MACHINE: Final = "gpus:\n- {model: t4, memory: 8Gi}\n- {model: t4, memory: 8Gi}\n"
SHARED_GPU: Final = 1


@dataclass(eq=False)
class Tenant:
    """One process of the share, and what the model knows of it."""

    connection: socket.socket
    lines: Any
    pid: int
    process: subprocess.Popen[bytes] | None
    is_open: bool = False
    inherited: bool = False
    """Forked from a process that had initialised the driver: the driver is of no use in it."""
    held: dict[int, tuple[str, int]] = field(default_factory=dict)

    def send(self, command: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(command).encode() + b"\n")

    def answer(self) -> dict[str, Any]:
        line = self.lines.readline()
        assert line, f"process {self.pid} ended when it was asked something"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **more: object) -> dict[str, Any]:
        self.send({"do": do, **more})
        return self.answer()

    def wait(self) -> None:
        """Until it has ended: the kernel closes files, and with them locks, before it says so."""
        with contextlib.suppress(ConnectionResetError):
            while self.lines.readline():
                pass
        self.lines.close()
        self.connection.close()
        if self.process is not None:
            self.process.wait()
        else:
            wait_for_end(self.pid)


def wait_for_end(pid: int) -> None:
    """Until a process that is not our child is gone, or is only its parent's zombie."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":
            return
        time.sleep(0.001)
    pytest.fail(f"process {pid} does not end")


class World:
    """A simulated machine, a share of one of its GPUs, and the way to start processes in it."""

    def __init__(self, limit: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="allotment-properties-"))
        spec = self.folder / "machine.yaml"
        spec.write_text(MACHINE)
        self.machine = simulated.machine_path(self.folder, str(spec))
        self.device = read_machine(self.machine).devices[SHARED_GPU]
        self.share = self.add_share("share", limit)
        self.address = str(self.folder / "socket")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.address)
        self.listener.listen()
        self.listener.settimeout(120)
        self.release_us = 0
        self.observer = self.start("dlsym", inside=False)

    def add_share(self, name: str, limit: int) -> Path:
        directory = self.folder / name
        directory.mkdir()
        policy = ledger.DevicePolicy(
            uuid=self.device.uuid, memory_limit=limit, context_bytes=self.device.context_bytes
        )
        ledger.create(
            directory, ledger.LedgerPolicy(share_id=name, share_name=name, devices=(policy,))
        )
        return directory

    def start(self, resolving: str, *, inside: bool = True, share: Path | None = None) -> Tenant:
        environment = os.environ | {
            "LD_LIBRARY_PATH": str(library_path(SIMULATED)),
            "ALLOTMENT_SIMULATED_MACHINE": str(self.machine),
        }
        if inside:
            environment["LD_PRELOAD"] = str(library_path(SHIM))
            environment["ALLOTMENT_SHARE"] = str(share or self.share)
        command = [sys.executable, "-I", "-S", str(WORKER), self.address, resolving]
        return self.accept(subprocess.Popen(command, env=environment))

    def accept(self, process: subprocess.Popen[bytes] | None) -> Tenant:
        connection, _ = self.listener.accept()
        connection.settimeout(120)
        lines = connection.makefile("r", encoding="ascii")
        return Tenant(connection, lines, json.loads(lines.readline())["pid"], process)

    def outside(self) -> dict[str, Any]:
        """What NVML says of the GPU outside the share."""
        return self.observer.ask("nvml", index=SHARED_GPU)

    def read(self) -> ledger.Ledger:
        ledger.reap(self.share)
        if self.release_us == 0:
            ledger.reap(self.share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        return ledger.read(self.share)

    def set_release(self, release_us: int) -> None:
        """Let the driver free a process's memory so late after its end."""
        self.release_us = release_us
        set_driver_fault(self.machine, release_us=release_us)

    def wait_for_driver(self, living: Sequence[Tenant]) -> None:
        """Until the driver lists no process that has ended."""
        pids = {str(tenant.pid) for tenant in living}
        while self.release_us and set(self.outside()["processes"][2]) - pids:
            time.sleep(0.002)
        ledger.reap(self.share)
        ledger.reap(self.share, asked_ns=time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    def close(self) -> None:
        self.observer.send({"do": "exit"})
        self.observer.wait()
        self.listener.close()
        shutil.rmtree(self.folder)
