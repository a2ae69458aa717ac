# SPDX-License-Identifier: Apache-2.0
"""What is to be done to GPUs, as `allot mig plan` prints it: a step each, in their order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from allotment.cli.documents import Document
from allotment.model.errors import AllotError
from allotment.modes.mig.applying import Change
from allotment.modes.mig.files import Entry
from allotment.placement.mig import MigAction, MigStep

__all__ = ["SWITCH_ON", "Planned", "Step", "plan_document", "plan_rows", "step_of"]

SWITCH_ON: Final = "switch MIG on"
_WORDS: Final[Mapping[MigAction, str]] = {
    MigAction.DRAIN: "drain",
    MigAction.REMOVE: "remove",
    MigAction.CREATE: "make",
}


class Step(NamedTuple):
    """One step on one GPU, in words."""

    word: str
    profile: str = ""
    slot: int | None = None
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is to be done to one GPU, or why it cannot be."""

    index: int
    uuid: str
    names: Mapping[int, str]
    """The profiles' names, by number."""
    entry: Entry | None = None
    """None: the configuration does not name this GPU."""
    change: Change | None = None
    error: AllotError | None = None
    advice: tuple[Step, ...] = ()
    """Steps for slices to fit, where that was asked."""


def step_of(step: MigStep, remark: str = "") -> Step:
    """Return the planner's step in words; without a remark its holder is that."""
    return Step(_WORDS[step.action], step.profile, step.start, remark or step.holder)


def plan_rows(planned: Sequence[Planned]) -> list[tuple[str, ...]]:
    """Return the rows of the table of `allot mig plan`: a step each, in their order."""
    rows: list[tuple[str, ...]] = []
    for each in planned:
        head = (str(each.index), each.uuid)
        if each.error is not None:
            rows.append((*head, "refused", "", "", each.error.message))
            continue
        nothing = "left as it is" if each.change is None else "as it is wanted"
        rows += [
            (*head, word, profile, "" if slot is None else str(slot), remark)
            for word, profile, slot, remark in _steps(each) or [Step("-", remark=nothing)]
        ]
    return rows


def plan_document(planned: Sequence[Planned]) -> Document:
    """Describe what would be done: what `allot mig plan -o json` prints."""
    return {
        "gpus": [
            {
                "index": each.index,
                "uuid": each.uuid or None,
                "named": each.entry is not None,
                "problem": each.error.message if each.error else None,
                "hint": each.error.hint if each.error else None,
                "steps": [
                    {
                        "step": word,
                        "profile": profile or None,
                        "slot": slot,
                        "remark": remark or None,
                    }
                    for word, profile, slot, remark in _steps(each)
                ],
            }
            for each in planned
        ]
    }


def _steps(planned: Planned) -> list[Step]:
    """Return what is done to one GPU; nothing: it stays as it is."""
    change = planned.change
    if change is None:
        return list(planned.advice)
    names = planned.names
    steps = [
        Step("keep", names.get(each.profile, "?"), each.start, each.uuid) for each in change.keep
    ]
    if change.switch is True:
        steps.append(Step(SWITCH_ON))
    steps += [
        Step("remove", names.get(each.profile, "?"), each.start, each.uuid)
        for each in change.remove
    ]
    steps += [Step("make", name, start) for name, start in change.make]
    if change.switch is False:
        steps.append(Step("switch MIG off"))
    if change.is_provisional:
        steps.append(Step("make", remark="the driver tells the slots once MIG is on"))
    return steps
