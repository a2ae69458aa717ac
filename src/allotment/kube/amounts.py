# SPDX-License-Identifier: Apache-2.0
"""CPU and memory that a pod asks for and a node has, as kube-scheduler counts them.

`PodRequests` of component-helpers (resource/helpers.go, v0.36), for these two: containers and
sidecars together, or what one init container has beside the sidecars before it, whichever is more;
in place of that what is given for the pod as a whole; and the overhead of its runtime class. A
container that is being resized counts with the most of what is asked for, allotted and in force.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from allotment.kube.objects import ContainerSpec, ContainerStatus, PodObject
from allotment.model.errors import QuantityError
from allotment.model.quantities import parse_rounded_up

__all__ = ["amounts", "requests_of"]

Amounts = tuple[int, int]
"""Thousandths of a core, and bytes."""

_NONE: Final[Amounts] = (0, 0)
_MILLI: Final = 1000


def amounts(written: Mapping[str, str] | None) -> Amounts:
    """Read CPU and memory out of a list of resources; what is no amount counts as none."""
    if not written:
        return _NONE
    return _parsed(written.get("cpu", ""), _MILLI), _parsed(written.get("memory", ""), 1)


def requests_of(pod: PodObject) -> Amounts:
    """Return what a pod asks for in all."""
    spec = pod.spec
    status = {each.name: each for each in pod.status.container_statuses or ()}
    regular = _sum(_effective(each, status.get(each.name)) for each in spec.containers or ())
    if spec.init_containers:
        status = {each.name: each for each in pod.status.init_container_statuses or ()}
        regular = _with_init(regular, spec.init_containers, status)
    if spec.resources is not None and spec.resources.requests:
        whole = amounts(spec.resources.requests)
        regular = (
            whole[0] if "cpu" in spec.resources.requests else regular[0],
            whole[1] if "memory" in spec.resources.requests else regular[1],
        )
    return _sum((regular, amounts(spec.overhead))) if spec.overhead else regular


def _with_init(
    regular: Amounts, init: Iterable[ContainerSpec], status: Mapping[str, ContainerStatus]
) -> Amounts:
    sidecars = most = _NONE
    for each in init:
        if each.restart_policy == "Always":
            sidecars = _sum((sidecars, _effective(each, status.get(each.name))))
            most = _most(most, sidecars)
        else:
            most = _most(most, _sum((sidecars, _effective(each, None))))
    return _most(_sum((regular, sidecars)), most)


def _effective(spec: ContainerSpec, status: ContainerStatus | None) -> Amounts:
    asked = amounts(spec.resources.requests) if spec.resources else _NONE
    if status is None or status.resources is None:
        return asked
    in_force = _most(amounts(status.resources.requests), amounts(status.allocated_resources))
    return _most(asked, in_force)


def _sum(parts: Iterable[Amounts]) -> Amounts:
    cpu = memory = 0
    for each in parts:
        cpu += each[0]
        memory += each[1]
    return cpu, memory


def _most(one: Amounts, other: Amounts) -> Amounts:
    return max(one[0], other[0]), max(one[1], other[1])


@lru_cache(maxsize=4096)
def _parsed(text: str, parts: int) -> int:
    if not text:
        return 0
    try:
        return parse_rounded_up(text, parts=parts)
    except QuantityError:
        # The API server has let it pass: a negative amount of a node's allocatable, say.
        return 0
