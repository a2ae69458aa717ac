# SPDX-License-Identifier: Apache-2.0
"""What is written down about a slice before each step of its life: `slice.json`.

A slice is a GPU instance with its compute instance that Allotment makes, and therefore removes. Its
record is there before the driver is asked for anything, so that no crash loses one.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from allotment.model.errors import StateError

__all__ = ["SliceRecord", "Stage", "decode", "encode"]

_VERSION = 1


class Stage(StrEnum):
    """How far a slice has come. Each is written before what follows it is begun."""

    INTENDED = "intended"
    """The driver is being asked for a GPU instance, or was when its maker died."""
    CUT = "cut"
    """The GPU instance is there, and its id known; the compute instance is being made."""
    READY = "ready"
    """Whole, with a UUID that no other slice will ever have: somebody's, or kept warm."""
    LEAVING = "leaving"
    """It is being removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRecord:
    """One slice of ours, as far as it has come."""

    id: str
    gpu: str
    """The whole GPU's UUID."""
    profile: int
    """The driver's number of it."""
    name: str
    """And its name, for people: `1g.10gb`."""
    start: int
    size: int
    """Memory slots from `start`."""
    stage: Stage
    holder: str = ""
    """The share that it is for, from the intention on; empty: nobody's."""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    uuid: str = ""
    """Of the MIG device."""
    idle_since: float | None = None
    """Since when nobody holds it, in seconds after the epoch: until when it is kept counts from
    there."""
    keep_s: float = 0.0
    """How long its last holder wants it kept after that, in seconds."""

    @property
    def slots(self) -> range:
        """The memory slots that it covers."""
        return range(self.start, self.start + self.size)


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file. What a later version adds is skipped; what it changes has another number."""

    version: int
    slice: SliceRecord


def encode(record: SliceRecord) -> bytes:
    """Write a record as one line of JSON."""
    return msgspec.json.encode(_Document(version=_VERSION, slice=record)) + b"\n"


def decode(data: bytes, *, source: str) -> SliceRecord:
    """Read a record; `source` names it in errors. Raises `StateError`."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.MsgspecError as error:
        raise _unusable(source, f"it is truncated or changed ({error})") from error
    if document.version != _VERSION:
        raise _unusable(source, f"it has version {document.version}, this program reads {_VERSION}")
    return document.slice


def _unusable(source: str, why: str) -> StateError:
    return StateError(
        f"{source}: not a usable record of a MIG slice: {why}",
        hint="remove this file: its slice then counts as made by others, and stays until"
        " `allot mig apply` or nvidia-smi removes it",
    )
