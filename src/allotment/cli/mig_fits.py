# SPDX-License-Identifier: Apache-2.0
"""How slices come to fit that do not fit as it is: what `allot mig plan --fit` says. Pure.

The cheapest way is told, in this order: what MIG GPUs have room for; an idle MIG device that others
cut, as it is; a GPU whose MIG is off and that nobody uses; what others cut, made way for; and last
what somebody has, who ends and starts again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from allotment.cli.mig_plans import SWITCH_ON, Step, step_of
from allotment.model.errors import DoesNotFitError
from allotment.model.mig import MigGpu, MigInstance
from allotment.modes.mig.applying import Occupied, layout_of
from allotment.placement.mig import MigAction, MigImpossible, MigPlan, advise

__all__ = ["FitGpu", "ways_to_fit"]

_BY_RUN: Final = "nobody uses it: `allot run --mig` does this by itself"
_BY_RUN_THEN: Final = "`allot run --mig` does this by itself once nobody uses it"
_BY_NODE: Final = "have mig in its node's allotment.dev/device-modes: `kubectl annotate node ...`"
_BY_AGENT: Final = "by a reset: `mig: {reset: true}` in the GPU's rule lets the node's agent"
_OF_OTHERS: Final = "idle, and cut by others: they remove it, or `allot mig apply`"


@dataclass(frozen=True, slots=True, kw_only=True)
class FitGpu:
    """A GPU that has MIG, and who has what of it."""

    number: int
    gpu: MigGpu
    occupied: Occupied
    of_others: frozenset[int] = frozenset()
    """GPU instances that Allotment did not make for shares, by id."""
    takes_at_once: bool = True
    """MIG is switched on without a reset."""
    kept: str = ""
    """Why it is not for slices, where somebody has said what it is for."""
    is_nodes: bool = False
    """What it is for is said by its node's annotation, and by `allot devices set-mode` never."""

    @property
    def idle_of_others(self) -> tuple[MigInstance, ...]:
        """What others cut, whole and used by nobody."""
        return tuple(
            each
            for each in self.gpu.instances
            if each.uuid
            and each.gpu_instance in self.of_others
            and not self.occupied.of(each.gpu_instance)
        )


Ways = dict[str, tuple[Step, ...]]
"""Steps by GPU's UUID."""


def ways_to_fit(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> Ways:
    """Return the steps by which all of this fits. Raises `DoesNotFitError` where none do.

    `wanted`: how many more of each profile, by name.
    """
    on = [each for each in gpus if each.gpu.is_enabled]
    off = [each for each in gpus if not each.gpu.is_enabled and each.gpu.profiles]
    moved = _advised(on, wanted)
    if moved is not None and not _costs_anybody(on, moved):
        return _told(on, moved)
    if reused := _reused(on, wanted):
        return reused
    free = [each for each in off if not each.occupied.whole]
    for each in sorted(free, key=lambda one: (bool(one.kept), not one.takes_at_once)):
        if (way := _switched(each, wanted)) is not None:
            return way
    if moved is not None:
        return _told(on, moved)
    for each in off:
        if (way := _switched(each, wanted)) is not None:
            return way
    raise _refusal(gpus, wanted)


def _advised(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> MigPlan | None:
    layouts = [replace(layout_of(each.gpu, each.occupied), is_enabled=True) for each in gpus]
    found = advise(layouts, wanted) if layouts else None
    return found if isinstance(found, MigPlan) else None


def _costs_anybody(gpus: Sequence[FitGpu], plan: MigPlan) -> bool:
    """Tell whether a plan takes a slice from anybody: who uses it, or who has cut it."""
    others = {(each.gpu.uuid, one.start) for each in gpus for one in each.idle_of_others}
    return bool(plan.those(MigAction.DRAIN)) or any(
        (step.gpu, step.start) in others for step in plan.those(MigAction.REMOVE)
    )


def _told(gpus: Sequence[FitGpu], plan: MigPlan) -> Ways:
    others = {(each.gpu.uuid, one.start) for each in gpus for one in each.idle_of_others}
    found: dict[str, list[Step]] = {}
    for step in plan.steps:
        is_theirs = step.action is MigAction.REMOVE and (step.gpu, step.start) in others
        found.setdefault(step.gpu, []).append(step_of(step, _OF_OTHERS if is_theirs else ""))
    return {uuid: tuple(steps) for uuid, steps in found.items()}


def _reused(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> Ways:
    """Return idle MIG devices of others that serve all that is wanted; none: they do not."""
    left = dict(wanted)
    found: dict[str, list[Step]] = {}
    for each in gpus:
        names = {profile.number: profile.name for profile in each.gpu.profiles}
        for one in each.idle_of_others:
            name = names.get(one.profile, "")
            if left.get(name, 0) > 0:
                left[name] -= 1
                remark = f"{one.uuid}, cut by others: `allot run --mig {name} --mig-reuse`"
                found.setdefault(each.gpu.uuid, []).append(Step("use", name, one.start, remark))
    is_all = not any(count > 0 for count in left.values())
    return {uuid: tuple(steps) for uuid, steps in found.items()} if is_all else {}


def _switched(gpu: FitGpu, wanted: Mapping[str, int]) -> Ways | None:
    """Return how a GPU whose MIG is off has room; None: it has not, even when empty."""
    plan = _advised([gpu], wanted)
    if plan is None:
        return None
    drains = (Step("drain", remark=who) for who in gpu.occupied.whole)
    switch = Step(SWITCH_ON, remark=_how_to_switch(gpu))
    return {gpu.gpu.uuid: (*drains, switch, *(step_of(each) for each in plan.steps))}


def _how_to_switch(gpu: FitGpu) -> str:
    reset = "" if gpu.takes_at_once else " --reset"
    by_command = f"`allot devices set-mode {gpu.gpu.uuid} mig{reset}`"
    if gpu.kept:
        return f"{gpu.kept}: {_BY_NODE if gpu.is_nodes else by_command}"
    if gpu.takes_at_once:
        return _BY_RUN_THEN if gpu.occupied.whole else _BY_RUN
    return _BY_AGENT if gpu.is_nodes else f"by a reset: {by_command}"


def _refusal(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> DoesNotFitError:
    layouts = [
        replace(layout_of(each.gpu, each.occupied), is_enabled=True)
        for each in gpus
        if each.gpu.profiles
    ]
    if not gpus:
        return DoesNotFitError(
            "no GPU here has MIG", hint="A100, A30, H100 and later data-centre GPUs have"
        )
    if not layouts:
        return DoesNotFitError(
            "MIG is off, and the driver tells what these GPUs can be cut into only when it is on",
            hint="switch it on: `allot devices set-mode GPU mig`, with --reset on an A100 or A30",
        )
    found = advise(layouts, wanted)
    if isinstance(found, MigImpossible):
        return DoesNotFitError(found.reason, hint=found.hint or None)
    return DoesNotFitError("no GPU can have it", hint="ask for fewer")
