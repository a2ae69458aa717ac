# SPDX-License-Identifier: Apache-2.0
"""The dialect of Tencent's qGPU, and that of elastic-gpu, which has the same shape.

    resources: {limits: {tke.cloud.tencent.com/qgpu-core: 30, tke.cloud.tencent.com/qgpu-memory: 5}}

Memory is a number of GiB, cores are percent of a GPU; 100 and its multiples are whole cards. What
a part may have beyond its cores is a label of qGPU's nodes, of which a pod says nothing: a setting
here. Pods of class `online` go first, those of class `offline` have what all others leave.
elastic-gpu counts memory in MiB, and knows no classes. (TKE, "Using qGPU" and "Using qGPU
Online/Offline Hybrid Deployment"; elastic-gpu `pkg/utils`.)
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    NodeView,
    Translated,
    Translation,
    WithoutReceipt,
)
from allotment.dialects.foreign_amounts import (
    GIB,
    MIB,
    Name,
    amount_of,
    bytes_of,
    index_list,
    is_asked,
    of_earlier_placement,
    regular_containers,
    uuids_by_container,
    whole_cards,
)
from allotment.dialects.protocol import meant, refusal, shown
from allotment.dialects.quantities import keys_of
from allotment.dialects.tencent import cards_of, percent_compute
from allotment.model.clusters import PodBooking
from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request

__all__ = ["ElasticGpuDialect", "ElasticGpuSettings", "QgpuDialect", "QgpuSettings"]

CLASS: Final = "tke.cloud.tencent.com/app-class"
_ONLINE: Final = "online"
_OFFLINE: Final = "offline"
_CLASSES = (_ONLINE, _OFFLINE)

ASSUMED: Final = "elasticgpu.io/assumed"
CONTAINER_PREFIX: Final = "elasticgpu.io/container-"
_MOST_NAME: Final = 63 - len("container-")
"""Kubernetes takes 63 characters after the slash of a key, and refuses the binding else."""

_CARD: Final = 100
_FIXED, _BURST, _BEST_EFFORT = "fixed-share", "burst-share", "best-effort"
_POLICIES = (_BEST_EFFORT, _FIXED, _BURST)


class QgpuSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    core: Name = "tke.cloud.tencent.com/qgpu-core"
    memory: Name = "tke.cloud.tencent.com/qgpu-memory"
    greedy: Name = "tke.cloud.tencent.com/qgpu-core-greedy"
    policy: str = _BURST
    """What cores mean: `fixed-share` (so much, and no more), `burst-share` (so much, and what
    others leave), `best-effort` (nothing guaranteed, nothing limited; qGPU's own default)."""

    def __post_init__(self) -> None:
        """Raise `UsageError` for a word that is not known."""
        if self.policy not in _POLICIES:
            message = f"qgpu.policy is {shown(self.policy)}{meant(self.policy, _POLICIES)}"
            raise UsageError(message, hint=f"write one of: {', '.join(_POLICIES)}")


class QgpuDialect(WithoutReceipt):
    """`tke.cloud.tencent.com/qgpu-memory` and what goes with it."""

    name: Final = "qgpu"
    title: Final = "qGPU's"

    def __init__(self, settings: QgpuSettings | None = None) -> None:
        """Take what is configurable."""
        self.settings = settings or QgpuSettings()

    @property
    def resources(self) -> tuple[str, ...]:
        """Return the resources by which it is recognised."""
        return (self.settings.core, self.settings.memory, self.settings.greedy)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Return the annotations that it reads."""
        return (CLASS,)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Go by the resources: without them the annotation asks for nothing."""
        return tuple(name for name in self.resources if is_asked(pod, name))

    def translate(self, pod: ForeignPod) -> Translation:
        """Tell parts from whole cards, and classes from one another. Raises `UsageError`."""
        word = pod.annotations.get(CLASS)
        if word is not None and word not in _CLASSES:
            problem = f"the annotation {CLASS} is {shown(word)}{meant(word, _CLASSES)}"
            hint = f"write one of: {', '.join(_CLASSES)}; or remove it"
            raise refusal(pod, None, problem, hint=hint)
        containers: list[Translated] = []
        passed_over: list[str] = []
        for container in pod.containers:
            core = amount_of(pod, container, self.settings.core)
            memory = amount_of(pod, container, self.settings.memory)
            greedy = amount_of(pod, container, self.settings.greedy)
            if not core and not memory and not greedy:
                continue
            self._check_class(pod, container, word, core=core, greedy=greedy)
            if core >= _CARD:
                request = whole_cards(cards_of(pod, container, self.settings.core, core))
                if memory:
                    text = f"{self.settings.memory} of container {container.name!r}: whole cards"
                    passed_over.append(f"{text} have all of their memory")
            else:
                size = self._memory(pod, container, memory)
                request = Request(size, compute=self._compute(core, word, greedy=greedy))
            removes = keys_of(container, self.resources)
            containers.append(
                Translated(container=container.name, request=request, removes=removes)
            )
        return Translation(
            dialect=self.name, containers=tuple(containers), passed_over=tuple(passed_over)
        )

    def _check_class(
        self,
        pod: ForeignPod,
        container: ForeignContainer,
        word: str | None,
        *,
        core: int,
        greedy: int,
    ) -> None:
        names = self.settings
        if greedy > _CARD:
            problem = f"{names.greedy} is {greedy}: pods of class {_OFFLINE} have one GPU"
            raise refusal(pod, container.name, problem, hint=f"ask for at most {_CARD}")
        if greedy and (core or word == _ONLINE):
            other = names.core if core else f"class {_ONLINE}"
            problem = f"it asks for {names.greedy}, which is of class {_OFFLINE}, and {other}"
            raise refusal(pod, container.name, problem, hint="keep one of them")
        if core and word is not None:
            problem = f"it asks for {names.core}, and its class is {word}"
            hint = f"remove the annotation {CLASS}"
            if word == _OFFLINE:
                hint += f", or ask for {names.greedy} instead"
            raise refusal(pod, container.name, problem, hint=hint)

    def _memory(self, pod: ForeignPod, container: ForeignContainer, memory: int) -> MemoryAmount:
        if not memory:
            problem = f"it asks for a part of a GPU without {self.settings.memory}"
            hint = f"add {self.settings.memory}, in GiB, or ask for whole cards: 100 cores each"
            raise refusal(pod, container.name, problem, hint=hint)
        return bytes_of(pod, container.name, self.settings.memory, memory, unit=GIB)

    def _compute(self, core: int, word: str | None, *, greedy: int) -> Compute:
        """Give offline pods what is left, each in the proportion that it asks for."""
        if greedy or word == _OFFLINE:
            kind = ComputeClass.BESTEFFORT
            return Compute(weight=greedy or _CARD, kind=kind, is_governed=True)
        if word == _ONLINE:
            return Compute(kind=ComputeClass.LATENCY, is_governed=True)
        if not core or self.settings.policy == _BEST_EFFORT:
            return Compute(is_governed=True)
        return percent_compute(core, core if self.settings.policy == _FIXED else _CARD)

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Refuse a pod that runs by qGPU: on which GPU it is cannot be read."""
        del node
        problem = "it runs by qGPU, which does not say on which GPU"
        hint = "end it before the node is taken over, or let it end there"
        raise refusal(pod, None, problem, hint=hint)


class ElasticGpuSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise: its code has other names than its documents."""

    core: Name = "elasticgpu.io/gpu-core"
    memory: Name = "elasticgpu.io/gpu-memory"
    """A number of MiB."""


class ElasticGpuDialect:
    """`elasticgpu.io/gpu-memory` for parts, `elasticgpu.io/gpu-core` for whole cards, or both."""

    name: Final = "elastic-gpu"
    title: Final = "elastic-gpu's"
    records: Final = (f"{CONTAINER_PREFIX}*",)

    def __init__(self, settings: ElasticGpuSettings | None = None) -> None:
        """Take what is configurable."""
        self.settings = settings or ElasticGpuSettings()

    @property
    def resources(self) -> tuple[str, ...]:
        """Return the resources by which it is recognised."""
        return (self.settings.core, self.settings.memory)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Go by the resources."""
        return tuple(name for name in self.resources if is_asked(pod, name))

    def translate(self, pod: ForeignPod) -> Translation:
        """Tell parts from whole cards. Raises `UsageError`."""
        containers: list[Translated] = []
        for container in pod.containers:
            core = amount_of(pod, container, self.settings.core)
            memory = amount_of(pod, container, self.settings.memory)
            if not core and not memory:
                continue
            if core >= _CARD:
                request = whole_cards(cards_of(pod, container, self.settings.core, core))
            elif not memory:
                problem = f"{self.settings.core} is {core}, and of how much memory is not said"
                hint = f"add {self.settings.memory}, in MiB: a part has a limit of memory"
                raise refusal(pod, container.name, problem, hint=hint)
            else:
                size = bytes_of(pod, container.name, self.settings.memory, memory, unit=MIB)
                compute = percent_compute(core, core) if core else Compute()
                request = Request(size, compute=compute)
            removes = keys_of(container, self.resources)
            containers.append(
                Translated(container=container.name, request=request, removes=removes)
            )
        return Translation(
            dialect=self.name,
            containers=tuple(containers),
            passed_over=of_earlier_placement(filter(_is_elastic_receipt, sorted(pod.annotations))),
        )

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write which GPUs each container has, by its name, where that leaves room for a key."""
        del pod, now
        written = {
            f"{CONTAINER_PREFIX}{each.name}": indexes
            for each in booking.containers
            if len(each.name) <= _MOST_NAME and (indexes := index_list(each.devices, node))
        }
        return {**written, ASSUMED: "true"} if written else {}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read which GPUs each container has, by its name."""
        keys = {f"{CONTAINER_PREFIX}{each.name}": each.name for each in regular_containers(pod)}
        return uuids_by_container(pod, keys, node=node)


def _is_elastic_receipt(name: str) -> bool:
    return name == ASSUMED or name.startswith(CONTAINER_PREFIX)
