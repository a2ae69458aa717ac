# SPDX-License-Identifier: Apache-2.0
"""Allotment's own dialect: parts of GPUs as quantities.

    resources: {limits: {allotment.dev/gpu: 1, allotment.dev/gpu-memory: 4Gi}}

`allotment.dev/gpu` is the number of GPUs, counted by the kubelet. The other quantities are sums
over these GPUs, counted by the scheduler. Each GPU provides an equal part.
"""

from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Final

from allotment.dialects.own.annotations import (
    AFFINITY,
    ANTI_AFFINITY,
    COMPUTE,
    EXCLUSION,
    KEYS,
    MEMORY,
    MIG_PROFILE,
    MODE,
    NVLINK,
    PREFIX,
    TOPOLOGY,
)
from allotment.dialects.own.placement import PLACEMENT, RESIZE
from allotment.dialects.own.protocol import (
    ANY_MEMORY,
    MAX_DEVICES,
    STRONGEST,
    PlacementWish,
    PodAnnotations,
    ResizeWish,
    in_modes,
    refusal,
    suiting,
    unsuited,
    without_effect,
)
from allotment.model.compute import WHOLE, Compute, beyond, revised
from allotment.model.errors import UsageError
from allotment.model.formats import format_bytes, format_count, format_percent
from allotment.model.modes import MIG, SOFT, STRONGEST_FIRST, traits_of
from allotment.model.pods import Container, ContainerAsk, Pod
from allotment.model.quantities import LEAST_BYTES, MAX_BYTES, MemoryAmount
from allotment.model.requests import Request
from allotment.model.structs import replace

GPU = "allotment.dev/gpu"
"""Number of GPUs that the container shares; the kubelet allocates it through a plugin."""
GPU_MEMORY = "allotment.dev/gpu-memory"
"""Bytes over all these GPUs; part of the node's status."""
GPU_COMPUTE = "allotment.dev/gpu-compute"
"""Percent of a device over all these GPUs (100 for each GPU of the node)."""
RESOURCES = (GPU, GPU_MEMORY, GPU_COMPUTE)

_ALL = MemoryAmount("100%", part=Fraction(1))
_PERCENT = WHOLE // 100


class AllotmentDialect:
    """`allotment.dev/gpu` and its quantities."""

    name: Final = "Allotment's"
    takes: Final = KEYS

    def resources(self, container: Container) -> tuple[str, ...]:
        """A quantity alone counts too, so that it is refused and not ignored."""
        there = container.resources
        quantities = any(each in there for each in (GPU_MEMORY, GPU_COMPUTE))
        if not there.get(GPU) and not quantities:
            return ()
        return tuple(each for each in RESOURCES if each in there)

    def asks(
        self, pod: Pod, container: Container, annotations: PodAnnotations
    ) -> tuple[ContainerAsk, ...]:
        own = request_of(pod, container, replace(annotations, resize=None))
        request = (
            own if annotations.resize is None else _resized(pod, container, own, annotations.resize)
        )
        mode = request.mode if _names_mode(annotations) else None
        if annotations.placement is not None:
            request = _placed(pod, container, request, annotations)
            mode = request.mode
        elif pod.node:
            if annotations.resize is not None and PLACEMENT not in pod.annotations:
                _check_no_growth(pod, container, request, own)
            _check_node_can_choose(pod, container, request)
        return (
            ContainerAsk(
                container=container.name,
                kind=container.kind,
                resource=GPU,
                count=request.count,
                request=request,
                own=own,
                mode=mode,
                devices=annotations.placement.devices if annotations.placement else (),
                slices=annotations.placement.slices if annotations.placement else (),
            ),
        )


def request_of(pod: Pod, container: Container, annotations: PodAnnotations) -> Request:
    """The request without placement, mode soft by default. Raises `UsageError`."""
    _check_amounts(pod, container)
    count = container.resources[GPU]
    request = Request(
        _memory(pod, container, count, annotations),
        count=count,
        compute=_compute(pod, container, count, annotations),
        may_oversubscribe=bool(annotations.may_oversubscribe),
        mig_profile=annotations.mig_profile,
        constraints=annotations.constraints,
        preferences=annotations.preferences,
    )
    if _names_mode(annotations):
        request = _in_named_modes(pod, container, request, annotations)
    return (
        request
        if annotations.resize is None
        else _resized(pod, container, request, annotations.resize)
    )


def _resized(pod: Pod, container: Container, request: Request, wish: ResizeWish) -> Request:
    """Return a request with the amounts of `allotment.dev/resize`. Raises `UsageError`."""
    compute = request.compute
    asked = None if wish.compute is None else wish.compute.compute
    if wish.compute is not None and asked is not None and not wish.compute.names_guarantee:
        if asked.ceiling < compute.guarantee:
            problem = f"{RESIZE} ({wish.compute.text}) has a ceiling below the guarantee of"
            problem += f" {format_percent(compute.guarantee)} percent"
            hint = f"write the guarantee too: compute:0:{format_percent(asked.ceiling)}"
            raise refusal(pod, container.name, problem, hint=hint)
        asked = Compute(compute.guarantee, asked.ceiling)
    return replace(
        request,
        memory=wish.memory or request.memory,
        compute=revised(compute, compute=asked, weight=wish.weight, kind=wish.kind),
    )


def _check_no_growth(pod: Pod, container: Container, request: Request, own: Request) -> None:
    """Refuse more than the pod's own request: no scheduler and no quota counted it."""
    need, have = request.memory, own.memory
    is_within = have in (need, _ALL)
    if need.size_bytes is not None and have.size_bytes is not None:
        is_within = need.size_bytes <= have.size_bytes
    elif need.part is not None and have.part is not None:
        is_within = need.part <= have.part
    more = [] if is_within else [f"memory (need {need}, have {have})"]
    more += beyond(own.compute, request.compute)
    if more:
        problem = f"{RESIZE} asks for more than its request: {'; '.join(more)}"
        hint = "growth needs Allotment's scheduler, which has not placed this pod: ask for at most"
        raise refusal(pod, container.name, problem, hint=f"{hint} its request, in the same unit")


def with_preference(
    pod: Pod, container: Container, annotations: PodAnnotations, *, modes: Sequence[str]
) -> Request:
    request = request_of(pod, container, annotations)
    if _names_mode(annotations) or tuple(modes) == request.modes:
        return request
    suited = suiting(request, modes)
    if suited:
        return in_modes(request, suited)
    problem = f"it names no mode, and its request does not suit mode {' or '.join(modes)}"
    why = unsuited(request, modes[0]) or ", ".join(without_effect(request, modes[0]))
    hint = f"name a mode, for example {MODE}: {SOFT}; pods without a mode get these modes here"
    raise refusal(pod, container.name, f"{problem}: {why}", hint=hint)


def _names_mode(annotations: PodAnnotations) -> bool:
    return bool(annotations.modes or annotations.mig_profile)


def _in_named_modes(
    pod: Pod, container: Container, request: Request, annotations: PodAnnotations
) -> Request:
    is_strongest = annotations.modes == (STRONGEST,)
    modes = suiting(request, STRONGEST_FIRST) if is_strongest else annotations.modes or (MIG,)
    if annotations.mig_profile and MIG not in modes:
        problem = f"{MIG_PROFILE} is {annotations.mig_profile}, but {MODE} does not list {MIG}"
        hint = f"remove {MIG_PROFILE}, or write {MODE}: {MIG}"
        if is_strongest:
            problem = (
                f"{MIG_PROFILE} is {annotations.mig_profile}, but its request does not suit a slice"
            )
            problem += f": {unsuited(request, MIG) or ', '.join(without_effect(request, MIG))}"
            hint = f"name {MIG} alone, which implies an amount, or also ask for {GPU_MEMORY}"
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
    if traits_of(mode).is_slice:
        return (
            f"ask for bytes with {GPU_MEMORY}, or for a profile alone with {MIG_PROFILE}; "
            f"or leave {MIG} out of {MODE}"
        )
    return f"leave {mode} out of {MODE}"


def never_asked(pod: Pod, *, nvidia: Collection[str] = ()) -> UsageError | None:
    """The error of a pod whose plugin is never asked, so that the node does not refuse it.

    The kubelet asks the plugin for `allotment.dev/gpu` only. A container with only the other
    quantities or annotations would start without a GPU. `nvidia`: NVIDIA's resource names on the
    node.
    """
    for container in pod.containers:
        there = container.resources
        amounts = (there.get(each, 0) for each in (GPU_MEMORY, GPU_COMPUTE))
        if any(amount > 0 for amount in amounts) and not there.get(GPU):
            try:
                _check_amounts(pod, container)
            except UsageError as error:
                return error
    written = sorted(annotation for annotation in pod.annotations if annotation.startswith(PREFIX))
    if not written or any(_asks_for_gpu(each, nvidia) for each in pod.containers):
        return None
    problem = f"it has the annotation {', '.join(written)}, but no container asks for a GPU"
    hint = f"add `{GPU}: 1` to the limits of a container, or remove the annotation"
    return refusal(pod, None, problem, hint=hint)


def _asks_for_gpu(container: Container, nvidia: Collection[str]) -> bool:
    """A resource with a name like NVIDIA's counts: the node may have offered it earlier."""
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
    if there.get(GPU, 0) > MAX_DEVICES:
        problem = f"{GPU} is {there[GPU]}, more GPUs than any node has"
        raise refusal(pod, container.name, problem, hint="ask for no more than one node has")
    if not there.get(GPU):
        without = " and ".join(each for each in (GPU_MEMORY, GPU_COMPUTE) if each in there)
        problem = f"it asks for {without} without {GPU}"
        hint = f"add `{GPU}: 1` to its limits: the number of GPUs"
        raise refusal(pod, container.name, problem, hint=hint)


def _least(name: str, count: int) -> str:
    return format_bytes(LEAST_BYTES * max(1, count)) if name == GPU_MEMORY else "1"


def _memory(
    pod: Pod, container: Container, count: int, annotations: PodAnnotations
) -> MemoryAmount:
    total = container.resources.get(GPU_MEMORY)
    if total is None:
        if (
            annotations.mig_profile
            and annotations.memory is None
            and annotations.modes in {(), (MIG,)}
        ):
            return ANY_MEMORY
        return annotations.memory or _ALL
    if annotations.memory is not None:
        problem = (
            f"it asks for {GPU_MEMORY}, and {MEMORY} ({annotations.memory}) sets a part of each"
        )
        raise refusal(pod, container.name, f"{problem} GPU", hint="keep one of them")
    each = total // count
    if each < LEAST_BYTES:
        problem = f"{GPU_MEMORY} is {total} bytes"
        problem += f", {each} for each of its {count} GPUs" if count > 1 else ""
        hint = f"ask for at least 1Mi of each GPU; a number without a unit is bytes: {total}Mi?"
        raise refusal(pod, container.name, f"{problem}, less than 1Mi", hint=hint)
    return MemoryAmount(format_bytes(each), size_bytes=each)


def _compute(pod: Pod, container: Container, count: int, annotations: PodAnnotations) -> Compute:
    total = container.resources.get(GPU_COMPUTE)
    counted = None if total is None else total * _PERCENT // count
    if counted is not None and counted > WHOLE:
        problem = f"{GPU_COMPUTE} is {total}, {format_percent(counted)} percent of each of"
        hint = f"100 is one whole GPU: ask for at most {100 * count}, or for more {GPU}"
        raise refusal(pod, container.name, f"{problem} {format_count(count, 'GPU')}", hint=hint)
    if counted == 0:
        problem = f"{GPU_COMPUTE} is {total} for {count} GPUs, less than 0.01 percent of each"
        raise refusal(pod, container.name, problem, hint="ask for at least 1 percent of each GPU")
    wish = annotations.compute
    compute = None if wish is None else wish.compute
    if wish is None or compute is None:
        compute = None if counted is None else Compute(counted, counted)
    elif not wish.names_guarantee and counted is not None:
        if compute.ceiling < counted:
            problem = f"{COMPUTE} ({wish.text}) has a ceiling below the guarantee of {GPU_COMPUTE}"
            hint = f"raise the ceiling to {format_percent(counted)} at least"
            raise refusal(pod, container.name, f"{problem} of each GPU", hint=hint)
        compute = Compute(counted, compute.ceiling)
    elif -(-compute.guarantee * count // _PERCENT) != (total or 0):
        # The quantity is whole percent, rounded up; the annotation may have hundredths.
        raise _contradiction(pod, container, wish.text, compute=compute, counted=counted)
    return revised(Compute(), compute=compute, weight=annotations.weight, kind=annotations.kind)


def _contradiction(
    pod: Pod, container: Container, text: str, *, compute: Compute, counted: int | None
) -> Exception:
    asked = format_percent(compute.guarantee)
    problem = f"{COMPUTE} ({text}) guarantees {asked} percent of each GPU, but {GPU_COMPUTE} "
    if counted is None:
        problem += "is missing, so no scheduler would count it"
        count = container.resources[GPU]
        whole = -(-compute.guarantee * count // _PERCENT)
        hint = f"add `{GPU_COMPUTE}: {whole}` to its limits, or"
        hint += f" guarantee nothing: {COMPUTE}: 0:{format_percent(compute.ceiling)}"
    else:
        problem += f"is {format_percent(counted)}"
        hint = f"write the same in both, or the ceiling alone: :{format_percent(compute.ceiling)}"
    return refusal(pod, container.name, problem, hint=hint)


def _check_node_can_choose(pod: Pod, container: Container, request: Request) -> None:
    """Refuse requests that the node cannot serve if no scheduler has chosen the devices.

    Only the scheduler knows tags of shares and NVLink topology.
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
        problem = f"{' and '.join(written)} needs Allotment's scheduler, and that"
        hint = "schedule it with a kube-scheduler that calls `allot scheduler`, or remove"
        problem += f" has not placed the pod: {PLACEMENT} is missing"
        raise refusal(pod, container.name, problem, hint=f"{hint} {' and '.join(written)}")


def _placed(
    pod: Pod, container: Container, request: Request, annotations: PodAnnotations
) -> Request:
    """Check a placement against the request, and take mode and bytes from it."""
    placed = annotations.placement or PlacementWish(())
    mode = placed.mode or SOFT
    modes = request.modes
    if _names_mode(annotations) and mode not in modes:
        problem = f"has mode {mode}, but the container asks for {' or '.join(modes)}"
        raise _misplaced(pod, container, problem)
    request = in_modes(request, (mode,))
    if traits_of(request.mode).is_slice:
        for place in placed.slices:
            if request.mig_profile and place.profile != request.mig_profile:
                problem = f"has a slice {place.profile}, but {MIG_PROFILE} is {request.mig_profile}"
                raise _misplaced(pod, container, problem)
    elif len(set(placed.devices)) != len(placed.devices):
        raise _misplaced(pod, container, f"names a device twice: {', '.join(placed.devices)}")
    if len(placed.devices) != request.count:
        problem = f"has {len(placed.devices)} devices, but {GPU} is {request.count}"
        raise _misplaced(pod, container, problem)
    if placed.memory_bytes is None or traits_of(request.mode).is_slice:
        return request
    return _with_bytes(pod, container, request, placed, placed.memory_bytes)


def _with_bytes(
    pod: Pod, container: Container, request: Request, placed: PlacementWish, size: int
) -> Request:
    """Return a request with the bytes of its placement."""
    need = request.memory.size_bytes
    if placed.is_resized and size >= (need or 0):
        return request
    if need is None:
        return replace(request, memory=MemoryAmount(format_bytes(size), size_bytes=size))
    if size != need:
        problem = f"has {size} bytes of each device, but {GPU_MEMORY} amounts"
        raise _misplaced(pod, container, f"{problem} to {need}")
    return request


def _misplaced(pod: Pod, container: Container, problem: str) -> UsageError:
    hint = f"create the pod again without the annotation {PLACEMENT}: the node chooses"
    return refusal(pod, container.name, f"{PLACEMENT} {problem}", hint=hint)
