# SPDX-License-Identifier: Apache-2.0
"""Bound pods that another system may have given GPUs, as its dialect reads them.

They are kept as long as they run, so that what may be kept of each is bounded: how many annotations
a pod has is its author's to say.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from allotment.dialects.foreign import DIALECT, ForeignContainer, ForeignPod
from allotment.dialects.placements import PLACEMENT
from allotment.dialects.taking_over import may_be_given
from allotment.kube.objects import ContainerSpec, PodObject
from allotment.model.pods import ContainerKind

__all__ = ["foreign_pod"]

_MOST_CHARACTERS: Final = 64 << 10
"""Of annotations, labels and variables together; what is too long for it is left out."""


class _Variable(msgspec.Struct):
    name: str = ""
    value: str | None = None


_variables: Final = msgspec.json.Decoder(list[_Variable] | None)


def foreign_pod(item: PodObject) -> ForeignPod | None:
    """Return a bound pod as its author wrote it; None: nobody else can have given it GPUs."""
    meta, spec = item.metadata, item.spec
    annotations, labels = meta.annotations or {}, meta.labels or {}
    if DIALECT in annotations or PLACEMENT in annotations:
        return None
    if not may_be_given(_resources(item), (*annotations, *labels)):
        return None
    left = _Left(_MOST_CHARACTERS)
    return ForeignPod(
        namespace=meta.namespace,
        name=meta.name,
        labels=left.of(labels),
        annotations=left.of(annotations),
        containers=tuple(_containers(item, left)),
        scheduler=spec.scheduler_name,
        node=spec.node_name,
    )


class _Left:
    """How much more of a pod is kept."""

    def __init__(self, characters: int) -> None:
        self._characters = characters

    def of(self, written: Mapping[str, str]) -> dict[str, str]:
        """Keep what there is room for, the shortest first: what kubectl writes is among it."""
        kept = {}
        for key, text in sorted(written.items(), key=lambda each: (len(each[1]), each)):
            size = len(key) + len(text)
            if size <= self._characters:
                self._characters -= size
                kept[key] = text
        return kept


def _resources(item: PodObject) -> Iterator[str]:
    for listed in (item.spec.containers, item.spec.init_containers):
        for each in listed or ():
            if each.resources is not None:
                yield from each.resources.limits or ()


def _containers(item: PodObject, left: _Left) -> Iterator[ForeignContainer]:
    for each in item.spec.init_containers or ():
        is_sidecar = each.restart_policy == "Always"
        kind = ContainerKind.SIDECAR if is_sidecar else ContainerKind.INIT
        yield _container(each, kind, left)
    for each in item.spec.containers or ():
        yield _container(each, ContainerKind.REGULAR, left)


def _container(spec: ContainerSpec, kind: ContainerKind, left: _Left) -> ForeignContainer:
    resources = spec.resources
    return ForeignContainer(
        name=spec.name,
        kind=kind,
        limits=dict((resources and resources.limits) or {}),
        requests=dict((resources and resources.requests) or {}),
        environment=left.of(_environment(spec)),
    )


def _environment(spec: ContainerSpec) -> dict[str, str]:
    try:
        found = _variables.decode(spec.env)
    except msgspec.MsgspecError:
        return {}  # the API server lets no such pod be
    return {each.name: each.value for each in found or () if each.value is not None}
