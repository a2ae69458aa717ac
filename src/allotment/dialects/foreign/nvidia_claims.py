# SPDX-License-Identifier: Apache-2.0
"""The opaque parameters of NVIDIA's DRA driver, in claims that it served before. Pure.

    apiVersion: resource.nvidia.com/v1beta1
    kind: GpuConfig                       # or MigDeviceConfig
    sharing:
      strategy: MPS                       # or TimeSlicing
      mpsConfig:
        defaultActiveThreadPercentage: 50
        defaultPinnedDeviceMemoryLimit: 10Gi

Names and rules are those of its `api/nvidia.com/resource/v1beta1`: decoding is strict, the last
parameters for a device count alone, and those without requests skip devices of another kind.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from allotment.dialects.own.resource_claims import ClaimSharing, Parameters
from allotment.model.compute import WHOLE
from allotment.model.errors import QuantityError, UsageError
from allotment.model.formats import meant
from allotment.model.modes import MPS, TIMESLICE
from allotment.model.quantities import parse_whole
from allotment.model.structs import prepared

DRIVER: Final = "gpu.nvidia.com"
API_VERSION: Final = "resource.nvidia.com/v1beta1"

_GROUP: Final = "resource.nvidia.com/"
_GPU: Final = "GpuConfig"
_MIG: Final = "MigDeviceConfig"
_VFIO: Final = "VfioDeviceConfig"
_KINDS: Final = (_GPU, _MIG)
_SLICING: Final = "TimeSlicing"
_MPS: Final = "MPS"
_STRATEGIES: Final = (_SLICING, _MPS)
_INTERVALS: Final = ("Default", "Short", "Medium", "Long")
_MIB: Final = 1 << 20
_MOST_PERCENT: Final = 100
_PERCENT: Final = WHOLE // 100


class _Section(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """An object: an unknown field is refused with its path."""


class _TimeSlicing(_Section, frozen=True, kw_only=True):
    interval: str | None = None


class _Mps(_Section, frozen=True, kw_only=True):
    default_active_thread_percentage: int | None = None
    default_pinned_device_memory_limit: str | int | None = None
    default_per_device_pinned_memory_limit: dict[str, str | int] | None = None
    """By UUID, or by the place among the devices."""
    multi_user: bool | None = None
    """Without effect: the control daemon serves programs of all users anyway."""


class _Sharing(_Section, frozen=True, kw_only=True):
    strategy: str | None = None
    time_slicing_config: _TimeSlicing | None = None
    mps_config: _Mps | None = None


class _MigSharing(_Section, frozen=True, kw_only=True):
    strategy: str | None = None
    mps_config: _Mps | None = None


class _GpuConfig(_Section, frozen=True, kw_only=True):
    api_version: str
    kind: str
    sharing: _Sharing | None = None


class _MigConfig(_Section, frozen=True, kw_only=True):
    api_version: str
    kind: str
    sharing: _MigSharing | None = None


_Config = TypeVar("_Config", _GpuConfig, _MigConfig)


def is_nvidias(parameters: Parameters) -> bool:
    """Whether they are of an API of NVIDIA's."""
    content = parameters.content
    version = content.get("apiVersion") if isinstance(content, Mapping) else None
    return isinstance(version, str) and version.startswith(_GROUP)


def read_sharing(parameters: Iterable[Parameters], *, is_slice: bool) -> ClaimSharing | None:
    """Return how a GPU or slice is shared, by the last of the parameters that are for it.

    `parameters` are NVIDIA's for the request of the device. None: they do not say. Raises
    `UsageError`, which names the path.
    """
    found = None
    for each in parameters:
        kind, sharing = _read(each)
        if (kind == _MIG) == is_slice:
            found = sharing
        elif each.requests:
            device = "a MIG slice" if is_slice else "a GPU"
            raise UsageError(
                f"{each.where}: {kind} is not for the request's device, which is {device}",
                hint=f"write kind: {_MIG if is_slice else _GPU}",
            )
    return found


def _read(parameters: Parameters) -> tuple[str, ClaimSharing | None]:
    """Return the kind, and the sharing."""
    where, content = parameters.where, parameters.content
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} is not an object", hint=f"write apiVersion: {API_VERSION}")
    version, kind = content.get("apiVersion"), content.get("kind")
    if version != API_VERSION:
        raise UsageError(
            f"{where}.apiVersion is {version!r}, which is unknown",
            hint=f"write apiVersion: {API_VERSION}",
        )
    if kind == _VFIO:
        raise UsageError(
            f"{where}.kind: {_VFIO} passes a GPU through to a virtual machine, which is not served",
            hint="keep NVIDIA's driver on nodes with virtual machines",
        )
    if kind == _MIG:
        _check_slice(_decoded(content, _MigConfig, where), where)
        return _MIG, None
    if kind == _GPU:
        return _GPU, _of_gpu(_decoded(content, _GpuConfig, where), where)
    raise UsageError(
        f"{where}.kind is {kind!r}, which is unknown{meant(str(kind), _KINDS)}",
        hint=f"the kinds are: {', '.join(_KINDS)}",
    )


_PLACE: Final = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<key>.*)`", re.DOTALL)
_EXPECTED: Final = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")


def _decoded(content: Mapping[str, object], type_: type[_Config], where: str) -> _Config:
    try:
        return msgspec.convert(content, prepared(type_))
    except msgspec.ValidationError as error:
        message = str(error)
        place = _PLACE.search(message)
        path = where + (place["path"] if place else "")
        what = message[: place.start()] if place else message
        if unknown := _UNKNOWN.match(what):
            raise UsageError(
                f"{path}.{unknown['key']} is unknown", hint=f"see NVIDIA's {API_VERSION}"
            ) from error
        if expected := _EXPECTED.match(what):
            what = f"expected {expected['wanted'].replace(' | null', '')}, got {expected['got']}"
        raise UsageError(f"{path}: {what}") from error


def _check_slice(config: _MigConfig, where: str) -> None:
    sharing = config.sharing
    if sharing is None:
        return
    path = f"{where}.sharing"
    if _strategy(sharing.strategy, path) == _MPS:
        raise UsageError(
            f"{path}.strategy: MPS inside a MIG slice is not served",
            hint=f"the programs of a claim share its slice by {_SLICING}; or claim a GPU with MPS",
        )
    _refuse_mps_config(sharing.mps_config, path)


def _of_gpu(config: _GpuConfig, where: str) -> ClaimSharing | None:
    sharing = config.sharing
    if sharing is None:
        return None
    path = f"{where}.sharing"
    if _strategy(sharing.strategy, path) == _SLICING:
        _refuse_mps_config(sharing.mps_config, path)
        slicing = sharing.time_slicing_config
        interval = (
            _INTERVALS[0] if slicing is None or slicing.interval is None else slicing.interval
        )
        at = f"{path}.timeSlicingConfig.interval"
        return ClaimSharing(
            where=path,
            mode=TIMESLICE,
            time_slice=_known(interval, _INTERVALS, at, "time-slice interval").lower(),
        )
    if sharing.time_slicing_config is not None:
        raise UsageError(
            f"{path}.timeSlicingConfig: cannot be used with the strategy {_MPS}",
            hint="leave it out, or write mpsConfig",
        )
    return _of_mps(sharing.mps_config or _Mps(), path)


def _of_mps(config: _Mps, sharing: str) -> ClaimSharing:
    path = f"{sharing}.mpsConfig"
    percent = config.default_active_thread_percentage
    if percent is not None and not 0 < percent <= _MOST_PERCENT:
        raise UsageError(
            f"{path}.defaultActiveThreadPercentage is {percent}",
            hint="write 1 to 100, or leave it out for no limit",
        )
    least = config.default_pinned_device_memory_limit
    limits = config.default_per_device_pinned_memory_limit or {}
    each = f"{path}.defaultPerDevicePinnedMemoryLimit"
    return ClaimSharing(
        where=sharing,
        mode=MPS,
        ceiling=WHOLE if percent is None else percent * _PERCENT,
        memory_bytes=None
        if least is None
        else _limit(least, f"{path}.defaultPinnedDeviceMemoryLimit"),
        memory_by_device={key: _limit(text, f"{each}.{key}") for key, text in limits.items()},
    )


def _limit(value: str | int, path: str) -> int:
    """Return a limit in bytes, rounded down to the MiB that MPS counts in."""
    try:
        size = parse_whole(str(value))
    except QuantityError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error
    if size < _MIB:
        raise UsageError(f"{path}: {value} is less than 1Mi", hint="write it like 10Gi")
    return size // _MIB * _MIB


def _strategy(strategy: str | None, path: str) -> str:
    return _known(strategy or "", _STRATEGIES, f"{path}.strategy", "sharing strategy")


def _known(name: str, names: Sequence[str], path: str, what: str) -> str:
    if name not in names:
        raise UsageError(
            f"{path}: unknown {what} {name!r}{meant(name, names)}",
            hint=f"write one of: {', '.join(names)}",
        )
    return name


def _refuse_mps_config(config: _Mps | None, path: str) -> None:
    if config is not None:
        raise UsageError(
            f"{path}.mpsConfig: cannot be used with the strategy {_SLICING}",
            hint=f"leave it out, or write strategy: {_MPS}",
        )
