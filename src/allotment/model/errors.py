# SPDX-License-Identifier: Apache-2.0
"""The errors of Allotment: one root, and few classes, each named for a condition someone handles.

    AllotError               1   anything else that Allotment found wrong
    ├── UsageError           2   what was asked cannot be meant: a bad option or value
    │   ├── QuantityError        an amount that is no amount (`4Gb`, `0`, `-1Gi`)
    │   └── NotInModeError       no share of this mode can be so; one of another may
    ├── DoesNotFitError      3   no GPU has enough left; carries need and have per GPU
    │   └── UnknownProfileError  no GPU can be cut so, be it empty or not
    ├── NotFoundError        4   no share, GPU, machine or pod of that name
    ├── NoDevicesError       5   no GPU, or no NVML to ask
    ├── StateError           6   the state folder cannot be used: version, permission, space
    │   └── LedgerError          a share's ledger is missing, damaged or of another version
    ├── BusyError            7   it is in use, and going on would take something away from its user;
    │   │                        or it is suspended already, or not suspended
    │   └── LimitBelowUseError   a limit below what is used; carries need and have
    └── PrerequisiteError    8   this machine lacks something that the command needs
        └── LibraryMissingError  a native library of this installation

The number is the exit code of `allot`. `allot run` passes on its command's status, and adds the
two of every shell: 126 (found, but not executable) and 127 (not found). The message says what is
wrong and where; the hint says the next step.
"""

from collections.abc import Mapping
from pathlib import PurePath

from allotment.model.formats import format_bytes

__all__ = [
    "EXIT_CODES",
    "AllotError",
    "BusyError",
    "CommandNotExecutableError",
    "CommandNotFoundError",
    "DoesNotFitError",
    "LedgerError",
    "LibraryMissingError",
    "LimitBelowUseError",
    "NoDevicesError",
    "NotFoundError",
    "NotInModeError",
    "PrerequisiteError",
    "QuantityError",
    "StateError",
    "UnknownProfileError",
    "UsageError",
]


class AllotError(Exception):
    """The root of all errors that Allotment raises on purpose.

    `message` is one sentence without a full stop; `hint`, if any, is the next step to take.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        """Keep what is wrong and what to do about it."""
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AllotError):
    """What was asked cannot be meant."""

    exit_code = 2


class QuantityError(UsageError):
    """A text is not an amount of memory, a share of a device or a duration."""


class NotInModeError(UsageError):
    """What was asked cannot be had in this mode, wherever; in another it may."""


class DoesNotFitError(AllotError):
    """No set of devices has what the request needs; the message has need and have per device."""

    exit_code = 3

    def __init__(
        self, message: str, *, hint: str | None = None, reason: str = "", advises: str = ""
    ) -> None:
        """Keep the reason that tells most of all devices', and which mode the hint advises."""
        super().__init__(message, hint=hint)
        self.reason = reason
        self.advises = advises


class UnknownProfileError(DoesNotFitError):
    """A slice was asked for by a profile that no GPU here has, be there room or not."""


class NotFoundError(AllotError):
    """Nothing has that name or id."""

    exit_code = 4


class NoDevicesError(AllotError):
    """There is no GPU here, or nothing to ask about GPUs."""

    exit_code = 5


class StateError(AllotError):
    """The state folder, or something in it, cannot be used."""

    exit_code = 6


class LedgerError(StateError):
    """The ledger of one share is missing, damaged, of another version or unreadable."""


class BusyError(AllotError):
    """Something is in use, or suspended, or not suspended: it cannot be done to it now."""

    exit_code = 7


class LimitBelowUseError(BusyError):
    """A limit was to go below what is in use; `need` is the use and `have` the limit, in bytes."""

    def __init__(self, *, need: int, have: int) -> None:
        """Say both numbers."""
        self.need = need
        self.have = have
        super().__init__(
            f"{format_bytes(need)} ({need} bytes) are in use, more than the new limit of"
            f" {format_bytes(have)}",
            hint="free memory in the program first, or add --force: then new allocations fail until"
            " the use fits",
        )


class PrerequisiteError(AllotError):
    """This machine lacks something that the command needs; `allot doctor` tells all of it."""

    exit_code = 8


class LibraryMissingError(PrerequisiteError):
    """A native library of this installation is not where it belongs."""

    def __init__(self, path: PurePath) -> None:
        """Name the file."""
        super().__init__(
            f"{path} is missing: this installation has no native part for this machine",
            hint="in a clone, run `make native`; else install the wheel: pip install allotment",
        )


class LibraryBrokenError(PrerequisiteError):
    """A native library of this installation is there and cannot be loaded."""

    def __init__(self, path: PurePath, problem: str) -> None:
        """Name the file, and what the loader says."""
        super().__init__(
            f"{path} cannot be loaded: {problem}",
            hint="build it anew: `make native` in a clone, or reinstall the wheel",
        )


class CommandNotExecutableError(AllotError):
    """The command to run is there and cannot be executed."""

    exit_code = 126


class CommandNotFoundError(AllotError):
    """The command to run is not there."""

    exit_code = 127


EXIT_CODES: Mapping[int, str] = {
    0: "done",
    1: "something else went wrong",
    2: "a bad option or value",
    3: "no GPU has enough left for the request",
    4: "no share, GPU, machine or pod of that name",
    5: "no GPU, or no NVML to ask about GPUs",
    6: "the state folder or a ledger cannot be used",
    7: "in use: going on would take something from its user; or suspended already, or not at all",
    8: "this machine lacks a prerequisite (see `allot doctor`)",
    9: "`allot burn`: the driver refused memory",
    126: "`allot run`: the command is not executable",
    127: "`allot run`: the command was not found",
}
"""What each exit code of `allot` means, for the help and the reference."""
