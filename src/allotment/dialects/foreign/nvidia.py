# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's resources in pods at creation: some stay, some are translated.

By default all stay: the kubelet allocates them, and the node's configuration sets their meaning
(`allotment.dialects.own.registry`). A cluster without NVIDIA's plugin can translate whole GPUs and
replicas into shares, and MIG devices into slices created on demand. (k8s-device-plugin v0.20,
README; MIG names from its `mixed` strategy.)
"""

import re
from typing import Final, Literal

import msgspec

from allotment.dialects.foreign.base import ForeignDialect, Translated, Translation
from allotment.dialects.foreign.parsing import (
    Name,
    amount_of,
    check_count,
    keys_of,
    whole_cards,
)
from allotment.dialects.own.protocol import ANY_MEMORY, refusal
from allotment.model.modes import MIG as MIG_MODE
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.requests import Request, replicas_of

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
MIG: Final = "nvidia.com/mig-*"
KEYS = (GPU, SHARED, MIG)
"""The keys of this dialect, for the table in the documentation."""

_MIG = re.compile(
    r"nvidia\.com/mig-(?P<profile>(?P<shape>[1-9][0-9]?g\.[1-9][0-9]{0,3}gb)"
    r"(?:(?P<sign>[.-])(?P<attributes>[a-z]{1,8}(?:\.[a-z]{1,8})?))?)",
    re.ASCII,
)


class NvidiaSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Which of NVIDIA's resources to translate."""

    gpu: Name = GPU
    shared: Name = SHARED
    """Names of the resources: a plugin's configuration may rename them."""
    whole: Literal["left", "share"] = "left"
    """`nvidia.com/gpu`: left to the kubelet, or a share of all a GPU's memory and time."""
    replicas: int | None = None
    """`nvidia.com/gpu.shared`: the number of parts of a GPU; None: left to the kubelet."""
    mig: Literal["left", "slices"] = "left"
    """`nvidia.com/mig-1g.10gb`: left to the kubelet, or slices of that profile."""
    offered: frozenset[str] | None = None
    """MIG resources that the cluster's nodes offer; None: unknown, so all are left."""


class NvidiaForeign(ForeignDialect):
    """`nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.5gb` and similar."""

    name = "nvidia"
    title = "NVIDIA's"
    settings_type = NvidiaSettings

    def __init__(self, settings: NvidiaSettings | None = None) -> None:
        self._settings = settings or NvidiaSettings()
        if self._settings.replicas is not None and self._settings.replicas < 1:
            raise ValueError(self._settings.replicas)

        self.resources = (self._settings.gpu, self._settings.shared, MIG)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        found = (name for container in pod.containers for name in self._names(container))
        return tuple(dict.fromkeys(found))

    def keeps_resources(self, pod: ForeignPod) -> bool:
        return not any(self._is_translated(key) for key in self.recognises(pod))

    def translate(self, pod: ForeignPod) -> Translation:
        """The result has only containers with resources that the settings translate."""
        found = []
        for container in pod.containers:
            amounts = {name: amount_of(pod, container, name) for name in self._names(container)}
            asked = {name: amount for name, amount in amounts.items() if amount}
            for name in asked:
                self._check_mig(pod, container, name)
            ours = [name for name in asked if self._is_translated(name)]
            if len(asked) > 1 and ours:
                problem = (
                    f"it asks for {' and '.join(asked)}, and {ours[0]} means a part of a GPU here"
                )
                hint = "ask for one of them: a container gets its part of GPUs from one resource"
                raise refusal(pod, container.name, problem, hint=hint)
            for name in ours:
                request = self._request(pod, container, name, asked[name])
                found.append(Translated(container=container.name, request=request, removes=(name,)))
        return Translation(dialect=self.name, containers=tuple(found))

    def _is_translated(self, name: str) -> bool:
        if name == self._settings.gpu:
            return self._settings.whole != "left"
        if _MIG.fullmatch(name):
            return self._settings.mig == "slices"
        return name == self._settings.shared and self._settings.replicas is not None

    def _check_mig(self, pod: ForeignPod, container: ForeignContainer, name: str) -> None:
        match, offered = _MIG.fullmatch(name), self._settings.offered
        if match is None or offered is None or name in offered or self._is_translated(name):
            return
        problem = f"it asks for {name}, but no node of this cluster offers MIG devices of profile"
        there = ", ".join(sorted(offered)) or "none"
        hint = f"ask for a part of a GPU, or for one of these MIG resources: {there}"
        raise refusal(pod, container.name, f"{problem} {match['profile']}", hint=hint)

    def _request(
        self, pod: ForeignPod, container: ForeignContainer, name: str, count: int
    ) -> Request:
        check_count(pod, container.name, name, count)
        if profile := _profile_of(name):
            return Request(ANY_MEMORY, count=count, mode=MIG_MODE, mig_profile=profile)
        replicas = self._settings.replicas
        if name == self._settings.shared and replicas is not None:
            return replicas_of(replicas, count=count)
        return whole_cards(count)

    def _names(self, container: ForeignContainer) -> tuple[str, ...]:
        fixed = keys_of(container, (self._settings.gpu, self._settings.shared))
        mig = {each for each in (*container.limits, *container.requests) if _MIG.fullmatch(each)}
        return (*fixed, *sorted(mig))


def _profile_of(name: str) -> str:
    """NVIDIA's profile name; in resources `+me` is `.me`, and `-me` is unchanged."""
    match = _MIG.fullmatch(name)
    if match is None:
        return ""
    sign = "+" if match["sign"] == "." else match["sign"] or ""
    return f"{match['shape']}{sign}{match['attributes'] or ''}"
