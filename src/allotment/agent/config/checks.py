# SPDX-License-Identifier: Apache-2.0
"""Rules for a file of the right shape, in NVIDIA's words if NVIDIA has the rule."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec

from allotment.agent.config.options import parse_duration
from allotment.agent.config.schema import (
    SHARED_SUFFIX,
    AllotmentSection,
    ConfigFile,
    DeviceMatch,
    DeviceRule,
    HealthSection,
    MigSection,
    ReplicatedResource,
    ReplicatedResources,
    ResourcePattern,
    new_name,
    whole_name,
)
from allotment.agent.health.xids import parse_action
from allotment.cost.prices import prices_of
from allotment.model.devices import Device
from allotment.model.errors import UsageError
from allotment.model.modes import has_slices, traits_of
from allotment.model.placements import MAX_SHARES
from allotment.model.quantities import MemoryAmount
from allotment.model.requests import Request
from allotment.placement import is_selected

MAX_REPLICAS: Final = 1000
"""Of one GPU. The kubelet takes a list of some 100,000 ids (16 MiB), and 16 GPUs fit into that."""

MOST_KEEP_S: Final = 7 * 24 * 3600.0
"""The longest time for idle slices: longer is for ever, like an administrator's slice."""

MOST_EVICT_AFTER_S: Final = 24 * 3600.0
"""A GPU that is sick for longer is no temporary problem."""

PCI_ADDRESS: Final = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})"
    r"(?:\.(?P<function>[0-7]))?",
    re.ASCII | re.IGNORECASE,
)

_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GPU_INDEX: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_GPU_UUID: Final = re.compile(rf"GPU-{_UUID}", re.ASCII | re.IGNORECASE)
_MIG: Final = re.compile(
    rf"[0-9]{{1,9}}:[0-9]{{1,9}}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+",
    re.ASCII | re.IGNORECASE,
)
_UUID_BEGINNING: Final = re.compile(r"(?:GPU|MIG)-[0-9a-f-]+", re.ASCII | re.IGNORECASE)
_WORD: Final = re.compile(r"[a-z0-9]", re.ASCII | re.IGNORECASE)
_XID: Final = re.compile(r"[0-9]{1,6}", re.ASCII)


def check_file(file: ConfigFile) -> None:
    """Raise `UsageError` for the first mistake: `$.sharing.timeSlicing.resources[0]: ...`."""
    if file.resources is not None:
        _patterns(file.resources.gpus or (), "$.resources.gpus")
        _patterns(file.resources.mig or (), "$.resources.mig")
    if file.sharing is not None:
        if file.sharing.time_slicing is None:
            hint = "name one: nvidia.com/gpu; or leave timeSlicing out"
            raise _error("$.sharing.timeSlicing", "no resources specified", hint)
        if file.sharing.sliced is not None:
            _replicated(file.sharing.sliced, "$.sharing.timeSlicing")
        if file.sharing.mps is not None:
            _replicated(file.sharing.mps, "$.sharing.mps")
            _mixed(file.sharing.sliced, file.sharing.mps)
    if file.allotment is not None:
        _allotment(file.allotment)
        if file.sharing is not None and file.sharing.mps is not None:
            _unsliced(file.allotment.devices or ())


@contextmanager
def within(place: str) -> Iterator[None]:
    """Name the place in an error of the block."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{place}: {error.message}", hint=error.hint) from error


def _error(path: str, message: str, hint: str | None = None) -> UsageError:
    return UsageError(f"{path}: {message}", hint=hint)


def _patterns(patterns: Sequence[ResourcePattern], path: str) -> None:
    for number, each in enumerate(patterns):
        if not each.pattern:
            raise _error(f"{path}[{number}].pattern", "the pattern is empty", "write * for any")
        _name(each.name, f"{path}[{number}].name")


def _replicated(section: ReplicatedResources, path: str) -> None:
    if not section.resources:
        raise _error(f"{path}.resources", "no resources specified", "name one: nvidia.com/gpu")
    for number, each in enumerate(section.resources):
        entry = f"{path}.resources[{number}]"
        if each.rename is None and section.rename_by_default:
            _name(each.name + SHARED_SUFFIX, f"{entry}.name")
        _resource(each, entry)


def _mixed(slicing: ReplicatedResources | None, mps: ReplicatedResources) -> None:
    """As NVIDIA's documentation; its plugin silently takes `mps`."""
    sliced = {each.name for each in slicing.resources} if slicing else set()
    for number, each in enumerate(mps.resources):
        if each.name in sliced:
            raise _error(
                f"$.sharing.mps.resources[{number}]",
                f"time-slicing and MPS are mutually exclusive, and both name {each.name}",
                f"leave {each.name} out of sharing.timeSlicing or of sharing.mps",
            )


def _unsliced(rules: Sequence[DeviceRule]) -> None:
    """Refuse rules for replicas by time beside those of MPS: they would hand out whole GPUs."""
    for number, rule in enumerate(rules):
        if rule.mode and traits_of(rule.mode).is_time_sliced:
            raise _error(
                f"$.allotment.devices[{number}].mode",
                "sharing.timeSlicing has no effect beside sharing.mps, and so has mode timeslice",
                "write `mode: mps`, or leave sharing.mps out",
            )


def _resource(resource: ReplicatedResource, path: str) -> None:
    _name(resource.name, f"{path}.name")
    if resource.rename is not None:
        with within(f"{path}.rename"):
            new_name(resource.rename)
    if resource.replicas < 2:  # noqa: PLR2004 - NVIDIA's rule: one is no sharing
        raise _error(
            f"{path}.replicas",
            "number of replicas must be >= 2",
            "leave the resource out of `resources` for GPUs that are not shared",
        )
    if resource.replicas > MAX_REPLICAS:
        raise _error(
            f"{path}.replicas",
            f"{resource.replicas} replicas of a GPU are too many for the kubelet",
            f"write at most {MAX_REPLICAS}",
        )
    _devices(resource.devices, f"{path}.devices")


def _name(name: str, path: str) -> None:
    with within(path):
        whole_name(name)


def _devices(devices: str | int | list[str | int] | None, path: str) -> None:
    match devices:
        case str() if devices != "all":
            raise _error(
                path,
                f"devices set as '{devices}' but the only valid string input is 'all'",
                f"write a list: [{devices}]",
            )
        case int() if devices <= 0:
            raise _error(path, f"devices set as '{devices}' but a count of devices must be > 0")
        case list():
            if not devices:
                raise _error(path, "the list of devices is empty", "write `all`, or leave it out")
            for number, each in enumerate(devices):
                _reference(each, f"{path}[{number}]")
        case _:
            pass


def _reference(reference: str | int, path: str) -> None:
    text = str(reference)
    if not any(kind.fullmatch(text) for kind in (_GPU_INDEX, _GPU_UUID, _MIG)):
        raise _error(
            path,
            f"unsupported type for device in devices list: {text}",
            "write an index (0), an index of a MIG device (0:1), or a whole UUID (GPU-...)",
        )


def _allotment(section: AllotmentSection) -> None:
    path = "$.allotment"
    for number, rule in enumerate(section.devices or ()):
        _rule(rule, f"{path}.devices[{number}]")
    shares = section.shares_per_device
    if shares is not None and not 1 <= shares <= MAX_SHARES:
        raise _error(
            f"{path}.sharesPerDevice",
            f"{shares} shares of a GPU are not possible",
            f"write 1 to {MAX_SHARES}: more cannot take turns on one GPU",
        )
    if section.metrics is not None:
        with within(f"{path}.metrics.currency"):
            prices_of({}, section.metrics.currency or "")
        with within(f"{path}.metrics.prices"):
            prices_of(section.metrics.prices or {})
    if section.health is not None:
        _health(section.health, f"{path}.health")


def _rule(rule: DeviceRule, path: str) -> None:
    if rule.mode is None and not rule.modes:
        raise _error(path, "the rule names no mode", "write `mode: soft`, or `modes: [soft, mig]`")
    if rule.mode is not None and rule.modes is not None:
        raise _error(
            f"{path}.modes",
            "the rule has `mode` as well",
            "keep one of them: `modes` are those that a GPU may be in by turns",
        )
    if rule.modes is not None and len(set(rule.modes)) < len(rule.modes):
        raise _error(f"{path}.modes", "a mode is given twice", "write each once")
    if rule.mig is not None:
        _mig(rule, rule.mig, f"{path}.mig")
    if rule.time_slice is not None and not traits_of(rule.first).is_time_sliced:
        raise _error(
            f"{path}.timeSlice",
            f"only for mode timeslice; the rule's mode is {rule.first}",
            "leave it out, or write `mode: timeslice`",
        )
    if rule.match is not None:
        _match(rule.match, f"{path}.match")


def _mig(rule: DeviceRule, section: MigSection, path: str) -> None:
    if not has_slices(rule.shared):
        raise _error(
            path, "only for mode mig, which the rule does not have", "leave it out, or add mig"
        )
    if section.keep is not None:
        with within(f"{path}.keep"):
            parse_duration(section.keep, most_s=MOST_KEEP_S)


def _match(match: DeviceMatch, path: str) -> None:
    parts = {"index": match.index, "uuid": match.uuid, "pci": match.pci, "model": match.model}
    if all(part is None for part in parts.values()):
        raise _error(path, "`match` is empty", "leave `match` out for every GPU")
    for name, part in parts.items():
        if part is not None and not part:
            raise _error(f"{path}.{name}", "the list is empty: it matches no GPU", "leave it out")
        for number, value in enumerate(part or ()):
            is_right, what, hint = _MATCHES[name]
            if not is_right(str(value)):
                raise _error(f"{path}.{name}[{number}]", f"{value} is no {what}", hint)


def _is_model(text: str) -> bool:
    # A text that begins like a UUID is one.
    return _WORD.search(text) is not None and not text.lower().startswith(("gpu-", "mig-"))


_MATCHES: Final[Mapping[str, tuple[Callable[[str], object], str, str]]] = {
    "index": (_GPU_INDEX.fullmatch, "index of a GPU", "write 0 for the first"),
    "uuid": (_UUID_BEGINNING.fullmatch, "beginning of a UUID", "write one like GPU-7ca1b2a4"),
    "pci": (PCI_ADDRESS.fullmatch, "PCI address", "write it as `lspci -D` does: 0000:3b:00.0"),
    "model": (_is_model, "model", "write words of its name, like a100-80gb or rtx4090"),
}
"""By kind: the check of a value, its name and the hint."""


def _health(section: HealthSection, path: str) -> None:
    for xid, action in (section.xid or {}).items():
        if not _XID.fullmatch(xid):
            raise _error(f"{path}.xid", f"{xid!r} is no XID", "write its number: `79: reset-gpu`")
        with within(f"{path}.xid.{xid}"):
            parse_action(action)
    if section.evict_after is not None:
        with within(f"{path}.evictAfter"):
            parse_duration(section.evict_after, most_s=MOST_EVICT_AFTER_S)


_KEEP_S = 30.0


class MigUse(msgspec.Struct, frozen=True, kw_only=True):
    """How a GPU is cut on request."""

    keep_s: float = _KEEP_S
    """How long an idle slice is kept after its container."""
    may_reset: bool = False
    """It may be reset, while idle, to switch its mode."""


def mig_use(rule: DeviceRule) -> MigUse | None:
    """Return a rule's settings for slices; None: the GPU is not cut on request."""
    if not has_slices(rule.shared):
        return None
    section = rule.mig or MigSection()
    keep_s = _KEEP_S if section.keep is None else parse_duration(section.keep, most_s=MOST_KEEP_S)
    return MigUse(keep_s=keep_s, may_reset=bool(section.reset))


def rule_of(device: Device, rules: Sequence[DeviceRule]) -> int | None:
    """Return the index of the first rule that matches a device."""
    numbers = (number for number, rule in enumerate(rules) if matches(device, rule.match))
    return next(numbers, None)


def matches(device: Device, match: DeviceMatch | None) -> bool:
    """Return whether a device fits all parts of `match`; None fits every device."""
    if match is None:
        return True
    return (
        (match.index is None or device.index in match.index)
        and (match.uuid is None or any(_begins(device.uuid, each) for each in match.uuid))
        and (match.pci is None or any(_is_at(device, each) for each in match.pci))
        and (match.model is None or any(_model_matches(device, each) for each in match.model))
    )


def selected(
    devices: Sequence[Device], wanted: str | int | list[str | int] | None
) -> tuple[Device, ...]:
    """Return the resource's devices that `sharing.*.resources[].devices` selects.

    A count selects the lowest indices, so that a restart selects the same devices. Raises
    `UsageError` in NVIDIA's words for too few devices, or an unknown index or UUID.
    """
    ordered = sorted(devices, key=lambda device: device.place)
    match wanted:
        case int():
            if wanted > len(ordered):
                raise UsageError(
                    f"requested {wanted} devices to be replicated, but only {len(ordered)} devices"
                    " available"
                )
            return tuple(ordered[:wanted])
        case list():
            chosen = [_referred(ordered, str(each)) for each in wanted]
            return tuple(device for device in ordered if device in chosen)
        case _:
            return tuple(ordered)


def _referred(devices: Sequence[Device], reference: str) -> Device:
    by_index = all(part.isdecimal() for part in reference.split(":"))
    number = ":".join(str(int(each)) for each in reference.split(":")) if by_index else ""
    for device in devices:
        if by_index and device.index_text == number:
            return device
        if not by_index and reference.lower() in {device.uuid.lower(), _by_ids(device).lower()}:
            return device
    if by_index:
        raise UsageError(f"no matching device at index: {reference}")
    raise UsageError(f"no matching device with UUID: {reference}")


def _by_ids(device: Device) -> str:
    """Return a MIG device's name before R470: its GPU and the ids of its instances."""
    where = device.slice_of
    if where is None:
        return device.uuid
    return f"MIG-{where.gpu}/{where.gpu_instance}/{where.compute_instance}"


def _begins(uuid: str, beginning: str) -> bool:
    return uuid.lower().startswith(beginning.lower())


def _is_at(device: Device, address: str) -> bool:
    """Compare addresses as numbers: NVML writes the domain with eight digits, lspci with four."""
    here, wanted = _address(device.pci_bus_id), _address(address)
    return here is not None and here == wanted


def _address(text: str) -> tuple[int, ...] | None:
    match = PCI_ADDRESS.fullmatch(text.strip())
    if match is None:
        return None
    parts = (match["domain"] or "0", match["bus"], match["device"], match["function"] or "0")
    return tuple(int(part, 16) for part in parts)


def _model_matches(device: Device, model: str) -> bool:
    """Match as `allot run --gpu` does; the memory has no influence."""
    return is_selected(device, Request(MemoryAmount("1", size_bytes=1), selectors=(model,)))
