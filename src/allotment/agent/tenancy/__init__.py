# SPDX-License-Identifier: Apache-2.0
"""Who has what: from ids that the kubelet gave out to shares of containers, without a guess.

`Allocate` names no pod, so its answer names a share that is not there yet. Before a container
starts, the kubelet's checkpoint says whose the answer became, and the share is made then. What is
decided is decided by pure functions; `Tenants` asks, runs and repeats them.

stores       the Protocol of what makes and ends shares
orders       what is to be made for a container: `ShareOrder`
claims       who holds these ids, which of them may be starting, what is to be done for it
reconciling  which shares have served their time, which are missing
tenants      `Tenants`: the device plugin's two questions, and the loop
locks        one thing at a time for each pod
told         events about shares, each told once
node_shares  the node's state folder as such a store
"""

from allotment.agent.tenancy.orders import ShareOrder
from allotment.agent.tenancy.stores import ShareStore
from allotment.agent.tenancy.tenants import Patience, Tenants

__all__ = ["Patience", "ShareOrder", "ShareStore", "Tenants"]
