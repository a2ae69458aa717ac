# SPDX-License-Identifier: Apache-2.0
"""What a burn is asked to do, as a value that travels unchanged to each of its processes."""

from __future__ import annotations

from dataclasses import dataclass

from allotment.model.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnPlan:
    """The work of each process of a burn; all sizes in bytes, of one process.

    `memory_fraction` (0 to 1) is of what the driver calls the device's memory, and counts where
    `memory_bytes` is 0. `kernel_ns` 0 runs no kernels: the memory is held for `seconds`.
    `graph_nodes` 0 launches kernels one by one, else graphs of that many kernels in a row.
    `launches` above 0 ends after that many, however long they take; else `seconds` does.
    `rate` above 0 launches so often a second, as requests come to a service; else each launch
    follows the end of the one before.
    """

    memory_bytes: int = 0
    memory_fraction: float = 0.0
    chunk_bytes: int = 64 << 20
    api: str = "plain"
    touch: bool = False
    kernel_ns: int = 2_000_000
    graph_nodes: int = 0
    streams: int = 1
    processes: int = 1
    seconds: float = 5.0
    launches: int = 0
    rate: float = 0.0
    device: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.touch and self.api == "array":
            raise UsageError("arrays have no address to write to", hint="leave out --touch")
        if self.graph_nodes and not self.kernel_ns:
            raise UsageError("a graph needs kernels", hint="leave out --kernel 0 or --graph")
        if (self.launches or self.rate) and not self.kernel_ns:
            raise UsageError(
                "launches need kernels", hint="leave out --kernel 0, or --launches and --rate"
            )
        if self.rate and self.streams > 1:
            raise UsageError(
                "requests are answered one after the other", hint="leave out --streams or --rate"
            )

    @property
    def kernels_per_launch(self) -> int:
        """Tell how many kernels one launch runs."""
        return max(1, self.graph_nodes)
