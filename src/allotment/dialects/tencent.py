# SPDX-License-Identifier: Apache-2.0
"""Tencent's dialect: gpu-manager's `tencent.com/vcuda-core` and `tencent.com/vcuda-memory`.

    resources: {limits: {tencent.com/vcuda-core: 50, tencent.com/vcuda-memory: 30}}

Cores are percent of a GPU: less than 100 is a part of one, a multiple of 100 that many whole cards.
Memory is a number of 256 MiB, and means nothing to whole cards. The cores are fixed unless the
annotation `tencent.com/vcuda-core-limit` lets all parts of the pod have more while others leave it.
(gpu-manager `README.md` and `pkg/services/virtual-manager`; gpu-admission `pkg/util`.)
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.dialects.foreign import (
    ForeignContainer,
    ForeignPod,
    NodeView,
    Translated,
    Translation,
)
from allotment.dialects.foreign_amounts import (
    GIB,
    MAX_DEVICES,
    MIB,
    Name,
    amount_of,
    bytes_of,
    compute_of,
    index_list,
    is_asked,
    number_of,
    of_earlier_placement,
    regular_containers,
    uuids_by_container,
    whole_cards,
)
from allotment.dialects.protocol import refusal
from allotment.dialects.quantities import keys_of
from allotment.model.clusters import PodBooking
from allotment.model.compute import Compute
from allotment.model.formats import format_count
from allotment.model.requests import Request

__all__ = ["RECEIPTS", "TencentDialect", "TencentSettings"]

INDEX_PREFIX: Final = "tencent.com/predicate-gpu-idx-"
NODE: Final = "tencent.com/predicate-node"
TIME: Final = "tencent.com/predicate-time"
ASSIGNED: Final = "tencent.com/gpu-assigned"
RECEIPTS: Final = (NODE, TIME, ASSIGNED)
"""What that system writes on a pod beside `INDEX_PREFIX` and a container's place."""

_CARD: Final = 100
"""Cores of one GPU."""


class TencentSettings(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """What a cluster may have set otherwise."""

    core: Name = "tencent.com/vcuda-core"
    memory: Name = "tencent.com/vcuda-memory"
    limit: Name = "tencent.com/vcuda-core-limit"
    """The annotation with the ceiling."""
    memory_block_bytes: Annotated[int, Meta(ge=1, le=GIB)] = 256 * MIB
    """Bytes in one `memory`."""


class TencentDialect:
    """`tencent.com/vcuda-core` and what goes with it."""

    name: Final = "tencent"
    title: Final = "Tencent's"
    records: Final = (f"{INDEX_PREFIX}*",)

    def __init__(self, settings: TencentSettings | None = None) -> None:
        """Take what is configurable."""
        self.settings = settings or TencentSettings()

    @property
    def resources(self) -> tuple[str, ...]:
        """Return the resources by which it is recognised."""
        return (self.settings.core, self.settings.memory)

    @property
    def annotations(self) -> tuple[str, ...]:
        """Return the annotations that it reads."""
        return (self.settings.limit,)

    def recognises(self, pod: ForeignPod) -> tuple[str, ...]:
        """Go by the resources: without them the annotation asks for nothing."""
        return tuple(name for name in self.resources if is_asked(pod, name))

    def translate(self, pod: ForeignPod) -> Translation:
        """Tell parts from whole cards. Raises `UsageError`."""
        ceiling = self._ceiling(pod)
        containers: list[Translated] = []
        has_whole = False
        for container in pod.containers:
            core = amount_of(pod, container, self.settings.core)
            memory = amount_of(pod, container, self.settings.memory)
            if not core and not memory:
                continue
            if core >= _CARD:
                has_whole = True
                request = whole_cards(cards_of(pod, container, self.settings.core, core))
            else:
                request = self._part(pod, container, core, memory=memory, ceiling=ceiling)
            removes = keys_of(container, self.resources)
            containers.append(
                Translated(container=container.name, request=request, removes=removes)
            )
        passed_over = []
        if has_whole and ceiling is not None:
            text = f"{self.settings.limit}: whole cards have no ceiling, there is nobody beside"
            passed_over.append(text)
        passed_over += of_earlier_placement(filter(is_receipt, sorted(pod.annotations)))
        return Translation(
            dialect=self.name, containers=tuple(containers), passed_over=tuple(passed_over)
        )

    def _ceiling(self, pod: ForeignPod) -> int | None:
        """Return percent of a GPU; None: it is not said. More than a card is a card."""
        text = pod.annotations.get(self.settings.limit)
        if text is None:
            return None
        ceiling = number_of(pod, None, f"the annotation {self.settings.limit}", text)
        if ceiling == 0:
            problem = f"the annotation {self.settings.limit} is 0: nothing would ever run"
            raise refusal(pod, None, problem, hint="write percent of a GPU, like 50, or remove it")
        return min(ceiling, _CARD)

    def _part(
        self,
        pod: ForeignPod,
        container: ForeignContainer,
        core: int,
        *,
        memory: int,
        ceiling: int | None,
    ) -> Request:
        names = self.settings
        if not core or not memory:
            there, missing = (names.core, names.memory) if core else (names.memory, names.core)
            problem = f"it asks for {there} without {missing}, which is no part of a GPU"
            hint = f"add {missing}, or ask for whole cards: {names.core}: 100"
            raise refusal(pod, container.name, problem, hint=hint)
        if ceiling is not None and ceiling < core:
            problem = f"{names.core} is {core}, more than the annotation {names.limit} ({ceiling})"
            hint = f"raise the annotation to {core} at least: it is a ceiling"
            raise refusal(pod, container.name, problem, hint=hint)
        block = names.memory_block_bytes
        size = bytes_of(pod, container.name, names.memory, memory, unit=block)
        return Request(size, compute=percent_compute(core, core if ceiling is None else ceiling))

    def receipt(
        self, pod: ForeignPod, booking: PodBooking, node: NodeView, *, now: float
    ) -> Mapping[str, str]:
        """Write which GPUs each container has, by its place among the regular ones."""
        placed = {each.name: each.devices for each in booking.containers}
        written = {
            f"{INDEX_PREFIX}{place}": indexes
            for place, container in enumerate(regular_containers(pod))
            if (indexes := index_list(placed.get(container.name, ()), node))
        }
        if not written:
            return {}
        time = str(int(now * 1e9))
        return {**written, NODE: booking.node, TIME: time, ASSIGNED: "true"}

    def given(self, pod: ForeignPod, node: NodeView) -> Mapping[str, Sequence[str]]:
        """Read which GPUs each container has, by its place among the regular ones."""
        places = enumerate(regular_containers(pod))
        keys = {f"{INDEX_PREFIX}{place}": each.name for place, each in places}
        return uuids_by_container(pod, keys, node=node)


def cards_of(pod: ForeignPod, container: ForeignContainer, name: str, core: int) -> int:
    """Return how many whole cards so many cores are. Raises `UsageError`."""
    cards, rest = divmod(core, _CARD)
    if rest:
        low, high = cards * _CARD, (cards + 1) * _CARD
        problem = f"{name} is {core}: above {_CARD} it is a number of whole cards"
        raise refusal(pod, container.name, problem, hint=f"write {low} or {high}")
    if cards > MAX_DEVICES:
        problem = f"{name} is {core}, {format_count(cards, 'GPU')} of one node"
        raise refusal(pod, container.name, problem, hint=f"{_CARD} is one GPU")
    return cards


def percent_compute(guarantee: int, ceiling: int) -> Compute:
    """Return the compute for percent of a GPU."""
    return compute_of(Fraction(guarantee, _CARD), Fraction(ceiling, _CARD))


def is_receipt(name: str) -> bool:
    """Is it an annotation that gpu-admission or gpu-manager writes?"""
    return name in RECEIPTS or name.startswith(INDEX_PREFIX)
