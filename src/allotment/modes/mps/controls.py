# SPDX-License-Identifier: Apache-2.0
"""`nvidia-cuda-mps-control`, the driver's program that is a GPU's control daemon and talks to it.

Commands and answers are those of protocol version 2, which every driver with MPS has
(nvidia-cuda-mps-control(1), docs.nvidia.com/deploy/mps); those of version 3 are in `namespaces`. A
daemon that does not answer costs a few seconds, never more.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from allotment.model.errors import PrerequisiteError
from allotment.modes.mps.places import OLDER

__all__ = ["PROGRAM", "Control", "MpsUnreachableError"]

PROGRAM: Final = "nvidia-cuda-mps-control"
_PATIENCE_S: Final = 5.0
_FAULT: Final = "FAULT"
_ACTIVE: Final = "ACTIVE"


class MpsUnreachableError(Exception):
    """The daemon does not answer, or not as it should."""


@dataclass(frozen=True, slots=True)
class Control:
    """The program, for the daemon of one pipe directory that has one GPU."""

    pipes: Path
    logs: Path
    uuid: str
    program: str = PROGRAM
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it needs besides: a simulated machine's file."""

    def start(self) -> subprocess.Popen[bytes]:
        """Start the daemon in the foreground, as a child of this process, in a session of its own.

        For all users where root starts it: clients of two users would else take turns in whole
        servers, one waiting until the other's programs have ended. Raises `PrerequisiteError`.
        """
        try:
            return subprocess.Popen(
                [self.program, "-f", *self._options()],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise PrerequisiteError(
                f"{self.program}: the control daemon of MPS cannot be started: {error.strerror}",
                hint="install the driver's tools that go with it (on many systems a package named"
                " nvidia-compute-utils or cuda-mps), or use --mode soft",
            ) from error

    def daemons(self) -> tuple[int, ...]:
        """Return the process ids of daemons of this pipe directory, also such as do not answer.

        By what the kernel knows of their start; of other users' that only root may read.
        """
        ours = f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}".encode()
        name = Path(self.program).name.encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
                # A script in the program's place comes after its interpreter.
                called = any(word.rpartition(b"/")[2] == name for word in words[:2])
                if not called or b"-f" not in words:
                    continue
                variables = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended, or is another user's
            if ours in variables:
                found.append(int(process.name))
        return tuple(found)

    def offers_namespaces(self) -> bool:
        """Tell whether the program has protocol version 3, with limits that are the daemon's word.

        Its help lists the modules of that version (NVIDIA's guide to limits by MPS checks it so);
        one from before driver 615 knows neither the option nor these. To be asked while no daemon
        runs: the program goes by the version of the one that does.
        """
        try:
            done = subprocess.run(
                [self.program, "-p", "3", "-h"],
                env=self._variables(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        words = set(f"{done.stdout} {done.stderr}".replace(",", " ").split())
        return done.returncode == 0 and {"server", "namespace"} <= words

    def ask(self, command: str) -> str:
        """Give one command, and return the answer; raise `MpsUnreachableError`."""
        return self._run((), f"{command}\n", called=command)

    def answers(self) -> bool:
        """Tell whether the daemon answers a harmless command, as NVIDIA's own check has it."""
        try:
            float(self.ask("get_default_active_thread_percentage"))
        except (MpsUnreachableError, ValueError):
            return False
        return True

    def servers(self) -> tuple[int, ...]:
        """Return the process ids of its servers; raise `MpsUnreachableError`."""
        return tuple(int(word) for word in self.ask("get_server_list").split() if word.isdecimal())

    def start_server(self) -> None:
        """Have a server of this user, so that the first client need not wait for one."""
        self.ask(f"start_server -uid {os.geteuid()}")

    def others(self) -> tuple[str, ...]:
        """Return the names of servers that nobody of ours uses: by protocol 2 there are none."""
        return ()

    def hold_others(self) -> None:
        """Hold who comes by no share's part: by protocol 2 each program has what it is told."""

    def is_active(self, server: int) -> bool:
        """Tell whether a server takes clients; raise `MpsUnreachableError`."""
        return self.ask(f"get_server_status {server}") == _ACTIVE

    def is_faulted(self, server: int) -> bool:
        """Tell whether a client's fault keeps it from taking clients."""
        return self.ask(f"get_server_status {server}") == _FAULT

    def quit(self, within_s: int) -> None:
        """Have the daemon end when its clients have, and by force after so many seconds."""
        self.ask(f"quit -t {within_s}")

    @property
    def protocol(self) -> int:
        """The version of the daemon that `start` starts."""
        return OLDER

    def _options(self) -> list[str]:
        return ["-multiuser-server"] if os.geteuid() == 0 else []

    def _run(self, words: Sequence[str], said: str = "", *, called: str) -> str:
        """Run the program; return what it prints. Raises `MpsUnreachableError`, which says why."""
        try:
            done = subprocess.run(
                [self.program, *words],
                env=self._variables(),
                input=said,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PATIENCE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MpsUnreachableError(f"{called}: {error}") from error
        if done.returncode != 0:
            answer = " ".join(f"{done.stdout} {done.stderr}".split())
            raise MpsUnreachableError(f"{called}: {answer or f'status {done.returncode}'}")
        return done.stdout.strip()

    def _variables(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        return {
            **kept,
            **self.environment,
            "CUDA_VISIBLE_DEVICES": self.uuid,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(self.logs),
        }
