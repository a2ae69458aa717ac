# SPDX-License-Identifier: Apache-2.0
"""The machine's configuration, `/etc/allotment/config.yaml`: what its users get and may have.

Root writes it, and every `allot` that makes or enlarges a share obeys it. No variable and no option
names another file: its readers are those that it limits. Without the file there are no ceilings.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from allotment.files import read_file
from allotment.model.allowances import Allowance, GpuAmounts
from allotment.model.compute import Compute, ComputeClass, parse_compute, parse_weight
from allotment.model.devices import Device
from allotment.model.errors import DoesNotFitError, StateError, UsageError
from allotment.model.formats import format_count, meant
from allotment.model.placements import MAX_SHARES, Placement
from allotment.model.quantities import parse_memory
from allotment.model.structs import prepared
from allotment.modes import traits_of
from allotment.placement import is_selected
from allotment.shares.folders import CONFIG_FILE, RUN_FOLDER, StateFolder, user_name
from allotment.shares.placing import ShareOrder
from allotment.shares.record import LoadedShare

_VERSION: Final = "v1"
_MOST_BYTES: Final = 1 << 20
_MOST_GPUS: Final = 16
_EVERYONE: Final = "everyone"
_ASK_ROOT: Final = "ask for no more than that; root sets ceilings"


class _Section(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A mapping of the file: an unknown key is refused."""


class _Defaults(_Section, frozen=True, kw_only=True):
    memory: str | None = None
    compute: str | None = None
    kind: ComputeClass | None = msgspec.field(default=None, name="class")
    weight: str | None = None


class _Ceilings(_Section, frozen=True, kw_only=True):
    memory: str | None = None
    compute: str | None = None
    kind: ComputeClass | None = msgspec.field(default=None, name="class")
    gpus: str | None = None
    shares: str | None = None
    oversubscribe: bool | None = None


class _Terms(_Section, frozen=True, kw_only=True):
    """What some users get (`share`) and may have."""

    share: _Defaults = _Defaults()
    ceilings: _Ceilings = _Ceilings()


def _whole(most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= most:
            return int(text)
        raise UsageError(
            f"{text[:20]!r} is not a whole number from 1 to {most}",
            hint="leave it out for no ceiling",
        )

    return parse


_PARSERS: Final[Mapping[tuple[str, str], tuple[str, Callable[[Any], Any]]]] = {
    ("share", "memory"): ("memory", parse_memory),
    ("share", "compute"): ("compute", parse_compute),
    ("share", "kind"): ("kind", ComputeClass),
    ("share", "weight"): ("weight", parse_weight),
    ("ceilings", "memory"): ("most_memory", parse_memory),
    ("ceilings", "compute"): ("most_compute", parse_compute),
    ("ceilings", "kind"): ("most_class", ComputeClass),
    ("ceilings", "gpus"): ("most_gpus", _whole(_MOST_GPUS)),
    ("ceilings", "shares"): ("most_shares", _whole(MAX_SHARES)),
    ("ceilings", "oversubscribe"): ("may_oversubscribe", bool),
}
"""By section and key: the name in an `Allowance`, and the parser of the value."""


class _Setting(msgspec.Struct, frozen=True):
    value: Any
    place: str


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The parsed file: for each kind of user its settings by their name in an `Allowance`."""

    everyone: Mapping[str, _Setting] = msgspec.field(default_factory=dict)
    groups: Mapping[str, Mapping[str, _Setting]] = msgspec.field(default_factory=dict)
    """In the order of the file: of a user's groups the first one with a setting counts."""
    users: Mapping[str, Mapping[str, _Setting]] = msgspec.field(default_factory=dict)

    def allowance(self, uid: int) -> Allowance:
        """Return what a user gets and may have. Root, who writes the file, has no ceilings."""
        name, groups = _names_of(uid)
        own = [self.users.get(name, {}), self.users.get(str(uid), {})]
        sections = [*own, *(self.groups[each] for each in self.groups if each in groups)]
        found: dict[str, _Setting] = {}
        for section in (*sections, self.everyone):
            for key, setting in section.items():
                found.setdefault(key, setting)
        if uid == 0:
            ceilings = {name for (section, _), (name, _) in _PARSERS.items() if section != "share"}
            found = {key: each for key, each in found.items() if key not in ceilings}
        return Allowance(
            uid=uid,
            user=user_name(uid),
            places={key: each.place for key, each in found.items()},
            **{key: each.value for key, each in found.items()},
        )


def _names_of(uid: int) -> tuple[str, set[str]]:
    """Return a user's name and its groups' names; empty for a user that has none."""
    import grp  # late: few machines have the file
    import pwd

    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return "", set()
    groups = set()
    for gid in os.getgrouplist(user.pw_name, user.pw_gid):
        with suppress(KeyError):
            groups.add(grp.getgrgid(gid).gr_name)
    return user.pw_name, groups


# ---- the file ------------------------------------------------------------------------------------


def read_config(path: Path = CONFIG_FILE) -> MachineConfig | None:
    """Read the machine's configuration; None: there is none.

    Raises `UsageError` (a mistake, with its line), `StateError` (unreadable, or not root's alone).
    """
    try:
        _check_roots_own(path)
        text = read_file(str(path), most=_MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}",
            hint=f"run as root: chmod 755 {path.parent} && chmod 644 {path}",
        ) from error
    return parse_config(text, source=str(path))


def _check_roots_own(path: Path) -> None:
    """Refuse a file that another user than root could change."""
    for each in (path.parent, path):
        status = each.stat()
        if status.st_uid != 0 or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StateError(
                f"{each}: {user_name(status.st_uid)} owns it, mode {status.st_mode & 0o7777:04o}:"
                " other users than root could change the ceilings",
                hint=f"run as root: chown root {each} && chmod go-w {each}",
            )


def parse_config(text: str, *, source: str) -> MachineConfig:
    """Parse the file; `source` names it in errors. Raises `UsageError` with the line."""
    document, lines = _load(text, source)
    found = _Place(source, lines, "")
    if document is None:
        return MachineConfig()
    _check_keys(document, ("version", _EVERYONE, "groups", "users"), found)
    if document.get("version") != _VERSION:
        raise found.at("version").error("the version is missing, or unknown", "write `version: v1`")
    everyone = _settings(document.get(_EVERYONE), found.at(_EVERYONE))
    named: dict[str, dict[str, Mapping[str, _Setting]]] = {"groups": {}, "users": {}}
    for kind, sections in named.items():
        entries = document.get(kind) or {}
        _check_keys(entries, None, found.at(kind))
        for name, section in entries.items():
            sections[name] = _settings(section, found.at(kind).at(name))
    return MachineConfig(everyone=everyone, groups=named["groups"], users=named["users"])


class _Place(msgspec.Struct, frozen=True):
    """A place in the file."""

    source: str
    lines: Mapping[str, int]
    path: str

    def at(self, key: str) -> "_Place":
        return _Place(self.source, self.lines, f"{self.path}.{key}" if self.path else key)

    def __str__(self) -> str:
        """Name the line; of a missing key the one that it would be under."""
        path = self.path
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return f"{self.source}, line {self.lines.get(path, 1)}: {self.path or 'the file'}"

    def error(self, message: str, hint: str | None) -> UsageError:
        return UsageError(f"{self}: {message}", hint=hint)


def _check_keys(value: object, known: Sequence[str] | None, place: _Place) -> None:
    if not isinstance(value, dict):
        raise place.error("keys with values are expected here", "check the indentation")
    for key in value:
        if known is not None and key not in known:
            hint = f"keys: {', '.join(known)}"
            raise place.at(key).error(f"unknown key {key[:40]!r}{meant(key, known)}", hint)


def _settings(value: object, place: _Place) -> dict[str, _Setting]:
    """Check and parse one section of users."""
    if value is None:
        return {}
    fields: dict[str, type[_Section]] = {"share": _Defaults, "ceilings": _Ceilings}
    _check_keys(value, [*fields], place)
    assert isinstance(value, dict)  # noqa: S101 - it was checked
    found: dict[str, _Setting] = {}
    for section, struct in fields.items():
        inner = value.get(section)
        if inner is None:
            continue
        kinds = msgspec.structs.fields(struct)
        _check_keys(inner, [each.encode_name for each in kinds], place.at(section))
        for field in kinds:
            if inner.get(field.encode_name) is None:
                continue
            where = place.at(section).at(field.encode_name)
            name, parse = _PARSERS[section, field.name]
            one = {field.encode_name: inner[field.encode_name]}
            try:
                # Texts alone, as they are written: YAML would read 30:60 as a number of seconds.
                converted = msgspec.convert(one, prepared(struct), strict=False)
                found[name] = _Setting(parse(getattr(converted, field.name)), str(where))
            except msgspec.ValidationError as error:
                raise where.error(
                    f"{str(inner[field.encode_name])[:40]!r} is none of its values", _hint(field)
                ) from error
            except UsageError as error:
                raise where.error(error.message, error.hint) from error
    return found


def _hint(field: msgspec.structs.FieldInfo) -> str:
    if field.name == "kind":
        return f"write one of {', '.join(ComputeClass)}"
    return "write true or false" if field.name == "oversubscribe" else "write one value"


def _load(text: str, source: str) -> tuple[Any, Mapping[str, int]]:
    """Return the document, scalars as texts, and the line of each key by its path."""
    import yaml  # late: few machines have the file

    lines: dict[str, int] = {}

    def value(node: yaml.Node, path: str) -> Any:  # noqa: ANN401 - a document
        if isinstance(node, yaml.MappingNode):
            found: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(value(key_node, path))
                at = f"{path}.{key}" if path else key
                lines.setdefault(at, key_node.start_mark.line + 1)
                if key in found:
                    line = key_node.start_mark.line + 1
                    message = f"{source}, line {line}: {at}: the key is given twice"
                    raise UsageError(message, hint=f"the first one is in line {lines[at]}")
                found[key] = value(value_node, at)
            return found
        if isinstance(node, yaml.SequenceNode):
            return [value(each, path) for each in node.value]
        is_empty = isinstance(node, yaml.ScalarNode) and node.value == "" and node.style is None
        return None if is_empty else str(node.value)

    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return (None if node is None else value(node, "")), lines
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UsageError(
            f"{source}{line}: it is not YAML: {problem}", hint="check the indentation"
        ) from error


# ---- what it means for shares --------------------------------------------------------------------


def allowance_of(uid: int, path: Path = CONFIG_FILE) -> Allowance | None:
    """Return what a user gets and may have; None: the machine has no configuration."""
    config = read_config(path)
    return None if config is None else config.allowance(uid)


def check_folder(allowance: Allowance, folder: StateFolder, *, is_simulated: bool) -> None:
    """Refuse real GPUs by another state folder: it does not have the machine's other shares."""
    if is_simulated or folder.root == RUN_FOLDER or not allowance.has_ceilings:
        return
    raise StateError(
        f"{folder.root} is not the state folder of this machine, {RUN_FOLDER}, which"
        f" {CONFIG_FILE} is for",
        hint=f"leave out --state and ALLOTMENT_STATE; if {RUN_FOLDER} is not open for"
        f" {allowance.user}, root adds you to its group: adduser NAME allotment, and log in again",
    )


def check_one_share(allowance: Allowance, order: ShareOrder) -> None:
    """Raise `UsageError` for what one share may never have, wherever it is placed."""
    request = order.request
    traits = traits_of(request.mode)
    compute = request.compute
    for sentence, name in allowance.beyond_one_share(
        compute, count=request.count, may_oversubscribe=request.may_oversubscribe
    ):
        if name == "most_compute" and traits.is_slice:
            continue  # a slice has no ceiling
        if name == "most_class" and "class" in traits.ignores:
            continue
        raise _refused(allowance, sentence, name)


def check_compute(allowance: Allowance, compute: Compute) -> None:
    """Raise `UsageError` for compute in turns that no share of the user may have."""
    for sentence, name in allowance.beyond_one_share(compute, count=1, may_oversubscribe=False):
        raise _refused(allowance, sentence, name)


def allowed_devices(
    allowance: Allowance,
    order: ShareOrder,
    devices: Sequence[Device],
    shares: Iterable[LoadedShare],
) -> tuple[Device, ...]:
    """Return the devices on which the user may have the share beside its other ones.

    Raises `UsageError` if none of them could ever have it, `DoesNotFitError` if its other shares
    are in the way.
    """
    own = [each for each in shares if _user_of(each) == allowance.uid and each.owner is None]
    most = allowance.most_shares
    if most is not None and len(own) >= most:
        names = ", ".join(sorted(each.name for each in own))
        raise DoesNotFitError(
            f"{allowance.user} has {format_count(len(own), 'share')} ({names}), may have {most}"
            f" ({allowance.place_of('most_shares')})",
            hint="end one of them, or wait: --wait",
            reason="more shares than the user may have",
        )
    used = _amounts(own)
    request = order.request
    allowed, never, now = [], [], []
    selected = [device for device in devices if is_selected(device, request)]
    for device in selected:
        asked = GpuAmounts(request.memory.of(device.allottable_bytes), request.compute.guarantee)
        gpu, whole = gpu_of(device, devices)
        beside = used.get(gpu, GpuAmounts())
        if alone := next(allowance.beyond_on_gpu(asked, GpuAmounts(), whole), None):
            never.append((device, *alone))
        elif both := next(allowance.beyond_on_gpu(asked, beside, whole), None):
            now.append((device, *both))
        else:
            allowed.append(device)
    if len(allowed) >= request.count or not (never or now):
        return tuple(allowed)
    if not now:
        _, sentence, name = never[0]
        raise _refused(allowance, f"{sentence} of GPU {never[0][0].uuid}", name)
    lines = "\n".join(f"  {device.uuid}: {sentence}" for device, sentence, _ in (*now, *never))
    raise DoesNotFitError(
        f"{allowance.user} may have no more of the GPUs, with its other shares"
        f" ({allowance.place_of(now[0][2])}):\n{lines}",
        hint="ask for less, end one of your shares (`allot ps` shows them), or wait: --wait",
        reason="more of a GPU than the user may have",
    )


def check_placement(
    allowance: Allowance,
    placement: Placement,
    devices: Sequence[Device],
    shares: Iterable[LoadedShare],
) -> None:
    """Check slices that were cut for a share: their size was not known before."""
    allowed_parts = {
        gpu_of(placed.device, devices): GpuAmounts(
            placed.memory_bytes, placed.compute.guarantee if placed.compute else 0
        )
        for placed in placement.devices
    }
    check_parts(allowance, allowed_parts, shares)


def check_parts(
    allowance: Allowance,
    parts: Mapping[tuple[str, int], GpuAmounts],
    shares: Iterable[LoadedShare],
) -> None:
    """Check new parts of GPUs, by UUID and size, beside the user's other shares.

    Raises `DoesNotFitError`.
    """
    used = _amounts(each for each in shares if _user_of(each) == allowance.uid and not each.owner)
    for (gpu, whole), part in parts.items():
        for sentence, name in allowance.beyond_on_gpu(part, used.get(gpu, GpuAmounts()), whole):
            raise DoesNotFitError(
                f"{gpu}: {sentence}: the ceiling of {allowance.user}, with its other shares"
                f" ({allowance.place_of(name)})",
                hint=_ASK_ROOT,
                reason="more of a GPU than the user may have",
            )


def gpu_of(device: Device, devices: Iterable[Device]) -> tuple[str, int]:
    """Return a device's GPU and that GPU's memory: of a slice, the GPU that it is cut from."""
    origin = device.slice_of
    if origin is not None:
        whole = next((each for each in devices if each.uuid == origin.gpu), None)
        return origin.gpu, whole.memory_bytes if whole else device.memory_bytes
    return device.uuid, device.allottable_bytes or device.memory_bytes


def _refused(allowance: Allowance, sentence: str, name: str) -> UsageError:
    return UsageError(
        f"{sentence}: the ceiling of {allowance.user} ({allowance.place_of(name)})", hint=_ASK_ROOT
    )


def _amounts(shares: Iterable[LoadedShare]) -> dict[str, GpuAmounts]:
    """Add up shares by GPU; a suspended one counts, because it comes back."""
    found: dict[str, GpuAmounts] = {}
    for each in shares:
        guarantees, limits = each.guarantees(), each.limits()
        gpus = {device.uuid: device.driver_uuid for device in each.devices()}
        for uuid, limit in limits.items():
            gpu = gpus.get(uuid, uuid)
            part = GpuAmounts(limit, guarantees.get(uuid, 0))
            found[gpu] = found.get(gpu, GpuAmounts()) + part
    return found


def _user_of(loaded: LoadedShare) -> int | None:
    """Return the user whose programs a share is for: with `--user`, the owner of its use."""
    for path in (loaded.directory / "usage", loaded.directory):
        with suppress(OSError):
            return path.stat().st_uid
    return None


def unknown_names(config: MachineConfig) -> Iterator[str]:
    """Yield the users and groups of the file that this machine does not have."""
    import grp
    import pwd

    for name in config.users:
        try:
            pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        except KeyError:
            yield f"user {name}"
    for name in config.groups:
        try:
            grp.getgrnam(name)
        except KeyError:
            yield f"group {name}"
