# SPDX-License-Identifier: Apache-2.0
"""What pods ask for as policies see it, and which pods are no more than that.

A pod with one GPU container, and no wish that arrays do not know, is its kind: arrays answer for
thousands of nodes at once. For any other pod its kind is what its largest container asks for, which
is enough to prefer one node to another; where it really goes is found by search.
"""

from collections.abc import Sequence

from allotment.model.clusters import PodNeed, WantedContainer
from allotment.model.compute import WHOLE
from allotment.model.devices import Device
from allotment.model.requests import MIG, Constraints, Request
from allotment.placement.arrays import Arrays, Kind
from allotment.placement.constraints import unsuited
from allotment.placement.select import is_selected

__all__ = ["Kinds", "is_plain", "largest"]

_MOST_KEPT = 4096


def is_plain(need: PodNeed) -> bool:
    """Is the pod no more than its kind?"""
    if not need.containers:
        return True
    if len(need.containers) > 1:
        return False
    request = need.containers[0].request
    wanted = request.constraints
    return not (
        request.may_oversubscribe
        or request.other_modes
        or request.selectors
        or wanted.uuids
        or wanted.not_uuids
        or wanted.affinity
        or wanted.anti_affinity
        or wanted.exclusion
        or wanted.is_alone
        or (request.count > 1 and (wanted.same_numa or wanted.needs_nvlink))
    )


def largest(need: PodNeed) -> WantedContainer | None:
    """Return the container that stands for the pod; None: it asks for no device."""
    return max(need.containers, key=_size, default=None)


def _size(wanted: WantedContainer) -> tuple[float, float, int]:
    request = wanted.request
    memory = request.memory
    part = float(memory.part) if memory.part is not None else 0.0
    # A part of a device weighs by what it is of a device, bytes by themselves: both are rare.
    return (
        request.count * max(request.compute.guarantee / WHOLE, part),
        request.count * (memory.size_bytes or 0),
        -wanted.place,
    )


class Kinds:
    """Makes kinds, with the names of models as the cluster has them."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._models: dict[tuple[Constraints, tuple[str, ...]], tuple[int, frozenset[str]]] = {}

    def of(self, need: PodNeed) -> Kind:
        """Return the kind of a pod."""
        wanted = largest(need)
        if wanted is None:
            return Kind(cpu_milli=need.cpu_milli, memory_bytes=need.memory_bytes)
        return self.of_request(need, wanted.request)

    def of_request(self, need: PodNeed, request: Request) -> Kind:
        """Return the kind of a pod that asks for this alone."""
        return Kind(
            cpu_milli=need.cpu_milli,
            memory_bytes=need.memory_bytes,
            count=request.count,
            guarantee=request.compute.guarantee,
            device_memory_bytes=request.memory.size_bytes or 0,
            device_memory_part=request.memory.part,
            models=self._names(request),
            mode=request.mode,
            mig_profile=request.mig_profile if request.mode == MIG else "",
            mig_groups=request.mig_groups if request.mode == MIG else (),
        )

    def _names(self, request: Request) -> frozenset[str] | None:
        wanted = request.constraints
        if not (wanted.models or wanted.not_models or request.selectors):
            return None
        names = self._arrays.model_names
        # Only what is about models counts here, so that few are kept.
        rules = Constraints(models=wanted.models, not_models=wanted.not_models)
        selectors = tuple(each for each in request.selectors if not _is_uuid(each))
        if len(selectors) < len(request.selectors):
            selectors = ()  # a UUID beside them may be of any model
        key = rules, selectors
        known = self._models.get(key)
        version = self._arrays.names_version
        if known is None or known[0] != version:
            if len(self._models) >= _MOST_KEPT:
                self._models.clear()
            known = version, _matching(names, rules, selectors, request)
            self._models[key] = known
        return known[1]


def _is_uuid(selector: str) -> bool:
    return selector.strip().lower().startswith(("gpu-", "mig-"))


def _matching(
    names: Sequence[str], rules: Constraints, selectors: tuple[str, ...], request: Request
) -> frozenset[str]:
    asked = Request(request.memory, selectors=selectors)
    devices = (_named(name) for name in names)
    return frozenset(
        each.name for each in devices if not unsuited(each, rules) and is_selected(each, asked)
    )


def _named(name: str) -> Device:
    return Device(
        uuid="",
        name=name,
        index=0,
        memory_bytes=0,
        sm_count=0,
        compute_capability=(0, 0),
        numa_node=None,
        pci_bus_id="",
        simulated=False,
        mig=False,
    )
