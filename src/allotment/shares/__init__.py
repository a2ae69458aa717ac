# SPDX-License-Identifier: Apache-2.0
"""A share's life on one machine. `create` is the one call that every front door ends in.

folders      the state folder: its place, layout, version, lock
records      share.json
traces       processes.json: by what a share's processes are known
lives        create, look, find, destroy, recover
placing      what is ordered, and where it goes
found        a share as it lies there
bookings     what of each device is given out
phases       which containers of a pod run at the same time
guarantees   whose promise of compute is in force among them
pods         the node agent's shares: prepare, end, tidy
steps        where tests cut all that off
resizing     another limit for a share that lives
suspending   `allot suspend`: its programs stop, and its GPU memory is for others
resuming     `allot resume`: both come back
suspensions  what is written down meanwhile
checkpointing  the driver's part: all of a share's processes, or none
stopping     who is stopped, and goes on
copies       immutable copies of the native libraries
namespaces   a mount namespace with the shim in it
running      a child process as if `allot` were not there
sessions     `allot run`
processes    who lives, and who is in which share
views        shares as people and programs see them, with what is enforced
cdi          shares as CDI devices
drivers      what a container needs of a real driver
containers   `allot cdi create`
"""

from allotment.shares.folders import StateFolder
from allotment.shares.lives import Found, Order, create, destroy, find, look, recover

__all__ = [
    "Found",
    "Order",
    "StateFolder",
    "create",
    "destroy",
    "find",
    "look",
    "recover",
]
