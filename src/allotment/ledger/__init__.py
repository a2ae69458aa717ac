# SPDX-License-Identifier: Apache-2.0
"""A share's ledger from the agent's side: create, read, change a limit, reap dead processes.

`leases` has the turns that shares take on a device. Layout and protocol: native/ledger.h,
native/lease.h. Readers copy the files and never map them, so a tenant that truncates one cannot
harm them. Totals are changed only by the shim's own C code (liballotment-ledger.so).
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
    LedgerPolicy,
    ProcessUse,
    read,
)

__all__ = [
    "Contract",
    "DevicePolicy",
    "DeviceUse",
    "Leases",
    "Ledger",
    "LedgerPolicy",
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
