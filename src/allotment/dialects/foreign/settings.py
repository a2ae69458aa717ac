# SPDX-License-Identifier: Apache-2.0
"""All foreign dialects, with a cluster's settings of each.

    disabled: [kai]
    hami: {memoryFactor: 10}
    nvidia: {whole: share}

A section is named after its dialect. Pods of `disabled` dialects are left unchanged.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from allotment.dialects.foreign.aliyun import AliyunDialect, AliyunSettings
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.deepomatic import DeepomaticDialect
from allotment.dialects.foreign.hami import IGNORED, HamiDialect, HamiSettings
from allotment.dialects.foreign.kai import KaiDialect
from allotment.dialects.foreign.kubeshare import KubeShare2Dialect, KubeShareDialect
from allotment.dialects.foreign.mig_geometries import groups_from
from allotment.dialects.foreign.nvidia import NvidiaForeign
from allotment.dialects.foreign.tencent import ElasticGpuDialect, QgpuDialect, TencentDialect
from allotment.dialects.foreign.volcano import (
    VolcanoDialect,
    VolcanoGpuShareDialect,
    VolcanoSettings,
)
from allotment.dialects.own.protocol import shown
from allotment.model.errors import UsageError
from allotment.model.formats import meant
from allotment.model.mig import MigModelGroups
from allotment.model.structs import prepared

T = TypeVar("T", bound=msgspec.Struct)

_MAX_CHARACTERS: Final = 1 << 20
_MAX_SHOWN: Final = 200
_DISABLED: Final = "disabled"
_HINT: Final = "write a section named after a dialect: hami: {memoryFactor: 10}"

# In order of precedence: NVIDIA's gets keys that no other dialect claims.
_DIALECTS: Final[tuple[type[ForeignDialect], ...]] = (
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
NAMES: Final[tuple[str, ...]] = tuple(dialect.name for dialect in _DIALECTS)
"""The short names of all dialects."""
SYSTEMS: Final = tuple(dialect.name for dialect in _DIALECTS if dialect.records)
"""Dialects with readable GPU records that can be checked."""
SETTINGS: Final[Mapping[str, type[msgspec.Struct]]] = {
    dialect.name: dialect.settings_type for dialect in _DIALECTS if dialect.settings_type
}
"""The type of each section, by dialect name."""


class DialectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster's settings of dialects."""

    sections: Mapping[str, object] = msgspec.field(default_factory=dict)
    """Each dialect's settings object, by dialect name."""
    disabled: frozenset[str] = frozenset()
    """Names of disabled dialects."""


def foreign_dialects(settings: DialectSettings | None = None) -> tuple[ForeignDialect, ...]:
    settings = settings or DialectSettings()
    made = []
    for dialect in _DIALECTS:
        if dialect.name not in settings.disabled:
            make: Any = dialect
            section = settings.sections.get(dialect.name)
            made.append(make(section) if dialect.settings_type else make())
    return tuple(made)


def memory_unit(settings: DialectSettings) -> str:
    """The unit in which Aliyun's pods ask for memory: `GiB` or `MiB`."""
    section = settings.sections.get(AliyunDialect.name)
    return section.memory_unit if isinstance(section, AliyunSettings) else "GiB"


def mig_groups_of(settings: DialectSettings) -> Mapping[str, tuple[MigModelGroups, ...]]:
    """Allowed MIG slices, by the name of the dialect that configures them."""
    found = {}
    for name, section in settings.sections.items():
        if isinstance(section, HamiSettings):
            found[name] = groups_from(section.known_mig_geometries, section.mig_profile_allowlist)
        elif isinstance(section, VolcanoSettings):
            found[name] = groups_from(section.known_mig_geometries)
    return {name: groups for name, groups in found.items() if groups}


def read_sections(text: str) -> dict[Any, object]:
    """Split YAML or JSON into sections. Raises `UsageError`."""
    import yaml

    if len(text) > _MAX_CHARACTERS:
        problem = f"the settings have {len(text)} characters"
        raise UsageError(f"{problem}, more than {_MAX_CHARACTERS}", hint=_HINT)
    try:
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problem = f"the settings are not valid YAML: {str(error)[:_MAX_SHOWN]}"
        raise UsageError(problem, hint=_HINT) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise UsageError("the settings are not a mapping of sections", hint=_HINT)
    return document


def settings_of(document: Mapping[Any, Any], *, more: Iterable[str] = ()) -> DialectSettings:
    """Read the dialects' sections. `more` names other sections of the file. Raises `UsageError`."""
    sections: dict[str, object] = {}
    disabled = _names(document.get(_DISABLED, []))
    for name, section in document.items():
        if name == _DISABLED:
            continue
        if not isinstance(name, str) or name not in SETTINGS:
            problem = f"the settings: {shown(str(name))} has none"
            known = (*SETTINGS, _DISABLED, *more)
            hint = f"known sections: {', '.join((*SETTINGS, *more))}; and {_DISABLED}"
            raise UsageError(problem + meant(str(name), known), hint=hint)
        ignored = IGNORED if name == HamiDialect.name else ()
        sections[name] = read_section(name, section, SETTINGS[name], ignored=ignored)
    return DialectSettings(sections=sections, disabled=disabled)


def read_section(name: str, section: object, kind: type[T], *, ignored: Collection[str] = ()) -> T:
    """Raises `UsageError`, also for an unknown key that is not `ignored`."""
    known = [each.encode_name for each in msgspec.structs.fields(kind)]
    hint = f"known fields: {', '.join(known)}"
    if not isinstance(section, Mapping):
        raise UsageError(f"the settings: {name} is not a section", hint=hint)
    for key in section:
        if key not in known and key not in ignored:
            problem = f"the settings: {name} has {shown(str(key))}, which is unknown"
            raise UsageError(problem + meant(str(key), known), hint=hint)
    try:
        return msgspec.convert(
            {key: section[key] for key in section if key in known}, prepared(kind)
        )
    except msgspec.ValidationError as error:
        _check_words(name, section, kind)
        problem = f"the settings, section {name}: {str(error)[:_MAX_SHOWN]}"
        raise UsageError(problem, hint="correct or remove it") from error


def _check_words(name: str, section: Mapping[Any, object], kind: type[msgspec.Struct]) -> None:
    """Raise `UsageError` for a wrong value of a field that allows only certain words."""
    allowed_by_field = {
        each.encode_name: get_args(each.type)
        for each in msgspec.structs.fields(kind)
        if get_origin(each.type) is Literal
    }
    for key, value in section.items():
        words = allowed_by_field.get(key)
        if words and value not in words:
            problem = f"the settings, section {name}: {shown(str(value))} is no value of {key}"
            allowed = " or ".join(word or '""' for word in words)
            raise UsageError(problem + meant(str(value), words), hint=f"write {key}: {allowed}")


def _names(names: object) -> frozenset[str]:
    hint = f"write names from: {', '.join(NAMES)}"
    if not isinstance(names, list):
        raise UsageError(f"the settings: {_DISABLED} is not a list", hint=hint)
    for name in names:
        if name not in NAMES:
            problem = f"the settings: {_DISABLED} has {shown(str(name))}"
            raise UsageError(problem + meant(str(name), NAMES), hint=hint)
    return frozenset(names)
