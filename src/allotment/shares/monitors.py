# SPDX-License-Identifier: Apache-2.0
"""Monitors: containers that see GPUs, take nothing of them and have no limit (`adminAccess`).

Nothing is booked for a monitor, and no shim is loaded into it. Its folder below `monitors` says
which claim it is for; then its CDI spec is published. `hide` does the reverse.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from allotment.model.devices import Device
from allotment.model.pods import Owner, PodUid
from allotment.model.shares import ShareId
from allotment.shares import cdi
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import StateFolder, explained

KIND: Final = "allotment.dev/monitor"
"""Of its CDI device, which has the monitor's id as its name."""
_OWNER: Final = "owner.json"
_VISIBLE: Final = "devices"
_DRAFT: Final = ".new-"
_PRIVATE: Final = 0o700
_DECODER: Final = msgspec.json.Decoder(Owner)


class Monitors:
    """The monitors of a node. All state is in the folder. Several threads may use it."""

    def __init__(
        self,
        folder: StateFolder,
        *,
        cdi_folder: Path,
        sight: Callable[[Path, Path, Sequence[Device]], cdi.CdiContent],
    ) -> None:
        """`sight` returns how a container sees devices: `PodShares.sight`."""
        self._folder = folder
        self._cdi = cdi_folder
        self._sight = sight

    def show(self, monitor: ShareId, owner: Owner, devices: Sequence[Device]) -> None:
        """Make a monitor, or complete it. Raises `StateError`, `NoDevicesError`."""
        self._folder.prepare(mode=_PRIVATE)
        with self._folder.locked():
            failpoint("monitor.begun")
            self._sweep()
            directory, spec = self._directory(monitor), self._spec(monitor)
            if spec.exists() and _shows(directory, devices):
                return
            # Without its spec nothing uses the folder. It may be from before a power failure.
            content = self._sight(directory, directory / _VISIBLE, devices)
            self._build(directory, owner, devices)
            edits = cdi.edits_of(content, devices=0)
            document = cdi.document_of(KIND, str(monitor), edits)
            cdi.publish(spec, json.dumps(document, separators=(",", ":")).encode() + b"\n")

    def hide(self, claim: PodUid) -> None:
        """Remove the monitors of a claim. Raises `StateError`."""
        if not self._folder.monitors.exists():
            return
        with self._folder.locked():
            failpoint("monitor.ending")
            self._sweep()
            for monitor, owner in self._read():
                if owner is None or owner.uid == claim:
                    cdi.remove_spec(self._spec(monitor))
                    failpoint("monitor.unpublished")
                    self._remove(self._directory(monitor))

    def owners(self) -> Mapping[ShareId, Owner]:
        """Return the request that each monitor is for."""
        return {monitor: owner for monitor, owner in self._read() if owner is not None}

    def _read(self) -> Iterator[tuple[ShareId, Owner | None]]:
        """Yield all monitors; without an owner: damaged by a power failure."""
        folder = self._folder.monitors
        for name in sorted(os.listdir(folder)) if folder.exists() else ():  # noqa: PTH208
            if name.startswith(_DRAFT):
                continue
            try:
                owner = _DECODER.decode((folder / name / _OWNER).read_bytes())
            except (OSError, msgspec.MsgspecError):
                owner = None
            yield ShareId(name), owner

    def _build(self, directory: Path, owner: Owner, devices: Sequence[Device]) -> None:
        draft = directory.with_name(f"{_DRAFT}{directory.name}")
        try:
            draft.mkdir(parents=True)
            visible = draft / _VISIBLE
            visible.write_text(_listed(devices), "utf-8")
            visible.chmod(0o644)
            (draft / _OWNER).write_bytes(msgspec.json.encode(owner))
            failpoint("monitor.drafted")
            if directory.exists():
                shutil.rmtree(directory)
            draft.rename(directory)
        except OSError as error:
            raise explained(error, directory, "make the monitor") from error
        failpoint("monitor.shown")

    def _remove(self, directory: Path) -> None:
        draft = directory.with_name(f"{_DRAFT}{directory.name}")
        try:
            directory.rename(draft)
        except OSError as error:
            raise explained(error, directory, "remove the monitor") from error
        failpoint("monitor.hidden")
        shutil.rmtree(draft, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove drafts: the lock is held, so their calls were killed."""
        for path in self._folder.monitors.glob(f"{_DRAFT}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _directory(self, monitor: ShareId) -> Path:
        return self._folder.monitors / monitor

    def _spec(self, monitor: ShareId) -> Path:
        return self._cdi / cdi.monitor_spec_name(monitor)


def _listed(devices: Sequence[Device]) -> str:
    return "".join(f"{each.uuid}\n" for each in devices)


def _shows(directory: Path, devices: Sequence[Device]) -> bool:
    """Whether a monitor is of these devices: its claim may have been allocated anew."""
    try:
        return (directory / _VISIBLE).read_text("utf-8") == _listed(devices)
    except OSError:
        return False
