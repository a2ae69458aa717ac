# SPDX-License-Identifier: Apache-2.0
"""How to make room for slices: the answer of `allot mig plan --fit`. Pure.

The cheapest way wins, in this order: free slots of MIG GPUs; an idle foreign MIG device; an unused
GPU whose MIG is off; removing idle foreign instances; draining slices in use.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from allotment.cli.documents import Document
from allotment.cli.tables import short_uuid
from allotment.model.errors import AllotError, DoesNotFitError
from allotment.model.mig import MigGpu, MigInstance
from allotment.model.structs import replace
from allotment.modes.mig.apply import GpuChange, Occupied, layout_of
from allotment.modes.mig.files import ConfigEntry
from allotment.placement.mig.arrange import MigAction, MigImpossible, MigPlan, MigStep
from allotment.placement.mig.drain_plan import plan_drain

SWITCH_ON: Final = "switch MIG on"
_WORDS: Final[Mapping[MigAction, str]] = {
    MigAction.DRAIN: "drain",
    MigAction.REMOVE: "remove",
    MigAction.CREATE: "make",
}


class PlanStep(NamedTuple):
    """One step on one GPU, as text."""

    word: str
    profile: str = ""
    slot: int | None = None
    remark: str = ""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The plan for one GPU, or the error that prevents it."""

    index: int
    uuid: str
    names: Mapping[int, str]
    """Profile names by number."""
    entry: ConfigEntry | None = None
    """None: the configuration does not name this GPU."""
    change: GpuChange | None = None
    error: AllotError | None = None
    resets: bool = False
    """Its MIG mode is switched by a reset."""
    advice: tuple[PlanStep, ...] = ()
    """Steps that make room, with `--fit`."""


def step_of(step: MigStep, remark: str = "") -> PlanStep:
    """Describe a step of the planner; the default remark is its holder."""
    return PlanStep(_WORDS[step.action], step.profile, step.start, remark or step.holder)


def plan_rows(planned: Sequence[Planned]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for gpu in planned:
        head = (str(gpu.index), short_uuid(gpu.uuid))
        if gpu.error is not None:
            rows.append((*head, "refused", "", "", gpu.error.message))
            continue
        nothing = "not changed" if gpu.change is None else "already as configured"
        rows += [
            (*head, word, profile, "" if slot is None else str(slot), _shown(remark))
            for word, profile, slot, remark in _steps(gpu) or [PlanStep("-", remark=nothing)]
        ]
    return rows


def _shown(remark: str) -> str:
    """Shorten a remark that is only a MIG device's UUID."""
    return short_uuid(remark) if remark.startswith("MIG-") and " " not in remark else remark


def plan_document(planned: Sequence[Planned]) -> Document:
    return {
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid or None,
                "named": gpu.entry is not None,
                "problem": gpu.error.message if gpu.error else None,
                "hint": gpu.error.hint if gpu.error else None,
                "steps": [
                    {
                        "step": word,
                        "profile": profile or None,
                        "slot": slot,
                        "remark": remark or None,
                    }
                    for word, profile, slot, remark in _steps(gpu)
                ],
            }
            for gpu in planned
        ]
    }


def _steps(planned: Planned) -> list[PlanStep]:
    """Return the steps on one GPU; empty: nothing changes."""
    change = planned.change
    if change is None:
        return list(planned.advice)
    names = planned.names
    steps = [
        PlanStep("keep", names.get(instance.profile, "?"), instance.start, instance.uuid)
        for instance in change.keep
    ]
    reset = _BY_RESET if planned.resets else ""
    if change.switch is True:
        steps.append(PlanStep(SWITCH_ON, remark=reset))
    steps += [
        PlanStep("remove", names.get(instance.profile, "?"), instance.start, instance.uuid)
        for instance in change.remove
    ]
    steps += [PlanStep("make", name, start) for name, start in change.make]
    if change.switch is False:
        steps.append(PlanStep("switch MIG off", remark=reset))
    if change.is_provisional:
        steps.append(PlanStep("make", remark="the driver reports the slots once MIG is on"))
    return steps


_BY_RESET: Final = "resets the GPU: `allot mig apply --reset`"
_BY_RUN: Final = "unused: `allot run --mig` does this automatically"
_BY_RUN_THEN: Final = "`allot run --mig` does this automatically once the GPU is unused"
_BY_NODE: Final = "add mig to its node's allotment.dev/device-modes: `kubectl annotate node ...`"
_BY_AGENT: Final = (
    "needs a reset: `mig: {reset: true}` in the GPU's rule allows the node's agent to do it"
)
_OF_OTHERS: Final = "idle and foreign: its owner or `allot mig apply` removes it"


class FitGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU with MIG, and the users of its instances."""

    number: int
    gpu: MigGpu
    occupied: Occupied
    of_others: frozenset[int] = frozenset()
    """Ids of the GPU instances that Allotment did not create."""
    takes_at_once: bool = True
    """Whether MIG can be switched on without a reset."""
    kept: str = ""
    """Why its mode policy forbids slices; empty: it does not."""
    is_nodes: bool = False
    """Whether its mode policy is set by its node's annotation, not by `allot devices set-mode`."""

    @property
    def idle_of_others(self) -> tuple[MigInstance, ...]:
        """Idle foreign instances that are complete."""
        return tuple(
            instance
            for instance in self.gpu.instances
            if instance.uuid
            and instance.gpu_instance in self.of_others
            and not self.occupied.of(instance.gpu_instance)
        )


Ways = dict[str, tuple[PlanStep, ...]]
"""Steps by the UUID of the GPU."""


def ways_to_fit(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> Ways:
    """Return the cheapest steps after which all of `wanted` fits.

    `wanted` is the number of additional slices per profile. Raises `DoesNotFitError`.
    """
    on = [gpu for gpu in gpus if gpu.gpu.is_enabled]
    off = [gpu for gpu in gpus if not gpu.gpu.is_enabled and gpu.gpu.profiles]
    moved = _advised(on, wanted)
    if moved is not None and not _disturbs_users(on, moved):
        return _steps_by_gpu(on, moved)
    if reused := _reused(on, wanted):
        return reused
    free = [gpu for gpu in off if not gpu.occupied.whole]
    for gpu in sorted(
        free, key=lambda candidate: (bool(candidate.kept), not candidate.takes_at_once)
    ):
        if (way := _switched(gpu, wanted)) is not None:
            return way
    if moved is not None:
        return _steps_by_gpu(on, moved)
    for gpu in off:
        if (way := _switched(gpu, wanted)) is not None:
            return way
    raise _refusal(gpus, wanted)


def _advised(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> MigPlan | None:
    layouts = [replace(layout_of(gpu.gpu, gpu.occupied), is_enabled=True) for gpu in gpus]
    plan = plan_drain(layouts, wanted) if layouts else None
    return plan if isinstance(plan, MigPlan) else None


def _disturbs_users(gpus: Sequence[FitGpu], plan: MigPlan) -> bool:
    others = {(gpu.gpu.uuid, instance.start) for gpu in gpus for instance in gpu.idle_of_others}
    return bool(plan.those(MigAction.DRAIN)) or any(
        (step.gpu, step.start) in others for step in plan.those(MigAction.REMOVE)
    )


def _steps_by_gpu(gpus: Sequence[FitGpu], plan: MigPlan) -> Ways:
    others = {(gpu.gpu.uuid, instance.start) for gpu in gpus for instance in gpu.idle_of_others}
    steps_by_gpu: dict[str, list[PlanStep]] = {}
    for step in plan.steps:
        is_theirs = step.action is MigAction.REMOVE and (step.gpu, step.start) in others
        steps_by_gpu.setdefault(step.gpu, []).append(step_of(step, _OF_OTHERS if is_theirs else ""))
    return {uuid: tuple(steps) for uuid, steps in steps_by_gpu.items()}


def _reused(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> Ways:
    """Return idle foreign MIG devices that cover all of `wanted`; empty: they do not."""
    left = dict(wanted)
    steps_by_gpu: dict[str, list[PlanStep]] = {}
    for gpu in gpus:
        names = {profile.number: profile.name for profile in gpu.gpu.profiles}
        for instance in gpu.idle_of_others:
            name = names.get(instance.profile, "")
            if left.get(name, 0) > 0:
                left[name] -= 1
                remark = f"{instance.uuid}, cut by others: `allot run --mig {name} --mig-reuse`"
                steps_by_gpu.setdefault(gpu.gpu.uuid, []).append(
                    PlanStep("use", name, instance.start, remark)
                )
    is_all = not any(count > 0 for count in left.values())
    return {uuid: tuple(steps) for uuid, steps in steps_by_gpu.items()} if is_all else {}


def _switched(gpu: FitGpu, wanted: Mapping[str, int]) -> Ways | None:
    """Return how a GPU whose MIG is off gets room; None: not even when empty."""
    plan = _advised([gpu], wanted)
    if plan is None:
        return None
    drains = (PlanStep("drain", remark=user) for user in gpu.occupied.whole)
    switch = PlanStep(SWITCH_ON, remark=_how_to_switch(gpu))
    return {gpu.gpu.uuid: (*drains, switch, *(step_of(step) for step in plan.steps))}


def _how_to_switch(gpu: FitGpu) -> str:
    reset = "" if gpu.takes_at_once else " --reset"
    by_command = f"`allot devices set-mode {gpu.gpu.uuid} mig{reset}`"
    if gpu.kept:
        return f"{gpu.kept}: {_BY_NODE if gpu.is_nodes else by_command}"
    if gpu.takes_at_once:
        return _BY_RUN_THEN if gpu.occupied.whole else _BY_RUN
    return _BY_AGENT if gpu.is_nodes else f"needs a reset: {by_command}"


def _refusal(gpus: Sequence[FitGpu], wanted: Mapping[str, int]) -> DoesNotFitError:
    layouts = [
        replace(layout_of(gpu.gpu, gpu.occupied), is_enabled=True)
        for gpu in gpus
        if gpu.gpu.profiles
    ]
    if not gpus:
        return DoesNotFitError(
            "no GPU of this machine supports MIG",
            hint="A100, A30, H100 and later data-centre GPUs do",
        )
    if not layouts:
        return DoesNotFitError(
            "MIG is off; the driver lists the profiles of these GPUs only when it is on",
            hint="switch MIG on: `allot devices set-mode GPU mig`, with --reset on an A100 or A30",
        )
    impossible = plan_drain(layouts, wanted)
    if isinstance(impossible, MigImpossible):
        return DoesNotFitError(impossible.reason, hint=impossible.hint or None)
    return DoesNotFitError("these slices fit no GPU", hint="request fewer")
