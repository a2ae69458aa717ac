# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's file of MIG configurations, version v1, as mig-parted reads and writes it.

    version: v1
    mig-configs:
      all-balanced:
        - device-filter: ["0x233010DE"]
          devices: all
          mig-enabled: true
          mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

What mig-parted refuses is refused, with its words and with the place in the file; what it lets pass
and cannot mean (a profile that is none, a PCI id that is none, a GPU twice in one list) is refused
as well. Parts of GPU instances (`1c.3g.40gb`) are refused in the configuration that is chosen
(`select`), and let pass in others. Source: NVIDIA/mig-parted api/spec/v1/spec.go and
pkg/types/device.go, v0.15.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from allotment.model.errors import NotFoundError, UsageError

__all__ = [
    "Entry",
    "GpuIdentity",
    "check_numbers",
    "document_of",
    "parse_configurations",
    "select",
]

_VERSION: Final = "v1"
_PROFILE: Final = re.compile(r"(?:(?P<compute>\d)c\.)?\dg\.\d+gb(?:[+-][a-z.]+)?")
_ID: Final = re.compile(r"(0[xX][0-9a-fA-F]{1,8}|\d{1,10})(?::(0[xX][0-9a-fA-F]{1,8}|\d{1,10}))?")
_PLACE: Final = re.compile(r" - at `(?P<path>[^`]*)`$")
_KEYS: Final = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<key>.*)`")


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """What some GPUs are to have."""

    devices: Literal["all"] | list[int]
    """NVML's numbers of them, among all GPUs of the machine."""
    mig_enabled: bool
    mig_devices: dict[str, int] | None = None
    """How many of each profile."""
    device_filter: str | list[str] | None = None
    """Only GPUs of these PCI ids: device and vendor, and perhaps those of the subsystem."""

    @property
    def filters(self) -> tuple[str, ...]:
        """The PCI ids; empty: any."""
        if isinstance(self.device_filter, str):
            return (self.device_filter,) if self.device_filter else ()
        return tuple(self.device_filter or ())

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many of each profile there are to be, those of which there are to be any."""
        return {name: count for name, count in (self.mig_devices or {}).items() if count}

    def names(self, gpu: "GpuIdentity") -> bool:
        """Is this entry about that GPU?"""
        if isinstance(self.devices, list) and gpu.index not in self.devices:
            return False
        return not self.filters or any(gpu.is_of(each) for each in self.filters)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    version: str
    mig_configs: dict[str, list[Entry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuIdentity:
    """Which GPU an entry may mean."""

    index: int
    """NVML's number of it."""
    pci_id: int
    """Device and vendor, as NVML has them: 0x20B010DE."""
    pci_subsystem: int = 0

    def is_of(self, text: str) -> bool:
        """Has it the PCI ids of a filter?"""
        match = _ID.fullmatch(text)
        if match is None:
            return False
        device, subsystem = (None if each is None else int(each, 0) for each in match.groups())
        return device == self.pci_id and subsystem in (None, self.pci_subsystem)

    @property
    def filter(self) -> str:
        """Its PCI id, as a filter has it."""
        return f"0x{self.pci_id:08X}"


def parse_configurations(document: object, *, source: str) -> Mapping[str, tuple[Entry, ...]]:
    """Read what YAML or JSON was read into; `source` names the file in errors.

    Raises `UsageError`: `source: where: what`, with mig-parted's words for what it refuses.
    """
    if not isinstance(document, dict) or not document:
        raise UsageError(f"{source}: it holds no configuration", hint="it begins: version: v1")
    if "version" not in document:
        raise UsageError(
            f"{source}: unable to parse with missing 'version' field", hint="add `version: v1`"
        )
    if document["version"] != _VERSION:
        raise UsageError(
            f"{source}: unknown version: {document['version']}", hint="write `version: v1`"
        )
    try:
        file = msgspec.convert(document, _File)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _explained(str(error), document, source) from error
    if not file.mig_configs:
        raise UsageError(f"{source}: at least one entry in 'mig-configs' is required")
    for name, entries in file.mig_configs.items():
        if not entries:
            raise UsageError(f"{source}: at least one entry in '{name}' is required")
        for number, entry in enumerate(entries):
            if problem := _problem(entry):
                message, hint = problem
                raise UsageError(f"{source}: mig-configs.{name}[{number}]: {message}", hint=hint)
    return {name: tuple(entries) for name, entries in file.mig_configs.items()}


def select(
    configurations: Mapping[str, tuple[Entry, ...]], name: str | None, *, source: str
) -> tuple[Entry, ...]:
    """Return the configuration of that name, or the only one.

    Raises `UsageError` where there are several and none is named, or where the one that is chosen
    wants parts of GPU instances: a file may have such configurations beside it, as NVIDIA's own
    have. Raises `NotFoundError` for no such name.
    """
    names = ", ".join(configurations)
    if name is None and len(configurations) > 1:
        raise UsageError(
            f"{source}: there is more than one configuration", hint=f"choose by -c: {names}"
        )
    chosen = next(iter(configurations)) if name is None else name
    if chosen not in configurations:
        raise NotFoundError(
            f"{source}: selected mig-config not present: {chosen}", hint=f"there are: {names}"
        )
    for number, entry in enumerate(configurations[chosen]):
        for profile in entry.wanted:
            match = _PROFILE.fullmatch(profile)
            if match is not None and match["compute"]:
                raise UsageError(
                    f"{source}: mig-configs.{chosen}[{number}]: mig-devices: '{profile}' is a part"
                    " of a GPU instance",
                    hint="Allotment gives whole GPU instances: leave the part before `c.` out, or"
                    " choose another configuration",
                )
    return configurations[chosen]


def check_numbers(entries: Sequence[Entry], count: int) -> None:
    """Refuse numbers in `devices` that no GPU has: whoever wrote them meant another machine.

    Those of an entry for certain models are let pass: it may mean GPUs of other machines. Raises
    `UsageError`.
    """
    for entry in entries:
        if isinstance(entry.devices, list) and not entry.filters:
            missing = [str(index) for index in entry.devices if index >= count]
            if missing:
                raise UsageError(
                    f"the configuration names GPU {', '.join(missing)}, and this machine has"
                    f" {count}",
                    hint="they are counted from 0; `allot devices` shows their numbers",
                )


def document_of(
    name: str, gpus: Sequence[tuple[GpuIdentity, Mapping[str, int] | None]]
) -> dict[str, object]:
    """Return the file's document that describes GPUs as they are.

    For each GPU how many of each profile it has; None: it is not in MIG mode. GPUs that have the
    same share an entry; one PCI id on all GPUs needs no filter.
    """
    kinds = {gpu.filter for gpu, _ in gpus}
    groups: dict[tuple[tuple[str, int], ...] | None, list[GpuIdentity]] = {}
    for gpu, has in gpus:
        key = None if has is None else tuple(sorted(has.items()))
        groups.setdefault(key, []).append(gpu)
    entries = []
    for key, members in groups.items():
        filters = sorted({gpu.filter for gpu in members})
        of_these = [gpu.index for gpu, _ in gpus if gpu.filter in filters]
        indices = [gpu.index for gpu in members]
        entry: dict[str, object] = {}
        if len(kinds) > 1 and len(groups) > 1:
            entry["device-filter"] = filters[0] if len(filters) == 1 else filters
        entry["devices"] = "all" if indices == of_these else indices
        entry["mig-enabled"] = key is not None
        entry["mig-devices"] = dict(key or ())
        entries.append(entry)
    return {"version": _VERSION, "mig-configs": {name: entries}}


# ---- what is wrong -------------------------------------------------------------------------------


def _problem(entry: Entry) -> tuple[str, str | None] | None:
    """Return what an entry cannot mean, with a hint; None: nothing."""
    counts = entry.mig_devices
    for problem in (_profile_problem(counts or {}), _device_problem(entry)):
        if problem:
            return problem
    if entry.mig_enabled and counts is None:
        return (
            "missing required field 'mig-devices' when 'mig-enabled' is true",
            "for MIG mode without instances: `mig-devices: {}`",
        )
    if not entry.mig_enabled and counts:
        return (
            "MIG devices included when 'mig-enabled' is false",
            "remove `mig-devices`, or write `mig-enabled: true`",
        )
    return None


def _profile_problem(counts: Mapping[str, int]) -> tuple[str, str | None] | None:
    for name, count in counts.items():
        match = _PROFILE.fullmatch(name)
        if match is None:
            return f"mig-devices: invalid format for '{name}'", "a profile is like 1g.10gb"
        if count < 0:
            return f"mig-devices: invalid count for '{name}': {count}", None
    if counts and not any(counts.values()):
        return "all counts for all MigProfiles are 0", "for no instances: `mig-devices: {}`"
    return None


def _device_problem(entry: Entry) -> tuple[str, str | None] | None:
    for text in entry.filters:
        if not _ID.fullmatch(text):
            return (
                f"device-filter: invalid DeviceID format '{text}'",
                "device and vendor in one number, as NVML has them: 0x20B010DE",
            )
    if isinstance(entry.devices, list):
        twice = [str(index) for index, times in Counter(entry.devices).items() if times > 1]
        if twice:
            return f"devices: {', '.join(twice)} is there twice", None
        if any(index < 0 for index in entry.devices):
            return "devices: a GPU's number is not below 0", None
        if not entry.devices:
            return "devices: it names no GPU", "write `devices: all`, or numbers"
    return None


def _explained(message: str, document: object, source: str) -> UsageError:
    """Put msgspec's message into mig-parted's words, with the place as the file has it."""
    place = _PLACE.search(message)
    what = message[: place.start()] if place else message
    path = place["path"].removeprefix("$").removeprefix(".") if place else ""
    where = f"{source}: {_named(path, document)}: " if path else f"{source}: "
    if match := _KEYS.match(what):
        is_unknown = match["what"] == "contains unknown"
        said = "unexpected field" if is_unknown else "missing required field"
        return UsageError(f"{where}{said}: {match['key']}")
    if path.endswith(".devices"):
        return UsageError(
            f"{where}invalid input for 'devices'", hint="write `devices: all` or `devices: [0, 1]`"
        )
    if path.endswith((".device-filter", ".device-filter[...]")):
        return UsageError(f"{where}{what}", hint='write it in quotes: "0x20B010DE"')
    return UsageError(f"{where}{what}")


def _named(path: str, document: object) -> str:
    """Return msgspec's path with the name of the configuration: it writes `[...]` for any key."""
    before, mark, after = path.partition("[...]")
    if not mark or before != "mig-configs" or not isinstance(document, dict):
        return path
    names: Iterable[str] = document["mig-configs"]
    for name in names:
        try:
            msgspec.convert(document["mig-configs"][name], list[Entry])
        except msgspec.ValidationError:
            return f"{before}.{name}{after}"
    return path
