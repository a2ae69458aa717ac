# SPDX-License-Identifier: Apache-2.0
"""What is known of a cluster, for those who read it: `cluster` alone changes it."""

from collections.abc import Mapping
from dataclasses import dataclass

from allotment.model.pods import PodUid
from allotment.placement.arrays import Arrays
from allotment.placement.filters import Filter
from allotment.placement.kinds import Kinds
from allotment.placement.nodes import Node

__all__ = ["There"]


@dataclass(frozen=True, slots=True, kw_only=True)
class There:
    """The nodes that there are, in each of the forms in which they are asked about."""

    nodes: Mapping[str, Node]
    """By name: each of them, exactly."""
    arrays: Arrays
    """All of them at once."""
    kinds: Kinds
    filter: Filter
    homes: Mapping[PodUid, str]
    """The node of each pod that has something, also of nodes that are not there."""
