# SPDX-License-Identifier: Apache-2.0
"""Allowed sets of MIG slices, in the file formats of HAMi and Volcano.

    knownMigGeometries:
    - models: [A100-SXM4-40GB]
      allowedGeometries:
      - group: group1
        geometries: [{name: 1g.5gb, memory: 5120, count: 7}]
    migProfileAllowlist:
    - models: [A100-SXM4-40GB]
      profiles: [1g.5gb, 2g.10gb, 3g.20gb]

HAMi up to v2.9 has lists of geometries without groups, numbered from 0. From v2.10 it has the
second format, profiles only. (Volcano v1.13, `volcano-vgpu-device-config`; HAMi v2.5 and v2.10,
`hami-scheduler-device`.)
"""

from collections.abc import Iterable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from allotment.model.mig import MigGroup, MigModelGroups, MigTemplate

_Word = Annotated[str, Meta(min_length=1, max_length=64)]
_MOST: Final = 64


_Profile = Annotated[
    str,
    Meta(
        max_length=32,
        pattern=r"^[1-9][0-9]?g\.[1-9][0-9]{0,3}gb(?:[+-][a-z]{1,8}(?:\.[a-z]{1,8})?)*\Z",
    ),
]
"""The driver's name: `1g.10gb`, `1g.5gb+me.all`."""


class _Geometry(msgspec.Struct, frozen=True):
    name: _Profile
    memory: Annotated[int, Meta(ge=1, le=1 << 30)]
    """MiB."""
    count: Annotated[int, Meta(ge=1, le=64)]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    group: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\[\]]+$")]
    geometries: Annotated[tuple[_Geometry, ...], Meta(min_length=1, max_length=_MOST)]


class KnownGeometries(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Allowed sets of slices for some models."""

    models: Annotated[tuple[_Word, ...], Meta(min_length=1, max_length=_MOST)]
    allowed_geometries: Annotated[
        tuple[_Group | Annotated[tuple[_Geometry, ...], Meta(min_length=1, max_length=_MOST)], ...],
        Meta(min_length=1, max_length=_MOST),
    ]


class AllowedProfiles(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True
):
    """Allowed profiles for some models."""

    models: Annotated[tuple[_Word, ...], Meta(min_length=1, max_length=_MOST)]
    profiles: Annotated[tuple[_Profile, ...], Meta(min_length=1, max_length=_MOST)]


def groups_from(
    known: Iterable[KnownGeometries], allowed: Iterable[AllowedProfiles] = ()
) -> tuple[MigModelGroups, ...]:
    return (
        *(
            MigModelGroups(
                each.models,
                tuple(_group(number, one) for number, one in enumerate(each.allowed_geometries)),
            )
            for each in known
        ),
        *(MigModelGroups(each.models, profiles=each.profiles) for each in allowed),
    )


def _group(number: int, written: _Group | tuple[_Geometry, ...]) -> MigGroup:
    name, geometries = (
        (written.group, written.geometries)
        if isinstance(written, _Group)
        else (str(number), written)
    )
    return MigGroup(
        name,
        tuple(
            MigTemplate(geometry.name, geometry.memory, geometry.count) for geometry in geometries
        ),
    )
