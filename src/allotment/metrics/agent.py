# SPDX-License-Identifier: Apache-2.0
"""Metrics of the node agent."""

from collections.abc import Iterable

from allotment.metrics.figures import Figure, Figures

_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
"""Around the limit of `PreStartContainer` (50 ms), up to the time-out of the kubelet (30 s)."""

FIGURES: tuple[Figure, ...] = (
    Figure("prepare_seconds", "histogram", "Time of PreStartContainer.", ("resource",)),
    Figure("preferred_seconds", "histogram", "Time of GetPreferredAllocation.", ("resource",)),
    Figure("registrations", "counter", "Registrations with the kubelet.", ("resource", "result")),
    Figure("refusals", "counter", "Containers refused without a share.", ("reason",)),
    Figure("shares", "gauge", "Shares of containers on this node.", ("mode",)),
    Figure(
        "shares_exceeding",
        "gauge",
        "Shares beyond their limit by the driver, or with files that allow more than promised.",
    ),
    Figure("shares_made", "counter", "Shares created.", ("mode",)),
    Figure("shares_ended", "counter", "Shares removed.", ("reason",)),
    Figure("evictions", "counter", "Pods deleted so that their controllers create them again."),
    Figure(
        "config_loads",
        "counter",
        "Configurations read: applied, or invalid (the last valid one stays).",
        ("result",),
        ("applied", "invalid"),
    ),
    Figure("config_valid", "gauge", "1: the newest configuration is applied; 0: it is invalid."),
    Figure("events_dropped", "counter", "Kubernetes events dropped: too many, or refused."),
    Figure("cdi_fallback", "counter", "Shares handed over without CDI.", ("mode",)),
    Figure("device_healthy", "gauge", "1: healthy; 0: not.", ("device",)),
    Figure("device_xids", "counter", "XID events of a device.", ("device", "xid")),
    Figure("device_recoveries", "counter", "Times a device became healthy again.", ("device",)),
    Figure("mps_daemon_up", "gauge", "1: the MPS daemon of the GPU accepts clients.", ("device",)),
    Figure("mps_restarts", "counter", "Restarts of an MPS daemon.", ("device",)),
    Figure(
        "mps_losses",
        "counter",
        "Times the MPS clients of a GPU lost their memory and contexts.",
        ("device",),
    ),
    Figure(
        "mig_slices",
        "gauge",
        "MIG slices of GPUs that are cut on demand; lost: used by containers, removed by others.",
        ("device", "hold"),
    ),
    Figure("mig_losses", "counter", "Slices of shares that other programs removed.", ("device",)),
    Figure("mig_switched_off", "counter", "Times another program switched MIG off.", ("device",)),
    Figure("mig_paused", "gauge", "1: switching MIG on is paused.", ("device",)),
    Figure(
        "mig_failures",
        "counter",
        "Times a driver failed to list slices, or to remove one.",
        ("device", "reason"),
    ),
    Figure("label_failures", "counter", "Failed attempts to write the labels of the node."),
    Figure(
        "api_synced", "gauge", "1: the watch of the API server is in sync; 0: it is not.", ("what",)
    ),
)


class AgentMetrics(Figures):
    """The metrics `allotment_agent_NAME`. Thread-safe."""

    def __init__(self, figures: Iterable[Figure] = FIGURES) -> None:
        super().__init__("allotment_agent_", figures, buckets=_FAST_S)
