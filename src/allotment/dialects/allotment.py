# SPDX-License-Identifier: Apache-2.0
"""Allotment's own dialect: parts of GPUs as true quantities.

    resources: {limits: {allotment.dev/gpu: 1, allotment.dev/gpu-memory: 4Gi}}

The first is how many GPUs the container has a part of, which the kubelet counts. The others are
sums over these GPUs, which the scheduler counts against what the node has in all. The same amount
is had of each GPU.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from allotment.dialects.annotations import (
    AFFINITY,
    ANTI_AFFINITY,
    COMPUTE,
    EXCLUSION,
    KEYS,
    MEMORY,
    MIG_PROFILE,
    MODE,
    PREFIX,
    TOPOLOGY,
)
from allotment.dialects.modes import (
    ANY_MEMORY,
    STRONGEST,
    STRONGEST_FIRST,
    in_modes,
    suiting,
    unsuited,
    without_effect,
)
from allotment.dialects.placements import PLACEMENT
from allotment.dialects.protocol import refusal
from allotment.dialects.values import NVLINK
from allotment.dialects.wishes import PlacementWish, Wishes
from allotment.model.compute import WHOLE, Compute, revised
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.pods import Container, ContainerAsk, Pod
from allotment.model.quantities import LEAST_BYTES, MAX_BYTES, MemoryAmount
from allotment.model.requests import MIG, SOFT, Request

__all__ = [
    "GPU",
    "GPU_COMPUTE",
    "GPU_MEMORY",
    "RESOURCES",
    "AllotmentDialect",
    "never_asked",
    "request_of",
    "with_preference",
]

GPU = "allotment.dev/gpu"
"""How many GPUs a container has a part of: what the kubelet asks a plugin for."""
GPU_MEMORY = "allotment.dev/gpu-memory"
"""Bytes, of all these GPUs together: a quantity of the node's status."""
GPU_COMPUTE = "allotment.dev/gpu-compute"
"""Percent of a device, of all these GPUs together: likewise (100 for each GPU of the node)."""
RESOURCES = (GPU, GPU_MEMORY, GPU_COMPUTE)

_ALL = MemoryAmount("100%", part=Fraction(1))
_PERCENT = WHOLE // 100


class AllotmentDialect:
    """`allotment.dev/gpu` and its quantities."""

    name: Final = "Allotment's"
    takes: Final = KEYS

    def resources(self, container: Container) -> tuple[str, ...]:
        """A quantity alone counts too, so that it is refused and not passed over."""
        there = container.resources
        quantities = any(each in there for each in (GPU_MEMORY, GPU_COMPUTE))
        if not there.get(GPU) and not quantities:
            return ()
        return tuple(each for each in RESOURCES if each in there)

    def asks(self, pod: Pod, container: Container, wishes: Wishes) -> tuple[ContainerAsk, ...]:
        """One ask: all quantities are about the same GPUs."""
        request = request_of(pod, container, wishes)
        mode = request.mode if _names_mode(wishes) else None
        if wishes.placement is not None:
            request = _placed(pod, container, request, wishes)
            mode = request.mode
        elif pod.node:
            _check_node_can_choose(pod, container, request)
        return (
            ContainerAsk(
                container=container.name,
                kind=container.kind,
                resource=GPU,
                count=request.count,
                request=request,
                mode=mode,
                devices=wishes.placement.devices if wishes.placement else (),
                slices=wishes.placement.slices if wishes.placement else (),
            ),
        )


def request_of(pod: Pod, container: Container, wishes: Wishes) -> Request:
    """Say what a container asks for, wherever it is to be placed. Raises `UsageError`.

    In mode soft where it leaves that open.
    """
    _check_amounts(pod, container)
    count = container.resources[GPU]
    request = Request(
        _memory(pod, container, count, wishes),
        count=count,
        compute=_compute(pod, container, count, wishes),
        may_oversubscribe=bool(wishes.may_oversubscribe),
        mig_profile=wishes.mig_profile,
        constraints=wishes.constraints,
        preferences=wishes.preferences,
    )
    return _in_named_modes(pod, container, request, wishes) if _names_mode(wishes) else request


def with_preference(
    pod: Pod, container: Container, wishes: Wishes, *, modes: Sequence[str]
) -> Request:
    """Return the request, in those of the modes that suit it where it leaves that open.

    Raises `UsageError`.
    """
    request = request_of(pod, container, wishes)
    if _names_mode(wishes) or tuple(modes) == (SOFT,):
        return request
    suited = suiting(request, modes)
    if suited:
        return in_modes(request, suited)
    problem = f"it names no mode, and what it asks for cannot be had in {' or '.join(modes)}"
    why = unsuited(request, modes[0]) or ", ".join(without_effect(request, modes[0]))
    hint = f"name a mode, as in {MODE}: {SOFT}; pods that name none have these modes here"
    raise refusal(pod, container.name, f"{problem}: {why}", hint=hint)


def _names_mode(wishes: Wishes) -> bool:
    return bool(wishes.modes or wishes.mig_profile)


def _in_named_modes(pod: Pod, container: Container, request: Request, wishes: Wishes) -> Request:
    """Refuse what a mode that was named cannot give, and what no one of them sees to."""
    is_strongest = wishes.modes == (STRONGEST,)
    modes = suiting(request, STRONGEST_FIRST) if is_strongest else wishes.modes or (MIG,)
    if wishes.mig_profile and MIG not in modes:
        problem = f"{MIG_PROFILE} is {wishes.mig_profile}, and {MODE} has no {MIG}"
        hint = f"remove {MIG_PROFILE}, or write {MODE}: {MIG}"
        if is_strongest:
            problem = f"{MIG_PROFILE} is {wishes.mig_profile}, and it cannot have a slice"
            problem += f": {unsuited(request, MIG) or ', '.join(without_effect(request, MIG))}"
            hint = f"name {MIG} alone, which implies an amount, or ask for {GPU_MEMORY} too"
        raise refusal(pod, container.name, problem, hint=hint)
    for mode in modes:
        if why := unsuited(request, mode):
            raise refusal(pod, container.name, f"in mode {mode} {why}", hint=_other_mode(mode))
    lost = [without_effect(request, mode) for mode in modes]
    for each in lost[0]:
        if all(each in others for others in lost):
            problem = f"{each} has no effect in mode {' or '.join(modes)}"
            hint = f"leave it out, or ask for mode {SOFT}, where shares take turns"
            raise refusal(pod, container.name, problem, hint=hint)
    return in_modes(request, modes)


def _other_mode(mode: str) -> str:
    if mode == MIG:
        return (
            f"ask for bytes by {GPU_MEMORY}, or for a profile alone by {MIG_PROFILE}; or leave"
            f" {MIG} out of {MODE}"
        )
    return f"leave {mode} out of {MODE}"


def never_asked(pod: Pod, *, nvidia: Collection[str] = ()) -> UsageError | None:
    """Return what is wrong with a pod whose plugin is never asked, so that nobody refuses it.

    The kubelet asks for `allotment.dev/gpu`, and for no quantity and no annotation: a container
    with these alone would start, without a GPU and without a word. `nvidia` has the names of
    NVIDIA's resources that the node offers.
    """
    for container in pod.containers:
        there = container.resources
        amounts = (there.get(each, 0) for each in (GPU_MEMORY, GPU_COMPUTE))
        if any(amount > 0 for amount in amounts) and not there.get(GPU):
            try:
                _check_amounts(pod, container)
            except UsageError as error:
                return error
    written = sorted(each for each in pod.annotations if each.startswith(PREFIX))
    if not written or any(_asks_for_gpu(each, nvidia) for each in pod.containers):
        return None
    problem = f"it has the annotation {', '.join(written)}, and no container asks for a GPU"
    hint = f"add `{GPU}: 1` to the limits of a container, or remove the annotation"
    return refusal(pod, None, problem, hint=hint)


def _asks_for_gpu(container: Container, nvidia: Collection[str]) -> bool:
    """Leave in doubt what is named like NVIDIA's: the node may have offered it a while ago."""
    return any(
        amount and (name == GPU or name in nvidia or name.startswith("nvidia.com/"))
        for name, amount in container.resources.items()
    )


def _check_amounts(pod: Pod, container: Container) -> None:
    there = container.resources
    for name in RESOURCES:
        amount = there.get(name)
        if amount is None or (name == GPU and amount == 0):
            continue
        if amount <= 0:
            problem = f"{name} is {amount}"
            hint = f"leave {name} out, or ask for at least {_least(name, there.get(GPU, 1))}"
            raise refusal(pod, container.name, problem, hint=hint)
        if amount > MAX_BYTES:
            problem = f"{name} is {amount}, more than any node can have"
            raise refusal(pod, container.name, problem, hint="write an amount below 8Ei")
    if not there.get(GPU):
        without = " and ".join(each for each in (GPU_MEMORY, GPU_COMPUTE) if each in there)
        problem = f"it asks for {without} without {GPU}"
        hint = f"add `{GPU}: 1` to its limits: of how many GPUs it is"
        raise refusal(pod, container.name, problem, hint=hint)


def _least(name: str, count: int) -> str:
    """Return the least of a resource that is accepted, as people write it."""
    return format_bytes(LEAST_BYTES * max(1, count)) if name == GPU_MEMORY else "1"


def _memory(pod: Pod, container: Container, count: int, wishes: Wishes) -> MemoryAmount:
    total = container.resources.get(GPU_MEMORY)
    if total is None:
        if wishes.mig_profile and wishes.memory is None and wishes.modes in {(), (MIG,)}:
            return ANY_MEMORY
        return wishes.memory or _ALL
    if wishes.memory is not None:
        problem = f"it asks for {GPU_MEMORY}, and {MEMORY} ({wishes.memory}) says a part of each"
        raise refusal(pod, container.name, f"{problem} GPU", hint="keep one of them")
    each = total // count
    if each < LEAST_BYTES:
        problem = f"{GPU_MEMORY} is {total} bytes"
        problem += f", {each} for each of its {count} GPUs" if count > 1 else ""
        hint = f"ask for at least 1Mi of each GPU; a number without a unit is bytes: {total}Mi?"
        raise refusal(pod, container.name, f"{problem}, less than 1Mi", hint=hint)
    return MemoryAmount(format_bytes(each), size_bytes=each)


def _compute(pod: Pod, container: Container, count: int, wishes: Wishes) -> Compute:
    """Join the quantity, which is a guarantee, with what the annotations add to it."""
    total = container.resources.get(GPU_COMPUTE)
    counted = None if total is None else total * _PERCENT // count
    if counted is not None and counted > WHOLE:
        problem = f"{GPU_COMPUTE} is {total}, {format_percent(counted)} percent of each of"
        hint = f"100 is all of one GPU: ask for at most {100 * count}, or for more of {GPU}"
        raise refusal(pod, container.name, f"{problem} {format_count(count, 'GPU')}", hint=hint)
    if counted == 0:
        problem = f"{GPU_COMPUTE} is {total} for {count} GPUs, less than 0.01 percent of each"
        raise refusal(pod, container.name, problem, hint="ask for at least 1 percent of each GPU")
    wish = wishes.compute
    compute = None if wish is None else wish.compute
    if wish is None or compute is None:
        compute = None if counted is None else Compute(counted, counted)
    elif not wish.names_guarantee and counted is not None:
        if compute.ceiling < counted:
            problem = f"{COMPUTE} ({wish.text}) has a ceiling below what {GPU_COMPUTE} guarantees"
            hint = f"raise the ceiling to {format_percent(counted)} at least"
            raise refusal(pod, container.name, f"{problem} of each GPU", hint=hint)
        compute = Compute(counted, compute.ceiling)
    elif -(-compute.guarantee * count // _PERCENT) != (total or 0):
        # The quantity is whole percent, rounded up; the annotation says hundredths where need be.
        raise _contradiction(pod, container, wish.text, compute=compute, counted=counted)
    return revised(Compute(), compute=compute, weight=wishes.weight, kind=wishes.kind)


def _contradiction(
    pod: Pod, container: Container, text: str, *, compute: Compute, counted: int | None
) -> Exception:
    asked = format_percent(compute.guarantee)
    problem = f"{COMPUTE} ({text}) guarantees {asked} percent of each GPU, but {GPU_COMPUTE} "
    if counted is None:
        problem += "is not asked for, so that no scheduler would count it"
        count = container.resources[GPU]
        whole = -(-compute.guarantee * count // _PERCENT)
        hint = f"add `{GPU_COMPUTE}: {whole}` to its limits, or"
        hint += f" guarantee nothing: {COMPUTE}: 0:{format_percent(compute.ceiling)}"
    else:
        problem += f"is {format_percent(counted)}"
        hint = f"write the same in both, or the ceiling alone: :{format_percent(compute.ceiling)}"
    return refusal(pod, container.name, problem, hint=hint)


def _check_node_can_choose(pod: Pod, container: Container, request: Request) -> None:
    """Refuse what a node does not see to by itself, where no scheduler has chosen the devices.

    A share's tags are in the scheduler's book alone, and so is which devices NVLink joins.
    """
    its = request.constraints
    beyond = {
        AFFINITY: bool(its.affinity),
        ANTI_AFFINITY: bool(its.anti_affinity),
        EXCLUSION: bool(its.exclusion),
        f"{TOPOLOGY} ({NVLINK})": request.count > 1 and its.needs_nvlink,
    }
    written = [key for key, is_there in beyond.items() if is_there]
    if written:
        problem = f"{' and '.join(written)} can be seen to by Allotment's scheduler alone, and it"
        hint = "let it be scheduled by a kube-scheduler that asks `allot scheduler`, or remove"
        problem += f" has not placed the pod: there is no {PLACEMENT}"
        raise refusal(pod, container.name, problem, hint=f"{hint} {' and '.join(written)}")


def _placed(pod: Pod, container: Container, request: Request, wishes: Wishes) -> Request:
    """Check a placement against what is asked for; take from it how much a part is, in bytes."""
    placed = wishes.placement or PlacementWish(())
    hint = f"remove the annotation {PLACEMENT}, so that the node chooses"
    request = _placed_in_mode(pod, container, request, wishes)
    if request.mode == MIG:
        _check_profile(pod, container, request, placed)
    elif len(set(placed.devices)) != len(placed.devices):
        problem = f"{PLACEMENT} names a device twice: {', '.join(placed.devices)}"
        raise refusal(pod, container.name, problem, hint=hint)
    if len(placed.devices) != request.count:
        problem = f"{PLACEMENT} has {len(placed.devices)} devices, {GPU} is {request.count}"
        raise refusal(pod, container.name, problem, hint=hint)
    need = request.memory.size_bytes
    if placed.memory_bytes is None or request.mode == MIG:
        return request
    if need is None:
        size = placed.memory_bytes
        return replace(request, memory=MemoryAmount(format_bytes(size), size_bytes=size))
    if placed.memory_bytes != need:
        problem = f"{PLACEMENT} has {placed.memory_bytes} bytes of each device, {GPU_MEMORY} comes"
        raise refusal(pod, container.name, f"{problem} to {need}", hint=hint)
    return request


def _placed_in_mode(pod: Pod, container: Container, request: Request, wishes: Wishes) -> Request:
    """Return the request in the one mode that was decided; one that names none is of mode soft."""
    mode = (wishes.placement and wishes.placement.mode) or SOFT
    if _names_mode(wishes) and mode not in {request.mode, *request.other_modes}:
        asked = " or ".join((request.mode, *request.other_modes))
        problem = f"{PLACEMENT} is of mode {mode}, and the container asks for {asked}"
        hint = f"remove the annotation {PLACEMENT}, so that the node chooses"
        raise refusal(pod, container.name, problem, hint=hint)
    return in_modes(request, (mode,))


def _check_profile(pod: Pod, container: Container, request: Request, placed: PlacementWish) -> None:
    wanted = request.mig_profile
    for each in placed.slices:
        if wanted and each.profile != wanted:
            problem = f"{PLACEMENT} has a slice {each.profile}, {MIG_PROFILE} is {wanted}"
            hint = f"remove the annotation {PLACEMENT}, so that the node chooses"
            raise refusal(pod, container.name, problem, hint=hint)
