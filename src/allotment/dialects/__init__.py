# SPDX-License-Identifier: Apache-2.0
"""What containers ask for, in whatever syntax: pods in, one `ContainerAsk` for each out.

Pure: no API server, no node. A dialect is one existing way of writing a request, one file each; the
registry knows them all, and refuses a container that uses two at once. What cannot be meant is a
`UsageError` that names the pod, the container, what is wrong and the next step: it is shown to the
people who wrote the pod, who have nothing else to go by.

protocol     what a dialect is
annotations  `allotment.dev/...` annotations, which any dialect may take some of
placements   `allotment.dev/placement`: what a scheduler decided
allotment    `allotment.dev/gpu`, `allotment.dev/gpu-memory`, `allotment.dev/gpu-compute`
nvidia       `nvidia.com/gpu` and its kin
registry     `asks_of`
"""

from allotment.dialects.allotment import never_asked
from allotment.dialects.registry import asks_of

__all__ = ["asks_of", "never_asked"]
