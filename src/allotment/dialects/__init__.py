# SPDX-License-Identifier: Apache-2.0
"""Reads containers' requests in any system's syntax: pods in, requests out. No I/O.

Each dialect is one file. Nodes and schedulers read those in `own`: Allotment's and NVIDIA's. Those
in `foreign` are translated into Allotment's own when a pod is created. A `UsageError` names the
pod, the container, the problem and the next step.
"""

from allotment.dialects.own.allotment import never_asked
from allotment.dialects.own.registry import asks_of

__all__ = ["asks_of", "never_asked"]
