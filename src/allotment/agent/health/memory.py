# SPDX-License-Identifier: Apache-2.0
"""What has to outlive the agent: which GPUs wait for a reset, and how they were when hurt.

NVML tells of an XID once. An agent that is killed or upgraded would put a GPU back that only a
reset can heal, so that much is written down, in a file of the state folder: in memory, as /run is,
so that it ends with the node's restart, which resets every GPU.
"""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from allotment.agent.health.actions import Action, parse_action
from allotment.agent.health.records import Need, Record, State
from allotment.devices.watching import Vitals
from allotment.model.errors import AllotError, StateError

__all__ = ["HURT", "Memory"]

HURT: Final = "health.json"
"""The file's name in the state folder."""


class _Hurt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    reason: str
    action: str | None = None
    xid: int | None = None
    vitals: Vitals | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    gpus: dict[str, _Hurt] = msgspec.field(default_factory=dict)


class Memory:
    """The file. Reads and writes block for as long as a small file takes."""

    __slots__ = ("_path", "_written")

    def __init__(self, folder: Path) -> None:
        self._path = folder / HURT
        self._written: bytes | None = None

    def read(self) -> Mapping[str, Record]:
        """Return the GPUs that wait for a reset, each with when it was hurt unknown (0).

        A file that cannot be read is like none: what it held will be reported again or is lost.
        """
        try:
            data = self._path.read_bytes()
            file = msgspec.json.decode(data, type=_File)
        except (OSError, msgspec.MsgspecError):
            return {}
        self._written = data
        return {
            uuid: Record(
                state=State.UNHEALTHY,
                need=Need.RESET,
                reason=hurt.reason,
                action=_action(hurt.action),
                xid=hurt.xid,
                vitals=hurt.vitals,
            )
            for uuid, hurt in file.gpus.items()
            if hurt.reason
        }

    def write(self, records: Mapping[str, Record]) -> None:
        """Keep those that wait for a reset. Raises `StateError`."""
        hurt = {
            uuid: _Hurt(
                reason=record.reason,
                action=None if record.action is None else record.action.value,
                xid=record.xid,
                vitals=record.vitals,
            )
            for uuid, record in sorted(records.items())
            if record.need is Need.RESET
        }
        data = msgspec.json.encode(_File(gpus=hurt))
        if data == self._written or (not hurt and self._written is None):
            return
        try:
            self._replace(data)
        except OSError as error:
            raise StateError(
                f"cannot write {self._path}: {error.strerror}",
                hint="until then an agent that starts anew forgets which GPUs need a reset",
            ) from error
        self._written = data

    def _replace(self, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(prefix=".health-", dir=self._path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(temporary).replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise


def _action(name: str | None) -> Action | None:
    if name is None:
        return None
    try:
        return parse_action(name)
    except AllotError:
        return None  # of a newer agent: people read the reason all the same
