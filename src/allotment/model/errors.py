# SPDX-License-Identifier: Apache-2.0
"""The errors of Allotment: one root, and few classes, each named for a condition someone handles.

    AllotError               1   any other error
    ├── UsageError           2   a bad option or value
    │   ├── QuantityError        an invalid amount (`4Gb`, `0`, `-1Gi`)
    │   └── NotInModeError       a share in this mode never supports it; another mode may
    ├── DoesNotFitError      3   no GPU has enough room; carries need and have per GPU
    │   └── UnknownProfileError  no GPU offers this MIG profile
    ├── NotFoundError        4   no share, GPU, machine or pod with this name
    ├── NoDevicesError       5   no GPU, or NVML is missing
    ├── StateError           6   the state folder is unusable: version, permission, space
    │   ├── LedgerError          a share's ledger is missing, damaged or of another version
    │   ├── MisplacedError       a pod's devices were chosen before its node changed
    │   └── IdentityError        it is not known which container the kubelet starts
    ├── BusyError            7   in use: going on would take it from its user;
    │   │                        or already suspended, or not suspended
    │   └── LimitBelowUseError   a limit below current use; carries need and have
    └── PrerequisiteError    8   this machine lacks a prerequisite of the command
        ├── LibraryMissingError  a native library of this installation is missing
        └── LibraryBrokenError   a native library cannot be loaded

The number is the exit code of `allot`. `allot run` passes on its command's status, and adds the
two of every shell: 126 (found, but not executable) and 127 (not found). The message says what is
wrong and where; the hint says the next step.
"""

from collections.abc import Mapping
from pathlib import PurePath

from allotment.model.formats import format_bytes


class AllotError(Exception):
    """The root of all errors that Allotment raises on purpose.

    `message` is one sentence without a full stop. `hint`, if any, is the next step.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def one_line(self, *, longest: int | None = None) -> str:
        """Return message and hint on one line; the message is cut to `longest` characters."""
        message = _joined(self.message)
        hint = f"; hint: {_joined(self.hint)}" if self.hint else ""
        if longest is None:
            return message + hint
        room = longest - len(hint)
        if len(message) > room:
            message = message[: max(0, room - 1)] + "…"
        return (message + hint)[:longest]


def _joined(text: str) -> str:
    """Join lines, each of which may be a sentence of its own."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    joined = ""
    for line in filter(None, lines):
        if joined:
            joined += " " if joined.endswith((":", ";", ",")) else "; "
        joined += line
    return joined


class UsageError(AllotError):
    """The request is invalid."""

    exit_code = 2


class QuantityError(UsageError):
    """A text is not an amount of memory, a share of a device or a duration."""


class NotInModeError(UsageError):
    """A share in this mode never supports the request; a share in another mode may."""


class DoesNotFitError(AllotError):
    """No set of devices fits the request; the message has need and have per device."""

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str | None = None, reason: str = "", advises: str = ""
    ) -> None:
        """`reason`: the most telling of all devices; `advises`: the mode that the hint names."""
        super().__init__(message, hint=hint)
        self.reason = reason
        self.advises = advises


class UnknownProfileError(DoesNotFitError):
    """The request names a MIG profile that no GPU here offers."""


class NotFoundError(AllotError):
    """No object has this name or id."""

    exit_code = 4


class NoDevicesError(AllotError):
    """There is no GPU here, or NVML is missing."""

    exit_code = 5


class StateError(AllotError):
    """The state folder, or a file in it, is unusable."""

    exit_code = 6


class MisplacedError(StateError):
    """The devices that were chosen for a pod do not serve it since its node changed."""


class IdentityError(StateError):
    """It is not known which container the kubelet starts, or its records contradict each other."""


class LedgerError(StateError):
    """The ledger of one share is missing, damaged, of another version or unreadable."""


class BusyError(AllotError):
    """The object is in use, already suspended, or not suspended."""

    exit_code = 7


class LimitBelowUseError(BusyError):
    """The new limit is below current use; `need` is the use and `have` the limit, in bytes.

    `has_leaving`: some of the use is that of ended programs, until the driver frees their memory.
    """

    def __init__(self, *, need: int, have: int, has_leaving: bool = False) -> None:
        self.need = need
        self.have = have
        self.has_leaving = has_leaving
        super().__init__(
            f"{format_bytes(need)} ({need} bytes) in use, more than the new limit of "
            f"{format_bytes(have)}",
            hint=(
                "some of it is of programs that have ended: the driver frees it within seconds, so"
                " try again"
                if has_leaving
                else "free memory in the program first, or add --force: new allocations then fail "
                "until usage fits the limit"
            ),
        )

    def hint_for_pod(self) -> str:
        """Return the next step for a pod, which has no `--force`, and whose agent retries."""
        if self.has_leaving:
            return (
                "wait: the driver frees memory of ended programs within seconds; the agent retries"
            )
        mib = -(-self.need // (1 << 20))
        return f"free memory in its programs: the agent retries; or ask for memory:{mib}Mi or more"


class PrerequisiteError(AllotError):
    """This machine lacks a prerequisite of the command; `allot doctor` lists them all."""

    exit_code = 8


class LibraryMissingError(PrerequisiteError):
    """A native library of this installation is missing."""

    def __init__(self, path: PurePath) -> None:
        super().__init__(
            f"{path} is missing: this installation has no native libraries for this machine",
            hint="in a clone, run `make native`; else install the wheel (docs/install.md)",
        )


class LibraryBrokenError(PrerequisiteError):
    """A native library of this installation exists but cannot be loaded."""

    def __init__(self, path: PurePath, problem: str) -> None:
        super().__init__(
            f"{path} cannot be loaded: {problem}",
            hint="rebuild it: `make native` in a clone, or reinstall the wheel",
        )


class CommandNotExecutableError(AllotError):
    """The command exists but is not executable."""

    exit_code = 126


class CommandNotFoundError(AllotError):
    """The command does not exist."""

    exit_code = 127


EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "any other error",
    2: "a bad option or value",
    3: "no GPU has enough room for the request",
    4: "no share, GPU, machine or pod with this name",
    5: "no GPU, or NVML is missing",
    6: "the state folder or a ledger is unusable",
    7: "in use: going on would take it from its user; or already suspended, or not suspended",
    8: "this machine lacks a prerequisite (see `allot doctor`)",
    9: "`allot burn`: the driver refused memory",
    126: "`allot run`: the command is not executable",
    127: "`allot run`: the command was not found",
    141: "the reader of the output has ended (`allot ps | head`)",
}
"""Meaning of each exit code of `allot`, for the help and the reference."""
