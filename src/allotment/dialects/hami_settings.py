# SPDX-License-Identifier: Apache-2.0
"""What a HAMi may have been configured with, under HAMi's own names, read from its own file.

`device-config.yaml` of the ConfigMap `hami-scheduler-device` says, in its section `nvidia`, how
resources are called and what is had without them; the scheduler's default policies are options of
its command. (HAMi v2.10 `docs/config.md`.)
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from allotment.dialects.foreign_amounts import Name
from allotment.dialects.mig_geometries import AllowedProfiles, KnownGeometries
from allotment.dialects.protocol import meant, shown
from allotment.model.errors import UsageError
from allotment.model.requests import MIG, MPS, SOFT

__all__ = ["HamiSettings", "hami_of", "load_hami"]

_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
_MAX_CHARACTERS: Final = 1 << 20
_MAX_SHOWN: Final = 200

_ELSEWHERE: Final[Mapping[str, str]] = {
    "overwriteEnv": "a pod without a GPU is not changed",
    "preConfiguredDeviceMemory": "the node's agent asks the GPU",
    "deviceSplitCount": "as many shares as fit are on a GPU",
    "deviceCoreScaling": "a GPU has 100 percent to guarantee",
    "enableNumaTopology": "NUMA nodes are known always",
    "libCudaLogLevel": "the shim has its own log",
    "runtimeClassName": "pods need no runtime class",
}


class HamiSettings(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The part of HAMi's configuration that says what a pod means."""

    resource_count_name: Name = "nvidia.com/gpu"
    resource_memory_name: Name = "nvidia.com/gpumem"
    resource_memory_percentage_name: Name = "nvidia.com/gpumem-percentage"
    resource_core_name: Name = "nvidia.com/gpucores"
    resource_priority_name: Name = "nvidia.com/priority"
    memory_factor: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    """MiB in one of `resource_memory_name`."""
    default_memory: _Amount = 0
    """What is had without memory asked for, in the same units; 0: all of it."""
    default_cores: Annotated[int, Meta(ge=0, le=100)] = 0
    default_gpu_num: Annotated[int, Meta(ge=0, le=1024)] = msgspec.field(
        default=1, name="defaultGPUNum"
    )
    """How many GPUs a container has that asks for amounts alone; 0: none."""
    device_memory_scaling: Annotated[float, Meta(ge=0)] = 1.0
    """Above 1 memory is promised more than once: it may live on the host."""
    gpu_core_policy: Literal["", "default", "force", "disable"] = "default"
    """`disable`: what is reserved of a GPU's time is no ceiling."""
    disable_core_limit: bool = False
    """The same, by its older name."""
    node_scheduler_policy: Literal["", "binpack", "spread"] = ""
    """For pods that do not say; empty: Allotment's own default. HAMi's chart has `binpack`."""
    gpu_scheduler_policy: str = ""
    """Likewise, a chain; HAMi's chart has `spread`."""
    scheduler_name: str = "hami-scheduler"
    """A pod that asks for this scheduler is HAMi's, whatever else it says."""
    owns_plain_count: bool = False
    """`nvidia.com/gpu` alone is HAMi's, too: it is translated, and not left to the kubelet."""
    known_mig_geometries: tuple[KnownGeometries, ...] = ()
    """Which slices GPUs are cut into for pods of mode `mig`; none: whatever their driver has."""
    mig_profile_allowlist: tuple[AllowedProfiles, ...] = ()
    """The only profiles that these are of, by model, and none of models that are not in it; empty:
    whatever their driver has."""
    modes: frozenset[str] = frozenset({SOFT, MIG, MPS})
    """Those in which nodes have GPUs for shares: what `nvidia.com/vgpu-mode` may ask for."""


def load_hami(text: str) -> tuple[HamiSettings, tuple[str, ...]]:
    """Read HAMi's `device-config.yaml`; also returned is what of it has no part in this, and why.

    Raises `UsageError`: the file is none, or has an unknown name in its section `nvidia`.
    """
    import yaml

    hint = "give the value of device-config.yaml in the ConfigMap hami-scheduler-device"
    if len(text) > _MAX_CHARACTERS:
        problem = f"HAMi's configuration has {len(text)} characters, more than {_MAX_CHARACTERS}"
        raise UsageError(problem, hint=hint)
    try:
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"HAMi's configuration is no YAML: {error}", hint=hint) from error
    section = document.get("nvidia") if isinstance(document, dict) else None
    if not isinstance(section, dict):
        raise UsageError("HAMi's configuration has no section nvidia", hint=hint)
    return hami_of(section)


def hami_of(section: Mapping[Any, object]) -> tuple[HamiSettings, tuple[str, ...]]:
    """Read the section alone. Raises `UsageError`."""
    known = {each.encode_name for each in msgspec.structs.fields(HamiSettings)}
    for key in section:
        if key not in known and key not in _ELSEWHERE:
            problem = f"HAMi's configuration: {shown(str(key))} is not known"
            hint = f"correct or remove it; there are: {', '.join(sorted(known))}"
            raise UsageError(problem + meant(str(key), known), hint=hint)
    try:
        read = {key: value for key, value in section.items() if key in known}
        settings = msgspec.convert(read, HamiSettings)
    except msgspec.ValidationError as error:
        problem = f"HAMi's configuration: {str(error)[:_MAX_SHOWN]}"
        raise UsageError(problem, hint="write it as HAMi's documentation has it") from error
    told = [f"{key}: {_ELSEWHERE[key]}" for key in section if key in _ELSEWHERE]
    return settings, tuple(told)
