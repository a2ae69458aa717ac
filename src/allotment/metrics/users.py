# SPDX-License-Identifier: Apache-2.0
"""Metrics of the users of GPUs beside the shares.

The containers that hold them, processes outside of shares by container, and, where asked for, each
process.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
from prometheus_client.core import Metric

HOLDER_LABELS: Final = (
    "node", "gpu", "device", "namespace", "pod", "container", "claim", "share", "mode", "resource",
    "replica",
)  # fmt: skip
OUTSIDE_LABELS: Final = ("node", "gpu", "namespace", "pod", "container")
PROCESS_LABELS: Final = (
    "node", "gpu", "device", "namespace", "pod", "container", "claim", "request", "share", "pid",
)  # fmt: skip
MOST_PROCESSES: Final = 1000
"""The processes of a node that have series: those with the most memory."""

_NS: Final = 1e9


class GpuHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A container that holds a GPU or a part of one. Empty: unknown, or not so."""

    gpu: str
    device: str = ""
    """UUID of the MIG device."""
    namespace: str
    pod: str
    container: str
    claim: str = ""
    share: str = ""
    """Empty: another plugin or driver handed it out."""
    mode: str = ""
    """The share's."""
    resource: str = ""
    """As the kubelet names it; of a claim its driver."""
    replica: str = ""
    """Number of a time-sliced or MPS replica of another plugin."""


class OutsideUse(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one container on a GPU outside of shares. Without a pod: of the host."""

    gpu: str
    namespace: str = ""
    pod: str = ""
    container: str = ""
    """Empty: the pod's status does not name it yet."""
    memory_used: int | None = None
    utilization: float | None = None
    processes: int = 0


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One process on one device, in a share or outside."""

    pid: int
    gpu: str
    device: str = ""
    """UUID of the MIG device."""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    claim: str = ""
    request: str = ""
    share: str = ""
    place: int = 0
    """Position of the device among the share's."""
    memory_used: int | None = None
    utilization: float | None = None
    gpu_ns: int | None = None
    """On all of the share's devices. None for all but the first: it would count twice."""


class UserFigure(NamedTuple):
    """A metric: its name without prefix and `_total`, and a user's value."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    of: Callable[..., float | None]


OUTSIDE_FIGURES: Final = (
    UserFigure("memory_used_bytes", "gauge", "Memory in use by processes outside any share.",
           lambda use: use.memory_used),
    UserFigure("utilization_ratio", "gauge",
           "Part of the last second or so in which their kernels ran.",
           lambda use: use.utilization),
    UserFigure("processes", "gauge", "Processes outside any share.", lambda use: use.processes),
)  # fmt: skip
"""`allotment_outside_NAME`: by GPU and container."""

PROCESS_FIGURES: Final = (
    UserFigure("memory_used_bytes", "gauge", "Memory of a process on a device.",
           lambda use: use.memory_used),
    UserFigure("utilization_ratio", "gauge",
           "Part of the last second or so in which its kernels ran.",
           lambda use: use.utilization),
    UserFigure("gpu_seconds", "counter",
               "Measured GPU time of a process, on all devices of its share.",
           lambda use: None if use.gpu_ns is None else use.gpu_ns / _NS),
)  # fmt: skip
"""`allotment_process_NAME`: where asked for (`allotment.metrics.perProcess`)."""


def of_users(
    node: str,
    *,
    holders: Sequence[GpuHolder],
    outside: Sequence[OutsideUse],
    processes: Sequence[GpuProcess] | None,
    left_out: int,
) -> Iterator[Metric]:
    """Yield the metrics; `processes` None: not asked for."""
    info = Metric(
        "allotment_gpu_pod_info", "Containers that hold a GPU or a part of one; always 1.", "gauge"
    )
    for holder in holders:
        info.add_sample(info.name, _labels(node, holder, HOLDER_LABELS), 1)
    yield info
    yield from _figures("allotment_outside_", OUTSIDE_FIGURES, node, outside, OUTSIDE_LABELS)
    if processes is None:
        return
    yield from _figures("allotment_process_", PROCESS_FIGURES, node, processes, PROCESS_LABELS)
    left = Metric("allotment_use_processes_left_out", "Processes without a series.", "gauge")
    left.add_sample(left.name, {}, left_out)
    yield left


def _figures(
    prefix: str,
    figures: Sequence[UserFigure],
    node: str,
    users: Sequence[OutsideUse] | Sequence[GpuProcess],
    names: Sequence[str],
) -> Iterator[Metric]:
    labels = [_labels(node, user, names) for user in users]
    for figure in figures:
        metric = Metric(prefix + figure.name, figure.help, figure.kind)
        name = metric.name + ("_total" if figure.kind == "counter" else "")
        for user, known in zip(users, labels, strict=True):
            if (value := figure.of(user)) is not None:
                metric.add_sample(name, known, value)
        yield metric


def _labels(
    node: str, user: GpuHolder | OutsideUse | GpuProcess, names: Sequence[str]
) -> dict[str, str]:
    """Return a user's labels; an empty one is left out."""
    values = {name: str(getattr(user, name)) for name in names if name != "node"}
    return {"node": node, **{name: value for name, value in values.items() if value}}
