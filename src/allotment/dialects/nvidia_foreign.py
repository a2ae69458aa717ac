# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's resources, seen from outside a node: what of them stays, and what is translated.

By default all of it stays: the kubelet of a node that offers the resource gives it, and what is had
of a GPU is that node's configuration's to say (`allotment.dialects.nvidia`). A cluster without such
a plugin may have whole GPUs and replicas translated into shares, and MIG devices into slices that
are cut when a pod comes, where an administrator would have cut them before.
(k8s-device-plugin v0.20, README; MIG names as its `mixed` strategy makes them.)
"""

import re
from typing import Final, Literal

import msgspec

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    Translated,
    Translation,
    WithoutRecord,
)
from allotment.dialects.foreign_amounts import MAX_DEVICES, Name, amount_of, whole_cards
from allotment.dialects.modes import ANY_MEMORY
from allotment.dialects.protocol import refusal
from allotment.dialects.quantities import keys_of
from allotment.model.requests import MIG as MIG_MODE
from allotment.model.requests import Request, replicas_of

__all__ = ["KEYS", "NvidiaForeign", "NvidiaSettings"]

GPU: Final = "nvidia.com/gpu"
SHARED: Final = "nvidia.com/gpu.shared"
MIG: Final = "nvidia.com/mig-*"
KEYS = (GPU, SHARED, MIG)
"""What this dialect reads, as its table in the documentation has it."""

_MIG = re.compile(
    r"nvidia\.com/mig-(?P<profile>(?P<shape>[1-9][0-9]?g\.[1-9][0-9]{0,3}gb)"
    r"(?:(?P<sign>[.-])(?P<attributes>[a-z]{1,8}(?:\.[a-z]{1,8})?))?)",
    re.ASCII,
)


class NvidiaSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What is to be done with NVIDIA's resources."""

    gpu: Name = GPU
    shared: Name = SHARED
    """How the resources are called: a plugin's configuration may rename them."""
    whole: Literal["left", "share"] = "left"
    """`nvidia.com/gpu`: left to the kubelet, or a share of all a GPU's memory and time."""
    replicas: int | None = None
    """`nvidia.com/gpu.shared`: of how many parts of a GPU it is one; None: left to the kubelet."""
    mig: Literal["left", "slices"] = "left"
    """`nvidia.com/mig-1g.10gb`: left to the kubelet, or so many slices of that profile."""
    offered: frozenset[str] | None = None
    """Which MIG resources the cluster's nodes offer; None: not known, so that all are left."""


class NvidiaForeign(WithoutRecord):
    """`nvidia.com/gpu`, `nvidia.com/gpu.shared`, `nvidia.com/mig-1g.5gb` and its kin."""

    name: Final = "nvidia"
    title: Final = "NVIDIA's"

    def __init__(self, settings: NvidiaSettings | None = None) -> None:
        """Take the settings; by default everything is left to the kubelet."""
        self._settings = settings or NvidiaSettings()
        if self._settings.replicas is not None and self._settings.replicas < 1:
            raise ValueError(self._settings.replicas)

        self.resources = (self._settings.gpu, self._settings.shared, MIG)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Return NVIDIA's resources of all containers."""
        found = (each for container in pod.containers for each in self._names(container))
        return tuple(dict.fromkeys(found))

    def stays(self, pod: ForeignPod) -> bool:
        """Is there nothing to translate?"""
        return not any(self._is_translated(each) for each in self.recognises(pod))

    def translate(self, pod: ForeignPod) -> Translation:
        """Translate what the settings say; a container that has none of it is not in the result."""
        found = []
        for container in pod.containers:
            amounts = {name: amount_of(pod, container, name) for name in self._names(container)}
            asked = {name: amount for name, amount in amounts.items() if amount}
            for name in asked:
                self._check_mig(pod, container, name)
            ours = [name for name in asked if self._is_translated(name)]
            if len(asked) > 1 and ours:
                problem = f"it asks for {' and '.join(asked)}, and {ours[0]} is a part of GPUs here"
                hint = "ask for one of them: a container has its part of GPUs by one resource"
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
        problem = f"it asks for {name}, and no node of this cluster offers MIG devices of profile"
        there = ", ".join(sorted(offered)) or "none"
        hint = f"ask for a part of a GPU, or for one of the MIG resources that there are: {there}"
        raise refusal(pod, container.name, f"{problem} {match['profile']}", hint=hint)

    def _request(
        self, pod: ForeignPod, container: ForeignContainer, name: str, count: int
    ) -> Request:
        if count > MAX_DEVICES:
            problem = f"{name} is {count}, more than any node has"
            raise refusal(pod, container.name, problem, hint="ask for as many as a node has")
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
    """Return a profile as NVIDIA writes it; a resource has `.me` for `+me`, and `-me` as it is."""
    match = _MIG.fullmatch(name)
    if match is None:
        return ""
    sign = "+" if match["sign"] == "." else match["sign"] or ""
    return f"{match['shape']}{sign}{match['attributes'] or ''}"
