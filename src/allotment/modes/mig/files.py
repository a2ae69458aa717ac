# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's file of MIG configurations, version v1, as mig-parted reads and writes it.

    version: v1
    mig-configs:
      all-balanced:
        - device-filter: ["0x233010DE"]
          devices: all
          mig-enabled: true
          mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}

Errors are mig-parted's, with the place in the file. Meaningless values that mig-parted accepts are
also refused: invalid profiles and PCI ids, a GPU twice in one list. Parts of GPU instances
(`1c.3g.40gb`) are refused only in the selected configuration. Source: NVIDIA/mig-parted
api/spec/v1/spec.go and pkg/types/device.go, v0.15.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from allotment.model.errors import NotFoundError, UsageError
from allotment.model.structs import prepared

_VERSION: Final = "v1"
_PROFILE: Final = re.compile(r"(?:(?P<compute>\d)c\.)?\dg\.\d+gb(?:[+-][a-z.]+)?")
_ID: Final = re.compile(r"(0[xX][0-9a-fA-F]{1,8}|\d{1,10})(?::(0[xX][0-9a-fA-F]{1,8}|\d{1,10}))?")
_PLACE: Final = re.compile(r" - at `(?P<path>[^`]*)`$")
_KEYS: Final = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<key>.*)`")


class ConfigEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"
):
    """The configuration of some GPUs."""

    devices: Literal["all"] | list[int]
    """NVML's numbers of the GPUs."""
    mig_enabled: bool
    mig_devices: dict[str, int] | None = None
    """Number of instances of each profile."""
    device_filter: str | list[str] | None = None
    """Only GPUs of these PCI ids: device and vendor, optionally with those of the subsystem."""

    @property
    def filters(self) -> tuple[str, ...]:
        """The PCI ids; empty: any."""
        if isinstance(self.device_filter, str):
            return (self.device_filter,) if self.device_filter else ()
        return tuple(self.device_filter or ())

    @property
    def wanted(self) -> Mapping[str, int]:
        """`mig_devices` without counts of 0."""
        return {name: count for name, count in (self.mig_devices or {}).items() if count}

    def names(self, gpu: "GpuIdentity") -> bool:
        """True if this entry is about that GPU."""
        if isinstance(self.devices, list) and gpu.index not in self.devices:
            return False
        return not self.filters or any(gpu.matches(filter_) for filter_ in self.filters)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    version: str
    mig_configs: dict[str, list[ConfigEntry]]


class GpuIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a GPU that entries name."""

    index: int
    """NVML's number of the GPU."""
    pci_id: int
    """NVML's number of device and vendor: 0x20B010DE."""
    pci_subsystem: int = 0

    def matches(self, text: str) -> bool:
        """True if it has the PCI ids of a filter."""
        match = _ID.fullmatch(text)
        if match is None:
            return False
        device, subsystem = (None if text is None else int(text, 0) for text in match.groups())
        return device == self.pci_id and subsystem in (None, self.pci_subsystem)

    @property
    def filter(self) -> str:
        """Its PCI id as a filter."""
        return f"0x{self.pci_id:08X}"


def parse_configurations(document: object, *, source: str) -> Mapping[str, tuple[ConfigEntry, ...]]:
    """Check a document from YAML or JSON; `source` is its file's name for errors.

    Raises `UsageError`: `source: place: problem`, with mig-parted's messages.
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
        file = msgspec.convert(document, prepared(_File))
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
    configurations: Mapping[str, tuple[ConfigEntry, ...]], name: str | None, *, source: str
) -> tuple[ConfigEntry, ...]:
    """Return the configuration of that name, or the only one.

    Raises `UsageError` for several without a name, or for parts of GPU instances in the selected
    one (NVIDIA's own file has such configurations), and `NotFoundError` for an unknown name.
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


def check_numbers(entries: Sequence[ConfigEntry], count: int) -> None:
    """Refuse numbers of GPUs that this machine does not have. Raises `UsageError`.

    Entries with a filter are skipped: they may be for other machines.
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
    """Return the document of a file that describes the present state of GPUs.

    `gpus`: with the number of instances of each profile; None: not in MIG mode. Equal GPUs share an
    entry; a single PCI id needs no filter.
    """
    kinds = {gpu.filter for gpu, _ in gpus}
    groups: dict[tuple[tuple[str, int], ...] | None, list[GpuIdentity]] = {}
    for gpu, counts in gpus:
        key = None if counts is None else tuple(sorted(counts.items()))
        groups.setdefault(key, []).append(gpu)
    entries = []
    for key, members in groups.items():
        filters = sorted({gpu.filter for gpu in members})
        filtered = [gpu.index for gpu, _ in gpus if gpu.filter in filters]
        indices = [gpu.index for gpu in members]
        entry: dict[str, object] = {}
        if len(kinds) > 1 and len(groups) > 1:
            entry["device-filter"] = filters[0] if len(filters) == 1 else filters
        entry["devices"] = "all" if indices == filtered else indices
        entry["mig-enabled"] = key is not None
        entry["mig-devices"] = dict(key or ())
        entries.append(entry)
    return {"version": _VERSION, "mig-configs": {name: entries}}


# ---- what is wrong -------------------------------------------------------------------------------


def _problem(entry: ConfigEntry) -> tuple[str, str | None] | None:
    """Return what is wrong with an entry, with a hint; None: it is valid."""
    counts = entry.mig_devices
    if problem := _profile_problem(counts or {}) or _device_problem(entry):
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


def _device_problem(entry: ConfigEntry) -> tuple[str, str | None] | None:
    for text in entry.filters:
        if not _ID.fullmatch(text):
            return (
                f"device-filter: invalid DeviceID format '{text}'",
                "write NVML's number of device and vendor: 0x20B010DE",
            )
    if isinstance(entry.devices, list):
        repeated = [str(index) for index, times in Counter(entry.devices).items() if times > 1]
        if repeated:
            return f"devices: {', '.join(repeated)} is repeated", None
        if any(index < 0 for index in entry.devices):
            return "devices: a GPU's number cannot be negative", None
        if not entry.devices:
            return "devices: the list is empty", "write `devices: all`, or numbers"
    return None


def _explained(message: str, document: object, source: str) -> UsageError:
    """Translate msgspec's message to mig-parted's, with the place in the file."""
    place = _PLACE.search(message)
    what = message[: place.start()] if place else message
    path = place["path"].removeprefix("$").removeprefix(".") if place else ""
    where = f"{source}: {_named(path, document)}: " if path else f"{source}: "
    if match := _KEYS.match(what):
        is_unknown = match["what"] == "contains unknown"
        problem = "unexpected field" if is_unknown else "missing required field"
        return UsageError(f"{where}{problem}: {match['key']}")
    if path.endswith(".devices"):
        return UsageError(
            f"{where}invalid input for 'devices'", hint="write `devices: all` or `devices: [0, 1]`"
        )
    if path.endswith((".device-filter", ".device-filter[...]")):
        return UsageError(f"{where}{what}", hint='write it in quotes: "0x20B010DE"')
    return UsageError(f"{where}{what}")


def _named(path: str, document: object) -> str:
    """Return msgspec's path with the configuration's name in place of `[...]`."""
    before, mark, after = path.partition("[...]")
    if not mark or before != "mig-configs" or not isinstance(document, dict):
        return path
    names: Iterable[str] = document["mig-configs"]
    for name in names:
        try:
            msgspec.convert(document["mig-configs"][name], prepared(list[ConfigEntry]))
        except msgspec.ValidationError:
            return f"{before}.{name}{after}"
    return path
