# SPDX-License-Identifier: Apache-2.0
"""Every foreign dialect there is, with a cluster's settings of each.

    disabled: [kai]
    hami: {memoryFactor: 10}
    nvidia: {whole: share}

A section has the name of a dialect and what that one may have set otherwise. Those that
are `disabled` are not translated: their pods are left as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import msgspec

from allotment.dialects.aliyun import AliyunDialect, AliyunSettings
from allotment.dialects.deepomatic import DeepomaticDialect, DeepomaticSettings
from allotment.dialects.foreign import ForeignDialect
from allotment.dialects.hami import HamiDialect
from allotment.dialects.hami_settings import HamiSettings, hami_of
from allotment.dialects.kai import KaiDialect, KaiSettings
from allotment.dialects.kubeshare import KubeShare2Dialect, KubeShareDialect
from allotment.dialects.mig_geometries import groups_from
from allotment.dialects.nvidia_foreign import NvidiaForeign, NvidiaSettings
from allotment.dialects.protocol import meant, shown
from allotment.dialects.tencent import TencentDialect, TencentSettings
from allotment.dialects.tencent_qgpu import (
    ElasticGpuDialect,
    ElasticGpuSettings,
    QgpuDialect,
    QgpuSettings,
)
from allotment.dialects.volcano import VolcanoDialect, VolcanoGpuShareDialect, VolcanoSettings
from allotment.model.errors import UsageError
from allotment.model.mig_groups import MigModelGroups

__all__ = [
    "NAMES",
    "SETTINGS",
    "DialectSettings",
    "foreign_dialects",
    "load_settings",
    "mig_groups_of",
    "read_section",
    "read_sections",
    "settings_of",
]

T = TypeVar("T", bound=msgspec.Struct)

_MAX_CHARACTERS: Final = 1 << 20
_MAX_SHOWN: Final = 200
_DISABLED: Final = "disabled"
_HINT: Final = "write a section by the name of a dialect: hami: {memoryFactor: 10}"

SETTINGS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "hami": HamiSettings,
    "volcano": VolcanoSettings,
    "aliyun": AliyunSettings,
    "tencent": TencentSettings,
    "qgpu": QgpuSettings,
    "elastic-gpu": ElasticGpuSettings,
    "kai": KaiSettings,
    "deepomatic": DeepomaticSettings,
    "nvidia": NvidiaSettings,
}
"""What a section holds, by the name of its dialect."""
# In the order in which they have what two of them see: NVIDIA's has what nobody else claims.
_DIALECTS: Final[tuple[type, ...]] = (
    HamiDialect,
    VolcanoDialect,
    VolcanoGpuShareDialect,
    AliyunDialect,
    TencentDialect,
    QgpuDialect,
    ElasticGpuDialect,
    KubeShareDialect,
    KubeShare2Dialect,
    KaiDialect,
    DeepomaticDialect,
    NvidiaForeign,
)
NAMES: Final[tuple[str, ...]] = tuple(cast("ForeignDialect", each).name for each in _DIALECTS)
"""The short names of all dialects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectSettings:
    """What a cluster has set otherwise."""

    sections: Mapping[str, object] = field(default_factory=dict)
    """By the names of the dialects, an object of the settings of that one."""
    disabled: frozenset[str] = frozenset()
    """Names of dialects that are not spoken."""
    told: tuple[str, ...] = ()
    """What was written and has no part in this, each with the reason."""


def foreign_dialects(settings: DialectSettings | None = None) -> tuple[ForeignDialect, ...]:
    """Return the dialects that pods are translated from, for `translate`."""
    its = settings or DialectSettings()
    spoken = (each for each in _DIALECTS if cast("Any", each).name not in its.disabled)
    return tuple(_made(each, its) for each in spoken)


def mig_groups_of(settings: DialectSettings) -> Mapping[str, tuple[MigModelGroups, ...]]:
    """Return which MIG slices an administrator allows, by the name of the dialect that says so."""
    found = {}
    for name, section in settings.sections.items():
        if isinstance(section, HamiSettings):
            found[name] = groups_from(section.known_mig_geometries, section.mig_profile_allowlist)
        elif isinstance(section, VolcanoSettings):
            found[name] = groups_from(section.known_mig_geometries)
    return {name: groups for name, groups in found.items() if groups}


def load_settings(text: str) -> DialectSettings:
    """Read a cluster's settings, YAML or JSON; empty: all as usual. Raises `UsageError`."""
    return settings_of(read_sections(text))


def read_sections(text: str) -> dict[Any, object]:
    """Read YAML or JSON into its sections, whosever they are. Raises `UsageError`."""
    import yaml

    if len(text) > _MAX_CHARACTERS:
        problem = f"the settings have {len(text)} characters"
        raise UsageError(f"{problem}, more than {_MAX_CHARACTERS}", hint=_HINT)
    try:
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"the settings are no YAML: {str(error)[:_MAX_SHOWN]}"
        raise UsageError(problem, hint=_HINT) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError("the settings have no sections", hint=_HINT)
    return document


def settings_of(document: Mapping[Any, object], *, more: Iterable[str] = ()) -> DialectSettings:
    """Read the dialects' sections. `more` names others of the same file. Raises `UsageError`."""
    sections: dict[str, object] = {}
    told: list[str] = []
    disabled = _names(document.get(_DISABLED, []))
    for name, section in document.items():
        if name == _DISABLED:
            continue
        if not isinstance(name, str) or name not in SETTINGS:
            problem = f"the settings: {shown(str(name))} has none"
            known = (*SETTINGS, _DISABLED, *more)
            hint = f"there are sections for: {', '.join((*SETTINGS, *more))}; and {_DISABLED}"
            raise UsageError(problem + meant(str(name), known), hint=hint)
        if name == "hami":
            if not isinstance(section, dict):
                raise UsageError(f"the settings: {name} is no section", hint=_HINT)
            sections[name], more_told = hami_of(section)
            told += (f"hami.{each}" for each in more_told)
        else:
            sections[name] = read_section(name, section, SETTINGS[name])
    return DialectSettings(sections=sections, disabled=disabled, told=tuple(told))


def read_section(name: str, section: object, kind: type[T]) -> T:
    """Read a section. Raises `UsageError`: it is none, or has what is not known."""
    known = [each.encode_name for each in msgspec.structs.fields(kind)]
    hint = f"there are: {', '.join(known)}"
    if not isinstance(section, Mapping):
        raise UsageError(f"the settings: {name} is no section", hint=hint)
    for key in section:
        if key not in known:
            problem = f"the settings: {name} has {shown(str(key))}, which is not known"
            raise UsageError(problem + meant(str(key), known), hint=hint)
    try:
        return msgspec.convert(section, kind)
    except msgspec.ValidationError as error:
        problem = f"the settings, section {name}: {str(error)[:_MAX_SHOWN]}"
        raise UsageError(problem, hint="correct or remove it") from error


def _made(dialect: type, settings: DialectSettings) -> ForeignDialect:
    make = cast("Any", dialect)
    name: str = make.name
    if name not in SETTINGS:
        return cast("ForeignDialect", make())
    return cast("ForeignDialect", make(settings.sections.get(name)))


def _names(found: object) -> frozenset[str]:
    hint = f"write some of: {', '.join(NAMES)}"
    if not isinstance(found, list):
        raise UsageError(f"the settings: {_DISABLED} is no list", hint=hint)
    for each in found:
        if each not in NAMES:
            problem = f"the settings: {_DISABLED} has {shown(str(each))}"
            raise UsageError(problem + meant(str(each), NAMES), hint=hint)
    return frozenset(found)
