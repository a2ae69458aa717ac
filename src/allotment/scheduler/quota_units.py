# SPDX-License-Identifier: Apache-2.0
"""What one of each resource is that a ResourceQuota may name, as a cluster has its dialects set."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from allotment.dialects.aliyun import AliyunSettings
from allotment.dialects.deepomatic import DeepomaticSettings
from allotment.dialects.hami_settings import HamiSettings
from allotment.dialects.systems import DialectSettings
from allotment.dialects.tencent import TencentSettings
from allotment.dialects.tencent_qgpu import ElasticGpuSettings, QgpuSettings
from allotment.dialects.volcano import VolcanoSettings
from allotment.scheduler.quota import COMPUTE, DEVICES, MEMORY, OWN_UNITS, PART, Unit

__all__ = ["units_of"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_PERCENT: Final = 100  # basis points


def units_of(settings: DialectSettings | None = None) -> Mapping[str, Unit]:
    """Return the unit of each resource by its name, Allotment's own and all dialects'."""
    its = settings or DialectSettings()
    units = dict(OWN_UNITS)
    units |= _vgpu(_section(its, "hami", HamiSettings), "memory_factor", "hami", "nvidia")
    units |= _vgpu(_section(its, "volcano", VolcanoSettings), "gpu_memory_factor", "volcano")
    units |= {
        "volcano.sh/gpu-memory": Unit(MEMORY, _MIB),
        "volcano.sh/gpu-number": Unit(DEVICES, dialects=frozenset({"volcano-gpushare"})),
    }
    aliyun = _section(its, "aliyun", AliyunSettings)
    units[aliyun.memory] = Unit(MEMORY, _MIB if aliyun.memory_unit == "MiB" else _GIB)
    units[aliyun.compute] = Unit(COMPUTE, _PERCENT)
    tencent = _section(its, "tencent", TencentSettings)
    units[tencent.memory] = Unit(MEMORY, tencent.memory_block_bytes)
    units[tencent.core] = Unit(COMPUTE, _PERCENT)
    qgpu = _section(its, "qgpu", QgpuSettings)
    units[qgpu.memory] = Unit(MEMORY, _GIB)
    units[qgpu.core] = Unit(COMPUTE, _PERCENT)
    elastic = _section(its, "elastic-gpu", ElasticGpuSettings)
    units[elastic.memory] = Unit(MEMORY, _MIB)
    units[elastic.core] = Unit(COMPUTE, _PERCENT)
    shared = _section(its, "deepomatic", DeepomaticSettings)
    units[shared.resource] = Unit(DEVICES, dialects=frozenset({"deepomatic"}))
    return units


def _vgpu(settings: Any, factor: str, *dialects: str) -> dict[str, Unit]:  # noqa: ANN401 - two kinds
    """Return the units of HAMi's kind of names, which two systems have."""
    return {
        settings.resource_count_name: Unit(DEVICES, dialects=frozenset(dialects)),
        settings.resource_memory_name: Unit(MEMORY, _MIB * getattr(settings, factor)),
        settings.resource_memory_percentage_name: Unit(PART, _PERCENT),
        settings.resource_core_name: Unit(COMPUTE, _PERCENT),
    }


def _section(settings: DialectSettings, name: str, kind: type[msgspec.Struct]) -> Any:  # noqa: ANN401 - of that kind
    return settings.sections.get(name) or kind()
