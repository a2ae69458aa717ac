# SPDX-License-Identifier: Apache-2.0
"""The alerts: when each fires, what it means, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert. Texts have Prometheus' templates for labels."""

    name: str
    expr: str
    wait: str
    """How long it must be so."""
    severity: Severity
    summary: str
    meaning: str
    next: str
    """A command, or what to look at."""

    @property
    def full_name(self) -> str:
        return f"Allotment{self.name}"


@dataclass(frozen=True, slots=True)
class Group:
    """Alerts of one part."""

    name: str
    title: str
    alerts: tuple[Alert, ...]


def grew(metric: str, choice: str = "", window: str = "15m") -> str:
    """An expression that is there while a counter has grown in the window.

    A counter with labels appears with its first event: there is no zero before it, from which
    `increase` could tell it. So a series that was not there before counts as well. An hour back, so
    that a pause of scrapes makes nothing new.
    """
    chosen = f"{metric}{{{choice}}}" if choice else metric
    before = f"last_over_time({chosen}[1h] offset {window})"
    return f"increase({chosen}[{window}]) > 0 or ({chosen} > 0 unless {before})"


_ON_NODE: Final = "{{ $labels.node }}"
_GPU: Final = "GPU {{ $labels.gpu }} of node {{ $labels.node }}"
_DEVICE: Final = "GPU {{ $labels.device }} of node {{ $labels.node }}"
_SHARE: Final = (
    "{{ with $labels.namespace }}{{ . }}/{{ end }}{{ $labels.pod }}{{ $labels.claim }}"
    " {{ $labels.container }}{{ $labels.request }} (share {{ $labels.share }},"
    " node {{ $labels.node }})"
)
_LOGS: Final = (
    "kubectl -n allotment-system logs ds/allotment-agent --all-pods --since=1h"
    " | grep {{ $labels.%s }}"
)
_AGENT_POD: Final = (
    "kubectl -n allotment-system get pods -l app.kubernetes.io/component=agent"
    " --field-selector spec.nodeName={{ $labels.node }}"
)
_SCHEDULER_LOG: Final = "kubectl -n allotment-system logs deploy/allotment-scheduler --since=1h"

AGENT: Final = Group(
    "allotment-agent",
    "Node agents",
    (
        Alert(
            "AgentDown",
            'up{job="allotment-agent"} == 0',
            "5m",
            "critical",
            f"The agent of node {_ON_NODE} does not answer.",
            "No container with a GPU starts on the node. Running programs are not affected, and"
            " their limits stay in force.",
            _AGENT_POD,
        ),
        Alert(
            "AgentsMissing",
            'absent(up{job="allotment-agent"})',
            "10m",
            "critical",
            "Prometheus knows no agent.",
            "No agent is scraped: the DaemonSet is gone, or the scrape configuration selects none"
            " of its pods. All other alerts about nodes are silent meanwhile.",
            "kubectl -n allotment-system get ds,pods -o wide",
        ),
        Alert(
            "AgentConfigInvalid",
            "allotment_agent_config_valid == 0",
            "5m",
            "warning",
            f"The newest configuration of node {_ON_NODE} is invalid.",
            "The last valid configuration stays in force.",
            f"kubectl describe node {_ON_NODE} | grep -A9 Events",
        ),
        Alert(
            "AgentApiServerAway",
            "allotment_agent_api_synced == 0",
            "5m",
            "warning",
            f"The agent of node {_ON_NODE} gets no updates of {{{{ $labels.what }}}}.",
            "It goes on with the last known state. New pods with GPUs may not start.",
            _AGENT_POD,
        ),
        Alert(
            "UseNotRead",
            "allotment_use_read == 0",
            "10m",
            "warning",
            f"Scrapes of node {_ON_NODE} lack {{{{ $labels.what }}}}.",
            "They did not answer within 2 s: a GPU hangs, or the files of the shares cannot be"
            " read. What is missing has no series.",
            "allot doctor (on the node)",
        ),
        Alert(
            "SharesDamaged",
            "allotment_use_shares_damaged > 0",
            "5m",
            "warning",
            f"{{{{ $value }}}} shares of node {_ON_NODE} have a damaged file.",
            "They have a limit and no use in the metrics. A program may have written its ledger.",
            "allot ps -o wide (on the node)",
        ),
        Alert(
            "ContainerRefused",
            grew("allotment_agent_refusals_total", 'reason!="IdentityError"'),
            "0s",
            "warning",
            f"Node {_ON_NODE} refused a container: {{{{ $labels.reason }}}}.",
            "The container got no share and did not start. The kubelet tries again.",
            "kubectl get events -A --field-selector reason=ShareRefused",
        ),
        Alert(
            "IdentityRefused",
            grew("allotment_agent_refusals_total", 'reason="IdentityError"'),
            "0s",
            "critical",
            f"Node {_ON_NODE} refused a container, because it is not known whose it is.",
            "The kubelet's checkpoint and the API server do not say, or contradict each other. No"
            " share is given to the wrong pod. If it goes on, the agent does not reach the API"
            " server, or the checkpoint is damaged.",
            _LOGS % "node",
        ),
    ),
)

GPUS: Final = Group(
    "allotment-gpus",
    "GPUs",
    (
        Alert(
            "GpuUnhealthy",
            "allotment_gpu_healthy == 0",
            "1m",
            "critical",
            f"{_GPU} is not healthy.",
            "No new share is placed on it.",
            "allot doctor (on the node); docs/concepts/health.md has each reason",
        ),
        Alert(
            "GpuNotAnswering",
            "allotment_gpu_answers == 0",
            "5m",
            "critical",
            f"The driver of {_GPU} does not answer.",
            "The GPU hangs. Its programs may hang, too.",
            "nvidia-smi -i {{ $labels.gpu }} (on the node); then restart the node",
        ),
        Alert(
            "Xid",
            grew("allotment_agent_device_xids_total"),
            "0s",
            "warning",
            f"{_DEVICE} reported XID {{{{ $labels.xid }}}}.",
            "Some XIDs are faults of a program, others of the GPU. If the GPU is at fault,"
            " AllotmentGpuUnhealthy fires as well.",
            "nvidia-smi -q -i {{ $labels.device }} (on the node); see NVIDIA's XID catalogue",
        ),
        Alert(
            "EccErrors",
            'increase(allotment_gpu_ecc_errors_total{kind="uncorrected"}[1h]) > 0',
            "0s",
            "critical",
            f"{_GPU} had an error of memory that could not be corrected.",
            "The program that used this memory has wrong data, or was ended.",
            "nvidia-smi -q -d ECC,ROW_REMAPPER -i {{ $labels.gpu }} (on the node)",
        ),
        Alert(
            "MemoryRepair",
            "allotment_gpu_memory_repair_pending == 1 or allotment_gpu_memory_repair_failed == 1",
            "5m",
            "warning",
            f"Memory of {_GPU} waits for a repair, or could not be repaired.",
            "A repair needs a reset of the GPU. If it failed, replace the GPU.",
            f"kubectl drain {_ON_NODE} --ignore-daemonsets; then nvidia-smi --gpu-reset"
            " -i {{ $labels.gpu }} (on the node)",
        ),
        Alert(
            "GpuIdle",
            "avg_over_time(allotment_gpu_utilization_ratio[1h]) < 0.02"
            " and on (gpu) min_over_time(allotment_gpu_memory_allocated_bytes[1h]) > 0",
            "1h",
            "info",
            f"{_GPU} is promised to shares, and idle.",
            "Its shares were busy less than 2 % of an hour, and hold it still.",
            "allot ps (on the node); delete the pods that are not needed",
        ),
        Alert(
            "MpsDaemonDown",
            "allotment_agent_mps_daemon_up == 0",
            "2m",
            "critical",
            f"The MPS daemon of {_DEVICE} accepts no clients.",
            "Programs in shares of mode mps cannot start there.",
            _LOGS % "device",
        ),
        Alert(
            "AnotherManagerOfMig",
            'allotment_agent_mig_paused == 1 or allotment_agent_mig_slices{hold="lost"} > 0',
            "1m",
            "warning",
            f"Another tool changes MIG on {_DEVICE}.",
            "It removed slices of shares, or keeps switching MIG off. Two managers must not have"
            " the same GPU.",
            "kubectl get pods -A | grep -i -e mig-manager -e mig-parted",
        ),
    ),
)

SHARES: Final = Group(
    "allotment-shares",
    "Shares",
    (
        Alert(
            "LimitPassed",
            "allotment_agent_shares_exceeding > 0",
            "2m",
            "critical",
            f"{{{{ $value }}}} shares of node {_ON_NODE} are beyond their limit.",
            "By the driver they have more memory than their limit, or their files allow more than"
            " was promised. A program bypasses the shim. Its neighbours may run out of memory.",
            "kubectl get events -A --field-selector reason=LimitExceeded",
        ),
        Alert(
            "NotEnforced",
            'allotment_share_enforced{mode=~"soft|mps|mig"} == 0 and allotment_share_processes > 0',
            "5m",
            "warning",
            f"Limits are not in force for {_SHARE}.",
            "A process of the share does not have the shim: the program is statically linked,"
            " clears LD_PRELOAD, or its image has another libc.",
            "allot ps -o wide (on the node)",
        ),
        Alert(
            "MemoryRefused",
            grew("allotment_share_memory_refusals_total"),
            "0s",
            "info",
            f"Memory beyond its limit was refused to {_SHARE}.",
            "The program got CUDA_ERROR_OUT_OF_MEMORY. Most programs then exit. Some are made to"
            " retry with less.",
            "kubectl allot resize --pod {{ $labels.namespace }}/{{ $labels.pod }} --memory SIZE",
        ),
        Alert(
            "Starving",
            "rate(allotment_share_gpu_seconds_total[10m])"
            " < 0.5 * allotment_share_compute_guaranteed_ratio"
            " and rate(allotment_share_held_seconds_total[10m]) > 0.5",
            "10m",
            "warning",
            f"{_SHARE} waits, and has less than half of its guarantee.",
            "Its launches are held back, and others use the GPU. A neighbour does not give way, or"
            " its kernels are very long.",
            "allot top (on the node); AllotmentNotEnforced may name the neighbour",
        ),
        Alert(
            "Thrashing",
            "rate(allotment_share_memory_moved_bytes_total[10m])"
            " > 0.05 * allotment_share_memory_limit_bytes",
            "10m",
            "warning",
            f"{_SHARE} moves memory to the GPU all the time.",
            "Each second it moves more than 5 % of its limit. The programs of the GPU use more"
            " memory at a time than it has, and mostly wait.",
            "kubectl allot resize --pod {{ $labels.namespace }}/{{ $labels.pod }} --memory SIZE",
        ),
        Alert(
            "OutsidePrograms",
            "allotment_gpu_memory_outside_bytes > 2^30 and on (gpu) allotment_gpu_shares > 0",
            "10m",
            "warning",
            f"Programs outside any share use {{{{ $value | humanize1024 }}}}B of {_GPU}.",
            "The memory is promised to shares, which may be refused it.",
            "allot ps (on the node) lists them with their PIDs",
        ),
    ),
)

SCHEDULER: Final = Group(
    "allotment-scheduler",
    "Scheduler",
    (
        Alert(
            "SchedulerDown",
            'up{job="allotment-scheduler"} == 0',
            "5m",
            "warning",
            "Replica {{ $labels.instance }} of the scheduler does not answer.",
            "Another replica takes over. If none is left, pods with GPUs wait.",
            "kubectl -n allotment-system get pods -l app.kubernetes.io/component=scheduler",
        ),
        Alert(
            "NobodyLeads",
            "sum without (instance, pod) (allotment_scheduler_leading) < 1",
            "1m",
            "critical",
            "No replica of the scheduler leads.",
            "Pods with GPUs wait.",
            "kubectl -n allotment-system get lease; " + _SCHEDULER_LOG,
        ),
        Alert(
            "SchedulerNotSynced",
            "allotment_scheduler_api_synced == 0",
            "5m",
            "warning",
            "Replica {{ $labels.instance }} of the scheduler gets no updates.",
            "It does not answer kube-scheduler before it has read everything.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "PodsNotCounted",
            "allotment_scheduler_pods_not_taken_over + allotment_scheduler_pods_without_placement"
            " > 0",
            "5m",
            "critical",
            "{{ $value }} pods use GPUs that the scheduler does not count.",
            "They were bound by another scheduler. Their GPUs may be given twice.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "ObjectsLeftOut",
            "allotment_scheduler_objects_left_out > 0",
            "10m",
            "warning",
            "The scheduler leaves out {{ $value }} nodes or pods.",
            "Their annotations or requests are invalid. The log names each.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "GpusToldTwice",
            "allotment_scheduler_devices_told_twice > 0",
            "5m",
            "critical",
            "{{ $value }} GPUs are reported by more than one node.",
            "A machine joined again under another name, or an inventory is forged. The log names"
            " them.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "PodsWaiting",
            'sum without (instance, pod) (allotment_scheduler_pods_waiting{reason!="placed"}) > 0',
            "30m",
            "info",
            "{{ $value }} pods wait for GPUs: {{ $labels.reason }}.",
            "For half an hour there were pods that wait for this reason.",
            "kubectl allot explain pod NAME",
        ),
        Alert(
            "Distrusted",
            grew("allotment_scheduler_extender_handshakes_failed_total", 'why="distrusted"')
            + " or "
            + grew("allotment_scheduler_webhook_handshakes_failed_total", 'why="distrusted"'),
            "1m",
            "critical",
            "kube-scheduler or the API server does not trust the scheduler's certificate.",
            "It was not restarted since a new authority was created. Pods with GPUs wait, or are"
            " created without translation.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "CertificateNotKept",
            "allotment_scheduler_webhook_certificate_kept == 0",
            "10m",
            "warning",
            "Replica {{ $labels.instance }} cannot renew the webhook's certificate.",
            "When it expires, pods with GPUs are not translated.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "SchedulerRestartsParts",
            grew("allotment_scheduler_parts_begun_anew_total"),
            "0s",
            "warning",
            "The scheduler started its task {{ $labels.part }} again after a failure.",
            "It goes on working. The log names the failure.",
            _SCHEDULER_LOG,
        ),
        Alert(
            "SchedulerSlow",
            "histogram_quantile(0.99, sum by (le, verb)"
            " (rate(allotment_scheduler_request_seconds_bucket[10m]))) > 1",
            "10m",
            "warning",
            "1 % of the answers to kube-scheduler take more than a second: {{ $labels.verb }}.",
            "Pods start late. kube-scheduler gives up after its time-out.",
            _SCHEDULER_LOG,
        ),
    ),
)

GROUPS: Final = (AGENT, GPUS, SHARES, SCHEDULER)
ALERTS: Final = tuple(alert for group in GROUPS for alert in group.alerts)
