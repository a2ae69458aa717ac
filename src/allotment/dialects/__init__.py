# SPDX-License-Identifier: Apache-2.0
"""What containers ask for, in whatever syntax: pods in, requests out.

Pure: no API server, no node. A dialect is one existing way of writing a request, one file each.
There are two kinds. Those that a node and a scheduler read are Allotment's own and NVIDIA's;
the registry knows them, and refuses a container that uses both. Those of other systems are foreign:
a pod in one of them is translated into Allotment's own when it is created, and never read again.
What cannot be meant is a `UsageError` that names the pod, the container, what is wrong and the next
step: it is shown to the people who wrote the pod, who have nothing else to go by.

protocol     what a dialect of the first kind is
annotations  `allotment.dev/...` annotations, which any dialect may take some of
values       what these annotations have for values: read, and written
placements   `allotment.dev/placement`: what a scheduler decided
allotment    `allotment.dev/gpu`, `allotment.dev/gpu-memory`, `allotment.dev/gpu-compute`
nvidia       `nvidia.com/gpu` and its kin
registry     `asks_of` for the node, `wanted` for the scheduler
foreign      what a dialect of the second kind is
translating  which of them a pod is written in, and what it means
native       what is written into a pod in place of it
systems      all dialects of the second kind, and a cluster's settings of them
taking_over  what other systems have given the pods that they bound
"""

from allotment.dialects.allotment import never_asked
from allotment.dialects.registry import asks_of

__all__ = ["asks_of", "never_asked"]
