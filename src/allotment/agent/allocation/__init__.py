# SPDX-License-Identifier: Apache-2.0
"""The share of each container: made before it starts, ended when its pod is gone.

`Allocate` names no pod, so its answer names a share that does not exist yet. Before a container
starts, the kubelet's checkpoint shows which container got that answer; then the share is made.

claims       which container holds these ids, which may be starting, what to do for it (pure)
orders       the `ShareOrder` of a container (pure)
reconcile    which shares to end, which are missing, which devices have no placement (pure)
tenants      `Tenants`: `PreStartContainer`, and the loop
share_events events about shares, each reported once
"""

from allotment.agent.allocation.tenants import Tenants
from allotment.agent.allocation.waiting import Patience

__all__ = ["Patience", "Tenants"]
