# SPDX-License-Identifier: Apache-2.0
"""A share's ledger, seen from the agent's side: make it, read it, change a limit, clear the dead.

The layout and the protocol are native/ledger.h's. Reading goes through copies of the files, never
through a mapping: a tenant that truncates its usage file cannot harm the reader. Whatever changes
a total is done by the same C that the shim runs (liballotment-ledger.so).

This package knows files and numbers; it does not know shares, devices or the state folder.
"""

from allotment.ledger.operations import create, reap, set_limit
from allotment.ledger.snapshots import (
    DevicePolicy,
    DeviceUse,
    Ledger,
    Policy,
    ProcessUse,
    read,
)

__all__ = [
    "DevicePolicy",
    "DeviceUse",
    "Ledger",
    "Policy",
    "ProcessUse",
    "create",
    "read",
    "reap",
    "set_limit",
]
