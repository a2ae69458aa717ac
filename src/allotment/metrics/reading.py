# SPDX-License-Identifier: Apache-2.0
"""Reads an agent's metrics of use back from their text, as far as people look at them. Pure.

A page of a node with 60 shares has 4,000 lines, and a cluster has many nodes. So lines of other
metrics are skipped by one expression, and the labels of a share, which are the same text on all its
lines, are read once.
"""

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

from allotment.metrics.use import ClaimUser, GpuUse, ShareUse, Use

_NS: Final = 1_000_000_000

_Setter = tuple[str, Callable[[float], Any]]


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


_SHARE: Final[Mapping[str, _Setter]] = {
    "memory_used_bytes": ("memory_used", int),
    "memory_limit_bytes": ("memory_limit", int),
    "memory_peak_bytes": ("memory_peak", int),
    "memory_refusals_total": ("refusals", int),
    "memory_host_bytes": ("host_bytes", int),
    "memory_moved_bytes_total": ("moved_bytes", int),
    "compute_guaranteed_ratio": ("guarantee", float),
    "compute_ceiling_ratio": ("ceiling", float),
    "utilization_ratio": ("utilization", float),
    "gpu_seconds_total": ("gpu_ns", _ns),
    "held_seconds_total": ("held_ns", _ns),
    "processes": ("processes", int),
    "enforced": ("is_enforced", bool),
    "suspended": ("is_suspended", bool),
}
_GPU: Final[Mapping[tuple[str, str], _Setter]] = {
    ("answers", ""): ("answers", bool),
    ("healthy", ""): ("is_healthy", bool),
    ("memory_total_bytes", ""): ("memory_total", int),
    ("memory_reserved_bytes", ""): ("memory_reserved", int),
    ("memory_used_bytes", ""): ("memory_used", int),
    ("memory_outside_bytes", ""): ("memory_outside", int),
    ("memory_allocated_bytes", ""): ("memory_allocated", int),
    ("compute_guaranteed_ratio", ""): ("guaranteed", float),
    ("shares", ""): ("shares", int),
    ("utilization_ratio", ""): ("utilization", float),
    ("temperature_celsius", "gpu"): ("temperature_c", int),
    ("power_watts", ""): ("power_mw", lambda watts: round(watts * 1000)),
    ("last_xid", ""): ("last_xid", int),
}
"""By the metric and the value of its own label."""

_NAMES: Final = "|".join(
    (
        *(f"share_{name}" for name in _SHARE),
        *dict.fromkeys(f"gpu_{name}" for name, _ in _GPU),
        "gpu_info",
        "claim_pod_info",
        "use_read",
    )
)
_LINE: Final = re.compile(
    rf'^allotment_({_NAMES})\{{((?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)*)\}} (\S+)', re.MULTILINE
)
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_NEWLINE: Final = "n"


def read_use(text: str) -> Use | None:
    """Return the use that a page has; None: it has none, as that of another program.

    Lines that cannot be read are skipped. Fields that nothing shows have their defaults.
    """
    labels: dict[str, dict[str, str]] = {}
    gpus: dict[str, dict[str, Any]] = {}
    shares: dict[str, dict[str, Any]] = {}
    users = []
    read: dict[str, float] = {}
    for match in _LINE.finditer(text):
        name, written, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if not isfinite(value):
            continue
        if name.startswith("share_"):
            field, convert = _SHARE[name[6:]]
            shares.setdefault(written, {})[field] = convert(value)
            continue
        found = labels.get(written)
        if found is None:
            found = labels[written] = _labels(written)
        if name.startswith("gpu_"):
            _add(gpus, name[4:], found, value)
        elif name == "use_read":
            read[found.get("what", "")] = value
        elif {"namespace", "claim", "pod"} <= found.keys():
            of_claim = (found["namespace"], found["claim"], found["pod"])
            users.append(ClaimUser(namespace=of_claim[0], claim=of_claim[1], pod=of_claim[2],
                                   is_only=False))  # fmt: skip
    if not read:
        return None
    made = [_gpu(uuid, fields) for uuid, fields in gpus.items()]
    indexes = {each.uuid: each.index for each in made}
    return Use(
        node=next((each["node"] for each in labels.values() if "node" in each), ""),
        gpus=tuple(sorted(made, key=lambda each: each.index)),
        shares=tuple(
            _share(_labels(written), fields, indexes) for written, fields in shares.items()
        ),
        claim_users=tuple(users),
        are_shares_read=read.get("shares") == 1,
    )


def _labels(written: str) -> dict[str, str]:
    return {
        name: _ESCAPED.sub(_unescaped, value) if "\\" in value else value
        for name, value in _LABEL.findall(written)
    }


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == _NEWLINE else match[1]


def _add(
    gpus: dict[str, dict[str, Any]], name: str, labels: Mapping[str, str], value: float
) -> None:
    fields = gpus.setdefault(labels.get("gpu", ""), {})
    if name == "info":
        fields["index"] = int(index) if (index := labels.get("index", "")).isdecimal() else 0
        fields |= {key: labels.get(key, "") for key in ("model", "pci_bus_id", "mode")}
        return
    setter = _GPU.get((name, labels.get("sensor", "")))
    if setter is not None:
        field, convert = setter
        fields[field] = convert(value)


def _gpu(uuid: str, fields: Mapping[str, Any]) -> GpuUse:
    known = {"index": 0, "model": "", "pci_bus_id": "", "memory_total": 0, **fields}
    return GpuUse(uuid=uuid, **known)


def _share(
    labels: Mapping[str, str], fields: Mapping[str, Any], indexes: Mapping[str, int]
) -> ShareUse:
    gpu = labels.get("gpu", "")
    named = ("namespace", "pod", "container", "claim", "request", "share", "mode")
    known: dict[str, Any] = {name: labels.get(name, "") for name in named}
    return ShareUse(
        **known,
        kind=labels.get("class", ""),
        gpu=gpu,
        device=labels.get("device") or gpu,
        gpu_index=indexes.get(gpu, 0),
        **fields,
    )
