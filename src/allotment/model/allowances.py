# SPDX-License-Identifier: Apache-2.0
"""An allowance: what one user of a machine gets without asking, and the most that it may have.

Ceilings of memory and of guaranteed compute count all shares of the user on a GPU together; the
others are of one share. Percent are of the whole GPU, also for its MIG slices.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from allotment.model.compute import Compute, ComputeClass, revised
from allotment.model.formats import format_percent, need_and_have
from allotment.model.quantities import MemoryAmount

_URGENCY: Final = tuple(reversed(ComputeClass))
_NONE: Final = "none"


class GpuAmounts(msgspec.Struct, frozen=True):
    """A user's part of one GPU: bytes, and basis points of its time."""

    memory_bytes: int = 0
    guarantee: int = 0

    def __add__(self, other: "GpuAmounts") -> "GpuAmounts":
        return GpuAmounts(self.memory_bytes + other.memory_bytes, self.guarantee + other.guarantee)


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What a user gets and may have. None: nothing is set."""

    uid: int
    user: str
    """For messages: `alice (uid 1000)`."""
    memory: MemoryAmount | None = None
    """Of a share that does not say how much."""
    compute: Compute | None = None
    kind: ComputeClass | None = None
    weight: int | None = None
    most_memory: MemoryAmount | None = None
    most_compute: Compute | None = None
    """Its guarantee is of all shares on a GPU together, its ceiling of each share."""
    most_class: ComputeClass | None = None
    most_gpus: int | None = None
    """Of one share."""
    most_shares: int | None = None
    may_oversubscribe: bool = True
    places: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Where each value was set, by its name here: `FILE, line 7: users.alice.ceilings.memory`."""

    def place_of(self, name: str) -> str:
        return self.places.get(name, "the machine's configuration")

    @property
    def has_ceilings(self) -> bool:
        return str(self) != _NONE

    def filled(
        self, compute: Compute | None, kind: ComputeClass | None, weight: int | None
    ) -> Compute:
        """Return the compute of a share in turns: as asked for, else what the user gets.

        What was not asked for is lowered to the ceilings without a word.
        """
        given = Compute()
        most = self.most_compute
        if self.compute is not None and compute is None:
            given = revised(given, compute=self.compute)
        if most is not None and compute is None and given.ceiling > most.ceiling:
            lower = Compute(min(given.guarantee, most.guarantee), most.ceiling)
            given = revised(given, compute=lower)
        if self.kind is not None and kind is None:
            given = revised(given, kind=self.kind)
        if self.most_class is not None and kind is None and self._is_above(given.kind):
            given = revised(given, kind=self.most_class)
        if self.weight is not None and weight is None:
            given = revised(given, weight=self.weight)
        return revised(given, compute=compute, kind=kind, weight=weight)

    def beyond_one_share(
        self, compute: Compute, *, count: int, may_oversubscribe: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield what one share may never have: its sentence, and the ceiling's name."""
        if self.most_gpus is not None and count > self.most_gpus:
            yield f"need {count} GPUs in a share, may have {self.most_gpus}", "most_gpus"
        if may_oversubscribe and not self.may_oversubscribe:
            yield "need host memory in place of GPU memory, may not have it", "may_oversubscribe"
        if self._is_above(compute.kind):
            yield f"need class {compute.kind}, may have {self.most_class}", "most_class"
        most = self.most_compute
        if most is not None and compute.ceiling > most.ceiling:
            need, have = format_percent(compute.ceiling), format_percent(most.ceiling)
            yield f"need a ceiling of {need} % of compute, may have {have} %", "most_compute"

    def beyond_on_gpu(
        self, asked: GpuAmounts, used: GpuAmounts, whole_bytes: int
    ) -> Iterator[tuple[str, str]]:
        """Yield what the user may not have on one GPU beside what it has there.

        Each with its sentence and the ceiling's name. What is not asked for is not refused.
        """
        total = asked + used
        if self.most_memory is not None and asked.memory_bytes:
            have_bytes = self.most_memory.of(whole_bytes)
            if total.memory_bytes > have_bytes:
                yield need_and_have(total.memory_bytes, have_bytes), "most_memory"
        most = self.most_compute
        if most is not None and asked.guarantee and total.guarantee > most.guarantee:
            need, have = format_percent(total.guarantee), format_percent(most.guarantee)
            yield f"need {need} % of guaranteed compute, may have {have} %", "most_compute"

    def _is_above(self, kind: ComputeClass) -> bool:
        most = self.most_class
        return most is not None and _URGENCY.index(kind) > _URGENCY.index(most)

    def __str__(self) -> str:
        """Return the ceilings in one line."""
        words = []
        if self.most_memory is not None:
            words.append(f"memory {self.most_memory} of each GPU")
        if self.most_compute is not None:
            words.append(f"compute {self.most_compute}")
        if self.most_class is not None:
            words.append(f"class {self.most_class}")
        if self.most_gpus is not None:
            words.append(f"GPUs of a share {self.most_gpus}")
        if self.most_shares is not None:
            words.append(f"shares {self.most_shares}")
        if not self.may_oversubscribe:
            words.append("no oversubscription")
        return ", ".join(words) or _NONE
