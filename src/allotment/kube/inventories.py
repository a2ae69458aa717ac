# SPDX-License-Identifier: Apache-2.0
"""`allotment.dev/devices`: what a node's agent tells schedulers about its devices. Pure.

    {"version": 1, "host": BYTES, "devices": [{"uuid": "GPU-...", "model": "NVIDIA H100 80GB HBM3",
      "memory": BYTES, "index": 0, "numa": 0, "problem": "...",
      "taken": {"memory": BYTES, "guarantee": 3000, "shares": 1, "mode": "soft"}}, ...],
     "links": [[0, 1, 60], ...],
     "profiles": [[["1g.10gb", 19, 1, BYTES, 1, [0, 1, 2, 3, 4, 5, 6], 7, 16], ...], ...]}

A device that can be cut by MIG has `"mig": {"profiles": 0, "on": false, "slices": [["1g.10gb", 4,
"idle"], ...]}`: the place of its list of profiles, whether its MIG mode is on, and the slices for
which no placement of ours stands. A profile is its name, number, compute slices, memory, slots that
it covers, slots where it may begin, how many there can be, multiprocessors, and true if it takes
scarce media engines; a slice is `idle`, `used` (by who was not placed by a scheduler) or `foreign`.
One whose MIG mode is left off for a time has why as `"mig_off": "..."`, and no `mig`.

What is as usual is left out. `guarantee` is in basis points of a device's time; a link names two
devices by their place in the list. Fields that are not known are passed over: a newer agent may
write more, and `version` goes up when their meaning changes.

Only the node's agent writes it (RBAC and an admission policy see to that). It is read as if anybody
could: everything has a bound, and what is wrong is one node's trouble and no other's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Final, NoReturn

import msgspec
from msgspec import Meta

from allotment.dialects.annotations import MODES
from allotment.kube.amounts import amounts
from allotment.kube.objects import NodeObject
from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, Taken
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigProfile, MigSlice
from allotment.model.quantities import MAX_BYTES
from allotment.model.requests import SOFT

__all__ = [
    "CORDONS",
    "DEVICES",
    "MOST_LISTS",
    "VERSION",
    "cordoned",
    "decode",
    "encode",
    "inventory_of",
]

DEVICES: Final = "allotment.dev/devices"
"""On the node. Absent: no device of it is shared by `allotment.dev/gpu`, or it has no agent."""
VERSION: Final = 1
CORDONS: Final = ("allotment.dev/device-cordon", "hami.io/device-cordon")
"""On the node, by whoever looks after it: UUIDs, by commas, of devices that take nothing new."""
_CORDONED: Final = "cordoned"

MOST_CHARACTERS: Final = 128 << 10
"""All annotations of an object have 256 KiB."""
MOST_DEVICES: Final = 32
"""As many GPUs as NVIDIA's driver serves on one machine (NV_MAX_DEVICES, nvlimits.h). Schedulers
look at all nodes at once, in arrays as wide as the node with the most devices: so one node cannot
make every decision about all others slower by more than that."""
LONGEST_PROBLEM: Final = 200
_LONGEST_UUID: Final = 128
_LONGEST_NAME: Final = 256
_MOST_SHARES: Final = 1 << 20
_MOST_POINTS: Final = 1 << 20
_LARGEST_INDEX: Final = 1 << 16
_LARGEST_NUMA: Final = 1023
"""Linux knows 1,024 NUMA nodes at most (CONFIG_NODES_SHIFT)."""
_MOST_MEMORY: Final = 1 << 50
"""Of a device: a thousand times what the largest has, and exact in floats and their sums."""
MOST_SLOTS: Final = 8
"""Memory slots of a GPU with MIG. What can still be cut is worked out for each set of them."""
_MOST_PROFILES: Final = 24
"""Of one GPU: twice as many as any has."""
MOST_LISTS: Final = 4
"""Of profiles: so many kinds of GPU a node can have that MIG cuts. What fits on one is worked out
for each kind, which takes a tenth of a second for what somebody made up."""
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
    # More than all of a device can have been promised before it was given back.
    guarantee: Annotated[int, Meta(ge=0, le=_MOST_SHARES * WHOLE)] = 0
    shares: _Shares = 0
    mode: Annotated[str, Meta(max_length=64)] = ""


_Slot = Annotated[int, Meta(ge=0, lt=MOST_SLOTS)]
_Number = Annotated[int, Meta(ge=0, le=_LARGEST_NUMBER)]


class _Profile(msgspec.Struct, frozen=True, array_like=True):
    name: _Word
    number: _Number
    slices: Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
    memory: _DeviceBytes
    size: Annotated[int, Meta(ge=1, le=MOST_SLOTS)]
    starts: Annotated[tuple[_Slot, ...], Meta(max_length=MOST_SLOTS)]
    most: Annotated[int, Meta(ge=0, le=MOST_SLOTS)]
    sms: _Number
    media: bool = False


_Profiles = Annotated[tuple[_Profile, ...], Meta(max_length=_MOST_PROFILES)]


class _Mig(msgspec.Struct, frozen=True, omit_defaults=True):
    # No default, so that it is always written.
    profiles: Annotated[int, Meta(ge=0, lt=MOST_LISTS)]
    on: bool = True
    slices: Annotated[tuple[tuple[_Word, _Slot, MigHold], ...], Meta(max_length=MOST_SLOTS)] = ()


class _Device(msgspec.Struct, frozen=True, omit_defaults=True):
    uuid: _UuidText
    model: _Name
    memory: _DeviceBytes
    index: Annotated[int, Meta(ge=0, le=_LARGEST_INDEX)] = 0
    numa: Annotated[int, Meta(ge=0, le=_LARGEST_NUMA)] | None = None
    modes: Annotated[tuple[_Word, ...], Meta(max_length=16)] | None = None
    """None: as most have them. Those that are not known here serve nobody who asks here."""
    shares: _Shares = _USUAL_SHARES
    guarantee: Annotated[int, Meta(ge=0, le=WHOLE)] = WHOLE
    problem: Annotated[str, Meta(max_length=1024)] = ""
    taken: _Taken | None = None
    mig: _Mig | None = None
    mig_off: Annotated[str, Meta(max_length=1024)] = ""


class _Inventory(msgspec.Struct, frozen=True, omit_defaults=True):
    # No default, so that it is always written.
    version: int
    devices: Annotated[tuple[_Device, ...], Meta(max_length=MOST_DEVICES)] = ()
    host: _Bytes = 0
    links: Annotated[
        tuple[tuple[_Place, _Place, _Points], ...],
        Meta(max_length=MOST_DEVICES * (MOST_DEVICES - 1) // 2),
    ] = ()
    profiles: Annotated[tuple[_Profiles, ...], Meta(max_length=MOST_LISTS)] = ()


class _Version(msgspec.Struct, frozen=True):
    version: int


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_Inventory)
_version: Final = msgspec.json.Decoder(_Version)


def encode(inventory: NodeInventory) -> str:
    """Write the annotation. The same devices always give the same text.

    Left out, rather than to write what would not be read: text of problems and names beyond their
    bounds, slices of profiles that their GPU does not have. Raises `ValueError` for more than an
    annotation can hold.
    """
    devices = sorted(inventory.devices, key=_by_place)
    if len(devices) > MOST_DEVICES:
        raise ValueError(f"{len(devices)} devices, more than {MOST_DEVICES}")
    places = {each.uuid: place for place, each in enumerate(devices)}
    links = sorted(
        (places[one], places[other], min(points, _MOST_POINTS))
        for (one, other), points in inventory.links.items()
        if points > 0 and one < other and one in places and other in places
    )
    profiles = tuple(dict.fromkeys(each.mig.profiles for each in devices if each.mig))
    if len(profiles) > MOST_LISTS:
        raise ValueError(f"{len(profiles)} kinds of GPUs that MIG cuts, more than {MOST_LISTS}")
    document = _Inventory(
        version=VERSION,
        devices=tuple(_written(each, profiles) for each in devices),
        host=inventory.host_budget_bytes,
        links=tuple(links),
        profiles=tuple(tuple(map(_written_profile, each)) for each in profiles),
    )
    text = _encoder.encode(document).decode()
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    return text


def decode(name: str, text: str, *, cpu_milli: int = 0, memory_bytes: int = 0) -> NodeInventory:
    """Read a node's annotation; CPU and memory are what the node's object says is allocatable.

    Raises `UsageError` that names the node.
    """
    if len(text) > MOST_CHARACTERS:
        _refuse(name, f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    try:
        document = _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        # Of another version, what is amiss is that; and nothing else may have its old shape.
        _check_version(name, text)
        _refuse(name, str(error), error)
    if document.version != VERSION:
        _check_version(name, text)
    uuids = [each.uuid for each in document.devices]
    if len(set(uuids)) != len(uuids):
        twice = next(each for each in uuids if uuids.count(each) > 1)
        _refuse(name, f"it has {twice[:64]!r} twice")
    links: dict[tuple[str, str], int] = {}
    for one, other, points in document.links:
        if one == other or max(one, other) >= len(uuids):
            _refuse(name, f"it links devices {one} and {other}, and has {len(uuids)}")
        first, second = sorted((uuids[one], uuids[other]))
        links[first, second] = points
    try:
        profiles = [_same(tuple(map(_read_profile, each))) for each in document.profiles]
        devices = tuple(_read(each, profiles) for each in document.devices)
    except ValueError as error:
        _refuse(name, str(error), error)
    return NodeInventory(
        name=name,
        devices=devices,
        cpu_milli=cpu_milli,
        memory_bytes=memory_bytes,
        host_budget_bytes=document.host,
        links=links,
    )


def inventory_of(node: NodeObject) -> NodeInventory | None:
    """Return what a node's object says of its devices; None: none of them is shared.

    Those that somebody has cordoned are marked so. Raises `UsageError` that names the node.
    """
    annotations = node.metadata.annotations or {}
    text = annotations.get(DEVICES)
    if text is None:
        return None
    cpu_milli, memory_bytes = amounts(node.status.allocatable)
    found = decode(node.metadata.name, text, cpu_milli=cpu_milli, memory_bytes=memory_bytes)
    named = cordoned(annotations)
    if not named:
        return found
    devices = tuple(
        replace(each, problem=each.problem or _CORDONED) if each.uuid in named else each
        for each in found.devices
    )
    return replace(found, devices=devices)


def cordoned(annotations: Mapping[str, str]) -> frozenset[str]:
    """Return the UUIDs of a node's devices that somebody has told to take nothing new."""
    return frozenset(
        uuid
        for key in CORDONS
        for part in annotations.get(key, "").split(",")
        if (uuid := part.strip())
    )


def _by_place(device: NodeDevice) -> tuple[int, str]:
    return (device.index, device.uuid)


def _written(device: NodeDevice, profiles: Sequence[tuple[MigProfile, ...]]) -> _Device:
    taken = device.taken
    return _Device(
        uuid=device.uuid,
        model=device.model[:_LONGEST_NAME],
        memory=device.memory_bytes,
        index=device.index,
        numa=device.numa_node,
        modes=None if device.modes == _USUAL_MODES else device.modes,
        shares=device.max_shares,
        guarantee=device.guarantee,
        problem=_shortened(device.problem),
        taken=None
        if taken == Taken()
        else _Taken(taken.memory, taken.guarantee, taken.shares, taken.mode),
        mig=None if device.mig is None else _written_mig(device.mig, profiles),
        mig_off=_shortened(device.mig_off),
    )


def _written_mig(mig: NodeMig, profiles: Sequence[tuple[MigProfile, ...]]) -> _Mig:
    names = {each.number: each.name for each in mig.profiles}
    slices = (
        (names[each.profile], each.start, each.hold) for each in mig.slices if each.profile in names
    )
    return _Mig(profiles.index(mig.profiles), mig.is_enabled, tuple(sorted(slices, key=_by_start)))


def _by_start(each: tuple[str, int, MigHold]) -> tuple[int, str, str]:
    name, start, hold = each
    return (start, name, hold.value)


def _written_profile(profile: MigProfile) -> _Profile:
    return _Profile(
        name=profile.name,
        number=profile.number,
        slices=profile.slices,
        memory=profile.memory_bytes,
        size=profile.size,
        starts=profile.starts,
        most=profile.most,
        sms=profile.multiprocessors,
        media=profile.has_media,
    )


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_PROBLEM else f"{text[: LONGEST_PROBLEM - 3]}..."


def _read(device: _Device, profiles: Sequence[tuple[MigProfile, ...]]) -> NodeDevice:
    """Raises `ValueError`."""
    taken = device.taken or _Taken()
    return NodeDevice(
        uuid=device.uuid,
        model=device.model,
        memory_bytes=device.memory,
        index=device.index,
        numa_node=device.numa,
        modes=_USUAL_MODES if device.modes is None else _known(device.modes),
        max_shares=device.shares,
        problem=device.problem,
        taken=Taken(taken.memory, taken.guarantee, taken.shares, taken.mode),
        guarantee=device.guarantee,
        mig=None if device.mig is None else _read_mig(device.mig, profiles),
        mig_off=device.mig_off,
    )


def _read_mig(mig: _Mig, profiles: Sequence[tuple[MigProfile, ...]]) -> NodeMig:
    if mig.profiles >= len(profiles):
        raise ValueError(f"a device has list {mig.profiles} of profiles, of {len(profiles)}")
    of = {each.name: each for each in profiles[mig.profiles]}
    for name, _, _ in mig.slices:
        if name not in of:
            raise ValueError(f"a slice is of profile {name!r}, which its device has not")
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
        raise ValueError(f"profile {profile.name!r} goes beyond slot {MOST_SLOTS - 1}")
    return MigProfile(
        name=profile.name,
        number=profile.number,
        slices=profile.slices,
        memory_bytes=profile.memory,
        size=profile.size,
        starts=tuple(sorted(set(profile.starts))),
        most=profile.most,
        multiprocessors=profile.sms,
        has_media=profile.media,
    )


@lru_cache(maxsize=64)
def _same(profiles: tuple[MigProfile, ...]) -> tuple[MigProfile, ...]:
    """Return one object for all that are equal, whichever nodes have them. Raises `ValueError`."""
    for what in ("name", "number"):
        if len({getattr(each, what) for each in profiles}) < len(profiles):
            raise ValueError(f"a list of profiles has a {what} twice")
    return profiles


def _known(modes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for each in modes if each in MODES))


def _check_version(name: str, text: str) -> None:
    try:
        version = _version.decode(text).version
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return
    if version != VERSION:
        raise UsageError(
            f"node {name}: the annotation {DEVICES} is of version {version}, and {VERSION} is what"
            " can be read",
            hint="run agents and scheduler of one version: upgrade whichever is older",
        )


def _refuse(name: str, problem: str, cause: Exception | None = None) -> NoReturn:
    raise UsageError(
        f"node {name}: the annotation {DEVICES} is no inventory: {problem}",
        hint="the node's agent writes it: see that it runs there, and its log; what others wrote"
        " there it replaces",
    ) from cause
