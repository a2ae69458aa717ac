# SPDX-License-Identifier: Apache-2.0
"""What can be said about a pod: the answer of `explaining`, for whoever prints it. Data alone."""

from dataclasses import dataclass, field
from enum import StrEnum

from allotment.model.mig import MigPlace
from allotment.scheduler.explaining_evidence import Condition

__all__ = [
    "Asked",
    "Explanation",
    "Group",
    "Obstacle",
    "Obstacles",
    "Part",
    "Standing",
]


class Standing(StrEnum):
    """How far a pod has come."""

    PLACED = "placed"
    """On a node, with a placement that says what of which GPUs it has."""
    BOUND = "bound"
    """On a node, without one: its agent chose what GPUs it has, or it has none."""
    PENDING = "pending"
    ENDED = "ended"


class Obstacles(StrEnum):
    """What keeps a pod from being placed, before any GPU is looked at."""

    REFUSED = "refused"
    """It cannot be meant as it is written."""
    UNTRANSLATED = "untranslated"
    SCHEDULER = "scheduler"
    QUOTA = "quota"
    NO_INVENTORY = "no-inventory"
    FOREIGN = "foreign"
    """Another system has bound it."""
    UNPLACED = "unplaced"
    """It is on a node, and what is written there of its GPUs does not count."""
    DELETED = "deleted"
    NOMINATED = "nominated"
    """Other pods are being ended for it."""
    KEPT = "kept"
    """What pods leave on a node is for one that is no less important."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One of them, in words."""

    kind: Obstacles
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a container has of one device. Bytes; basis points of its time."""

    uuid: str
    memory: int
    guarantee: int
    index: int | None = None
    """None, as the two that follow: the node does not say that it has this device."""
    model: str | None = None
    memory_total: int | None = None
    slice: MigPlace | None = None
    """In mode `mig`: which slice of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A container that asks for GPUs, and what it has of them."""

    name: str
    kind: str
    text: str
    """What it asks for, in words."""
    mode: str
    """That it has; of who has nothing, the one that it likes best."""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes that do not do, all for the same."""

    reason: str
    text: str
    """Need and have; of an amount that they have, the most."""
    nodes: tuple[str, ...]
    note: str = ""
    """What there is to be known besides: which models these nodes have, who has cordoned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What can be said about a pod."""

    namespace: str
    name: str
    uid: str
    standing: Standing
    scheduler: str
    dialect: str = ""
    """The short name of the syntax that it was written in; empty: Allotment's own, or none."""
    title: str = ""
    """Its name, as a word in a sentence: `HAMi's`."""
    policies: tuple[str, ...] = ()
    """By which nodes are compared, in a chain."""
    is_own_policy: bool = False
    """The pod says by which."""
    containers: tuple[Asked, ...] = ()
    """Those that ask for GPUs; empty: none does, or not in a way that can be meant."""
    node: str = ""
    obstacles: tuple[Obstacle, ...] = ()
    condition: Condition | None = None
    """What the scheduler wrote last, of a pod that waits."""
    nodes: int = 0
    """How many there are, those without devices included."""
    fitting: tuple[str, ...] = ()
    """Where it would have room now, without what it has itself; the best first."""
    proposal: tuple[Asked, ...] = ()
    """Of a pod that waits: what it would get on the best of these."""
    refused: tuple[Group, ...] = ()
    beyond: Group | None = None
    """Of a pod that waits: why it would have room nowhere if all nodes were empty and well, as most
    of them say it; None: it would, or that is not known."""
    has_started: bool = False
    """A container that asks for GPUs runs, or has run."""
    others: tuple[str, ...] = field(default=())
    """Resources of extensions that it asks for, and that Allotment does not place."""

    @property
    def rank(self) -> int | None:
        """The place of its node among those with room, from 1; None: it is not among them."""
        return self.fitting.index(self.node) + 1 if self.node in self.fitting else None
