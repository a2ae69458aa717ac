# SPDX-License-Identifier: Apache-2.0
"""How a share is enforced. Each mode is a small class behind one Protocol.

protocol     what a mode can do, and what one with a ledger can do besides
soft         a ledger that the shim keeps
mps          the same for memory, and MPS for compute
mig          a slice that the hardware holds; cut and removed by `shares.slicing`
damages      what programs did to their files, for whoever is to tell it
unenforced   exclusive and timeslice: a record, and no shim
turns        the devices' folders: contracts and leases
"""

from allotment.model.errors import UsageError
from allotment.model.requests import SOFT
from allotment.modes.damages import Damage, take_damages
from allotment.modes.mig.mode import MigMode
from allotment.modes.mps import MpsMode
from allotment.modes.protocol import LedgerMode, Mode, Turns
from allotment.modes.soft import SoftMode
from allotment.modes.unenforced import ExclusiveMode, TimesliceMode

__all__ = [
    "DEFAULT_MODE",
    "Damage",
    "ExclusiveMode",
    "LedgerMode",
    "MigMode",
    "Mode",
    "MpsMode",
    "SoftMode",
    "TimesliceMode",
    "Turns",
    "all_modes",
    "ledger_mode",
    "mode_named",
    "take_damages",
]

DEFAULT_MODE = SOFT
_LEDGER_MODES: dict[str, LedgerMode] = {each.name: each for each in (SoftMode(), MpsMode())}
_MODES: dict[str, Mode] = {
    **_LEDGER_MODES,
    **{each.name: each for each in (ExclusiveMode(), TimesliceMode(), MigMode())},
}


def mode_named(name: str) -> Mode:
    """Return the mode of that name; raise `UsageError` where there is none."""
    try:
        return _MODES[name]
    except KeyError:
        raise UsageError(
            f"there is no mode {name!r}", hint=f"the modes are: {', '.join(_MODES)}"
        ) from None


def ledger_mode(name: str) -> LedgerMode | None:
    """Return the mode of that name if it enforces by a ledger; None for any other."""
    return _LEDGER_MODES.get(name)


def all_modes() -> tuple[Mode, ...]:
    """Return every mode there is."""
    return tuple(_MODES.values())
