# SPDX-License-Identifier: Apache-2.0
"""The dialects that nodes and schedulers read, including NVIDIA's, and how a pod is read.

Other systems' pods are translated at creation, so their dialects are not included.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import msgspec

from allotment.dialects.foreign.settings import DialectSettings, mig_groups_of
from allotment.dialects.own.allotment import RESOURCES, AllotmentDialect, with_preference
from allotment.dialects.own.annotations import MODE, annotations_of
from allotment.dialects.own.protocol import STRONGEST, Dialect, PodAnnotations, refusal
from allotment.model.clusters import ClusterPod, PodNeed, WantedContainer
from allotment.model.compute import DEFAULT_FLOOR
from allotment.model.mig import MigModelGroups
from allotment.model.modes import SOFT, has_slices
from allotment.model.pods import Container, ContainerAsk, Pod
from allotment.model.quantities import MAX_BYTES
from allotment.model.structs import replace


def asks_of(pod: Pod, *, nvidia: Collection[str]) -> tuple[ContainerAsk, ...]:
    """Each container's request, in order; empty: no GPU requested.

    `nvidia`: NVIDIA's resource names on the node. Raises `UsageError`: one invalid container
    refuses the whole pod.
    """
    dialects = (AllotmentDialect(), NvidiaDialect(frozenset(nvidia) - set(RESOURCES)))
    speakers = {
        container.name: (container, dialect)
        for container in pod.containers
        if (dialect := _dialect_of(pod, container, dialects)) is not None
    }
    if not speakers:
        return ()
    takers = {name: dialect.takes for name, (_, dialect) in speakers.items()}
    annotations = annotations_of(pod, takers)
    return tuple(
        ask
        for name, (container, dialect) in speakers.items()
        for ask in dialect.asks(pod, container, annotations[name])
    )


def wanted(
    pod: Pod, *, modes: Sequence[str] = (SOFT,), resize: str = ""
) -> tuple[WantedContainer, ...]:
    """The containers that a scheduler must place, in order; empty: none.

    Only Allotment's own resources count; for others the kubelet chooses devices. An existing
    placement is ignored. `modes` apply to containers without a mode, the best first. `resize` is
    the text of `allotment.dev/resize` that counts. Raises `UsageError`.
    """
    dialect = AllotmentDialect()
    asking = [(place, each) for place, each in enumerate(pod.containers) if dialect.resources(each)]
    if not asking:
        return ()
    takers = {each.name: dialect.takes for _, each in asking}
    annotations = annotations_of(pod, takers, has_placement=False, resize=resize)
    return tuple(
        WantedContainer(
            name=each.name,
            request=with_preference(pod, each, annotations[each.name], modes=modes),
            kind=each.kind,
            place=place,
        )
        for place, each in asking
    )


def _dialect_of(pod: Pod, container: Container, known: tuple[Dialect, ...]) -> Dialect | None:
    spoken = [(dialect, found) for dialect in known if (found := dialect.resources(container))]
    if len(spoken) > 1:
        both = " and ".join(f"{dialect.name} {', '.join(found)}" for dialect, found in spoken)
        hint = "keep one of them: a container gets whole GPUs or parts of GPUs, not both"
        raise refusal(pod, container.name, f"it asks for {both}", hint=hint)
    return spoken[0][0] if spoken else None


class NeedSettings(msgspec.Struct, frozen=True):
    """Cluster defaults for settings that pods leave open."""

    modes: tuple[str, ...] = (SOFT,)
    """Default modes, the best first."""
    groups: Mapping[str, tuple[MigModelGroups, ...]] = msgspec.field(default_factory=dict)
    """Allowed slices, by dialect name."""
    floor: int = DEFAULT_FLOOR
    """Basis points of a GPU's time kept for its containers without a compute request."""


_USUAL = NeedSettings()


def need_settings(
    modes: Sequence[str], dialects: DialectSettings, *, floor: int = DEFAULT_FLOOR
) -> NeedSettings:
    return NeedSettings(tuple(modes), mig_groups_of(dialects), floor)


def need_of(pod: ClusterPod, settings: NeedSettings = _USUAL, *, resize: str = "") -> PodNeed:
    """A pod's request; without containers if it asks for no GPU of ours.

    An existing placement is ignored: it may be a copy from another pod. So is the pod's
    `allotment.dev/resize`: `resize` is the text that counts. Raises `UsageError`.
    """
    return PodNeed(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        cpu_milli=pod.cpu_milli,
        memory_bytes=pod.memory_bytes,
        priority=pod.priority,
        containers=()
        if pod.asks is None
        else containers_of(pod.asks, pod.dialect, settings, resize=resize),
    )


def containers_of(
    asks: Pod, dialect: str, settings: NeedSettings, *, resize: str = ""
) -> tuple[WantedContainer, ...]:
    """The containers' requests; `dialect`: the one translated from. Raises `UsageError`."""
    found = wanted(asks, modes=settings.modes, resize=resize)
    groups = settings.groups.get(dialect)
    if groups:
        found = tuple(_among(each, groups) for each in found)
    return tuple(_with_floor(each, settings.floor) for each in found)


def _with_floor(container: WantedContainer, floor: int) -> WantedContainer:
    request = container.request
    if request.asks_compute or not floor:
        return container
    return replace(container, request=replace(request, floor=floor))


def _among(container: WantedContainer, groups: tuple[MigModelGroups, ...]) -> WantedContainer:
    request = container.request
    if not has_slices(request.modes):
        return container
    if request.mig_profile:
        # Only whether a group is allowed matters, not the group's name.
        groups = tuple(group for group in groups if group.profiles is not None)
    return replace(container, request=replace(request, mig_groups=groups))


class NvidiaDialect(msgspec.Struct, frozen=True):
    """NVIDIA's resources that a node offers, by name."""

    names: frozenset[str]

    name: ClassVar[str] = "NVIDIA's"
    takes: ClassVar[frozenset[str]] = frozenset({MODE})

    def resources(self, container: Container) -> tuple[str, ...]:
        """A quantity of zero does not count."""
        return tuple(sorted(name for name in self.names if container.resources.get(name)))

    def asks(
        self, pod: Pod, container: Container, annotations: PodAnnotations
    ) -> tuple[ContainerAsk, ...]:
        """One ask for each resource: NVIDIA's plugin also answers for each separately."""
        found = []
        for resource in self.resources(container):
            count = container.resources[resource]
            if not 0 < count <= MAX_BYTES:
                problem = f"{resource} is {count}"
                raise refusal(pod, container.name, problem, hint="ask for at least 1")
            if len(annotations.modes) > 1 or STRONGEST in annotations.modes:
                problem = f"{MODE} has several modes, but the kubelet chooses the devices of"
                hint = "name one mode, or ask for allotment.dev/gpu"
                raise refusal(pod, container.name, f"{problem} {resource}", hint=hint)
            found.append(
                ContainerAsk(
                    container=container.name,
                    kind=container.kind,
                    resource=resource,
                    count=count,
                    request=None,
                    mode=annotations.modes[0] if annotations.modes else None,
                )
            )
        return tuple(found)
