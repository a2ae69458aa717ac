# SPDX-License-Identifier: Apache-2.0
"""A share's ledger, seen from the agent's side: make it, read it, change a limit, clear the dead.

`leases` has the turns that shares of one device take: `take`, `change` and `free` a seat.

The layout and the protocol are native/ledger.h's and native/lease.h's. Reading goes through copies
of the files, never through a mapping: a tenant that truncates its usage file cannot harm the
reader. Whatever changes a total is done by the same C that the shim runs (liballotment-ledger.so).

This package knows files and numbers; it does not know shares, devices or the state folder.
"""

from allotment.ledger.leases import (
    Contract,
    Leases,
    Seat,
    SeatAccount,
    Terms,
    read_contract,
    read_leases,
)
from allotment.ledger.operations import create, cut_usage, reap, set_limit
from allotment.ledger.snapshots import (
    DevicePolicy,
    DeviceUse,
    Ledger,
    Policy,
    ProcessUse,
    read,
)

__all__ = [
    "Contract",
    "DevicePolicy",
    "DeviceUse",
    "Leases",
    "Ledger",
    "Policy",
    "ProcessUse",
    "Seat",
    "SeatAccount",
    "Terms",
    "create",
    "cut_usage",
    "read",
    "read_contract",
    "read_leases",
    "reap",
    "set_limit",
]
