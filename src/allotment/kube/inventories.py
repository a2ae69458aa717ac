# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/devices`: a node's devices, as its agent publishes them for schedulers. No I/O.

The annotation is JSON: see `_Inventory`. Defaults are omitted, unknown fields are ignored, and
`version` changes with their meaning. Only the node's agent may write it (RBAC and an admission
policy). The reader trusts nothing: all values are bounded, and an invalid inventory affects only
its node.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Final, NoReturn

import msgspec
from msgspec import Meta

from allotment.dialects.own.annotations import MODE_WORDS
from allotment.kube.objects import NodeObject, amounts
from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, TakenPart
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.formats import shortened
from allotment.model.mig import MigHold, MigProfile, MigSlice
from allotment.model.modes import SOFT
from allotment.model.pods import PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.structs import replace

DEVICES: Final = "allotment.dev/devices"
"""On the node. Absent: it shares no device by `allotment.dev/gpu`, or it has no agent."""
VERSION: Final = 1
CORDONS: Final = ("allotment.dev/device-cordon", "hami.io/device-cordon")
"""On the node, written by administrators: UUIDs, by commas, of devices closed to new pods."""
_CORDONED: Final = "cordoned"

MOST_CHARACTERS: Final = 128 << 10
"""All annotations of an object have 256 KiB."""
MOST_DEVICES: Final = 32
"""The limit of NVIDIA's driver per machine (NV_MAX_DEVICES, nvlimits.h). Schedulers use arrays as
wide as the node with the most devices, so the limit bounds how far one node can slow down all
decisions."""
MOST_RESIZED: Final = 1024
"""Pods of a node that were resized: more than any node runs."""
MOST_CLAIMS: Final = 2048
"""Shares of claims: more than the devices of a node can have."""
LONGEST_PROBLEM: Final = 200
_LONGEST_UUID: Final = 128
_LONGEST_NAME: Final = 256
_MOST_SHARES: Final = 1 << 20
_MOST_POINTS: Final = 1 << 20
_LARGEST_INDEX: Final = 1 << 16
_LARGEST_NUMA: Final = 1023
"""Linux supports up to 1,024 NUMA nodes (CONFIG_NODES_SHIFT)."""
_MOST_MEMORY: Final = 1 << 50
"""Per device: a thousand times the largest one's, and exact in floats and their sums."""
MOST_SLOTS: Final = 8
"""Memory slots of a GPU with MIG. Possible slices are computed for each set of slots."""
_MOST_PROFILES: Final = 24
"""Per GPU: twice as many as any has."""
MOST_LISTS: Final = 4
"""Lists of profiles: GPU models with MIG per node. Layouts are computed per model, which takes a
tenth of a second for a made-up list."""
_LARGEST_NUMBER: Final = 1 << 16

_UuidText = Annotated[str, Meta(min_length=1, max_length=_LONGEST_UUID)]
_Name = Annotated[str, Meta(max_length=_LONGEST_NAME)]
_Word = Annotated[str, Meta(min_length=1, max_length=64)]
_Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
_DeviceBytes = Annotated[int, Meta(ge=0, le=_MOST_MEMORY)]
_Points = Annotated[int, Meta(ge=0, le=_MOST_POINTS)]
_Shares = Annotated[int, Meta(ge=0, le=_MOST_SHARES)]
_Place = Annotated[int, Meta(ge=0, lt=MOST_DEVICES)]
_USUAL_MODES: Final = (SOFT,)
_USUAL_SHARES: Final = 63


class _Taken(msgspec.Struct, frozen=True, omit_defaults=True):
    memory: _Bytes = 0
    # May exceed a whole device if guarantees were lowered later.
    guarantee: Annotated[int, Meta(ge=0, le=_MOST_SHARES * WHOLE)] = 0
    shares: _Shares = 0
    mode: Annotated[str, Meta(max_length=64)] = ""


_Slot = Annotated[int, Meta(ge=0, lt=MOST_SLOTS)]
_Number = Annotated[int, Meta(ge=0, le=_LARGEST_NUMBER)]


class _Profile(msgspec.Struct, frozen=True, array_like=True):
    """The fields of `MigProfile`, in its order."""

    name: _Word
    number: _Number
    slices: Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
    memory_bytes: _DeviceBytes
    size: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    starts: Annotated[tuple[_Slot, ...], Meta(max_length=MOST_SLOTS)]
    most: Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
    multiprocessors: _Number
    has_media: bool = False


_PodUid = Annotated[str, Meta(max_length=64)]
_Profiles = Annotated[tuple[_Profile, ...], Meta(max_length=_MOST_PROFILES)]


class _Mig(msgspec.Struct, frozen=True, omit_defaults=True):
    # No default, so that it is always written.
    profiles: Annotated[int, Meta(ge=0, lt=MOST_LISTS)]
    on: bool = True
    slices: Annotated[tuple[tuple[_Word, _Slot, MigHold], ...], Meta(max_length=MOST_SLOTS)] = ()


class _Device(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={"memory_bytes": "memory", "numa_node": "numa", "max_shares": "shares"},
):
    """The fields of `NodeDevice`."""

    uuid: _UuidText
    model: _Name
    memory_bytes: _DeviceBytes
    index: Annotated[int, Meta(ge=0, le=_LARGEST_INDEX)] = 0
    numa_node: Annotated[int, Meta(ge=0, le=_LARGEST_NUMA)] | None = None
    modes: Annotated[tuple[_Word, ...], Meta(max_length=16)] | None = None
    """None: the usual modes. Unknown modes are ignored."""
    max_shares: _Shares = _USUAL_SHARES
    guarantee: Annotated[int, Meta(ge=0, le=WHOLE)] = WHOLE
    problem: Annotated[str, Meta(max_length=1024)] = ""
    taken: _Taken | None = None
    mig: _Mig | None = None
    mig_off: Annotated[str, Meta(max_length=1024)] = ""


class _Inventory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The annotation.

    {"version": 1, "host": BYTES, "devices": [{"uuid": "GPU-...", "model": "NVIDIA H100 80GB HBM3",
      "memory": BYTES, "index": 0, "numa": 0, "problem": "...",
      "taken": {"memory": BYTES, "guarantee": 3000, "shares": 1, "mode": "soft"},
      "mig": {"profiles": 0, "on": false, "slices": [["1g.10gb", 4, "idle"], ...]}}, ...],
     "links": [[0, 1, 60], ...], "resized": {"POD'S UID": 1, ...}, "claims": ["SHARE", ...],
     "profiles": [[["1g.10gb", 19, 1, BYTES, 1, [0, 1, 2, 3, 4, 5, 6], 7, 16], ...], ...]}

    `guarantee` is in basis points of a device's time. A link names two devices by their place in
    the list. `mig` has the place of the device's list of profiles, its MIG mode, and the slices
    without a placement of ours: `idle`, `used` (without a scheduler) or `foreign`. `mig_off`
    replaces `mig` with the reason while MIG mode stays off. `resized` has the last resize in force,
    by its generation. `claims` has the shares of ResourceClaims that the amounts count. For a
    profile's fields see `_Profile`.
    """

    # No default, so that it is always written.
    version: int
    devices: Annotated[tuple[_Device, ...], Meta(max_length=MOST_DEVICES)] = ()
    host: _Bytes = 0
    links: Annotated[
        tuple[tuple[_Place, _Place, _Points], ...],
        Meta(max_length=MOST_DEVICES * (MOST_DEVICES - 1) // 2),
    ] = ()
    profiles: Annotated[tuple[_Profiles, ...], Meta(max_length=MOST_LISTS)] = ()
    resized: Annotated[dict[_PodUid, int], Meta(max_length=MOST_RESIZED)] = {}
    claims: Annotated[tuple[_Word, ...], Meta(max_length=MOST_CLAIMS)] = ()


class _Version(msgspec.Struct, frozen=True):
    version: int


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_Inventory)
_version: Final = msgspec.json.Decoder(_Version)


def encode(inventory: NodeInventory) -> str:
    """Write the annotation. The same devices always give the same text.

    Too long problems and names are shortened, and slices of unknown profiles are left out. Raises
    `ValueError` for more than an annotation can hold.
    """
    devices = sorted(inventory.devices, key=_by_place)
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"{len(devices)} devices, more than {MOST_DEVICES}")
    places = {device.uuid: place for place, device in enumerate(devices)}
    links = sorted(
        (places[one], places[other], min(points, _MOST_POINTS))
        for (one, other), points in inventory.links.items()
        if points > 0 and one < other and one in places and other in places
    )
    profiles = tuple(dict.fromkeys(device.mig.profiles for device in devices if device.mig))
    if len(profiles) > MOST_LISTS:
        raise ValueError(f"{len(profiles)} GPU models with MIG profiles, more than {MOST_LISTS}")
    document = _Inventory(
        version=VERSION,
        devices=tuple(_written(device, profiles) for device in devices),
        host=inventory.host_budget_bytes,
        links=tuple(links),
        resized=dict(sorted(inventory.resized.items())[:MOST_RESIZED]),
        claims=tuple(sorted(inventory.claims)[:MOST_CLAIMS]),
        profiles=tuple(
            tuple(_Profile(*msgspec.structs.astuple(profile)) for profile in listed)
            for listed in profiles
        ),
    )
    text = _encoder.encode(document).decode()
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    return text


def decode(name: str, text: str, *, cpu_milli: int = 0, memory_bytes: int = 0) -> NodeInventory:
    """Read a node's annotation; CPU and memory are the node object's allocatable amounts.

    Raises `UsageError` that names the node.
    """
    if len(text) > MOST_CHARACTERS:
        _refuse(name, f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        document = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # A different version explains any difference in the format.
        _check_version(name, text)
        _refuse(name, str(error), error)
    if document.version != VERSION:
        _check_version(name, text)
    uuids = [device.uuid for device in document.devices]
    if len(set(uuids)) != len(uuids):
        twice = next(uuid for uuid in uuids if uuids.count(uuid) > 1)
        _refuse(name, f"it has {twice[:64]!r} twice")
    links: dict[tuple[str, str], int] = {}
    for one, other, points in document.links:
        if one == other or max(one, other) >= len(uuids):
            _refuse(name, f"it links devices {one} and {other}, but has {len(uuids)}")
        first, second = sorted((uuids[one], uuids[other]))
        links[first, second] = points
    try:
        profiles = [_same(tuple(map(_read_profile, profile))) for profile in document.profiles]
        devices = tuple(_read(device, profiles) for device in document.devices)
    except ValueError as error:
        _refuse(name, str(error), error)
    return NodeInventory(
        name=name,
        devices=devices,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        host_budget_bytes=document.host,
        links=links,
        resized={PodUid(uid): generation for uid, generation in document.resized.items()},
        claims=frozenset(document.claims),
    )


def inventory_of(node: NodeObject) -> NodeInventory | None:
    """Return a node's published devices; None if it shares none.

    Cordoned devices are marked. Raises `UsageError` that names the node.
    """
    annotations = node.metadata.annotations or {}
    text = annotations.get(DEVICES)
    if text is None:
        return None
    cpu_milli, memory_bytes = amounts(node.status.allocatable)
    inventory = decode(node.metadata.name, text, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    named = cordoned(annotations)
    if not named:
        return inventory
    devices = tuple(
        replace(device, problem=device.problem or _CORDONED) if device.uuid in named else device
        for device in inventory.devices
    )
    return replace(inventory, devices=devices)


def cordoned(annotations: Mapping[str, str]) -> frozenset[str]:
    return frozenset(
        uuid
        for key in CORDONS
        for part in annotations.get(key, "").split(",")
        if (uuid := part.strip())
    )


def _by_place(device: NodeDevice) -> tuple[int, str]:
    return (device.index, device.uuid)


def _written(device: NodeDevice, profiles: Sequence[tuple[MigProfile, ...]]) -> _Device:
    fields = msgspec.structs.asdict(device) | {
        "model": device.model[:_LONGEST_NAME],
        "modes": None if device.modes == _USUAL_MODES else device.modes,
        "problem": shortened(device.problem, LONGEST_PROBLEM),
        "taken": None
        if device.taken == TakenPart()
        else _Taken(*msgspec.structs.astuple(device.taken)),
        "mig": None if device.mig is None else _written_mig(device.mig, profiles),
        "mig_off": shortened(device.mig_off, LONGEST_PROBLEM),
    }
    return _Device(**fields)


def _written_mig(mig: NodeMig, profiles: Sequence[tuple[MigProfile, ...]]) -> _Mig:
    names = {profile.number: profile.name for profile in mig.profiles}
    slices = (
        (names[slice_.profile], slice_.start, slice_.hold)
        for slice_ in mig.slices
        if slice_.profile in names
    )
    return _Mig(profiles.index(mig.profiles), mig.is_enabled, tuple(sorted(slices, key=_by_start)))


def _by_start(each: tuple[str, int, MigHold]) -> tuple[int, str, str]:
    name, start, hold = each
    return (start, name, hold.value)


def _read(device: _Device, profiles: Sequence[tuple[MigProfile, ...]]) -> NodeDevice:
    """Raises `ValueError`."""
    fields = msgspec.structs.asdict(device) | {
        "modes": _USUAL_MODES if device.modes is None else _known(device.modes),
        "taken": TakenPart(*msgspec.structs.astuple(device.taken or _Taken())),
        "mig": None if device.mig is None else _read_mig(device.mig, profiles),
    }
    return NodeDevice(**fields)


def _read_mig(mig: _Mig, profiles: Sequence[tuple[MigProfile, ...]]) -> NodeMig:
    if mig.profiles >= len(profiles):
        raise ValueError(f"a device names profile list {mig.profiles} of {len(profiles)}")
    of = {profile.name: profile for profile in profiles[mig.profiles]}
    for name, _, _ in mig.slices:
        if name not in of:
            raise ValueError(f"a slice has profile {name!r}, which its device does not offer")
    return NodeMig(
        profiles=profiles[mig.profiles],
        slices=tuple(
            MigSlice(profile=of[name].number, start=start, size=of[name].size, hold=hold)
            for name, start, hold in mig.slices
        ),
        is_enabled=mig.on,
    )


def _read_profile(profile: _Profile) -> MigProfile:
    if any(start + profile.size > MOST_SLOTS for start in profile.starts):
        raise ValueError(f"profile {profile.name!r} ends after slot {MOST_SLOTS - 1}")
    read = MigProfile(**msgspec.structs.asdict(profile))
    return replace(read, starts=tuple(sorted(set(read.starts))))


@lru_cache(maxsize=64)
def _same(profiles: tuple[MigProfile, ...]) -> tuple[MigProfile, ...]:
    """Return one object for all equal lists of profiles. Raises `ValueError`."""
    for what in ("name", "number"):
        if len({getattr(profile, what) for profile in profiles}) < len(profiles):
            raise ValueError(f"a list of profiles has a {what} twice")
    return profiles


def _known(modes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for each in modes if each in MODE_WORDS))


def _check_version(name: str, text: str) -> None:
    try:
        version = _version.decode(text).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    if version != VERSION:
        raise UsageError(
            f"node {name}: the annotation {DEVICES} has version {version}, but only {VERSION}"
            " can be read",
            hint="run agents and scheduler of one version: upgrade the older ones",
        )


def _refuse(name: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise UsageError(
        f"node {name}: the annotation {DEVICES} is not an inventory: {problem}",
        hint="check that the node's agent runs, and its log: the agent writes this annotation and"
        " replaces other values",
    ) from cause
