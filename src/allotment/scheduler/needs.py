# SPDX-License-Identifier: Apache-2.0
"""What a pod asks for: out of its resources and annotations, in placement's words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from allotment.dialects.registry import wanted
from allotment.dialects.systems import DialectSettings, mig_groups_of
from allotment.kube.cluster_feed import ClusterPod
from allotment.model.clusters import PodNeed, WantedContainer
from allotment.model.mig_groups import MigModelGroups
from allotment.model.pods import Pod
from allotment.model.requests import MIG, SOFT

__all__ = ["NeedSettings", "containers_of", "need_of", "need_settings"]


@dataclass(frozen=True, slots=True)
class NeedSettings:
    """What a cluster has set of what pods do not say themselves."""

    modes: tuple[str, ...] = (SOFT,)
    """For containers that leave it open, the best first."""
    groups: Mapping[str, tuple[MigModelGroups, ...]] = field(default_factory=dict)
    """By the name of a dialect, which slices its administrator allows."""


_USUAL = NeedSettings()


def need_settings(modes: Sequence[str], dialects: DialectSettings) -> NeedSettings:
    """Return the settings of a scheduler that was started with these."""
    return NeedSettings(tuple(modes), mig_groups_of(dialects))


def need_of(pod: ClusterPod, settings: NeedSettings = _USUAL) -> PodNeed:
    """Say what a pod asks for; without containers where it asks for no GPU of ours.

    A placement that it has already is not looked at: somebody may have copied it from another pod
    with all the rest. Raises `UsageError`: what is wrong with what is written, and the next step.
    """
    return PodNeed(
        uid=pod.uid,
        namespace=pod.namespace,
        name=pod.name,
        cpu_milli=pod.cpu_milli,
        memory_bytes=pod.memory_bytes,
        priority=pod.priority,
        containers=() if pod.asks is None else containers_of(pod.asks, pod.dialect, settings),
    )


def containers_of(asks: Pod, dialect: str, settings: NeedSettings) -> tuple[WantedContainer, ...]:
    """Say what a pod's containers ask for; `dialect`: that it was translated from. `UsageError`."""
    found = wanted(asks, modes=settings.modes)
    groups = settings.groups.get(dialect)
    return tuple(_among(each, groups) for each in found) if groups else found


def _among(container: WantedContainer, groups: tuple[MigModelGroups, ...]) -> WantedContainer:
    request = container.request
    if MIG not in {request.mode, *request.other_modes}:
        return container
    if request.mig_profile:
        # Which group it would be of says nothing more; whether it is allowed does.
        groups = tuple(each for each in groups if each.profiles is not None)
    return replace(container, request=replace(request, mig_groups=groups))
