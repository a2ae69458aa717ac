# SPDX-License-Identifier: Apache-2.0
"""The modes without enforcement: `exclusive` and `timeslice`.

An exclusive share has its devices alone. Time-sliced shares take the driver's turns, and the first
process to allocate gets the memory. Neither has a ledger or a shim. `placement` keeps shares of
other modes off their devices; the container hides all other devices.
"""

from allotment.model.modes import EXCLUSIVE, TIMESLICE
from allotment.modes.base import Mode


class ExclusiveMode(Mode):
    """A device for one share alone."""

    name = EXCLUSIVE
    remark = "not enforced: exclusive"


class TimesliceMode(Mode):
    """A device that the driver slices among its shares' processes."""

    name = TIMESLICE
    remark = "time-sliced, nothing enforced"
