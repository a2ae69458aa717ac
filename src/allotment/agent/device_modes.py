# SPDX-License-Identifier: Apache-2.0
"""Restricts GPUs to modes, by the node's annotation, and finds GPUs reserved by compute mode.

    allotment.dev/device-modes: GPU-4f6e...=mig; GPU-77aa...=soft,mps

The annotation becomes mode policies in the state folder (`shares.mode_policy`), and goes with it.
A GPU takes no new share of other modes; its present shares stay, and it drains. Annotators are not
root: only known GPUs become files, and an annotation with an error has no effect at all.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from allotment.agent.node_state import AnnotatedNode, NodeState, poll_folders
from allotment.agent.protocols import Reports
from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.watching import Asker
from allotment.model.errors import AllotError, UsageError
from allotment.model.reported import Reported
from allotment.shares.booking import Bookings
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import (
    BY_NODE,
    ModePolicy,
    check_uuid,
    parse_modes,
    read_mode_policies,
    refusal,
    users_of_gpu,
    write_mode_policy,
)
from allotment.shares.mps_daemons import place_of
from allotment.shares.record import LoadedShare

DEVICE_MODES: Final = "allotment.dev/device-modes"
"""On the node: GPU-UUID=MODE[,MODE...], separated by semicolons."""

DRAINING: Final = "DeviceDraining"
DRAINED: Final = "DeviceDrained"
INVALID: Final = "DeviceModesInvalid"
"""Reasons of the node's events."""

_WATCH_S: Final = 0.5
"""How often shares and mode policies are polled."""
_SEPARATORS: Final = re.compile(r"[;,\s]+")
_MOST_CHARACTERS: Final = 16 << 10
_NAMED: Final = 4
_MOST_SHOWN: Final = 8
_UNKNOWN_S: Final = 30.0
"""How long GPUs may take to answer before an unknown one is reported."""


def device_modes(text: str) -> Mapping[str, tuple[str, ...]]:
    """Parse the annotation: the modes of each GPU by UUID. `default` is as if it were not named.

    Raises `UsageError` for any error: then no part of it counts.
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
                f"{DEVICE_MODES}: {word[:64]!r} belongs to no GPU",
                hint="write it like GPU-4f6e...=mig; GPU-77aa...=soft,mps",
            )
        last.append(mode)
    for uuid in words:
        if uuid.startswith("MIG-"):
            raise UsageError(
                f"{DEVICE_MODES} names {uuid[:64]!r}, a MIG device: only GPUs have modes",
                hint="name its GPU, with mode mig",
            )
        check_uuid(uuid)
    parsed = {uuid: parse_modes(",".join(modes)) for uuid, modes in words.items()}
    return {uuid: modes for uuid, modes in parsed.items() if modes is not None}


def unsuited(
    wanted: Mapping[str, Sequence[str]],
    known: Collection[str],
    offered: Mapping[str, Sequence[str]],
) -> str:
    """Name the rules that have no effect, and why; empty: none.

    `known` are the node's devices, `offered` the modes of each by its configuration.
    """
    gpus = sorted(each for each in known if each.startswith("GPU-"))
    here = ", ".join(gpus[:_MOST_SHOWN]) + (", ..." if len(gpus) > _MOST_SHOWN else "")
    parts = []
    for uuid, modes in wanted.items():
        rule = f"{uuid}={','.join(modes)}"
        if uuid not in known:
            present = f"its GPUs are {here}" if here else "none of its GPUs has answered"
            parts.append(f"{rule} names no GPU of this node: {present}")
        elif uuid in offered and not set(modes) & set(offered[uuid]):
            has = " or ".join(offered[uuid]) or "none"
            parts.append(
                f"{rule} leaves this GPU without a mode: the node's configuration allows"
                f" {has} (see allotment.devices there)"
            )
    return "; ".join(parts)


def draining(allowed: Mapping[str, ModePolicy], shares: Iterable[LoadedShare]) -> Mapping[str, str]:
    """Return the GPUs with shares of modes that their policy forbids, and the shares' names."""
    loaded = list(shares)
    names_by_gpu: dict[str, str] = {}
    for uuid, policy in allowed.items():
        names = [share.name for share, mode in users_of_gpu(loaded, uuid) if refusal(policy, mode)]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            names_by_gpu[uuid] = ", ".join(names[:_NAMED]) + more
    return names_by_gpu


class DeviceModes:
    """Keeps the mode policies. For one event loop; needs `run` running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        state: NodeState,
        node: AnnotatedNode,
        reports: Reports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._bookings = Bookings(folder)
        self._state = state
        self._node = node
        self._reports = reports
        self._clock = clock
        self._draining: Mapping[str, str] = {}
        self._reported = Reported[str]()
        self._text: str | None = None
        """The annotation, once it is known."""
        self._changed_at = 0.0
        """When it last changed."""
        self._wanted: Mapping[str, Sequence[str]] = {}
        """The rules of a valid annotation."""
        self._applied: frozenset[str] = frozenset()
        """The devices that were known when it was last applied."""
        self._applying = asyncio.Lock()

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_node())
            group.create_task(self._follow_devices())
            await self._follow_folders()
        raise AssertionError  # none of them ends by itself

    async def _follow_node(self) -> None:
        async for _ in self._node.changes():
            node = self._node.current
            if node is None:
                continue  # missing or not known: the policies stay
            text = node.annotations.get(DEVICE_MODES, "")
            if text != self._text:
                self._text = text
                self._changed_at = self._clock()
                await self._apply()

    async def _apply(self) -> None:
        """Apply the annotation to the known devices; to others when they are known."""
        async with self._applying:
            known = self._applied = frozenset(self._state.devices)
            try:
                wanted = device_modes(self._text or "")
                await asyncio.to_thread(self._write, wanted, known)
            except AllotError as error:
                self._wanted = {}
                problem = AllotError(
                    f"{error.message}; the mode policies stay as they were", hint=error.hint
                )
                self._report_invalid(problem.one_line())
                return
        self._wanted = wanted
        if not wanted:
            self._reported.over(INVALID)
        self._report_unsuited()
        await self._look()

    def _report_unsuited(self) -> None:
        """Report rules without effect; for an unknown GPU after `_UNKNOWN_S`."""
        known = self._state.devices.keys()
        is_overdue = self._clock() - self._changed_at > _UNKNOWN_S
        due = {uuid: modes for uuid, modes in self._wanted.items() if is_overdue or uuid in known}
        if not due:
            return
        problems = unsuited(due, known, self._state.served_modes())
        self._report_invalid(f"{DEVICE_MODES}: {problems}" if problems else "")

    def _write(self, wanted: Mapping[str, tuple[str, ...]], known: Collection[str]) -> None:
        with self._folder.locked():
            policies = read_mode_policies(self._folder)
            for uuid, modes in wanted.items():
                policy = policies.get(uuid)
                if uuid not in known:
                    continue  # a GPU that is away for a time keeps its policy
                if policy is None or (policy.modes, policy.by) != (modes, BY_NODE):
                    write_mode_policy(self._folder, uuid, ModePolicy(modes, by=BY_NODE))
            for uuid, policy in policies.items():
                if policy.by == BY_NODE and uuid not in wanted:
                    write_mode_policy(self._folder, uuid, None)

    def _report_invalid(self, message: str) -> None:
        if not message:
            self._reported.over(INVALID)
        elif self._reported.is_new(INVALID, message):
            self._reports.node(INVALID, message, is_warning=True)

    async def _follow_devices(self) -> None:
        """Apply the annotation again when other devices are known; report what has no effect."""
        while True:
            if self._text and self._applied != frozenset(self._state.devices):
                with contextlib.suppress(AllotError):  # of reading shares: it is tried again
                    await self._apply()
            self._report_unsuited()
            await asyncio.sleep(_WATCH_S)

    async def _follow_folders(self) -> None:
        folders = self._folder.root / "modes", self._folder.shares
        async for _ in poll_folders(*folders, period_s=_WATCH_S):
            with contextlib.suppress(AllotError):  # of reading shares: it is tried again
                await self._look()

    async def _look(self) -> None:
        """Read the mode policies, and report GPUs that begin or end to drain."""
        current, left = await asyncio.to_thread(self._read)
        if current != self._state.mode_policies:
            self._state.mode_policies = current
            self._state.changed.notify()
        for uuid, who in left.items():
            if uuid not in self._draining:
                text = f"GPU {uuid} takes only mode {current[uuid]}, and drains: {who}"
                self._reports.node(DRAINING, text, is_warning=False)
        for uuid in self._draining.keys() - left.keys():
            modes = f"only mode {current[uuid]}" if uuid in current else "every mode"
            self._reports.node(DRAINED, f"GPU {uuid} takes {modes}", is_warning=False)
        self._draining = left

    def _read(self) -> tuple[Mapping[str, ModePolicy], Mapping[str, str]]:
        current = read_mode_policies(self._folder)
        shares = self._bookings.read() if current and self._folder.shares.is_dir() else []
        return current, draining(current, shares)


_LOOK_S: Final = 10.0
"""How often each GPU is asked."""
_PATIENCE_S: Final = 2.0
"""The wait for answers; a GPU without one keeps its last state."""


class ComputeModes:
    """Finds GPUs that others reserved by compute mode. For one event loop."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        state: NodeState,
        machine: Path | None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._machine = machine
        self._askers: dict[str, Asker] = {}

    async def run(self) -> NoReturn:
        """Ask until cancelled. A hung GPU blocks only its own thread."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(_LOOK_S)
        finally:
            for each in self._askers.values():
                each.close()

    async def look(self) -> None:
        """Ask each GPU once."""
        gpus = frozenset(self._state.offer.parted)
        for uuid in self._askers.keys() - gpus:
            self._askers.pop(uuid).close()
        asked: dict[str, Future[str]] = {}
        for uuid in gpus:
            asker = self._askers.setdefault(uuid, Asker(f"compute mode of {uuid}"))
            answer = asker.ask(partial(self._why, uuid))
            if answer is not None:
                asked[uuid] = answer
        if asked:
            waiting = [asyncio.wrap_future(each) for each in asked.values()]
            await asyncio.wait(waiting, timeout=_PATIENCE_S)
        reasons = {uuid: why for uuid, why in self._state.reserved.items() if uuid in gpus}
        for uuid, each in asked.items():
            if each.done():
                reasons[uuid] = "" if each.exception() is not None else each.result()
        reserved = {uuid: why for uuid, why in reasons.items() if why}
        if reserved != self._state.reserved:
            self._state.reserved = reserved
            self._state.changed.notify()

    def _why(self, uuid: str) -> str:
        """Return why a GPU is reserved outside Allotment; empty: it is not, or no answer."""
        place = place_of(self._folder, uuid)
        try:
            # Before and after: our supervisor writes first when it begins, and last when it ends.
            before = place.status().mode_before
            mode = GpuSettings(uuid, machine=self._machine).compute_mode()
            after = place.status().mode_before
        except (AllotError, ValueError):
            return ""  # health reports a GPU that does not answer
        if mode is ComputeMode.DEFAULT or before is not None or after is not None:
            return ""
        return f"it is in compute mode {mode.name}, set outside Allotment"
