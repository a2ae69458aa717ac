# SPDX-License-Identifier: Apache-2.0
"""How a share is enforced. Each mode is a small class behind one Protocol; there is `soft`."""

from allotment.model.errors import UsageError
from allotment.modes.protocol import Mode, Turns
from allotment.modes.soft import SoftMode

__all__ = ["DEFAULT_MODE", "Mode", "SoftMode", "Turns", "mode_named"]

DEFAULT_MODE = SoftMode.name
_MODES: dict[str, Mode] = {SoftMode.name: SoftMode()}


def mode_named(name: str) -> Mode:
    """Return the mode of that name; raise `UsageError` where there is none."""
    try:
        return _MODES[name]
    except KeyError:
        raise UsageError(
            f"there is no mode {name!r}", hint=f"the modes are: {', '.join(_MODES)}"
        ) from None
