# SPDX-License-Identifier: Apache-2.0
"""The GPU systems that `allot migrate` replaces: their programs, labels and settings, as a table.

A system is data, and a function that reads its settings. What is done with them is the same for
all (docs/designs/migrate.md). Facts are of the releases that docs/guides/migrate.md names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from allotment.model.errors import UsageError

if TYPE_CHECKING:
    from allotment.agent.config.options import OptionKind
    from allotment.kube.migrations import WorkloadObject
    from allotment.kube.objects import ConfigMapObject

_SOFT: Final = "soft"
"""A configuration of the chart: each GPU in enforced parts."""
_PARTS: Final = {"mig": ["mig"], "mps": ["mps"]}
"""Modes of a node by HAMi's `operatingmode`; others are the default."""


class Setting(msgspec.Struct, frozen=True):
    """A setting of the old system, and what it becomes."""

    where: str
    name: str
    value: str
    becomes: str = ""
    """Empty: it cannot be carried over."""
    reason: str = ""


class CarriedSettings(msgspec.Struct):
    """What a system's settings become. Filled by its reader."""

    settings: list[Setting] = msgspec.field(default_factory=list)
    configs: dict[str, str] = msgspec.field(default_factory=dict)
    """More configurations of the agent, by name."""
    default_config: str = _SOFT
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    """More values of the chart."""
    dialects: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Sections of `allot scheduler --dialects`."""
    node_configs: dict[str, str] = msgspec.field(default_factory=dict)
    """Configurations of single nodes, by node."""
    notes: list[str] = msgspec.field(default_factory=list)
    known: set[str] = msgspec.field(default_factory=set)
    """Flags and variables that the reader looks at, also those with the usual value."""

    def carry(self, where: str, name: str, value: object, becomes: str) -> None:
        self.settings.append(Setting(where, name, _shown(value), becomes))

    def drop(self, where: str, name: str, value: object, reason: str) -> None:
        self.settings.append(Setting(where, name, _shown(value), reason=reason))


class SystemParts(msgspec.Struct, frozen=True, kw_only=True):
    """A system's objects in a cluster."""

    daemon_sets: Sequence[WorkloadObject]
    """Its plugins."""
    deployments: Sequence[WorkloadObject]
    config_maps: Sequence[ConfigMapObject]
    """Those that its plugins mount, and those with its settings."""
    is_enforced: bool
    """Replicas without limits become enforced parts."""


class OldSystem(msgspec.Struct, frozen=True, kw_only=True):
    """A system that offers GPUs to pods."""

    name: str
    title: str
    plugins: str
    """Pattern of names and images of DaemonSets that leave a node."""
    others: str
    """Pattern of Deployments, webhooks and classes that stay until the end."""
    resources: str
    """Pattern of the resources that its pods ask for."""
    labels: Mapping[str, str | None]
    """Labels in its plugins' node selectors, and the value (None: removed) that takes them off."""
    annotations: tuple[str, ...] = ()
    """Its plugins write them; its scheduler sends pods to nodes that have them."""
    config_maps: str = r"(?!)"
    """Pattern of names of ConfigMaps with settings that no plugin mounts."""
    take_over: tuple[str, ...] = ()
    """For the chart's `scheduler.takeOver`: its running pods count by their records."""
    claims_of: str = ""
    """Its driver of ResourceClaims. A claim ends at the driver that prepared it, so its pods cannot
    stay."""
    mps: str = r"(?!)"
    """Pattern of names of its plugins that are MPS servers: running pods end with them."""
    read: Callable[[SystemParts], CarriedSettings]
    before: tuple[str, ...] = ()
    """What the user does before `apply`."""
    after: tuple[str, ...] = ()
    """What the user does when all nodes have moved."""


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _programs(workloads: Sequence[WorkloadObject]) -> Iterator[tuple[WorkloadObject, str, str]]:
    """Yield each flag and variable of the containers: `--memory-unit`, `MiB`."""
    for workload in workloads:
        for each in workload.pod.all_containers:
            yield from ((workload, name, value) for name, value in each.options)


def _map_name(each: ConfigMapObject) -> str:
    return f"ConfigMap {each.metadata.namespace}/{each.metadata.name}"


def _document(text: str) -> dict[str, Any] | None:
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---- NVIDIA's device plugin ----------------------------------------------------------------------


def _read_nvidia(parts: SystemParts) -> CarriedSettings:
    reading = CarriedSettings(default_config="default")
    given = _nvidia_variables(parts, reading)
    found = {
        name: (_map_name(each), text)
        for each in parts.config_maps
        for name, text in (each.data or {}).items()
        if not name.endswith(".sh")  # the GPU Operator mounts its entry points, too
    }
    for name, (where, text) in sorted((found or {"default": ("", "version: v1\n")}).items()):
        document = _document(text)
        if document is None:
            reading.drop(where, name, "(text)", "it is not YAML")
        else:
            _nvidia_config(reading, where, name, document, given, is_enforced=parts.is_enforced)
    variables = {name: value for _, name, value in _programs(parts.daemon_sets)}
    named = variables.get("DEFAULT_CONFIG", "")
    if named in reading.configs:
        reading.default_config = named
    elif len(reading.configs) == 1:
        (reading.default_config,) = reading.configs
    reading.values = {"scheduler": {"enabled": False}, "kubeScheduler": {"enabled": False}}
    return reading


def _nvidia_variables(parts: SystemParts, reading: CarriedSettings) -> dict[str, object]:
    """Return the plugin's variables that differ from NVIDIA's defaults, by key of the file."""
    from allotment.agent.config.options import NVIDIA_OPTIONS

    words = {name: (str(workload), value) for workload, name, value in _programs(parts.daemon_sets)}
    given: dict[str, object] = {}
    for option in NVIDIA_OPTIONS:
        flags = [f"--{each}" for each in (option.flag, *option.aliases)]
        reading.known.update((*flags, *option.env))
        name = next((each for each in (*flags, *option.env) if each in words), "")
        where, value = words.get(name, ("", ""))
        where = f"DaemonSet {where}"
        if name in flags and not value and option.kind == "bool":
            value = "true"
        usual = "envvar" if option.flag == "device-list-strategy" else option.default
        if not value or option.key is None or value == usual:
            continue
        if option.no_effect:
            reading.drop(where, name, value, option.no_effect)
        else:
            given[option.key] = _typed(value, option.kind)
            reading.carry(where, name, value, f"agent.configs: {option.key}")
    return given


def _typed(value: str, kind: OptionKind) -> object:
    """Return a variable's value as the file has it."""
    match str(kind):
        case "bool":
            return value.lower() in {"1", "t", "true"}
        case "list":
            return value.split(",")
        case "numbers":
            return [int(each) for each in value.split(",") if each.isdecimal()]
        case _:
            return value


def _nvidia_config(
    reading: CarriedSettings,
    where: str,
    name: str,
    document: dict[str, Any],
    given: Mapping[str, object],
    *,
    is_enforced: bool,
) -> None:
    """Carry a configuration as it is, with the variables, if the agent accepts it."""
    from allotment.agent.config.options import NVIDIA_OPTIONS
    from allotment.agent.config.parsing import at, parse

    for path, value in given.items():
        _put(document, path, value)
    is_sliced = bool((document.get("sharing") or {}).get("timeSlicing"))
    if is_enforced and is_sliced and "allotment" not in document:
        document["allotment"] = {"devices": [{"mode": "soft"}]}
    written = yaml.safe_dump(document, sort_keys=False)
    try:
        parse(written, source=name)
    except UsageError as error:
        reading.drop(where, name, "(configuration)", error.one_line())
        return
    reading.configs[name] = written
    if where:
        reading.carry(where, name, _summary(document), f"agent.configs.{name}")
    for option in NVIDIA_OPTIONS:
        value = at(document, f"$.{option.key}") if option.key and option.no_effect else None
        if value is not None:
            reading.drop(where, f"{name}: {option.key}", value, option.no_effect)
    if is_sliced and not is_enforced:
        reading.notes.append(
            f"configuration {name}: replicas stay without limits, as before; --enforce makes each"
            " an enforced part"
        )


def _put(document: dict[str, Any], path: str, value: object) -> None:
    """Variables go before the file, as in NVIDIA's plugin."""
    *folders, key = path.split(".")
    inner = document
    for folder in folders:
        if not isinstance(inner.get(folder), dict):
            inner[folder] = {}
        inner = inner[folder]
    inner[key] = value


def _summary(document: Mapping[str, Any]) -> str:
    sharing = document.get("sharing") or {}
    words = [
        f"{each.get('name')} x {each.get('replicas')} ({kind})"
        for kind in ("timeSlicing", "mps")
        for each in ((sharing.get(kind) or {}).get("resources") or ())
        if isinstance(each, Mapping)
    ]
    return ", ".join(words) or "whole GPUs"


# ---- HAMi and Volcano ----------------------------------------------------------------------------


def _read_hami(parts: SystemParts) -> CarriedSettings:
    reading = _read_vgpu(parts, "hami")
    for workload, name, value in _programs(parts.deployments):
        key = {
            "--node-scheduler-policy": "nodeSchedulerPolicy",
            "--gpu-scheduler-policy": "gpuSchedulerPolicy",
        }.get(name)
        if key and value:
            _into_dialect(reading, "hami", f"Deployment {workload}", {key: value})
    for workload, name, value in _programs(parts.daemon_sets):
        if name == "--mig-strategy" and value not in {"", "none"}:
            reason = "slices are cut on request: see `modes` of a rule"
            reading.drop(f"DaemonSet {workload}", name, value, reason)
    reading.known.add("--mig-strategy")
    return reading


def _read_volcano(parts: SystemParts) -> CarriedSettings:
    reading = _read_vgpu(parts, "volcano")
    for each in parts.config_maps:
        for text in (each.data or {}).values():
            for name, value in _deviceshare(_document(text) or {}):
                reason = "scheduler.policy and gpuPolicy of the chart choose nodes and GPUs"
                reading.drop(_map_name(each), name, value, reason)
    return reading


def _deviceshare(document: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the arguments of Volcano's plugin `deviceshare`."""
    for tier in document.get("tiers") or ():
        for plugin in (tier or {}).get("plugins") or ():
            if plugin.get("name") == "deviceshare":
                yield from (plugin.get("arguments") or {}).items()


_VGPU_FLAGS: Final = {
    "--device-memory-scaling": "deviceMemoryScaling",
    "--device-split-count": "deviceSplitCount",
    "--device-cores-scaling": "deviceCoreScaling",
    "--disable-core-limit": "disableCoreLimit",
    "--gpu-memory-factor": "gpuMemoryFactor",
}


def _read_vgpu(parts: SystemParts, dialect: str) -> CarriedSettings:
    """Read `device-config.yaml` (the cluster's settings) and `config.json` (those of nodes)."""
    reading = CarriedSettings()
    for workload, name, value in _programs(parts.daemon_sets):
        if name in _VGPU_FLAGS:
            flag = {_VGPU_FLAGS[name]: (_document(f"it: {value}") or {}).get("it")}
            _into_dialect(reading, dialect, f"DaemonSet {workload}", flag)
    reading.known.update(_VGPU_FLAGS)
    for each in parts.config_maps:
        data = each.data or {}
        document = _document(data.get("device-config.yaml", "")) or {}
        section = document.get("nvidia")
        if isinstance(section, Mapping):
            _into_dialect(reading, dialect, _map_name(each), section)
        nodes = (_document(data.get("config.json", "")) or {}).get("nodeconfig")
        for entry in nodes if isinstance(nodes, list) else ():
            if isinstance(entry, Mapping) and entry.get("name"):
                _into_node(reading, _map_name(each), entry)
    return reading


def _into_dialect(
    reading: CarriedSettings, dialect: str, where: str, section: Mapping[str, object]
) -> None:
    """Carry the settings that the dialect has, one by one, so that one bad value drops itself."""
    from allotment.dialects.foreign.hami import IGNORED
    from allotment.dialects.foreign.settings import SETTINGS, settings_of

    usual = {each.encode_name: each.default for each in msgspec.structs.fields(SETTINGS[dialect])}
    for name, value in section.items():
        if name in IGNORED:
            reading.drop(where, name, value, IGNORED[name])
        elif name not in usual:
            reading.drop(where, name, value, "Allotment has no such setting")
        elif value == usual[name] or value in ([], None):
            continue
        else:
            try:
                settings_of({dialect: {name: value}})
            except UsageError as error:
                reading.drop(where, name, value, error.one_line())
                continue
            reading.dialects.setdefault(dialect, {})[name] = value
            reading.carry(where, name, value, f"--dialects: {dialect}.{name}")


_NODE_REASONS: Final = {
    "devicememoryscaling": "one value holds for the cluster: deviceMemoryScaling",
    "devicecorescaling": "guarantees on a GPU add up to at most 100 percent",
    "devicesplitcount": "a GPU takes as many shares as fit",
    "preconfigureddevicememory": "the node's agent reads it from the GPU",
    "enablenumatopology": "NUMA nodes are always used",
    "libcudaloglevel": "the shim writes its own log",
    "enablegetpreferredallocation": "the scheduler chooses the GPU",
    "filterdevices": "hide GPUs by the node's annotation allotment.dev/device-cordon",
}


def _into_node(reading: CarriedSettings, where: str, entry: Mapping[str, Any]) -> None:
    node = str(entry["name"])
    document: dict[str, Any] = {"version": "v1"}
    modes = _PARTS.get(str(entry.get("operatingmode", "")))
    strategy = entry.get("migstrategy")
    for key, value in entry.items():
        name = f"{node}: {key}"
        if key == "operatingmode" and modes:
            reading.carry(where, name, value, f"agent.configs.{node}: modes [{modes[0]}]")
        elif key == "migstrategy" and value in {"single", "mixed"}:
            reading.carry(where, name, value, f"agent.configs.{node}: flags.migStrategy")
        elif key in _NODE_REASONS and value not in (None, 0, "", False):
            reading.drop(where, name, value, _NODE_REASONS[key])
    if strategy in {"single", "mixed"}:
        document["flags"] = {"migStrategy": strategy}
    if modes or "flags" in document:
        document["allotment"] = {"devices": [{"modes": modes or ["soft"]}]}
        reading.configs[node] = yaml.safe_dump(document, sort_keys=False)
        reading.node_configs[node] = node


# ---- Aliyun, Tencent -----------------------------------------------------------------------------


def _read_aliyun(parts: SystemParts) -> CarriedSettings:
    reading = CarriedSettings(known={"--memory-unit"})
    for workload, name, value in _programs(parts.daemon_sets):
        if name == "--memory-unit" and value:
            if value == "GiB":
                reading.carry(f"DaemonSet {workload}", name, value, "the default unit")
            else:
                section = {"memoryUnit": value}
                _into_dialect(reading, "aliyun", f"DaemonSet {workload}", section)
        elif name == "--health-check":
            reason = "health is always checked"
            reading.drop(f"DaemonSet {workload}", name, value or "true", reason)
    reading.notes.append("programs get no more memory than they ask for: before, it was counted")
    return reading


_TENCENT_FLAGS: Final = {
    "--share-mode": "GPUs are always shared",
    "--container-runtime-endpoint": "the agent asks the kubelet",
    "--cgroup-driver": "the agent asks the kernel",
    "--allocation-check-period": "each command repairs what a dead process left",
    "--sample-period": "use is measured in each program",
}


def _read_tencent(parts: SystemParts) -> CarriedSettings:
    reading = CarriedSettings()
    for workload, flag, value in _programs(parts.daemon_sets):
        if flag in _TENCENT_FLAGS:
            reading.drop(f"DaemonSet {workload}", flag, value, _TENCENT_FLAGS[flag])
    return reading


# ---- NVIDIA's DRA driver -------------------------------------------------------------------------

_GATES: Final = {
    "TimeSlicingSettings": ("served: mode timeslice, for a claim of a whole GPU", ""),
    "MPSSupport": ("served: mode mps, one GPU in each request", ""),
    "DynamicMIG": ("agent.configs.dra: modes [soft, mig]", ""),
    "ConsumableShares": ("served: memory is a part of a GPU, and enforced", ""),
    "NVMLDeviceHealthCheck": ("always on, taint allotment.dev/unusable", ""),
    "PassthroughSupport": ("", "VfioDeviceConfig is not served"),
    "DeviceMetadata": ("", "not served"),
    "FabricManagerPartitioning": ("", "not served"),
    "HostManagedIMEX": ("", "not served"),
    "DRAListTypeAttributes": ("", "not served"),
}
_CLAIMS: Final = """\
version: v1
allotment:
  devices:
  - modes: [soft, mig]
  dra:
    driverName: gpu.nvidia.com
"""


def _read_dra(parts: SystemParts) -> CarriedSettings:
    reading = CarriedSettings(configs={"dra": _CLAIMS}, default_config="dra")
    reading.known = {"FEATURE_GATES", "--feature-gates"}
    reading.values = {"scheduler": {"enabled": False}, "kubeScheduler": {"enabled": False}}
    seen = set()
    for workload, name, value in _programs(parts.daemon_sets):
        if name.strip("-").replace("-", "_").upper() != "FEATURE_GATES":
            continue
        for gate in value.split(","):
            key, _, state = gate.partition("=")
            if state.lower() != "true" or key in seen:
                continue
            seen.add(key)
            becomes, reason = _GATES.get(key, ("", "Allotment does not know this gate"))
            where = f"DaemonSet {workload}"
            reading.settings.append(Setting(where, key, "true", becomes, reason))
    programs = {
        each.name: workload
        for workload in parts.daemon_sets
        for each in workload.pod.containers or ()
    }
    if "compute-domains" in programs:
        where = f"DaemonSet {programs['compute-domains']}"
        reason = "ComputeDomains leave with the same pod: keep such nodes on this driver"
        reading.drop(where, "compute-domain.nvidia.com", "served", reason)
    return reading


# ---- the table -----------------------------------------------------------------------------------

_IGNORE: Final = (
    "keep pods of all namespaces as they are: kubectl label namespaces --all"
    " allotment.dev/webhook=ignore"
)
_NAMESPACES: Final = (
    "move namespaces: kubectl label namespace NAME allotment.dev/webhook-, then restart its"
    " workloads"
)

OLD_SYSTEMS: Final[Mapping[str, OldSystem]] = {
    each.name: each
    for each in (
        OldSystem(
            name="nvidia",
            title="NVIDIA's device plugin",
            plugins=r"nvidia-device-plugin|nvidia/k8s-device-plugin|gpu-feature-discovery",
            others=r"gpu-operator",
            resources=r"nvidia\.com/(gpu|mig-).*",
            mps=r"mps-control-daemon",
            labels={
                "nvidia.com/gpu.deploy.device-plugin": "false",
                "nvidia.com/gpu.deploy.gpu-feature-discovery": "false",
            },
            read=_read_nvidia,
            after=(
                (
                    "remove the plugin's chart, or set devicePlugin.enabled=false and"
                    " gfd.enabled=false in the GPU Operator's"
                ),
            ),
        ),
        OldSystem(
            name="hami",
            title="HAMi",
            plugins=r"hami-device-plugin|projecthami/hami",
            others=r"hami",
            resources=r"nvidia\.com/(gpu|gpumem|gpumem-percentage|gpucores)",
            labels={"gpu": None},
            annotations=("hami.io/node-nvidia-register", "hami.io/node-handshake"),
            config_maps=r"hami-scheduler-device|hami-device-plugin",
            take_over=("hami",),
            read=_read_hami,
            before=(_IGNORE,),
            after=(
                _NAMESPACES,
                (
                    "when `kubectl get pods -A -l hami.io/vgpu-node` lists no pod: helm -n"
                    " kube-system uninstall hami, then set scheduler.takeOver=[]"
                ),
            ),
        ),
        OldSystem(
            name="volcano",
            title="Volcano's vGPU device plugin",
            plugins=r"volcano-vgpu|volcano-device-plugin",
            others=r"volcano",
            resources=r"volcano\.sh/(vgpu|gpu)-.*",
            labels={},
            annotations=("volcano.sh/node-vgpu-register", "volcano.sh/node-vgpu-handshake"),
            config_maps=r"volcano-vgpu-(device|node)-config|volcano-scheduler-configmap",
            take_over=("volcano", "volcano-gpushare"),
            read=_read_volcano,
            before=(_IGNORE,),
            after=(
                _NAMESPACES,
                (
                    "remove deviceshare from volcano-scheduler-configmap, and the plugin's"
                    " DaemonSet; then set scheduler.takeOver=[]"
                ),
            ),
        ),
        OldSystem(
            name="aliyun",
            title="Aliyun's gpushare",
            plugins=r"gpushare-device-plugin|k8s-gpushare-plugin",
            others=r"gpushare",
            resources=r"aliyun\.com/gpu-.*",
            labels={"gpushare": None},
            take_over=("aliyun",),
            read=_read_aliyun,
            before=(_IGNORE,),
            after=(
                _NAMESPACES,
                (
                    "delete Deployment gpushare-schd-extender and DaemonSet"
                    " gpushare-device-plugin-ds, and the extender with aliyun.com/gpu-mem from"
                    " kube-scheduler's configuration; then set scheduler.takeOver=[]"
                ),
            ),
        ),
        OldSystem(
            name="tencent",
            title="Tencent's GPU manager",
            plugins=r"^gpu-manager(-daemonset)?( |$)|/gpu-manager(:|@| |$)",
            others=r"(^|[ /])gpu-(manager|admission)",
            resources=r"tencent\.com/vcuda-.*",
            labels={"nvidia-device-enable": None},
            take_over=("tencent",),
            read=_read_tencent,
            before=(_IGNORE,),
            after=(
                _NAMESPACES,
                (
                    "remove gpu-admission from kube-scheduler's configuration, and the"
                    " DaemonSet; then set scheduler.takeOver=[]"
                ),
            ),
        ),
        OldSystem(
            name="nvidia-dra",
            title="NVIDIA's DRA driver",
            plugins=r"dra-driver-gpu|dra-driver-nvidia-gpu",
            others=r"gpu\.nvidia\.com|dra-driver-gpu",
            resources=r"(?!)",
            labels={},
            claims_of="gpu.nvidia.com",
            read=_read_dra,
            before=("Kubernetes 1.36 or later is needed",),
            after=(
                (
                    "uninstall NVIDIA's chart, which owns the device classes; then set"
                    " resourceClaims.enabled=true and resourceClaims.nvidiaClasses=true"
                ),
            ),
        ),
    )
}
