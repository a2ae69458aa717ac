# SPDX-License-Identifier: Apache-2.0
"""Metrics of use: what each share and each GPU of the node uses, read once for each scrape.

`docs/designs/watch.md` has the reasons for names, labels and bounds.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal, TypeVar

import msgspec
from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from allotment.metrics.users import GpuHolder, GpuProcess, OutsideUse, of_users
from allotment.model.structs import replace

SHARE_LABELS: Final = (
    "node", "namespace", "pod", "container", "claim", "request", "share", "gpu", "device", "mode",
    "class",
)  # fmt: skip
GPU_LABELS: Final = ("node", "gpu")

_NS: Final = 1e9


class ShareUse(msgspec.Struct, frozen=True, kw_only=True):
    """One share's use of one device. None: not measured, or not of this kind of share.

    Counts are since the share's creation, except `lent_ns`: since the agent's start.
    """

    namespace: str = ""
    pod: str = ""
    """Empty for a share of `allot run`, and for a claim that was not made for one pod alone."""
    container: str = ""
    claim: str = ""
    """The ResourceClaim that it is for."""
    request: str = ""
    """The claim's."""
    share: str
    gpu: str
    """UUID of the whole GPU."""
    device: str
    """UUID of the MIG device, or of the GPU. A label for a MIG device alone."""
    gpu_index: int = 0
    place: int = 0
    """Position among the share's devices."""
    mode: str = ""
    kind: str = ""
    """Class of its compute; empty: it takes no turns."""
    memory_used: int | None = None
    """On the device. Bytes, like all amounts of memory."""
    memory_limit: int = 0
    memory_peak: int | None = None
    memory_context: int | None = None
    refusals: int | None = None
    host_bytes: int | None = None
    moved_bytes: int | None = None
    guarantee: float | None = None
    """Part of the device's time, like the ceiling."""
    ceiling: float | None = None
    utilization: float | None = None
    gpu_ns: int | None = None
    copy_ns: int | None = None
    held_ns: int | None = None
    borrowed_ns: int | None = None
    lent_ns: int | None = None
    launches: int | None = None
    delayed_launches: int | None = None
    turns: int | None = None
    turns_taken: int | None = None
    waits: tuple[int, ...] = ()
    """By length: entry i counts those under `first_wait_ns << i`; the last, longer ones."""
    first_wait_ns: int = 0
    wait_ns: int = 0
    processes: int | None = None
    is_enforced: bool = False
    is_suspended: bool = False


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None: its driver does not report that, or has not answered in time."""

    uuid: str
    index: int
    model: str
    pci_bus_id: str
    mode: str = ""
    memory_total: int
    memory_reserved: int = 0
    memory_used: int | None = None
    """By all processes, without the driver's reserve."""
    memory_outside: int | None = None
    """By processes outside any share."""
    memory_allocated: int | None = None
    """To shares, as limits. None: the shares could not be read in time."""
    memory_oversubscribed: int | None = None
    """The part of it that may live on the host."""
    guaranteed: float | None = None
    """Part of its time that shares are guaranteed."""
    shares: int | None = None
    slices: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Its MIG devices, by profile."""
    answers: bool = False
    """The driver has answered in time."""
    is_healthy: bool = True
    utilization: float | None = None
    memory_utilization: float | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_mw: int | None = None
    energy_mj: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    is_repair_pending: bool | None = None
    is_repair_failed: bool | None = None
    last_xid: int = 0
    """Since the agent's start; 0: none."""
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    pcie_replays: int | None = None
    price: float | None = None
    """Of an hour; None: not configured."""
    currency: str = ""


class ClaimUser(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that uses a ResourceClaim with a share."""

    namespace: str
    claim: str
    pod: str
    is_only: bool
    """The claim was made for this pod, by a template: no other pod uses it."""


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """All of it at one moment."""

    node: str
    gpus: tuple[GpuUse, ...]
    shares: tuple[ShareUse, ...]
    claim_users: tuple[ClaimUser, ...] = ()
    holders: tuple[GpuHolder, ...] = ()
    outside: tuple[OutsideUse, ...] = ()
    """Processes outside of shares, by container."""
    processes: tuple[GpuProcess, ...] | None = None
    """None: not asked for."""
    processes_left_out: int = 0
    are_shares_read: bool
    """False: their files were not read in time."""
    are_pods_read: bool = True
    """False: the kubelet did not list them in time."""
    unreadable_shares: int = 0
    """Shares that have a damaged file."""
    seconds: float = 0.0
    """How long the reading took."""


def bounded(use: Use) -> Use:
    """Return the same use, with no more by the users of a GPU than by the GPU.

    Driver and shares are read one after the other, and a share's own files may say anything. So a
    GPU has at least what its users have together, and they have no more than the GPU itself. What
    the driver reports of processes outside of shares comes first. The processes of a user have no
    more than it has.
    """
    shares = _by_gpu(use.shares)
    outside = _by_gpu(use.outside)
    gpus: list[GpuUse] = []
    for gpu in use.gpus:
        others = outside[gpu.uuid] = _within(
            outside.get(gpu.uuid, []), memory=gpu.memory_total, busy=1.0
        )
        of_gpu = shares[gpu.uuid] = _within(
            shares.get(gpu.uuid, []),
            memory=gpu.memory_total - _memory_of(others),
            busy=1.0 - _busy_of(others),
        )
        gpus.append(_including(gpu, [*of_gpu, *others], others))
    ordered = tuple(each for some in shares.values() for each in some)
    apart = tuple(each for some in outside.values() for each in some)
    processes = None
    if use.processes is not None:
        processes = tuple(_processes_within(use.processes, ordered, apart))
    return replace(use, gpus=tuple(gpus), shares=ordered, outside=apart, processes=processes)


_User = TypeVar("_User", ShareUse, OutsideUse, GpuProcess)


def _by_gpu(users: Iterable[_User]) -> dict[str, list[_User]]:
    found: dict[str, list[_User]] = {}
    for each in users:
        found.setdefault(each.gpu, []).append(each)
    return found


def _memory_of(users: Iterable[ShareUse | OutsideUse | GpuProcess]) -> int:
    return sum(each.memory_used or 0 for each in users)


def _busy_of(users: Iterable[ShareUse | OutsideUse | GpuProcess]) -> float:
    return sum(each.utilization or 0 for each in users)


def _within(users: list[_User], *, memory: int, busy: float) -> list[_User]:
    """Reduce users in proportion, if they have more together."""
    used, spent = _memory_of(users), _busy_of(users)
    if used > memory:
        users = [
            each
            if each.memory_used is None
            else replace(each, memory_used=each.memory_used * memory // used)
            for each in users
        ]
    if spent > busy:
        part = max(0.0, busy) / spent
        users = [
            each
            if each.utilization is None
            else replace(each, utilization=int(each.utilization * part * 1e6) / 1e6)
            for each in users
        ]
    return users


def _including(
    gpu: GpuUse, users: Sequence[ShareUse | OutsideUse], outside: Sequence[OutsideUse]
) -> GpuUse:
    if gpu.memory_used is not None:
        gpu = replace(gpu, memory_used=max(gpu.memory_used, _memory_of(users)))
    if gpu.memory_outside is not None:
        gpu = replace(gpu, memory_outside=_memory_of(outside))
    if gpu.utilization is not None:
        gpu = replace(gpu, utilization=max(gpu.utilization, min(1.0, _busy_of(users))))
    return gpu


def _processes_within(
    processes: Iterable[GpuProcess], shares: Iterable[ShareUse], outside: Iterable[OutsideUse]
) -> Iterator[GpuProcess]:
    most: dict[tuple[str, ...], ShareUse | OutsideUse] = {}
    for share in shares:
        most[share.share, share.gpu, share.device] = share
    for other in outside:
        most[other.gpu, other.namespace, other.pod, other.container] = other
    of_user: dict[tuple[str, ...], list[GpuProcess]] = {}
    for each in processes:
        key: tuple[str, ...] = (each.gpu, each.namespace, each.pod, each.container)
        if each.share:
            key = each.share, each.gpu, each.device or each.gpu
        of_user.setdefault(key, []).append(each)
    for key, some in of_user.items():
        user = most.get(key)
        if user is not None:
            yield from _within(some, memory=user.memory_used or 0, busy=user.utilization or 0.0)


class ShareFigure(msgspec.Struct, frozen=True):
    """A metric of each share: `allotment_share_NAME`, and `_total` for a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    of: Callable[[ShareUse], float | None]


class GpuFigure(msgspec.Struct, frozen=True):
    """A metric of each GPU: `allotment_gpu_NAME`, and `_total` for a counter."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    of: Callable[[GpuUse], float | Mapping[str, float | None] | None]
    """A value, or one for each value of `label`."""
    label: str = ""


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / _NS


def _times(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor


SHARE_FIGURES: Final[tuple[ShareFigure, ...]] = (
    ShareFigure("memory_used_bytes", "gauge",
                "Memory on the device; of an oversubscribed share without what may be on the host.",
                lambda use: use.memory_used),
    ShareFigure("memory_limit_bytes", "gauge", "Limit of memory, on the device and on the host.",
                lambda use: use.memory_limit),
    ShareFigure("memory_peak_bytes", "gauge",
                "Most memory that was in use at once, since the share's creation.",
                lambda use: use.memory_peak),
    ShareFigure("memory_refusals", "counter", "Allocations refused because of the limit.",
                lambda use: use.refusals),
    ShareFigure("memory_host_bytes", "gauge",
                "Memory of an oversubscribed or suspended share that may be on the host.",
                lambda use: use.host_bytes),
    ShareFigure("memory_moved_bytes", "counter", "Oversubscribed memory moved to the device.",
                lambda use: use.moved_bytes),
    ShareFigure("compute_guaranteed_ratio", "gauge", "Guaranteed part of the device's time.",
                lambda use: use.guarantee),
    ShareFigure("compute_ceiling_ratio", "gauge", "Most of the device's time that it may have.",
                lambda use: use.ceiling),
    ShareFigure("utilization_ratio", "gauge",
                "Part of the last second or so in which its kernels ran, by the driver.",
                lambda use: use.utilization),
    ShareFigure("gpu_seconds", "counter", "Measured GPU time of its kernels.",
                lambda use: _seconds(use.gpu_ns)),
    ShareFigure("copy_seconds", "counter", "Measured time of its copies, on the copy engines.",
                lambda use: _seconds(use.copy_ns)),
    ShareFigure("held_seconds", "counter",
                "Time for which its launches were held back, summed over threads.",
                lambda use: _seconds(use.held_ns)),
    ShareFigure("borrowed_seconds", "counter", "GPU time that it used beyond its guarantee.",
                lambda use: _seconds(use.borrowed_ns)),
    ShareFigure("lent_seconds", "counter",
                "Guaranteed GPU time that others used, since the agent's start.",
                lambda use: _seconds(use.lent_ns)),
    ShareFigure("launches", "counter", "Launches of its kernels and graphs that have ended.",
                lambda use: use.launches),
    ShareFigure("delayed_launches", "counter", "Launches that were held back.",
                lambda use: use.delayed_launches),
    ShareFigure("turns", "counter", "Turns that it was given.", lambda use: use.turns),
    ShareFigure("turns_taken", "counter",
                "Turns taken from it, because it stopped or did not give way.",
                lambda use: use.turns_taken),
    ShareFigure("processes", "gauge", "Its processes that use a GPU.", lambda use: use.processes),
    ShareFigure("enforced", "gauge", "1: its limits are in force for all its processes; 0: not.",
                lambda use: float(use.is_enforced)),
    ShareFigure("suspended", "gauge", "1: it is suspended; 0: it is not.",
                lambda use: float(use.is_suspended)),
)  # fmt: skip

WAITS: Final = "turn_wait_seconds"
WAITS_HELP: Final = "Waits of its processes for a turn."

GPU_FIGURES: Final[tuple[GpuFigure, ...]] = (
    GpuFigure("answers", "gauge", "1: the driver answered this scrape; 0: not in time.",
              lambda gpu: float(gpu.answers)),
    GpuFigure("healthy", "gauge", "1: healthy; 0: not.", lambda gpu: float(gpu.is_healthy)),
    GpuFigure("memory_total_bytes", "gauge", "Memory.", lambda gpu: gpu.memory_total),
    GpuFigure("memory_reserved_bytes", "gauge", "The driver's reserve of its memory.",
              lambda gpu: gpu.memory_reserved),
    GpuFigure("memory_used_bytes", "gauge", "Memory in use by processes.",
              lambda gpu: gpu.memory_used),
    GpuFigure("memory_outside_bytes", "gauge", "Memory in use by processes outside any share.",
              lambda gpu: gpu.memory_outside),
    GpuFigure("memory_allocated_bytes", "gauge", "Memory allocated to shares, by their limits.",
              lambda gpu: gpu.memory_allocated),
    GpuFigure("memory_oversubscribed_bytes", "gauge",
              "The part of the allocated memory that may be on the host.",
              lambda gpu: gpu.memory_oversubscribed),
    GpuFigure("compute_guaranteed_ratio", "gauge", "Part of its time guaranteed to shares.",
              lambda gpu: gpu.guaranteed),
    GpuFigure("shares", "gauge", "Shares of it and of its MIG devices.", lambda gpu: gpu.shares),
    GpuFigure("mig_slices", "gauge", "Its MIG devices.", lambda gpu: gpu.slices, "profile"),
    GpuFigure("utilization_ratio", "gauge",
              "Part of the last second or so in which any kernel ran.",
              lambda gpu: gpu.utilization),
    GpuFigure("memory_utilization_ratio", "gauge",
              "Part of the last second or so in which its memory was read or written.",
              lambda gpu: gpu.memory_utilization),
    GpuFigure("temperature_celsius", "gauge", "Temperature, by sensor.",
              lambda gpu: {"gpu": gpu.temperature_c, "memory": gpu.memory_temperature_c}, "sensor"),
    GpuFigure("power_watts", "gauge", "Power draw.", lambda gpu: _times(gpu.power_mw, 1e-3)),
    GpuFigure("energy_joules", "counter", "Energy, since the driver was loaded.",
              lambda gpu: _times(gpu.energy_mj, 1e-3)),
    GpuFigure("clock_hertz", "gauge", "Clock now.",
              lambda gpu: {"sm": _times(gpu.sm_clock_mhz, 1e6),
                           "memory": _times(gpu.memory_clock_mhz, 1e6)}, "clock"),
    GpuFigure("ecc_errors", "counter", "ECC errors, since the driver was loaded.",
              lambda gpu: {"corrected": gpu.ecc_corrected, "uncorrected": gpu.ecc_uncorrected},
              "kind"),
    GpuFigure("memory_repair_pending", "gauge",
              "1: rows to remap or pages to retire wait for a reset.",
              lambda gpu: _times(gpu.is_repair_pending, 1.0)),
    GpuFigure("memory_repair_failed", "gauge", "1: rows could not be remapped.",
              lambda gpu: _times(gpu.is_repair_failed, 1.0)),
    GpuFigure("last_xid", "gauge", "The last XID since the agent's start; 0: none.",
              lambda gpu: gpu.last_xid),
    GpuFigure("nvlink_bytes", "counter", "Payload over all NVLinks, since the driver was loaded.",
              lambda gpu: {"sent": gpu.nvlink_sent_bytes, "received": gpu.nvlink_received_bytes},
              "direction"),
    GpuFigure("pcie_replays", "counter", "Repeated PCIe packets, since the driver was loaded.",
              lambda gpu: gpu.pcie_replays),
    GpuFigure("price_per_hour", "gauge", "Price of an hour of it, as configured.",
              lambda gpu: {gpu.currency: gpu.price}, "currency"),
)  # fmt: skip

INFO_LABELS: Final = (*GPU_LABELS, "index", "model", "pci_bus_id", "mode")

Aliases = Callable[[Use], Iterator[Metric]]
"""The same use under the names of another system."""


class UseMetrics:
    """The use as text, read on a scrape. Thread-safe."""

    def __init__(self, read: Callable[[], Use], aliases: Callable[[], Collection[Aliases]]) -> None:
        """`read` must return in time, from any thread. `aliases` are those in force.

        The text of one reading is made once: any pod may scrape, as often as it likes.
        """
        self._read = read
        self._aliases = aliases
        self._lock = threading.Lock()
        self._of: Use | None = None
        self._texts: dict[bool, bytes] = {}

    def text(self, is_open: bool) -> bytes:  # noqa: FBT001 - its only argument
        """Return all of it in Prometheus' format, or in that of OpenMetrics."""
        with self._lock:
            use = self._read()
            if use is not self._of:
                self._of = use
                self._texts.clear()
            if is_open not in self._texts:
                metrics = families(bounded(use), self._aliases())
                self._texts[is_open] = write(metrics, is_open=is_open).encode()
            return self._texts[is_open]


def families(use: Use, aliases: Collection[Aliases]) -> Iterator[Metric]:
    """Yield the metrics of a bounded use, with their aliases."""
    yield from _own(use)
    for alias in aliases:
        yield from alias(use)


def write(metrics: Iterable[Metric], *, is_open: bool) -> str:
    """Write metrics as prometheus_client does, in half the time of a scrape.

    The labels of a share are the same object in all its series, and are written once.
    """
    written: dict[int, tuple[Mapping[str, str], str]] = {}  # with what has the id, so that it stays
    lines = []
    for metric in metrics:
        name, kind = metric.name, metric.type
        if not is_open:
            name += "_total" if kind == "counter" else ""
            kind = "untyped" if kind == "unknown" else kind
        lines.append(f"# HELP {name} {metric.documentation}\n# TYPE {name} {kind}\n")
        for sample in metric.samples:
            labels = sample.labels
            known = written.get(id(labels))
            if known is None:
                known = written[id(labels)] = (labels, label_text(labels))
            value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{known[1]} {value}\n")
    if is_open:
        lines.append("# EOF\n")
    return "".join(lines)


def label_text(labels: Mapping[str, str]) -> str:
    """Return labels as they are written behind a metric's name."""
    if not labels:
        return ""
    parts = (f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(parts)}}}"


_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _own(use: Use) -> Iterator[Metric]:
    read = Metric("allotment_use_read", "1: read in time for this scrape; 0: not.", "gauge")
    read.add_sample(read.name, {"what": "shares"}, float(use.are_shares_read))
    answers = all(gpu.answers for gpu in use.gpus)
    read.add_sample(read.name, {"what": "gpus"}, float(answers))
    read.add_sample(read.name, {"what": "pods"}, float(use.are_pods_read))
    yield read
    damaged = Metric("allotment_use_shares_damaged", "Shares with an unreadable file.", "gauge")
    damaged.add_sample(damaged.name, {}, use.unreadable_shares)
    yield damaged
    took = Metric("allotment_use_read_seconds", "How long the reading took.", "gauge")
    took.add_sample(took.name, {}, use.seconds)
    yield took
    users = Metric(
        "allotment_claim_pod_info", "Pods of each claim with a share; always 1.", "gauge"
    )
    for each in use.claim_users:
        named = {"namespace": each.namespace, "claim": each.claim, "pod": each.pod}
        users.add_sample(users.name, named, 1)
    yield users
    yield from _of_gpus(use)
    yield from _of_shares(use)
    yield from of_users(
        use.node,
        holders=use.holders,
        outside=use.outside,
        processes=use.processes,
        left_out=use.processes_left_out,
    )


def _of_gpus(use: Use) -> Iterator[Metric]:
    info = Metric("allotment_gpu_info", "Facts of each GPU; always 1.", "gauge")
    labels = [(gpu, {"node": use.node, "gpu": gpu.uuid}) for gpu in use.gpus]
    for gpu, of_gpu in labels:
        facts = {"index": str(gpu.index), "model": gpu.model, "pci_bus_id": gpu.pci_bus_id}
        info.add_sample(info.name, {**of_gpu, **facts, "mode": gpu.mode}, 1)
    yield info
    for figure in GPU_FIGURES:
        metric, name = _metric("allotment_gpu_", figure)
        for gpu, of_gpu in labels:
            value = figure.of(gpu)
            values = value if isinstance(value, Mapping) else {"": value}
            for kind, each in values.items():
                if each is not None:
                    known = {**of_gpu, figure.label: kind} if kind else of_gpu
                    metric.add_sample(name, known, each)
        yield metric


def _of_shares(use: Use) -> Iterator[Metric]:
    labels = [(share, share_labels(use.node, share)) for share in use.shares]
    for figure in SHARE_FIGURES:
        metric, name = _metric("allotment_share_", figure)
        for share, of_share in labels:
            if (value := figure.of(share)) is not None:
                metric.add_sample(name, of_share, value)
        yield metric
    waits = Metric(f"allotment_share_{WAITS}", WAITS_HELP, "histogram")
    for share, of_share in labels:
        if share.waits:
            _add_waits(waits, share, of_share)
    yield waits


def share_labels(node: str, share: ShareUse) -> dict[str, str]:
    """Return a share's labels; an empty one is left out, which means the same to Prometheus."""
    labels = {
        "node": node,
        "namespace": share.namespace,
        "pod": share.pod,
        "container": share.container,
        "claim": share.claim,
        "request": share.request,
        "share": share.share,
        "gpu": share.gpu,
        "device": share.device if share.device != share.gpu else "",
        "mode": share.mode,
        "class": share.kind,
    }
    return {name: value for name, value in labels.items() if value}


def _metric(prefix: str, figure: ShareFigure | GpuFigure) -> tuple[Metric, str]:
    metric = Metric(prefix + figure.name, figure.help, figure.kind)
    return metric, metric.name + ("_total" if figure.kind == "counter" else "")


def _add_waits(metric: Metric, share: ShareUse, labels: Mapping[str, str]) -> None:
    count = 0
    bounds = _wait_bounds(share.first_wait_ns, len(share.waits))
    for bound, waits in zip(bounds, share.waits, strict=True):
        count += waits
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, count)
    metric.add_sample(f"{metric.name}_count", dict(labels), count)
    metric.add_sample(f"{metric.name}_sum", dict(labels), share.wait_ns / _NS)


@lru_cache(maxsize=4)
def _wait_bounds(first_ns: int, count: int) -> tuple[str, ...]:
    bounds = (
        floatToGoString((first_ns << number) / _NS)  # type: ignore[no-untyped-call]
        for number in range(count - 1)
    )
    return (*bounds, "+Inf")
