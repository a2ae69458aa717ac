# SPDX-License-Identifier: Apache-2.0
"""What a dialect is, the values of annotations, and the modes that suit a request."""

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from allotment.model.compute import DEFAULT_WEIGHT, WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.formats import format_percent
from allotment.model.mig import MigPlace
from allotment.model.modes import traits_of
from allotment.model.pods import Container, ContainerAsk, ForeignPod, Pod
from allotment.model.quantities import LEAST_BYTES, MemoryAmount
from allotment.model.requests import Constraints, Preferences, Request
from allotment.model.structs import replace


class ComputeWish(msgspec.Struct, frozen=True):
    """`allotment.dev/compute`: percent of each device."""

    text: str
    compute: Compute

    @property
    def names_guarantee(self) -> bool:
        """False for a ceiling alone, like `:80`."""
        return not self.text.lstrip().startswith(":")


class PlacementWish(msgspec.Struct, frozen=True):
    """`allotment.dev/placement`: the devices that a scheduler chose."""

    devices: tuple[str, ...]
    memory_bytes: int | None = None
    """Bytes of each device; None: not set."""
    mode: str | None = None
    """The mode there; None: not set."""
    slices: tuple[MigPlace, ...] = ()
    """In mode `mig`, the slice of each of `devices`; else empty."""
    is_resized: bool = False
    """The amounts may be more than the request: until a resize is in force."""


class ResizeWish(msgspec.Struct, frozen=True):
    """`allotment.dev/resize`: other amounts of each device. None: as requested."""

    memory: MemoryAmount | None = None
    compute: ComputeWish | None = None
    kind: ComputeClass | None = None
    weight: int | None = None


class PodAnnotations(msgspec.Struct, frozen=True):
    """All values. None: not set."""

    compute: ComputeWish | None = None
    kind: ComputeClass | None = None
    weight: int | None = None
    modes: tuple[str, ...] = ()
    """The best first, or `strongest` alone; empty: left open."""
    mig_profile: str = ""
    may_oversubscribe: bool | None = None
    placement: PlacementWish | None = None
    memory: MemoryAmount | None = None
    """A part of each device."""
    resize: ResizeWish | None = None
    constraints: Constraints = msgspec.field(default=Constraints())
    preferences: Preferences = msgspec.field(default=Preferences())


MAX_DEVICES: Final = 1024
"""More GPUs than any node has: larger numbers are mistakes."""
_MAX_SHOWN = 60


class Dialect(Protocol):
    """One syntax of requests. It has no state."""

    @property
    def name(self) -> str:
        """Possessive, for messages: `NVIDIA's`."""
        ...

    @property
    def takes(self) -> frozenset[str]: ...

    def resources(self, container: Container) -> tuple[str, ...]:
        """The container's resources in this dialect; empty: none."""
        ...

    def asks(
        self, pod: Pod, container: Container, annotations: PodAnnotations
    ) -> tuple[ContainerAsk, ...]:
        """One ask for each resource that the kubelet allocates. Raises `UsageError`."""
        ...


def refusal(pod: Pod | ForeignPod, container: str | None, problem: str, *, hint: str) -> UsageError:
    where = f"pod {pod}" if container is None else f"pod {pod}, container {container!r}"
    return UsageError(f"{where}: {problem}", hint=hint)


def shown(text: str) -> str:
    """Quote a user's text, cut to a length for messages."""
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


STRONGEST: Final = "strongest"
"""In place of a list: the strongest isolation with room."""
ANY_MEMORY: Final = MemoryAmount("any", size_bytes=LEAST_BYTES)
"""The minimum for a request by profile alone."""


def suiting(request: Request, modes: Iterable[str]) -> tuple[str, ...]:
    """The modes, in order, that can serve the whole request."""
    return tuple(
        mode for mode in modes if not unsuited(request, mode) and not without_effect(request, mode)
    )


def in_modes(request: Request, modes: Sequence[str]) -> Request:
    return replace(request, mode=modes[0], other_modes=tuple(modes[1:]))


def unsuited(request: Request, mode: str) -> str:
    """Why a mode can never serve a request; empty: it can."""
    traits = traits_of(mode)
    if traits.is_slice:
        if request.may_oversubscribe:
            return "a slice's memory is fixed hardware and cannot be promised twice"
        if request.memory.part is not None:
            return (
                f"its memory is {request.memory} of a GPU, and the GPU is unknown until a "
                "slice is chosen"
            )
    if traits.needs_daemon and request.count > 1:
        return (
            "a share has one GPU, because each GPU has its own control daemon and a "
            f"program connects to one; it asks for {request.count}"
        )
    if request.compute.ceiling < traits.least_ceiling:
        ceiling = format_percent(request.compute.ceiling)
        return f"{ceiling} percent of a GPU's compute is less than mode {mode} can enforce"
    return ""


def without_effect(request: Request, mode: str) -> tuple[str, ...]:
    its, ignored = request.compute, traits_of(mode).ignores
    found = []
    if "weight" in ignored and its.weight != DEFAULT_WEIGHT:
        found.append(f"the weight {its.weight}")
    if its.kind in ignored or ("class" in ignored and its.kind is not ComputeClass.NORMAL):
        found.append(f"the class {its.kind}")
    if "ceiling" in ignored and its.ceiling not in {its.guarantee, WHOLE}:
        found.append(f"the ceiling of {format_percent(its.ceiling)} percent")
    return tuple(found)


def unresizable(before: Request, after: Request, mode: str, capacity: int) -> str:
    """Why programs that run cannot follow a resize in a mode; empty: they can.

    `before` is the pod's own request, and `capacity` a device's memory in bytes.
    """
    more = after.memory.of(capacity) - before.memory.of(capacity)
    asked = replace(before.compute, is_governed=after.compute.is_governed)
    if not more and asked == after.compute:
        return ""
    traits = traits_of(mode)
    if traits.fixed_because:
        return f"mode {mode}: {traits.fixed_because}"
    if traits.needs_daemon:
        if asked != after.compute:
            return "MPS fixes the compute of a program when the program starts"
        if more > 0 and not after.may_oversubscribe:
            return "MPS fixes the memory limit of a program when the program starts"
    return ""


def is_any_memory(request: Request) -> bool:
    """True if only a profile sets the slice's memory."""
    return (
        traits_of(request.mode).is_slice
        and not request.other_modes
        and bool(request.mig_profile)
        and request.memory.size_bytes == LEAST_BYTES
    )
