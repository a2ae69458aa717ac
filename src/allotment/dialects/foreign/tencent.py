# SPDX-License-Identifier: Apache-2.0
"""Tencent's dialects: gpu-manager, qGPU, and elastic-gpu, which is like qGPU.

    resources: {limits: {tencent.com/vcuda-core: 50, tencent.com/vcuda-memory: 30}}
    resources: {limits: {tke.cloud.tencent.com/qgpu-core: 30, tke.cloud.tencent.com/qgpu-memory: 5}}

Cores are percent of a GPU; multiples of 100 are whole cards. Memory is in units of 256 MiB, GiB, or
MiB. (gpu-manager `README.md` and `pkg/services/virtual-manager`; gpu-admission `pkg/util`; TKE,
"Using qGPU" and "Using qGPU Online/Offline Hybrid Deployment"; elastic-gpu `pkg/utils`.)
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from allotment.dialects.foreign.base import (
    ForeignDialect,
    NodeView,
    Translation,
    index_list,
    unproven,
    uuids_by_container,
)
from allotment.dialects.foreign.parsing import (
    GIB,
    MIB,
    Name,
    amount_of,
    bytes_of,
    check_count,
    compute_of,
    number_of,
    of_earlier_placement,
    regular_containers,
    whole_cards,
    word_of,
)
from allotment.dialects.own.protocol import refusal
from allotment.model.clusters import PodBooking
from allotment.model.compute import Compute, ComputeClass
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.requests import Request

_CARD: Final = 100
"""Cores of one GPU."""


def _cards(pod: ForeignPod, container: ForeignContainer, name: str, core: int) -> Request:
    """The request of a container with at least the cores of one GPU."""
    cards, rest = divmod(core, _CARD)
    if rest:
        low, high = cards * _CARD, (cards + 1) * _CARD
        problem = f"{name} is {core}: above {_CARD} it counts whole cards"
        raise refusal(pod, container.name, problem, hint=f"write {low} or {high}")
    check_count(pod, container.name, f"{name}: {core}", cards)
    return whole_cards(cards)


def _percent(guarantee: int, ceiling: int) -> Compute:
    return compute_of(Fraction(guarantee, _CARD), Fraction(ceiling, _CARD))


# ---- gpu-manager ---------------------------------------------------------------------------------

INDEX_PREFIX: Final = "tencent.com/predicate-gpu-idx-"
NODE: Final = "tencent.com/predicate-node"
TIME: Final = "tencent.com/predicate-time"
ASSIGNED: Final = "tencent.com/gpu-assigned"
RESULTS: Final = (NODE, TIME, ASSIGNED)
"""Annotations that Tencent writes on a pod, besides `INDEX_PREFIX` plus a container's position."""


class TencentSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    core: Name = "tencent.com/vcuda-core"
    memory: Name = "tencent.com/vcuda-memory"
    limit: Name = "tencent.com/vcuda-core-limit"
    """The annotation with the ceiling."""
    memory_block_bytes: Annotated[int, Meta(ge=1, le=GIB)] = 256 * MIB
    """Bytes in one `memory`."""


class TencentDialect(ForeignDialect):
    """Cores are a ceiling too, unless an annotation raises it. Whole cards ignore memory."""

    name = "tencent"
    title = "Tencent's"
    settings_type = TencentSettings
    records = (f"{INDEX_PREFIX}*", NODE)
    result_keys = (f"{INDEX_PREFIX}*", *RESULTS)

    def __init__(self, settings: TencentSettings | None = None) -> None:
        self._settings = settings or TencentSettings()
        self.resources = (self._settings.core, self._settings.memory)
        self.annotations = (self._settings.limit,)

    def translate(self, pod: ForeignPod) -> Translation:
        ceiling = self._ceiling(pod)
        requests: dict[str, Request] = {}
        notes = []
        for container in pod.containers:
            core = amount_of(pod, container, self._settings.core)
            memory = amount_of(pod, container, self._settings.memory)
            if core >= _CARD:
                requests[container.name] = _cards(pod, container, self._settings.core, core)
                if ceiling is not None:
                    notes.append(f"{self._settings.limit}: ignored, whole cards have no ceiling")
            elif core or memory:
                requests[container.name] = self._part(pod, container, core, memory, ceiling)
        notes += of_earlier_placement(filter(is_result, sorted(pod.annotations)))
        return self.translation(pod, requests, notes=notes)

    def _ceiling(self, pod: ForeignPod) -> int | None:
        """Percent of a GPU, at most one card; None: not set."""
        text = pod.annotations.get(self._settings.limit)
        if text is None:
            return None
        ceiling = number_of(pod, None, f"the annotation {self._settings.limit}", text)
        if ceiling == 0:
            problem = f"the annotation {self._settings.limit} is 0: the pod could never run"
            raise refusal(pod, None, problem, hint="write percent of a GPU, like 50, or remove it")
        return min(ceiling, _CARD)

    def _part(
        self,
        pod: ForeignPod,
        container: ForeignContainer,
        core: int,
        memory: int,
        ceiling: int | None,
    ) -> Request:
        names = self._settings
        if not core or not memory:
            present, missing = (names.core, names.memory) if core else (names.memory, names.core)
            problem = f"it asks for {present} without {missing}: a part of a GPU needs both"
            hint = f"add {missing}, or ask for whole cards: {names.core}: 100"
            raise refusal(pod, container.name, problem, hint=hint)
        if ceiling is not None and ceiling < core:
            problem = f"{names.core} is {core}, more than the annotation {names.limit} ({ceiling})"
            hint = f"raise the annotation to at least {core}: it is a ceiling"
            raise refusal(pod, container.name, problem, hint=hint)
        block = names.memory_block_bytes
        size = bytes_of(pod, container.name, names.memory, memory, unit=block)
        return Request(size, compute=_percent(core, core if ceiling is None else ceiling))

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        devices = {container.name: container.devices for container in booking.containers}
        indexes = {
            f"{INDEX_PREFIX}{place}": text
            for place, container in enumerate(regular_containers(pod))
            if (text := index_list(devices.get(container.name, ()), node))
        }
        if not indexes:
            return {}
        return {**indexes, NODE: booking.node, TIME: str(int(now * 1e9)), ASSIGNED: "true"}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        if pod.annotations.get(NODE, pod.node) != pod.node:
            return {}  # the record was copied from another pod
        containers = enumerate(regular_containers(pod))
        keys = {f"{INDEX_PREFIX}{place}": container.name for place, container in containers}
        return uuids_by_container(pod, keys, node=node)


def is_result(name: str) -> bool:
    return name in RESULTS or name.startswith(INDEX_PREFIX)


# ---- qGPU ----------------------------------------------------------------------------------------

CLASS: Final = "tke.cloud.tencent.com/app-class"
_ONLINE: Final = "online"
_OFFLINE: Final = "offline"


class QgpuSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings."""

    core: Name = "tke.cloud.tencent.com/qgpu-core"
    memory: Name = "tke.cloud.tencent.com/qgpu-memory"
    greedy: Name = "tke.cloud.tencent.com/qgpu-core-greedy"
    policy: Literal["best-effort", "fixed-share", "burst-share"] = "burst-share"
    """Meaning of cores: `fixed-share` (guarantee and ceiling), `burst-share` (guarantee, no
    ceiling), `best-effort` (neither; qGPU's default)."""


class QgpuDialect(ForeignDialect):
    """`online` pods go first, `offline` pods use spare time."""

    name = "qgpu"
    title = "qGPU's"
    settings_type = QgpuSettings
    annotations = (CLASS,)

    def __init__(self, settings: QgpuSettings | None = None) -> None:
        self._settings = settings or QgpuSettings()
        self.resources = (self._settings.core, self._settings.memory, self._settings.greedy)

    def translate(self, pod: ForeignPod) -> Translation:
        text = pod.annotations.get(CLASS)
        word = "" if text is None else word_of(pod, CLASS, text, (_ONLINE, _OFFLINE))
        requests: dict[str, Request] = {}
        notes = []
        for container in pod.containers:
            core, memory, greedy = (amount_of(pod, container, name) for name in self.resources)
            if not core and not memory and not greedy:
                continue
            self._check_class(pod, container, word, core=core, greedy=greedy)
            if core >= _CARD:
                requests[container.name] = _cards(pod, container, self._settings.core, core)
                if memory:
                    resource = f"{self._settings.memory} of container {container.name!r}"
                    notes.append(f"{resource}: ignored, whole cards include all of their memory")
                continue
            if not memory:
                problem = f"it asks for a part of a GPU without {self._settings.memory}"
                hint = f"add {self._settings.memory}, in GiB, or ask for whole cards: 100 cores"
                raise refusal(pod, container.name, problem, hint=f"{hint} each")
            size = bytes_of(pod, container.name, self._settings.memory, memory, unit=GIB)
            compute = self._compute(core, word, greedy=greedy)
            requests[container.name] = Request(size, compute=compute)
        return self.translation(pod, requests, notes=notes)

    def _check_class(
        self, pod: ForeignPod, container: ForeignContainer, word: str, *, core: int, greedy: int
    ) -> None:
        names = self._settings
        if greedy > _CARD:
            problem = f"{names.greedy} is {greedy}: pods of class {_OFFLINE} get one GPU"
            raise refusal(pod, container.name, problem, hint=f"ask for at most {_CARD}")
        if greedy and (core or word == _ONLINE):
            other = names.core if core else f"class {_ONLINE}"
            problem = f"it asks for {names.greedy}, which is of class {_OFFLINE}, and {other}"
            raise refusal(pod, container.name, problem, hint="keep one of them")
        if core and word:
            problem = f"it asks for {names.core}, but its class is {word}"
            hint = f"remove the annotation {CLASS}"
            if word == _OFFLINE:
                hint += f", or ask for {names.greedy} instead"
            raise refusal(pod, container.name, problem, hint=hint)

    def _compute(self, core: int, word: str, *, greedy: int) -> Compute:
        """Offline pods get spare time in proportion to their request."""
        if greedy or word == _OFFLINE:
            kind = ComputeClass.BESTEFFORT
            return Compute(weight=greedy or _CARD, kind=kind, is_governed=True)
        if word == _ONLINE:
            return Compute(kind=ComputeClass.LATENCY, is_governed=True)
        if not core or self._settings.policy == "best-effort":
            return Compute(is_governed=True)
        return _percent(core, core if self._settings.policy == "fixed-share" else _CARD)

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        del node
        raise unproven(pod, "qGPU runs it and does not record its GPU")


# ---- elastic-gpu ---------------------------------------------------------------------------------

ASSUMED: Final = "elasticgpu.io/assumed"
CONTAINER_PREFIX: Final = "elasticgpu.io/container-"
_MOST_NAME: Final = 63 - len("container-")
"""Kubernetes allows 63 characters after the slash of a key; a longer key fails the binding."""


class ElasticGpuSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Cluster settings: names in its code differ from its documentation."""

    core: Name = "elasticgpu.io/gpu-core"
    memory: Name = "elasticgpu.io/gpu-memory"
    """A number of MiB."""


class ElasticGpuDialect(ForeignDialect):
    """`elasticgpu.io/gpu-memory` for parts, `elasticgpu.io/gpu-core` for whole cards, or both."""

    name = "elastic-gpu"
    title = "elastic-gpu's"
    settings_type = ElasticGpuSettings
    records = (f"{CONTAINER_PREFIX}*",)
    result_keys = (f"{CONTAINER_PREFIX}*", ASSUMED)

    def __init__(self, settings: ElasticGpuSettings | None = None) -> None:
        self._settings = settings or ElasticGpuSettings()
        self.resources = (self._settings.core, self._settings.memory)

    def translate(self, pod: ForeignPod) -> Translation:
        requests: dict[str, Request] = {}
        for container in pod.containers:
            core, memory = (amount_of(pod, container, name) for name in self.resources)
            if core >= _CARD:
                requests[container.name] = _cards(pod, container, self._settings.core, core)
            elif memory:
                size = bytes_of(pod, container.name, self._settings.memory, memory, unit=MIB)
                compute = _percent(core, core) if core else Compute()
                requests[container.name] = Request(size, compute=compute)
            elif core:
                problem = f"{self._settings.core} is {core}, without an amount of memory"
                hint = f"add {self._settings.memory}, in MiB: a share needs a memory limit"
                raise refusal(pod, container.name, problem, hint=hint)
        records = filter(_is_elastic_result, sorted(pod.annotations))
        return self.translation(pod, requests, notes=of_earlier_placement(records))

    def result_annotations(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """The GPUs of each container, by name, if the key is short enough."""
        del pod, now
        indexes = {
            f"{CONTAINER_PREFIX}{container.name}": text
            for container in booking.containers
            if len(container.name) <= _MOST_NAME and (text := index_list(container.devices, node))
        }
        return {**indexes, ASSUMED: "true"} if indexes else {}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        containers = regular_containers(pod)
        keys = {f"{CONTAINER_PREFIX}{container.name}": container.name for container in containers}
        return uuids_by_container(pod, keys, node=node)


def _is_elastic_result(name: str) -> bool:
    return name == ASSUMED or name.startswith(CONTAINER_PREFIX)
