# SPDX-License-Identifier: Apache-2.0
"""Series with which each alert fires, and some with which it just does not.

`values` are Prometheus' for unit tests: `0x5 1x9` is six times 0 and ten times 1, one a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Case:
    """What there is, and what the alert says of it then; without labels it does not fire."""

    alert: str
    series: Mapping[str, str]
    at: str
    labels: tuple[Mapping[str, str], ...] = ()
    is_alone: bool = False
    """Series of other cases would change it."""


GPU: Final = {"node": "n1", "gpu": "GPU-a"}
DEVICE: Final = {"node": "n1", "device": "GPU-a"}
SHARE: Final = {
    "node": "n1",
    "namespace": "ml",
    "pod": "train",
    "container": "main",
    "share": "5a",
    "gpu": "GPU-a",
    "mode": "soft",
}
REPLICA: Final = {"instance": "a:9448"}
_P: Final = "allotment_scheduler_"


def s(metric: str, labels: Mapping[str, str], **more: str) -> str:
    """A series, as it is written."""
    text = ", ".join(f'{name}="{value}"' for name, value in {**labels, **more}.items())
    return f"{metric}{{{text}}}"


def _pair(
    alert: str,
    metric: str,
    labels: Mapping[str, str],
    *,
    bad: str,
    good: str,
    at: str,
    drop: tuple[str, ...] = (),
) -> tuple[Case, Case]:
    """Two cases of one series: with `bad` values it fires, with `good` ones not."""
    shown = {name: value for name, value in labels.items() if name not in drop}
    return (
        Case(alert, {s(metric, labels): bad}, at, (shown,)),
        Case(alert, {s(metric, labels): good}, at),
    )


def _counter(
    alert: str, metric: str, labels: Mapping[str, str], *, at: str = "30m"
) -> tuple[Case, ...]:
    """Of a counter with labels, which appears with its first event."""
    series = s(metric, labels)
    return (
        # It is there with 1 for the first time: `increase` sees nothing.
        Case(alert, {series: "_x28 1x5"}, at, (labels,)),
        Case(alert, {series: "3x27 4x5"}, at, (labels,)),
        Case(alert, {series: "4x60"}, at),
        # Scrapes paused, and went on with the same number.
        Case(alert, {series: "4x8 _x19 4x5"}, at),
    )


_HELD = s("allotment_share_held_seconds_total", SHARE)
_TIME = s("allotment_share_gpu_seconds_total", SHARE)
_GUARANTEE = s("allotment_share_compute_guaranteed_ratio", SHARE)
_MOVED = s("allotment_share_memory_moved_bytes_total", SHARE)
_LIMIT = s("allotment_share_memory_limit_bytes", SHARE)
_UTIL = s("allotment_gpu_utilization_ratio", GPU)
_ALLOCATED = s("allotment_gpu_memory_allocated_bytes", GPU)
_OUTSIDE = s("allotment_gpu_memory_outside_bytes", GPU)
_SHARES = s("allotment_gpu_shares", GPU)
_ENFORCED = s("allotment_share_enforced", SHARE)
_PROCESSES = s("allotment_share_processes", SHARE)
_AGENT: Final = {"job": "allotment-agent", "instance": "n:9446", "node": "n1"}
_EXTENDER: Final = {"instance": "a:9448", "why": "distrusted"}
_BUCKETS: Final = {
    s(f"{_P}request_seconds_bucket", {"verb": "filter", "le": le}): values
    for le, values in {"1.0": "0+98x60", "2.0": "0+100x60", "+Inf": "0+100x60"}.items()
}
_SECOND: Final = s(f"{_P}request_seconds_bucket", {"verb": "filter", "le": "1.0"})
_FAST: Final = {**_BUCKETS, _SECOND: "0+99x60"}
_LEADING: Final = s(f"{_P}leading", REPLICA)
_OTHER_LEADING: Final = s(f"{_P}leading", {"instance": "b"})

CASES: Final[tuple[Case, ...]] = (
    # -- agents
    *_pair("AgentDown", "up", _AGENT, bad="0x60", good="1x55 0x4", at="60m"),
    Case("AgentsMissing", {"up{job='other'}": "1x60"}, "60m", ({"job": "allotment-agent"},),
         is_alone=True),
    Case("AgentsMissing", {s("up", _AGENT): "0x60"}, "60m", is_alone=True),
    *_pair("AgentConfigInvalid", "allotment_agent_config_valid", {"node": "n1"},
           bad="0x60", good="1x55 0x4", at="60m"),
    *_pair("AgentApiServerAway", "allotment_agent_api_synced", {"node": "n1", "what": "pods"},
           bad="0x60", good="1x55 0x4", at="60m"),
    *_pair("UseNotRead", "allotment_use_read", {"node": "n1", "what": "gpus"},
           bad="0x60", good="1x50 0x9", at="60m"),
    *_pair("SharesDamaged", "allotment_use_shares_damaged", {"node": "n1"},
           bad="1x60", good="0x60", at="60m"),
    *_counter("ContainerRefused", "allotment_agent_refusals_total",
              {"node": "n1", "reason": "DoesNotFitError"}),
    Case("ContainerRefused",
         {s("allotment_agent_refusals_total", {"reason": "IdentityError"}): "0x28 9x5"}, "30m"),
    *_counter("IdentityRefused", "allotment_agent_refusals_total",
              {"node": "n1", "reason": "IdentityError"}),
    # -- GPUs
    *_pair("GpuUnhealthy", "allotment_gpu_healthy", GPU, bad="0x60", good="1x59 0", at="60m"),
    *_pair("GpuNotAnswering", "allotment_gpu_answers", GPU, bad="0x60", good="1x55 0x4", at="60m"),
    *_counter("Xid", "allotment_agent_device_xids_total", {**DEVICE, "xid": "79"}),
    *_pair("EccErrors", "allotment_gpu_ecc_errors_total", {**GPU, "kind": "uncorrected"},
           bad="2x50 3x9", good="3x60", at="59m"),
    Case("EccErrors", {s("allotment_gpu_ecc_errors_total", GPU, kind="corrected"): "0+9x60"},
         "59m"),
    *_pair("MemoryRepair", "allotment_gpu_memory_repair_pending", GPU,
           bad="1x60", good="0x60", at="60m"),
    *_pair("MemoryRepair", "allotment_gpu_memory_repair_failed", GPU,
           bad="1x60", good="0x60", at="60m"),
    Case("GpuIdle", {_UTIL: "0.01x130", _ALLOCATED: "1e9x130"}, "125m", (GPU,)),
    Case("GpuIdle", {_UTIL: "0.03x130", _ALLOCATED: "1e9x130"}, "125m"),
    Case("GpuIdle", {_UTIL: "0x130", _ALLOCATED: "0x130"}, "125m"),
    Case("GpuIdle", {_UTIL: "0x130", _ALLOCATED: "0x70 1e9x59"}, "125m"),
    *_pair("MpsDaemonDown", "allotment_agent_mps_daemon_up", DEVICE,
           bad="0x60", good="1x58 0", at="59m"),
    *_pair("AnotherManagerOfMig", "allotment_agent_mig_paused", DEVICE,
           bad="1x60", good="0x60", at="60m"),
    *_pair("AnotherManagerOfMig", "allotment_agent_mig_slices", {**DEVICE, "hold": "lost"},
           bad="1x60", good="0x60", at="60m"),
    Case("AnotherManagerOfMig",
         {s("allotment_agent_mig_slices", DEVICE, hold="foreign"): "3x60"}, "60m"),
    # -- shares
    *_pair("LimitPassed", "allotment_agent_shares_exceeding", {"node": "n1"},
           bad="1x60", good="0x57 1x1", at="58m"),
    Case("NotEnforced", {_ENFORCED: "0x60", _PROCESSES: "1x60"}, "60m", (SHARE,)),
    Case("NotEnforced", {_ENFORCED: "0x60", _PROCESSES: "0x60"}, "60m"),
    Case("NotEnforced", {_ENFORCED: "1x60", _PROCESSES: "1x60"}, "60m"),
    Case("NotEnforced",
         {s("allotment_share_enforced", {**SHARE, "mode": "timeslice"}): "0x60",
          s("allotment_share_processes", {**SHARE, "mode": "timeslice"}): "1x60"}, "60m"),
    *_counter("MemoryRefused", "allotment_share_memory_refusals_total", SHARE),
    # It has 10 s of 60, and is owed 30: less than a half.
    Case("Starving", {_TIME: "0+10x60", _GUARANTEE: "0.5x60", _HELD: "0+40x60"}, "60m", (SHARE,)),
    Case("Starving", {_TIME: "0+16x60", _GUARANTEE: "0.5x60", _HELD: "0+40x60"}, "60m"),
    # It wants no more.
    Case("Starving", {_TIME: "0+1x60", _GUARANTEE: "0.5x60", _HELD: "0+20x60"}, "60m"),
    # 10 GB, of which 0.6 GB a second are moved, or 0.4.
    Case("Thrashing", {_MOVED: "0+36e9x60", _LIMIT: "10e9x60"}, "60m", (SHARE,)),
    Case("Thrashing", {_MOVED: "0+24e9x60", _LIMIT: "10e9x60"}, "60m"),
    Case("OutsidePrograms", {_OUTSIDE: "2e9x60", _SHARES: "1x60"}, "60m", (GPU,)),
    Case("OutsidePrograms", {_OUTSIDE: "1e9x60", _SHARES: "1x60"}, "60m"),
    Case("OutsidePrograms", {_OUTSIDE: "2e9x60", _SHARES: "0x60"}, "60m"),
    # -- scheduler
    *_pair("SchedulerDown", "up", {"job": "allotment-scheduler", "instance": "a:9448"},
           bad="0x60", good="1x55 0x4", at="60m"),
    Case("NobodyLeads", {_LEADING: "0x60", _OTHER_LEADING: "0x60"},
         "60m", ({},)),
    Case("NobodyLeads", {_LEADING: "0x60", _OTHER_LEADING: "1x60"},
         "60m"),
    *_pair("SchedulerNotSynced", f"{_P}api_synced", REPLICA, bad="0x60", good="1x55 0x4", at="60m"),
    Case("PodsNotCounted", {s(f"{_P}pods_not_taken_over", REPLICA): "0x60",
                            s(f"{_P}pods_without_placement", REPLICA): "1x60"}, "60m", (REPLICA,)),
    Case("PodsNotCounted", {s(f"{_P}pods_not_taken_over", REPLICA): "0x60",
                            s(f"{_P}pods_without_placement", REPLICA): "0x60"}, "60m"),
    *_pair("ObjectsLeftOut", f"{_P}objects_left_out", REPLICA, bad="1x60", good="0x60", at="60m"),
    *_pair("GpusToldTwice", f"{_P}devices_told_twice", REPLICA, bad="1x60", good="0x60", at="60m"),
    *_pair("PodsWaiting", f"{_P}pods_waiting", {**REPLICA, "reason": "gpu-memory"},
           bad="1x60", good="0x31 1x28", at="60m", drop=("instance",)),
    Case("PodsWaiting", {s(f"{_P}pods_waiting", REPLICA, reason="placed"): "5x60"}, "60m"),
    *_counter("Distrusted", f"{_P}extender_handshakes_failed_total", _EXTENDER),
    *_counter("Distrusted", f"{_P}webhook_handshakes_failed_total", _EXTENDER),
    Case("Distrusted",
         {s(f"{_P}webhook_handshakes_failed_total", REPLICA, why="other"): "0+9x60"}, "30m"),
    *_pair("CertificateNotKept", f"{_P}webhook_certificate_kept", REPLICA,
           bad="0x60", good="1x50 0x9", at="60m"),
    *_counter("SchedulerRestartsParts", f"{_P}parts_begun_anew_total",
              {**REPLICA, "part": "events"}),
    Case("SchedulerSlow", _BUCKETS, "60m", ({"verb": "filter"},), is_alone=True),
    Case("SchedulerSlow", _FAST, "60m", is_alone=True),
)  # fmt: skip
