# SPDX-License-Identifier: Apache-2.0
"""The metrics of use under the names and labels of other exporters, for their dashboards.

Each table has a name, as it is written, and its values by GPU or by share. Units are theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client.core import Metric

from allotment.metrics.use import Aliases, GpuUse, ShareUse, Use
from allotment.model.modes import traits_of

_MIB: Final = 1 << 20


class _OfGpu(NamedTuple):
    name: str
    help: str
    of: Callable[[GpuUse], float | None]
    kind: str = "gauge"


class _OfShare(NamedTuple):
    name: str
    help: str
    of: Callable[[ShareUse], float | None]


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else ratio * 100


def _mib(amount: int | None) -> float | None:
    return None if amount is None else amount // _MIB


def _free(gpu: GpuUse) -> int | None:
    if gpu.memory_used is None:
        return None
    return max(0, gpu.memory_total - gpu.memory_reserved - gpu.memory_used)


DCGM: Final = (
    _OfGpu("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", lambda gpu: gpu.sm_clock_mhz),
    _OfGpu("DCGM_FI_DEV_MEM_CLOCK", "Memory clock frequency (in MHz).",
           lambda gpu: gpu.memory_clock_mhz),
    _OfGpu("DCGM_FI_DEV_MEMORY_TEMP", "Memory temperature (in C).",
           lambda gpu: gpu.memory_temperature_c),
    _OfGpu("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", lambda gpu: gpu.temperature_c),
    _OfGpu("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).",
           lambda gpu: None if gpu.power_mw is None else gpu.power_mw / 1000),
    # Its name has no `_total`, which a counter must have here.
    _OfGpu("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "Energy since boot (in mJ).",
           lambda gpu: gpu.energy_mj, "unknown"),
    _OfGpu("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "Number of PCIe retries.",
           lambda gpu: gpu.pcie_replays, "unknown"),
    _OfGpu("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).",
           lambda gpu: _percent(gpu.utilization)),
    _OfGpu("DCGM_FI_DEV_MEM_COPY_UTIL", "Memory utilization (in %).",
           lambda gpu: _percent(gpu.memory_utilization)),
    _OfGpu("DCGM_FI_DEV_XID_ERRORS", "The last XID.", lambda gpu: gpu.last_xid),
    _OfGpu("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).",
           lambda gpu: _mib(_free(gpu))),
    _OfGpu("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).",
           lambda gpu: _mib(gpu.memory_used)),
    _OfGpu("DCGM_FI_DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB).",
           lambda gpu: _mib(gpu.memory_reserved)),
    _OfGpu("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "Corrected ECC errors.",
           lambda gpu: gpu.ecc_corrected, "unknown"),
    _OfGpu("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "Uncorrected ECC errors.",
           lambda gpu: gpu.ecc_uncorrected, "unknown"),
    _OfGpu("DCGM_FI_DEV_ROW_REMAP_FAILURE", "1: rows could not be remapped.",
           lambda gpu: gpu.is_repair_failed),
)  # fmt: skip
"""Of dcgm-exporter's default list: what NVML has. One series for each GPU, shared or not."""


def dcgm(use: Use) -> Iterator[Metric]:
    """Name the pod of a GPU that one container has alone, as dcgm-exporter does."""
    labels = [(gpu, _dcgm_labels(use, gpu)) for gpu in use.gpus]
    for figure in DCGM:
        metric = Metric(figure.name, figure.help, figure.kind)
        for gpu, known in labels:
            if (value := figure.of(gpu)) is not None:
                metric.add_sample(figure.name, known, float(value))
        yield metric


def _dcgm_labels(use: Use, gpu: GpuUse) -> dict[str, str]:
    labels = {
        "gpu": str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": f"nvidia{gpu.index}",
        "modelName": gpu.model,
        "Hostname": use.node,
    }
    owners = [each for each in use.shares if each.gpu == gpu.uuid]
    if len(owners) == 1 and traits_of(owners[0].mode).is_exclusive:
        (owner,) = owners
        if owner.claim:
            labels |= {"dra_claim_name": owner.claim, "dra_claim_namespace": owner.namespace}
        elif owner.pod:
            named = {"namespace": owner.namespace, "pod": owner.pod, "container": owner.container}
            labels |= named
    elif not owners:
        labels |= _whole_of_others(use, gpu)
    return labels


def _whole_of_others(use: Use, gpu: GpuUse) -> dict[str, str]:
    """Name the one container that another plugin gave the whole GPU."""
    holders = [each for each in use.holders if each.gpu == gpu.uuid]
    if len(holders) != 1 or holders[0].device or holders[0].replica:
        return {}
    (holder,) = holders
    labels = {"namespace": holder.namespace, "pod": holder.pod, "container": holder.container}
    if holder.claim:
        labels |= {"dra_claim_name": holder.claim, "dra_claim_namespace": holder.namespace}
    return labels


HAMI_GPU: Final = (
    _OfGpu("hami_host_gpu_memory_used_bytes", "GPU device memory usage in bytes.",
           lambda gpu: gpu.memory_used),
    _OfGpu("hami_host_gpu_utilization_ratio", "GPU core utilization (0-100).",
           lambda gpu: _percent(gpu.utilization)),
    _OfGpu("hami_host_gpu_memory_controller_utilization_ratio",
           "GPU memory controller utilization (0-100).",
           lambda gpu: _percent(gpu.memory_utilization)),
    _OfGpu("hami_gpu_memory_limit_bytes", "Device memory for shares.",
           lambda gpu: gpu.memory_total - gpu.memory_reserved),
    _OfGpu("hami_gpu_core_limit_ratio", "Device cores (0-100).", lambda _: 100),
    _OfGpu("hami_gpu_memory_allocated_bytes", "Device memory allocated.",
           lambda gpu: gpu.memory_allocated),
    _OfGpu("hami_gpu_core_allocated_ratio", "Device cores allocated (0-100).",
           lambda gpu: _percent(gpu.guaranteed)),
    _OfGpu("hami_gpu_shared_count", "Containers sharing this GPU.", lambda gpu: gpu.shares),
    _OfGpu("hami_node_gpu_overview", "Device memory allocated, with the GPU's amounts as labels.",
           lambda gpu: gpu.memory_allocated),
    _OfGpu("hami_node_gpu_memory_allocated_ratio", "Device memory allocated (0-1).",
           lambda gpu: None if gpu.memory_allocated is None else gpu.memory_allocated
           / max(1, gpu.memory_total - gpu.memory_reserved)),
)  # fmt: skip

HAMI_SHARE: Final = (
    _OfShare("hami_vgpu_memory_used_bytes", "vGPU device memory usage in bytes.",
             lambda use: use.memory_used),
    _OfShare("hami_vgpu_memory_limit_bytes", "vGPU device memory limit in bytes.",
             lambda use: use.memory_limit),
    _OfShare("hami_container_device_memory_bytes", "Container device memory usage in bytes.",
             lambda use: use.memory_used),
    _OfShare("hami_container_device_utilization_ratio", "Container device utilization (0-100).",
             lambda use: _percent(use.utilization)),
    _OfShare("hami_vgpu_memory_context_bytes", "Container device memory of contexts.",
             lambda use: use.memory_context),
    _OfShare("hami_vgpu_memory_buffer_bytes", "Container device memory without contexts.",
             lambda use: None if use.memory_used is None
             else max(0, use.memory_used - (use.memory_context or 0))),
)  # fmt: skip

HAMI_ALLOCATED: Final = (
    _OfShare("hami_vgpu_memory_allocated_bytes", "vGPU memory allocated.",
             lambda use: use.memory_limit),
    _OfShare("hami_vgpu_core_allocated_ratio", "vGPU cores allocated (0-100).",
             lambda use: _percent(use.guarantee)),
)  # fmt: skip

_ZONE: Final = {"zone": "vGPU"}
"""HAMi adds it to all its metrics."""


def hami(use: Use) -> Iterator[Metric]:
    """Of the current names: what a node knows. Claims have no name there."""
    for figure in HAMI_GPU:
        metric = Metric(figure.name, figure.help, figure.kind)
        for gpu in use.gpus:
            if (value := figure.of(gpu)) is not None:
                metric.add_sample(figure.name, _hami_labels(use, gpu, figure.name), float(value))
        yield metric
    # A pod of the same name that is ending has the same labels: the newer one counts.
    shares = tuple(
        {
            (each.namespace, each.pod, each.container, each.device): each
            for each in use.shares
            if each.container
        }.values()
    )
    runtime = [
        (each, {**_vgpu(each), "container": each.container, "vdevice_index": str(each.place)})
        for each in shares
    ]
    yield from _of_shares(HAMI_SHARE, runtime)
    places = _container_places(shares)
    booked = [
        (each, {**_vgpu(each), "node": use.node, "container_index": str(place)})
        for each, place in zip(shares, places, strict=True)
    ]
    yield from _of_shares(HAMI_ALLOCATED, booked)


def _container_places(shares: Sequence[ShareUse]) -> list[int]:
    """Number the containers with a share of each pod: HAMi tells them apart by a number."""
    known: dict[tuple[str, str], list[str]] = {}
    for each in shares:
        names = known.setdefault((each.namespace, each.pod), [])
        if each.share not in names:
            names.append(each.share)
    return [known[each.namespace, each.pod].index(each.share) for each in shares]


def _of_shares(
    figures: Sequence[_OfShare], shares: Sequence[tuple[ShareUse, dict[str, str]]]
) -> Iterator[Metric]:
    for figure in figures:
        metric = Metric(figure.name, figure.help, "gauge")
        for share, labels in shares:
            if (value := figure.of(share)) is not None:
                metric.add_sample(figure.name, labels, float(value))
        yield metric


def _vgpu(share: ShareUse) -> dict[str, str]:
    known = {"namespace": share.namespace, "pod": share.pod, "device_uuid": share.device}
    return {**_ZONE, **known}


def _hami_labels(use: Use, gpu: GpuUse, name: str) -> dict[str, str]:
    labels = {
        **_ZONE,
        "node": use.node,
        "device_index": str(gpu.index),
        "device_uuid": gpu.uuid,
        "device_type": gpu.model,
    }
    if name in ("hami_gpu_memory_allocated_bytes", "hami_node_gpu_overview"):
        labels["device_cores"] = "100"
    if name == "hami_node_gpu_overview":
        labels["device_memory_limit"] = str((gpu.memory_total - gpu.memory_reserved) // _MIB)
    return labels


ALIASES: Final[Mapping[str, Aliases]] = {"dcgm": dcgm, "hami": hami}
