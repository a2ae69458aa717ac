# SPDX-License-Identifier: Apache-2.0
"""What a file of the right shape may still not say, with NVIDIA's words where NVIDIA has some."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from allotment.agent.config.go_values import parse_duration
from allotment.agent.config.names import SHARED_SUFFIX, whole_name
from allotment.agent.config.schema import (
    AllotmentSection,
    ConfigFile,
    DeviceMatch,
    DeviceRule,
    HealthSection,
    MigSection,
    ReplicatedResource,
    ReplicatedResources,
    ResourcePattern,
)
from allotment.agent.health.actions import parse_action
from allotment.model.errors import UsageError
from allotment.model.placements import MAX_SHARES

__all__ = ["MAX_REPLICAS", "MOST_KEEP_S", "PCI_ADDRESS", "Finding", "findings", "is_mig_reference"]

MAX_REPLICAS: Final = 1000
"""Of one GPU. The kubelet takes a list of some 100,000 ids (16 MiB), and 16 GPUs fit into that."""

MOST_KEEP_S: Final = 7 * 24 * 3600.0
"""How long a slice may be kept warm: longer would be for ever, and an administrator's slice."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong, and where: `$.sharing.timeSlicing.resources[0].replicas`."""

    path: str
    message: str
    hint: str | None = None


def findings(file: ConfigFile) -> Iterator[Finding]:
    """Yield what is wrong, in the order of the file."""
    if file.resources is not None:
        yield from _patterns(file.resources.gpus or (), "$.resources.gpus")
        yield from _patterns(file.resources.mig or (), "$.resources.mig")
    if file.sharing is not None:
        if file.sharing.time_slicing is not None:
            yield from _replicated(file.sharing.time_slicing, "$.sharing.timeSlicing")
        if file.sharing.mps is not None:
            yield from _replicated(file.sharing.mps, "$.sharing.mps")
            yield from _mixed(file.sharing.time_slicing, file.sharing.mps)
    if file.allotment is not None:
        yield from _allotment(file.allotment)


def is_mig_reference(text: str) -> bool:
    """Does an entry of `devices` name a MIG device: `0:1`, or a UUID of one?"""
    return _MIG.fullmatch(text) is not None


def _patterns(patterns: Sequence[ResourcePattern], path: str) -> Iterator[Finding]:
    for number, each in enumerate(patterns):
        if not each.pattern:
            yield Finding(f"{path}[{number}].pattern", "the pattern is empty", "write * for any")
        yield from _name(each.name, f"{path}[{number}].name")


def _replicated(section: ReplicatedResources, path: str) -> Iterator[Finding]:
    if not section.resources:
        yield Finding(f"{path}.resources", "no resources specified", "name one: nvidia.com/gpu")
    for number, each in enumerate(section.resources):
        entry = f"{path}.resources[{number}]"
        if each.rename is None and section.rename_by_default:
            yield from _name(each.name + SHARED_SUFFIX, f"{entry}.name")
        yield from _resource(each, entry)


def _mixed(slicing: ReplicatedResources | None, mps: ReplicatedResources) -> Iterator[Finding]:
    """Refuse what NVIDIA's documentation does; its plugin takes `mps` then, without a word."""
    sliced = {each.name for each in slicing.resources} if slicing else set()
    for number, each in enumerate(mps.resources):
        if each.name in sliced:
            yield Finding(
                f"$.sharing.mps.resources[{number}]",
                f"time-slicing and MPS are mutually exclusive, and both name {each.name}",
                f"leave {each.name} out of sharing.timeSlicing or of sharing.mps",
            )


def _resource(resource: ReplicatedResource, path: str) -> Iterator[Finding]:
    yield from _name(resource.name, f"{path}.name")
    if resource.rename is not None:
        yield from _name(resource.rename, f"{path}.rename")
    if resource.replicas < 2:  # noqa: PLR2004 - NVIDIA's rule: one is no sharing
        yield Finding(
            f"{path}.replicas",
            "number of replicas must be >= 2",
            "leave the resource out of `resources` for GPUs that are not shared",
        )
    elif resource.replicas > MAX_REPLICAS:
        yield Finding(
            f"{path}.replicas",
            f"{resource.replicas} replicas of a GPU are more than the kubelet can be told of",
            f"write at most {MAX_REPLICAS}",
        )
    yield from _devices(resource.devices, f"{path}.devices")


def _name(name: str, path: str) -> Iterator[Finding]:
    try:
        whole_name(name)
    except UsageError as error:
        yield Finding(path, error.message, error.hint)


def _devices(devices: str | int | list[str | int] | None, path: str) -> Iterator[Finding]:
    match devices:
        case str() if devices != "all":
            yield Finding(
                path,
                f"devices set as '{devices}' but the only valid string input is 'all'",
                f"write a list: [{devices}]",
            )
        case int() if devices <= 0:
            yield Finding(path, f"devices set as '{devices}' but a count of devices must be > 0")
        case list():
            if not devices:
                yield Finding(path, "the list of devices is empty", "write `all`, or leave it out")
            for number, each in enumerate(devices):
                yield from _reference(each, f"{path}[{number}]")
        case _:
            pass


def _reference(reference: str | int, path: str) -> Iterator[Finding]:
    text = str(reference)
    if not any(kind.fullmatch(text) for kind in (_GPU_INDEX, _GPU_UUID, _MIG)):
        yield Finding(
            path,
            f"unsupported type for device in devices list: {text}",
            "write an index (0), an index of a MIG device (0:1), or a whole UUID (GPU-...)",
        )


def _allotment(section: AllotmentSection) -> Iterator[Finding]:
    path = "$.allotment"
    for number, rule in enumerate(section.devices or ()):
        yield from _rule(rule, f"{path}.devices[{number}]")
    shares = section.shares_per_device
    if shares is not None and not 1 <= shares <= MAX_SHARES:
        yield Finding(
            f"{path}.sharesPerDevice",
            f"{shares} shares of a GPU cannot be",
            f"write 1 to {MAX_SHARES}: more cannot take turns on one GPU",
        )
    if section.health is not None:
        yield from _health(section.health, f"{path}.health")


def _rule(rule: DeviceRule, path: str) -> Iterator[Finding]:
    if rule.mode is None and not rule.modes:
        yield Finding(path, "it names no mode", "write `mode: soft`, or `modes: [soft, mig]`")
    if rule.mode is not None and rule.modes is not None:
        yield Finding(
            f"{path}.modes",
            "the rule has `mode` as well",
            "keep one of them: `modes` are those that a GPU may be in by turns",
        )
    if rule.modes is not None and len(set(rule.modes)) < len(rule.modes):
        yield Finding(f"{path}.modes", "a mode is there twice", "write each once")
    if rule.mig is not None:
        yield from _mig(rule, rule.mig, f"{path}.mig")
    if rule.time_slice is not None and rule.mode != "timeslice":
        yield Finding(
            f"{path}.timeSlice",
            f"it is of mode timeslice, and the rule's mode is {rule.first}",
            "leave it out, or write `mode: timeslice`",
        )
    if rule.match is not None:
        yield from _match(rule.match, f"{path}.match")


def _mig(rule: DeviceRule, section: MigSection, path: str) -> Iterator[Finding]:
    if "mig" not in rule.shared:
        yield Finding(
            path, "it is about slices, and the rule has no mode mig", "leave it out, or add mig"
        )
    if section.keep is not None:
        try:
            parse_duration(section.keep, most_s=MOST_KEEP_S)
        except UsageError as error:
            yield Finding(f"{path}.keep", error.message, error.hint)


def _match(match: DeviceMatch, path: str) -> Iterator[Finding]:
    parts = {"index": match.index, "uuid": match.uuid, "pci": match.pci, "model": match.model}
    if all(part is None for part in parts.values()):
        yield Finding(path, "it names nothing", "leave `match` out for every GPU")
    for name, part in parts.items():
        if part is not None and not part:
            yield Finding(f"{path}.{name}", "the list is empty: it matches no GPU", "leave it out")
        for number, value in enumerate(part or ()):
            is_right, what, hint = _MATCHES[name]
            if not is_right(str(value)):
                yield Finding(f"{path}.{name}[{number}]", f"{value} is no {what}", hint)


def _is_model(text: str) -> bool:
    # A text that begins like a UUID would be taken for one.
    return _WORD.search(text) is not None and not text.lower().startswith(("gpu-", "mig-"))


_MATCHES: Final[Mapping[str, tuple[Callable[[str], object], str, str]]] = {
    "index": (_GPU_INDEX.fullmatch, "index of a GPU", "write 0 for the first"),
    "uuid": (_UUID_BEGINNING.fullmatch, "beginning of a UUID", "write one like GPU-7ca1b2a4"),
    "pci": (PCI_ADDRESS.fullmatch, "PCI address", "write it as `lspci -D` does: 0000:3b:00.0"),
    "model": (_is_model, "model", "write words of its name, like a100-80gb or rtx4090"),
}
"""What a value of each kind has to be, in code and in words."""


def _health(section: HealthSection, path: str) -> Iterator[Finding]:
    for xid, action in (section.xid or {}).items():
        if not _XID.fullmatch(xid):
            yield Finding(f"{path}.xid", f"{xid!r} is no XID", "write its number: `79: reset-gpu`")
        try:
            parse_action(action)
        except UsageError as error:
            yield Finding(f"{path}.xid.{xid}", error.message, error.hint)
