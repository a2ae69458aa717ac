# SPDX-License-Identifier: Apache-2.0
"""The mode `mps`: kernels of several shares run on a GPU at the same time, each on its part of it.

spatial      the mode: a ledger for memory, no turns
settings     what a share's programs may have, and are told by environment
places       where a GPU's control daemon has its files, and what is written down about it
controls     the driver's own program, `nvidia-cuda-mps-control`
namespaces   the same by protocol 3, where limits are the daemon's word
parts        the pipe directory of each share, by whichever protocol
keeping      the GPU itself, which lets nobody in but MPS clients meanwhile
daemons      one GPU's control daemon as a process: started by whichever protocol, and ended
supervision  the same, kept running: the core of whoever does that
"""

from allotment.modes.mps.controls import Control
from allotment.modes.mps.keeping import GpuAccess
from allotment.modes.mps.places import DaemonState, Loss, MpsPlace, MpsStatus
from allotment.modes.mps.settings import Limits, client_environment, limits_of
from allotment.modes.mps.spatial import MpsMode
from allotment.modes.mps.supervision import Supervisor

__all__ = [
    "Control",
    "DaemonState",
    "GpuAccess",
    "Limits",
    "Loss",
    "MpsMode",
    "MpsPlace",
    "MpsStatus",
    "Supervisor",
    "client_environment",
    "limits_of",
]
