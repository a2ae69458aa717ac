# SPDX-License-Identifier: Apache-2.0
"""The record of a GPU's health, and the part of it that outlives the agent."""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from allotment.agent.health.xids import Action, parse_action
from allotment.devices.watching import Vitals
from allotment.files import atomic_write
from allotment.model.errors import AllotError, StateError
from allotment.model.structs import prepared


class HealthState(StrEnum):
    """The states of `machine`."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    UNHEALTHY = "unhealthy"
    RECOVERING = "recovering"


class Need(StrEnum):
    """The condition for the tests of an unhealthy GPU."""

    NOTHING = "nothing"
    TESTS = "tests"
    ANSWER = "an answer"
    RESET = "a reset"


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits; times in seconds."""

    silence_s: float = 10.0
    """Without an answer for this long, a GPU is unhealthy."""
    test_pause_s: float = 5.0
    """Between tests, and after the first failed one."""
    longest_pause_s: float = 600.0
    tests_to_pass: int = 2
    most_tests: int = 64
    memory_s: float = 3600.0
    """How long an outage counts against a GPU."""
    calm_s: float = 10.0
    """How long the driver has to report that no action is needed."""
    sympathy_s: float = 60.0
    """How long after an XID about memory errors a higher count belongs to it."""
    recovers: bool = True
    """False: an unhealthy GPU stays so until the agent restarts."""
    memory_errors: Action = Action.RESET_GPU
    """The action for memory errors without an XID: the policy's for XID 48."""
    failed_repairs: Action = Action.RESET_GPU
    """The action for rows that cannot be remapped: the policy's for XID 64."""
    drivers_word: Action = Action.TEST
    """The action for the driver's recovery action: the policy's for XID 154."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's health. Times are of one monotonic clock."""

    state: HealthState = HealthState.HEALTHY
    need: Need = Need.NOTHING
    reason: str = ""
    """The problem; empty: none."""
    action: Action | None = None
    """The action that an administrator has to take."""
    xid: int | None = None
    since: float = 0.0
    """The start of this state."""
    test_at: float | None = None
    """When the next test is due."""
    passed: int = 0
    """Tests passed in a row."""
    failed: int = 0
    """Tests failed since it was taken out."""
    was_away: bool = False
    """The GPU or the driver was gone since it was taken out."""
    is_lost: bool = False
    """It has fallen off the bus, or the driver no longer lists it: no program can use it."""
    is_hidden: bool = False
    """The driver has it and this agent cannot see it: its programs may work as ever."""
    calm_since: float | None = None
    """Since when the driver has reported that no action is needed."""
    vitals: Vitals | None = None
    """As last reported."""
    memory_xid_at: float | None = None
    """When an XID about memory errors was last seen."""
    taken_out: tuple[float, ...] = ()
    """The times that still count against it."""

    @property
    def is_offered(self) -> bool:
        """Whether containers may get it."""
        return self.state in {HealthState.HEALTHY, HealthState.SUSPECT}

    def check_invariants(self) -> None:
        """Raise `AssertionError` for an impossible record."""
        healthy = self.state is HealthState.HEALTHY
        assert healthy == (self.reason == ""), self  # noqa: S101 - what the name says
        assert (self.need is not Need.NOTHING) == (self.state is HealthState.UNHEALTHY), self  # noqa: S101
        testing = self.state in {HealthState.SUSPECT, HealthState.RECOVERING}
        assert not testing or self.test_at is not None, self  # noqa: S101
        assert not healthy or self.test_at is None, self  # noqa: S101
        assert self.need is not Need.TESTS or self.test_at is not None, self  # noqa: S101
        assert self.state is HealthState.RECOVERING or self.passed == 0, self  # noqa: S101
        assert not (self.is_lost and self.is_offered), self  # noqa: S101
        assert not (self.is_hidden and (self.is_lost or self.is_offered)), self  # noqa: S101


HURT: Final = "health.json"
"""The file's name in the state folder."""


class _Hurt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    reason: str
    need: Need = Need.RESET
    is_lost: bool = False
    action: str | None = None
    xid: int | None = None
    vitals: Vitals | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    gpus: dict[str, _Hurt] = msgspec.field(default_factory=dict)


class Memory:
    """The file `health.json`. Blocks for reads and writes."""

    __slots__ = ("_path", "_written")

    def __init__(self, folder: Path) -> None:
        self._path = folder / HURT
        self._written: bytes | None = None

    def read(self) -> Mapping[str, Record]:
        """Return what `write` keeps, with time 0. An unreadable file counts as empty."""
        try:
            data = self._path.read_bytes()
            file = msgspec.json.decode(data, type=prepared(_File))
        except (OSError, msgspec.MsgspecError):
            return {}
        self._written = data
        return {
            uuid: Record(
                state=HealthState.UNHEALTHY,
                need=hurt.need,
                reason=hurt.reason,
                was_away=hurt.is_lost,
                is_lost=hurt.is_lost,
                action=_action(hurt.action),
                xid=hurt.xid,
                vitals=hurt.vitals,
            )
            for uuid, hurt in file.gpus.items()
            if hurt.reason
        }

    def write(self, records: Mapping[str, Record]) -> None:
        """Keep the GPUs that need a reset, and lost ones. Raises `StateError`."""
        hurt = {
            uuid: _Hurt(
                reason=record.reason,
                need=record.need,
                is_lost=record.is_lost,
                action=None if record.action is None else record.action.value,
                xid=record.xid,
                vitals=record.vitals,
            )
            for uuid, record in sorted(records.items())
            if record.need is Need.RESET or record.is_lost
        }
        data = msgspec.json.encode(_File(gpus=hurt))
        if data == self._written or (not hurt and self._written is None):
            return
        try:
            atomic_write(self._path, data, mode=0o600)
        except OSError as error:
            raise StateError(
                f"cannot write {self._path}: {error.strerror}",
                hint="an agent that restarts forgets which GPUs are lost or need a reset",
            ) from error
        self._written = data


def _action(name: str | None) -> Action | None:
    if name is None:
        return None
    try:
        return parse_action(name)
    except AllotError:
        return None  # written by a newer agent
