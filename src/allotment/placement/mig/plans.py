# SPDX-License-Identifier: Apache-2.0
"""Steps from what a GPU has to what it is to have: legal one after the other, in their order."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from allotment.model.mig import MigHold, MigSlice
from allotment.placement.mig.slots import Place, Slots

__all__ = ["MigAction", "MigImpossible", "MigPlan", "MigStep", "plan_of"]


class MigAction(Enum):
    """What one step does."""

    DRAIN = "drain"
    """Its holder ends, and starts again where the plan has a place for it."""
    REMOVE = "remove"
    CREATE = "create"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigStep:
    """One step on one GPU."""

    action: MigAction
    gpu: str
    profile: str
    """The profile's name; a number where the driver reports no profile of that number."""
    start: int
    holder: str = ""
    """Who has the slice, or is to have it again; empty where nobody is known."""

    def __str__(self) -> str:
        """Say it as a line of a plan."""
        whose = f" of {self.holder}" if self.holder else ""
        return f"{self.action.value} {self.profile} at slot {self.start}{whose}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MigPlan:
    """What to do, in this order; nothing where all is as it should be."""

    steps: tuple[MigStep, ...]
    displaced: tuple[MigStep, ...] = ()
    """Those that drain somebody for whom no step makes a slice again: there is no place."""

    def those(self, action: MigAction) -> tuple[MigStep, ...]:
        """Return the steps that do this."""
        return tuple(each for each in self.steps if each.action is action)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigImpossible:
    """Why there is no plan, and what would help."""

    reason: str
    hint: str = ""

    def __str__(self) -> str:
        """Say why."""
        return self.reason


def plan_of(
    gpu: str,
    slots: Slots,
    *,
    gone: Iterable[MigSlice],
    made: Iterable[tuple[Place, str]],
) -> list[MigStep]:
    """Return the steps on one GPU: used ones are drained, all that goes is removed, then made."""
    leaving = sorted(gone, key=lambda each: each.start)

    def of(action: MigAction, each: MigSlice) -> MigStep:
        profile = slots.by_number.get(each.profile)
        name = str(each.profile) if profile is None else profile.name
        return MigStep(action=action, gpu=gpu, profile=name, start=each.start, holder=each.holder)

    return [
        *(of(MigAction.DRAIN, each) for each in leaving if each.hold is MigHold.USED),
        *(of(MigAction.REMOVE, each) for each in leaving),
        *(
            MigStep(
                action=MigAction.CREATE,
                gpu=gpu,
                profile=place.profile.name,
                start=place.start,
                holder=holder,
            )
            for place, holder in sorted(made, key=lambda each: each[0].start)
        ),
    ]
