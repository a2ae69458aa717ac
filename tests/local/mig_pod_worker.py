# SPDX-License-Identifier: Apache-2.0
"""An agent's doings for one container with a slice, in a process that a test can have killed.

mig_pod_worker.py ROOT SPEC SHARE   makes the share, ends it, and settles the slices
"""

import sys
from pathlib import Path

from allotment.devices.simulated import SimulatedMachine, machine_path
from allotment.model.mig import MigPlace
from allotment.model.modes import MIG
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection, ShareId
from allotment.shares.folders import StateFolder
from allotment.shares.mig import allocate
from allotment.shares.placing import ShareOrder
from allotment.shares.pods import NodeFolders, NodePolicy, PodShares

root, spec, share = Path(sys.argv[1]), sys.argv[2], ShareId(sys.argv[3])
machine = machine_path(root, spec)
devices = SimulatedMachine(machine).devices()
folder = StateFolder(root / "state")
shares = PodShares(folder, machine=machine, spec=spec, folders=NodeFolders(cdi=root / "cdi"))
owner = Owner(
    uid=PodUid("1"),
    namespace="team",
    pod="pod-1",
    container="main",
    kind=ContainerKind.REGULAR,
    resource="allotment.dev/gpu",
    place=0,
)
shares.prepare(
    ShareOrder(
        Request(parse_memory("1Gi"), mode=MIG, mig_profile="1g.10gb"),
        Injection.CDI,
        id=share,
        owner=owner,
        devices=(devices[0].uuid,),
        slices=(MigPlace("1g.10gb", 3),),
    ),
    NodePolicy(devices=devices),
)
shares.end(share)
problems = allocate.free_orphans_on(
    folder, machine, devices[0].uuid, 0, may_reset=False, patience_s=60
)
assert not problems, problems
