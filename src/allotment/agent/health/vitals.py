# SPDX-License-Identifier: Apache-2.0
"""What can be read from how a GPU says that it is: a complaint, new errors, a reset. Pure."""

from typing import Final

from allotment.agent.health.actions import Action, Effect
from allotment.agent.health.records import Rules
from allotment.devices.watching import Vitals

__all__ = ["MEMORY_XID", "MEMORY_XIDS", "complaint_of", "new_errors", "was_reset"]

_DRIVER_ACTIONS: Final = {
    1: ("the driver says that the GPU needs a reset", Action.RESET_GPU),
    2: ("the driver says that the node needs a restart", Action.RESTART_NODE),
    3: ("the driver says that traffic between GPUs has to be drained", Action.RESET_GPU),
    4: ("the driver says that the GPU has to be drained and reset", Action.RESET_GPU),
    5: ("the driver says that its IMEX domain has to be recovered", Action.CONTACT_SUPPORT),
    6: ("the driver says that the GPU's bus needs a reset", Action.RESET_GPU),
    7: ("the driver says that the node needs a restart", Action.RESTART_NODE),
}

# What counts of uncorrected memory errors stand for.
MEMORY_XID: Final = 48
# XIDs that come with a count of uncorrected errors: those speak for it.
MEMORY_XIDS: Final = frozenset({48, 63, 64, 94, 95, 140, 171, 172})


def complaint_of(vitals: Vitals, rules: Rules) -> tuple[str, Action] | None:
    """Return what a GPU's vitals say against using it, and what has to be done."""
    if rules.drivers_word is not Action.IGNORE and vitals.recovery_action:
        return _DRIVER_ACTIONS.get(
            vitals.recovery_action,
            (f"the driver asks for recovery action {vitals.recovery_action}", Action.RESET_GPU),
        )
    if vitals.is_repair_failed and rules.failed_repairs.effect is Effect.WAIT_FOR_RESET:
        return "rows of its memory could not be repaired: no spare ones are left", (
            Action.CONTACT_SUPPORT
        )
    return None


def was_reset(before: Vitals | None, after: Vitals) -> bool:
    """Tell whether the GPU was initialised between two looks: what only grows became less."""
    if before is None:
        return False
    if before.recovery_action and after.recovery_action == 0:
        return True
    if before.is_repair_pending and after.is_repair_pending is False:
        return True
    counts = (
        (before.energy_mj, after.energy_mj),
        (before.ecc_uncorrected, after.ecc_uncorrected),
        (before.ecc_corrected, after.ecc_corrected),
    )
    return any(old is not None and new is not None and new < old for old, new in counts)


def new_errors(before: Vitals | None, after: Vitals) -> int:
    """Return how many uncorrected memory errors came between two looks."""
    if before is None or before.ecc_uncorrected is None or after.ecc_uncorrected is None:
        return 0
    return max(0, after.ecc_uncorrected - before.ecc_uncorrected)
