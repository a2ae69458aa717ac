# SPDX-License-Identifier: Apache-2.0
"""How a share is enforced. Each mode is a small class.

base         the operations of each mode, and their defaults: no enforcement
unenforced   exclusive and timeslice: a record, and no shim
soft         a ledger that the shim keeps
mps/         the same for memory, and MPS for compute
mig/         a slice that the hardware isolates; allocated by `shares.mig`
turns        the devices' folders: contracts and leases; reports of tampering
"""

from allotment.model.errors import UsageError
from allotment.model.modes import DEFAULT_MODE, Traits, traits_of
from allotment.modes.base import Mode, Turns
from allotment.modes.mig.mode import MigMode
from allotment.modes.mps.mode import MpsMode
from allotment.modes.soft import SoftMode
from allotment.modes.turns import Damage, take_damages
from allotment.modes.unenforced import ExclusiveMode, TimesliceMode

__all__ = [
    "DEFAULT_MODE",
    "Damage",
    "ExclusiveMode",
    "MigMode",
    "Mode",
    "MpsMode",
    "SoftMode",
    "TimesliceMode",
    "Traits",
    "Turns",
    "ledger_mode",
    "mode_named",
    "take_damages",
    "traits_of",
]

_LEDGER_MODES: dict[str, SoftMode] = {each.name: each for each in (SoftMode(), MpsMode())}
_MODES: dict[str, Mode] = {
    **_LEDGER_MODES,
    **{each.name: each for each in (ExclusiveMode(), TimesliceMode(), MigMode())},
}


def mode_named(name: str) -> Mode:
    """Return the mode of that name; raise `UsageError` if unknown."""
    try:
        return _MODES[name]
    except KeyError:
        raise UsageError(
            f"there is no mode {name!r}", hint=f"the modes are: {', '.join(_MODES)}"
        ) from None


def ledger_mode(name: str) -> SoftMode | None:
    """Return the mode of that name if its limits can change; None for any other."""
    return _LEDGER_MODES.get(name)
