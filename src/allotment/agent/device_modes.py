# SPDX-License-Identifier: Apache-2.0
"""What the node's GPUs are for, as its object or `allot devices set-mode` on it says.

    allotment.dev/device-modes: GPU-4f6e...=mig; GPU-77aa...=soft,mps     on the node, by kubectl

The annotation is written into the state folder, where whoever places a share reads it
(`shares.modes_of_gpus`), and taken out again with the annotation. What the folder has, whoever said
it, goes to schedulers and the kubelet: a GPU takes no new share of another mode, and what is on it
stays. A pod that was placed on it before that was heard of still starts. That a GPU drains, and
that it is over, is told by events.

Whoever may annotate a node is not its root: only GPUs that this node has become files, and nothing
of an annotation does in which something cannot be meant. What of it has no effect, or another than
was meant, is told with what there is instead.
"""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NoReturn, Protocol

from allotment.agent.protocols import Reports
from allotment.model.errors import AllotError, UsageError
from allotment.shares.bookings import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.found import Found
from allotment.shares.modes_of_gpus import (
    BY_NODE,
    Allowed,
    check_uuid,
    parse_modes,
    read_allowed,
    refusal,
    users_of_gpu,
    write_allowed,
)

__all__ = ["DEVICE_MODES", "DeviceModes", "device_modes", "draining", "unsuited"]

DEVICE_MODES: Final = "allotment.dev/device-modes"
"""On the node, by whoever looks after it: GPU-UUID=MODE[,MODE...], several by semicolons."""

DRAINING: Final = "DeviceDraining"
DRAINED: Final = "DeviceDrained"
INVALID: Final = "DeviceModesInvalid"
"""Reasons of the node's events."""

_WATCH_S: Final = 0.5
"""How often it is asked whether shares have come or gone, or a command has said something."""
_SEPARATORS: Final = re.compile(r"[;,\s]+")
_MOST_CHARACTERS: Final = 16 << 10
_NAMED: Final = 4
_MOST_SHOWN: Final = 8
_UNKNOWN_S: Final = 30.0
"""How long GPUs may take to be known, before it is told that there are none."""


class _Says(Protocol):
    @property
    def annotations(self) -> Mapping[str, str]: ...


class _Node(Protocol):
    """This node's object (`kube.nodes.OwnNode`)."""

    @property
    def current(self) -> _Says | None: ...

    def changes(self) -> AsyncIterator[None]: ...


def device_modes(text: str) -> Mapping[str, tuple[str, ...]]:
    """Read the annotation: the modes of each GPU by UUID. `default` is as if it were not named.

    Raises `UsageError` for what cannot be meant; then nothing of it counts.
    """
    if len(text) > _MOST_CHARACTERS:
        raise UsageError(f"{DEVICE_MODES} has {len(text)} characters, at most {_MOST_CHARACTERS}")
    words: dict[str, list[str]] = {}
    last: list[str] | None = None
    for word in filter(None, _SEPARATORS.split(text.strip())):
        uuid, is_named, mode = word.partition("=")
        if is_named:
            if uuid in words:
                raise UsageError(f"{DEVICE_MODES} names {uuid[:64]!r} twice")
            last = words[uuid] = []
        else:
            mode = word
        if last is None or (is_named and not uuid):
            raise UsageError(
                f"{DEVICE_MODES}: {word[:64]!r} is of no GPU",
                hint="write it like GPU-4f6e...=mig; GPU-77aa...=soft,mps",
            )
        last.append(mode)
    for uuid in words:
        if uuid.startswith("MIG-"):
            raise UsageError(
                f"{DEVICE_MODES} names {uuid[:64]!r}, a MIG device, and modes are said of GPUs",
                hint="name its GPU, with mig: on a node a MIG device is given as a whole",
            )
        check_uuid(uuid)
    parsed = {uuid: parse_modes(",".join(modes)) for uuid, modes in words.items()}
    return {uuid: modes for uuid, modes in parsed.items() if modes is not None}


def unsuited(
    wanted: Mapping[str, Sequence[str]],
    known: Collection[str],
    offered: Mapping[str, Sequence[str]],
) -> str:
    """Say what of an annotation has another effect than meant, rule by rule; empty: nothing.

    `known` are the devices of the node, `offered` the modes that its configuration has for each.
    """
    gpus = sorted(each for each in known if each.startswith("GPU-"))
    here = ", ".join(gpus[:_MOST_SHOWN]) + (", ..." if len(gpus) > _MOST_SHOWN else "")
    parts = []
    for uuid, modes in wanted.items():
        rule = f"{uuid}={','.join(modes)}"
        if uuid not in known:
            there = f"the GPUs here are {here}" if here else "no GPU of this node has answered"
            parts.append(f"{rule} suits no GPU of this node: {there}")
        elif uuid in offered and not set(modes) & set(offered[uuid]):
            has = " or ".join(offered[uuid]) or "none"
            parts.append(
                f"{rule} leaves this GPU for nothing: the node's configuration has it in mode"
                f" {has} (allotment.devices there adds others)"
            )
    return "; ".join(parts)


def draining(allowed: Mapping[str, Allowed], shares: Iterable[Found]) -> Mapping[str, str]:
    """Return the GPUs with shares of modes that they are not for any more, and who these are."""
    known = list(shares)
    found: dict[str, str] = {}
    for uuid, each in allowed.items():
        left = [share.name for share, mode in users_of_gpu(known, uuid) if refusal(each, mode)]
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            found[uuid] = ", ".join(left[:_NAMED]) + more
    return found


class DeviceModes:
    """Keeps it. All of it belongs to one event loop; `run` has to be running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        node: _Node,
        devices: Callable[[], Iterable[str]],
        reports: Reports,
        offered: Callable[[], Mapping[str, Sequence[str]]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take where it is said, and the UUIDs of the node's devices as far as they are known.

        `offered`: the modes that the node's configuration has for each, by UUID.
        """
        self._folder = folder
        self._bookings = Bookings(folder)
        self._node = node
        self._devices = devices
        self._reports = reports
        self._offered = offered
        self._clock = clock
        self._current: Mapping[str, Allowed] = {}
        self._draining: Mapping[str, str] = {}
        self._told = ""
        self._text: str | None = None
        """What the node says, once it is known."""
        self._heard = 0.0
        """When that was first heard."""
        self._wanted: Mapping[str, Sequence[str]] = {}
        """What of it can be meant."""
        self._obeyed: frozenset[str] = frozenset()
        """The devices that were known when that was last followed."""
        self._obeying = asyncio.Lock()
        self.followers: list[Callable[[], None]] = []
        """Called in the event loop when something else is said."""

    @property
    def current(self) -> Mapping[str, Allowed]:
        """What was said of GPUs, by UUID."""
        return self._current

    async def run(self) -> NoReturn:
        """Follow both until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_node())
            await self._follow_folder()
        raise AssertionError  # neither ends by itself

    async def _follow_node(self) -> None:
        async for _ in self._node.changes():
            node = self._node.current
            if node is None:
                continue  # not there, or not known: what was said stays
            text = node.annotations.get(DEVICE_MODES, "")
            if text != self._text:
                self._text = text
                self._heard = self._clock()
                await self._obey()

    async def _obey(self) -> None:
        """Follow what the node says, as far as its devices are known: else when they are."""
        async with self._obeying:
            known = self._obeyed = frozenset(self._devices())
            try:
                wanted = device_modes(self._text or "")
                await asyncio.to_thread(self._write, wanted, known)
            except AllotError as error:
                self._wanted = {}
                hint = f" ({error.hint})" if error.hint else ""
                self._tell_invalid(f"{error.message}{hint}: all stays as it was")
                return
        self._wanted = wanted
        if not wanted:
            self._told = ""
        self._tell_unsuited()
        await self._look()

    def _tell_unsuited(self) -> None:
        """Tell what suits no GPU; of one that is not known, once it should be."""
        known = frozenset(self._devices())
        are_all_here = self._clock() - self._heard > _UNKNOWN_S
        told = {
            uuid: modes for uuid, modes in self._wanted.items() if are_all_here or uuid in known
        }
        if not told:
            return
        found = unsuited(told, known, self._offered())
        self._tell_invalid(f"{DEVICE_MODES}: {found}" if found else "")

    def _write(self, wanted: Mapping[str, tuple[str, ...]], known: Collection[str]) -> None:
        with self._folder.locked():
            said = read_allowed(self._folder)
            for uuid, modes in wanted.items():
                there = said.get(uuid)
                if uuid not in known:
                    continue  # what was said of one that is away for a time stays, too
                if there is None or (there.modes, there.by) != (modes, BY_NODE):
                    write_allowed(self._folder, uuid, Allowed(modes, by=BY_NODE))
            for uuid in (each for each in said if said[each].by == BY_NODE):
                if uuid not in wanted:
                    write_allowed(self._folder, uuid, None)

    def _tell_invalid(self, message: str) -> None:
        if message != self._told:
            self._told = message
            if message:
                self._reports.node(INVALID, message, is_warning=True)

    async def _follow_folder(self) -> None:
        before: tuple[int, int] | None = None
        while True:
            if self._text and self._obeyed != frozenset(self._devices()):
                with contextlib.suppress(AllotError):  # as below
                    await self._obey()
            self._tell_unsuited()
            now = _time_of(self._folder.root / "modes"), _time_of(self._folder.shares)
            if now != before:
                before = now
                with contextlib.suppress(AllotError):  # of reading shares: it is tried again
                    await self._look()
            await asyncio.sleep(_WATCH_S)

    async def _look(self) -> None:
        """Read what is said, tell followers of news, and people of what drains."""
        current, left = await asyncio.to_thread(self._read)
        if current != self._current:
            self._current = current
            for follower in self.followers:
                follower()
        for uuid, who in left.items():
            if uuid not in self._draining:
                text = f"GPU {uuid} is only for mode {current[uuid]} from now on, and has {who}"
                self._reports.node(DRAINING, text, is_warning=False)
        for uuid in self._draining.keys() - left.keys():
            what = f"only for mode {current[uuid]}" if uuid in current else "for every mode"
            self._reports.node(DRAINED, f"GPU {uuid} is {what}", is_warning=False)
        self._draining = left

    def _read(self) -> tuple[Mapping[str, Allowed], Mapping[str, str]]:
        current = read_allowed(self._folder)
        there = self._bookings.read() if current and self._folder.shares.is_dir() else []
        return current, draining(current, there)


def _time_of(path: os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - twice a second
    except OSError:
        return 0
