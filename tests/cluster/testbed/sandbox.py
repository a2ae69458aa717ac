# SPDX-License-Identifier: Apache-2.0
"""Namespaces of its own for a cluster: processes, mounts, network, host name.

So the cluster has the real paths (/var/lib/kubelet, /var/run/cdi, /run/allotment) and ports, and
not the machine's; two clusters run side by side, and ending one is ending one process: the
kernel ends all others with it, also when the test runner itself is killed.

The network is joined to the machine's by one pair of virtual interfaces in 198.18.0.0/15, which is
set aside for tests of networks (RFC 2544). Nothing is routed further.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from testbed.waiting import PATIENCE_S, TestbedError, wait_until

_FIRST_PROCESS = Path(__file__).with_name("first_process.py")
_SUBNETS = ipaddress.ip_network("198.18.0.0/15")
_SUBNET_BITS = 30
_PREFIX = "testbed-"
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Link:
    """The pair of interfaces between the machine and the sandbox."""

    index: int
    """Which subnet; also in the names of the interface and of the control group."""

    @property
    def name(self) -> str:
        """The machine's end."""
        return f"{_PREFIX}{self.index:x}"

    @property
    def _subnet(self) -> int:
        return int(_SUBNETS.network_address) + (self.index << (32 - _SUBNET_BITS))

    @property
    def outer(self) -> str:
        """The machine's address."""
        return str(ipaddress.IPv4Address(self._subnet + 1))

    @property
    def inner(self) -> str:
        """The sandbox's address: what the API server and the kubelet are reached at."""
        return str(ipaddress.IPv4Address(self._subnet + 2))


class Process:
    """A program in a sandbox. Its process id is the machine's: anyone here may signal it."""

    def __init__(self, command: Sequence[str], popen: subprocess.Popen[str]) -> None:
        self.command = tuple(command)
        self.popen = popen
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The program's process id, seen from the machine."""
        if self._pid is None:
            # nsenter has to fork to enter a process namespace; the program is its only child.
            self._pid = wait_until(self._find_child, f"process of {self.command[0]}", every_s=0.002)
        return self._pid

    def _find_child(self) -> int | None:
        if self.popen.poll() is not None:
            raise TestbedError(f"{self.command[0]} ended at once with {self.popen.returncode}")
        children = children_of(self.popen.pid)
        return children[0] if children else None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.popen.poll() is None

    def send_signal(self, number: int) -> None:
        """Signals the program; nothing where it has ended."""
        if not self.is_running:
            return
        with contextlib.suppress(ProcessLookupError, TestbedError):
            os.kill(self.pid, number)
        if number == signal.SIGCONT:
            # nsenter stops when its child stops.
            with contextlib.suppress(ProcessLookupError):
                self.popen.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """Waits for its end and returns its status, negative for a signal's number.

        Raises:
            TestbedError: it is still running.
        """
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TestbedError(f"{self.command[0]} still runs after {timeout_s:g} s") from None

    def stop(self, *, number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int | None:
        """Signals it and waits for its status; where that is not enough, kills it: None."""
        self.send_signal(number)
        try:
            return self.wait(timeout_s)
        except TestbedError:
            self.send_signal(signal.SIGKILL)
            self.wait(PATIENCE_S)
            return None


class Sandbox:
    """One set of namespaces. Start, run programs inside, stop."""

    def __init__(self, state: Path, *, hostname: str) -> None:
        self.state = state
        self.hostname = hostname
        self._outer: subprocess.Popen[str] | None = None
        self._pid: int | None = None
        self._link: Link | None = None
        self._processes: list[Process] = []

    # ---- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Makes the namespaces and joins them to the machine's network.

        Raises:
            TestbedError: this machine does not allow it; with the words of what failed.
        """
        log = self.state / "logs" / "sandbox.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as errors:
            self._outer = subprocess.Popen(
                [
                    # Should this process be killed, the sandbox goes with it.
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "--mount", "--net", "--pid", "--uts", "--fork", "--kill-child"),
                    *("--mount-proc", "--propagation", "private"),
                    *(sys.executable, "-I", str(_FIRST_PROCESS), str(self.state), self.hostname),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # A terminal's Ctrl-C is for whoever holds the cluster, who then ends it in order.
                start_new_session=True,
            )
        assert self._outer.stdout is not None
        if self._outer.stdout.readline().strip() != "ready":
            self._outer.wait(PATIENCE_S)
            raise TestbedError(f"cannot make namespaces:\n{log.read_text(encoding='utf-8')}")
        self._pid = children_of(self._outer.pid)[0]
        self._link = self._join_networks()

    def stop(self) -> None:
        """Ends every process of the sandbox; mounts and interfaces go with them. Repeatable."""
        if self._outer is not None:
            # The first process ends when all others have; unshare ends after it.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid or self._outer.pid, signal.SIGKILL)
            self._outer.wait(PATIENCE_S)
            if self._outer.stdout is not None:
                self._outer.stdout.close()
        for process in self._processes:
            process.wait(PATIENCE_S)
        self._processes.clear()
        if self._link is not None:
            # The kernel takes an interface away some time after its namespace.
            _ip("link", "delete", self._link.name, check=False)
            remove_control_group(self.control_group)
        self._outer = self._pid = self._link = None

    @property
    def pid(self) -> int:
        """The first process, seen from the machine: its /proc folder leads to the namespaces."""
        if self._pid is None:
            raise TestbedError("the sandbox is not running")
        return self._pid

    @property
    def link(self) -> Link:
        """The addresses of the sandbox and of the machine towards it."""
        if self._link is None:
            raise TestbedError("the sandbox is not running")
        return self._link

    @property
    def control_group(self) -> str:
        """The control group that everything of the kubelet is below, in every hierarchy."""
        return f"/{self.link.name}"

    # ---- programs --------------------------------------------------------------------------------

    def path(self, inside: str | Path) -> Path:
        """Where the machine sees a path of the sandbox. Sockets can be connected to by it, too."""
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: int | IO[str] = subprocess.DEVNULL,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
    ) -> Process:
        """Starts a program in the sandbox; `environment` is added to this process's."""
        words = [str(word) for word in command]
        target = ["--target", str(self.pid), "--mount", "--net", "--pid", "--uts"]
        popen = subprocess.Popen(
            ["nsenter", *target, *(["--wd=" + str(folder)] if folder else []), "--", *words],
            env={**os.environ, **(environment or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._processes = [process for process in self._processes if process.is_running]
        self._processes.append(Process(words, popen))
        return self._processes[-1]

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = PATIENCE_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program in the sandbox to its end.

        Raises:
            TestbedError: it takes longer, or (with `check`) it failed; with what it said.
        """
        process = self.popen(
            command,
            environment=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        words = list(process.command)
        try:
            out, err = process.popen.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            out, err = process.popen.communicate(timeout=PATIENCE_S)
            raise TestbedError(f"{words} takes longer than {timeout_s:g} s\n{out}{err}") from None
        status = process.popen.returncode
        if check and status != 0:
            raise TestbedError(f"{words} ended with {status}\n{out}{err}")
        return subprocess.CompletedProcess(words, status, out, err)

    # ---- network ---------------------------------------------------------------------------------

    def _join_networks(self) -> Link:
        count = _SUBNETS.num_addresses >> (32 - _SUBNET_BITS)
        for _ in range(20):
            # An interface's name exists once: whoever makes it has the subnet.
            link = Link(random.randrange(1, count))  # noqa: S311 - no secret
            made = _ip(
                *("link", "add", link.name, "type", "veth"),
                *("peer", "name", "uplink", "netns", str(self.pid)),
                check=False,
            )
            if made:
                break
        else:
            raise TestbedError("cannot add a pair of interfaces (`ip link add ... type veth`)")
        _ip("address", "add", f"{link.outer}/{_SUBNET_BITS}", "dev", link.name)
        _ip("link", "set", link.name, "up")
        self.run(["ip", "link", "set", "lo", "up"])
        self.run(["ip", "address", "add", f"{link.inner}/{_SUBNET_BITS}", "dev", "uplink"])
        self.run(["ip", "link", "set", "uplink", "up"])
        return link


def _ip(*arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise TestbedError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode == 0


# ---- control groups ------------------------------------------------------------------------------


def make_control_group(name: str) -> None:
    """Makes a group of that name (`/testbed-1f`) in every hierarchy, for the kubelet's root."""
    for hierarchy in _hierarchies():
        group = hierarchy / name.strip("/")
        group.mkdir(exist_ok=True)
        # Version 1: nothing runs in a cpuset without CPUs and memory nodes.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (hierarchy / file).exists() and (group / file).exists():
                (group / file).write_text((hierarchy / file).read_text(encoding="ascii"))
        _delegate(group)


def _delegate(group: Path) -> None:
    # Version 2: a group's controllers are those that its parent hands down.
    available = group.parent / "cgroup.controllers"
    if not (available.exists() and (_CGROUPS / "cgroup.controllers").exists()):
        return
    for folder in (group.parent, group):
        for controller in available.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):  # one that has no groups, as on a real-time kernel
                (folder / "cgroup.subtree_control").write_text(f"+{controller}", encoding="ascii")


def remove_control_group(name: str, *, timeout_s: float = 60) -> None:
    """Removes a group and all below it, once the last processes of it have ended."""
    end = time.monotonic() + timeout_s
    roots = [hierarchy / name.strip("/") for hierarchy in _hierarchies()]
    while left := [root for root in roots if root.exists()]:
        for root in left:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # busy for a moment after a process's end
                    Path(folder).rmdir()
        if time.monotonic() > end:
            raise TestbedError(f"cannot remove the control groups {', '.join(map(str, left))}")
        if any(root.exists() for root in left):
            time.sleep(0.02)


def remove_stale_control_groups() -> None:
    """Removes the groups of sandboxes that are no more, as of test runs that were killed.

    A sandbox's group is named as its interface: where that is gone, so is the sandbox.
    """
    for hierarchy in _hierarchies():
        for group in hierarchy.glob(f"{_PREFIX}*"):
            if not Path("/sys/class/net", group.name).exists():
                with contextlib.suppress(TestbedError):  # another one's end is not ours to judge
                    remove_control_group(f"/{group.name}", timeout_s=2)


def _hierarchies() -> list[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [folder for folder in _CGROUPS.iterdir() if folder.is_dir() and not folder.is_symlink()]


# ---- processes -----------------------------------------------------------------------------------


def processes_of(first_process: int) -> set[int]:
    """Every process of a sandbox, seen from the machine: its own, and those of pods below."""
    wanted = Path(f"/proc/{first_process}/ns/pid").readlink()
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # no process, or one that has ended
            if (folder / "ns" / "pid").readlink() == wanted:
                found.add(int(folder.name))
    below = found
    while below:  # each container has a process namespace of its own
        below = {child for pid in below for child in children_of(pid)} - found
        found |= below
    return found


def children_of(pid: int) -> list[int]:
    """The process ids of a process's children. /proc/PID/task/*/children is not in every kernel."""
    folders = [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return sorted(int(folder.name) for folder in folders if _parent_of(folder) == pid)


def _parent_of(folder: Path) -> int | None:
    try:
        stat = (folder / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # it has ended since
        return None
    # "pid (name) state parent ...", and a name may hold anything.
    return int(stat.rpartition(")")[2].split()[1])
