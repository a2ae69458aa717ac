# SPDX-License-Identifier: Apache-2.0
"""GPUs that somebody else keeps for one program, or for none, by their compute mode.

In EXCLUSIVE_PROCESS a second program is turned away by the driver, and in PROHIBITED every one. The
supervisor of an MPS daemon sets the first itself, and writes that down before: what it keeps is not
told here. What somebody else set is left as it is, and schedulers are told to place nothing there.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from allotment.devices.compute_modes import ComputeMode, GpuSettings
from allotment.devices.watching import Asker
from allotment.model.errors import AllotError
from allotment.shares.folders import StateFolder
from allotment.shares.mps_daemons import place_of

__all__ = ["ComputeModes"]

_LOOK_S: Final = 10.0
"""How often each GPU is asked: others may set it at any time."""
_PATIENCE_S: Final = 2.0
"""How long an answer is waited for; what was known stays until there is one."""


class ComputeModes:
    """Keeps it. All of it belongs to one event loop; `run` has to be running."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        machine: Path | None,
        gpus: Callable[[], Iterable[str]],
        look_s: float = _LOOK_S,
    ) -> None:
        """Take whom to ask about: the UUIDs of GPUs that are given in parts."""
        self._folder = folder
        self._machine = machine
        self._gpus = gpus
        self._look_s = look_s
        self._askers: dict[str, Asker] = {}
        self._kept: dict[str, str] = {}
        self.followers: list[Callable[[], None]] = []
        """Called in the event loop when a GPU comes to be kept, or is free again."""

    @property
    def kept(self) -> Mapping[str, str]:
        """Why a GPU takes no share, by UUID; those without such a reason are not in it."""
        return self._kept

    async def run(self) -> NoReturn:
        """Ask until cancelled. A GPU that hangs keeps its own thread, and nothing else."""
        try:
            while True:
                await self.look()
                await asyncio.sleep(self._look_s)
        finally:
            for each in self._askers.values():
                each.close()

    async def look(self) -> None:
        """Ask each GPU once."""
        gpus = frozenset(self._gpus())
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
        kept = {uuid: why for uuid, why in self._kept.items() if uuid in gpus}
        for uuid, each in asked.items():
            if each.done():
                kept[uuid] = "" if each.exception() is not None else each.result()
        kept = {uuid: why for uuid, why in kept.items() if why}
        if kept != self._kept:
            self._kept = kept
            for follower in self.followers:
                follower()

    def _why(self, uuid: str) -> str:
        """Say why somebody else keeps a GPU; empty: nobody does, or it does not tell."""
        place = place_of(self._folder, uuid)
        try:
            # Before and after: the supervisor writes first when it begins, and last when it ends.
            before = place.status().mode_before
            mode = GpuSettings(uuid, machine=self._machine).compute_mode()
            after = place.status().mode_before
        except (AllotError, ValueError):
            return ""  # one that does not answer is told of by its health
        if mode is ComputeMode.DEFAULT or before is not None or after is not None:
            return ""
        return f"it is in compute mode {mode.name}, which somebody else set"
