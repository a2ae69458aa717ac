# SPDX-License-Identifier: Apache-2.0
"""What each GPU may be used for from now on, where somebody has said so: one small file a GPU.

    modes/UUID.json    {"version": 1, "id": "...", "modes": ["mig"], "by": "command"}

A GPU without a file is for every mode. The file is read under the state folder's lock by whoever
places a share, and replaced as a whole under the same lock: so no share of another mode comes after
it. That a GPU *drains* is written nowhere: it does as long as shares of other modes are on it.

In a state folder for all users only its owner may say what a GPU is for, and a file of anybody else
is none.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from allotment.model.devices import Device
from allotment.model.errors import PrerequisiteError, UsageError
from allotment.model.requests import EXCLUSIVE, MIG, MPS, SOFT, TIMESLICE
from allotment.shares.folders import StateFolder, explained
from allotment.shares.found import Found

__all__ = [
    "BY_COMMAND",
    "BY_NODE",
    "DEFAULT",
    "KEPT",
    "SETTABLE",
    "Allowed",
    "allowed_on",
    "check_uuid",
    "is_for",
    "is_for_mig_alone",
    "modes_on",
    "narrowed",
    "parse_modes",
    "read_allowed",
    "refusal",
    "refusal_on",
    "users_of_gpu",
    "write_allowed",
]

DEFAULT: Final = "default"
"""In the place of modes: all of them again."""
SETTABLE: Final = (SOFT, MPS, MIG, EXCLUSIVE, TIMESLICE)
BY_COMMAND: Final = "command"
"""`allot devices set-mode` said so."""
BY_NODE: Final = "node"
"""The node's annotation says so."""

KEPT: Final = "kept for mode"
"""What a refusal begins with."""
_VERSION: Final = 1
_SUFFIX: Final = ".json"
_LONGEST: Final = 4096
"""Bytes of a file that is read."""
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{1,64}")
"""As the driver has them: it is a file's name here, and may be of people's writing."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What one GPU may be used for."""

    modes: tuple[str, ...]
    """None at all where the file cannot be read: `problem` says why."""
    by: str = BY_COMMAND
    id: str = ""
    """Of the one decision that this is: another with the same modes has another."""
    problem: str = ""

    def __str__(self) -> str:
        """Name the modes for people."""
        return ", ".join(self.modes)


def parse_modes(text: str) -> tuple[str, ...] | None:
    """Read `mig` or `soft,mps`; None for `default`. Raises `UsageError`.

    The answer is in the order of `SETTABLE`, each mode once.
    """
    words = [word.strip().lower() for word in text.split(",")]
    if words == [DEFAULT]:
        return None
    unknown = [word for word in words if word not in SETTABLE]
    if unknown:
        raise UsageError(
            f"there is no mode {unknown[0]!r} to set",
            hint=f"the modes are: {', '.join(SETTABLE)}, several by commas; `{DEFAULT}` is all",
        )
    return tuple(mode for mode in SETTABLE if mode in words)


def check_uuid(uuid: str) -> None:
    """Raise `UsageError` for what cannot be a GPU's UUID, and so is to be no file's name."""
    if not _UUID.fullmatch(uuid):
        raise UsageError(
            f"{uuid[:80]!r} is no GPU's UUID", hint="`allot devices` shows them: GPU-4f6e..."
        )


def refusal(allowed: Allowed | None, mode: str) -> str:
    """Say why no new share of a mode comes to a GPU of which this was said; empty: it may."""
    if allowed is None or mode in allowed.modes:
        return ""
    if allowed.problem:
        return allowed.problem
    who = "the node's annotation" if allowed.by == BY_NODE else "`allot devices set-mode`"
    return f"{KEPT} {' or '.join(allowed.modes)} by {who}"


def refusal_on(said: Mapping[str, Allowed], device: Device, mode: str) -> str:
    """Say why no new share of a mode comes to a GPU or a MIG device; empty: it may.

    A share in a MIG device is of any mode there, and the GPU is in mode `mig` for that.
    """
    if device.slice_of is None:
        return refusal(said.get(device.uuid), mode)
    return refusal(said.get(device.slice_of.gpu), MIG)


def narrowed(modes: Collection[str], allowed: Allowed | None) -> frozenset[str]:
    """Return which of the modes that a GPU is configured for it takes new shares of."""
    return frozenset(modes) if allowed is None else frozenset(modes) & frozenset(allowed.modes)


def read_allowed(folder: StateFolder) -> Mapping[str, Allowed]:
    """Return what was said of each GPU, by UUID; one of which nothing was said is not in it.

    A GPU whose file cannot be read is for nothing until it is set anew.
    """
    place = _place(folder)
    try:
        names = os.listdir(place)  # noqa: PTH208 - asked at each start
    except OSError:
        return {}
    if not _is_trusted(folder, place):
        return {}
    return {
        uuid: found
        for name in names
        if name.endswith(_SUFFIX)
        and _UUID.fullmatch(uuid := name.removesuffix(_SUFFIX))
        and (found := _read(place / name)) is not None
    }


def allowed_on(folder: StateFolder, uuid: str) -> Allowed | None:
    """Return what was said of one GPU; None: nothing."""
    return read_allowed(folder).get(uuid)


def is_for(folder: StateFolder, uuid: str, mode: str) -> bool:
    """Tell whether a GPU takes new shares of a mode, as far as anybody has said."""
    return not refusal(allowed_on(folder, uuid), mode)


def is_for_mig_alone(folder: StateFolder, uuid: str) -> bool:
    """Tell whether a GPU's MIG mode stays on without a slice: it is for nothing else."""
    allowed = allowed_on(folder, uuid)
    return allowed is not None and allowed.modes == (MIG,)


def write_allowed(folder: StateFolder, uuid: str, allowed: Allowed | None) -> None:
    """Say what a GPU is for, in the place of what was said before; None: for everything.

    The caller holds the folder's lock. Raises `StateError`, `PrerequisiteError` in a folder that is
    another user's, or `UsageError` for what is no GPU's UUID.
    """
    check_uuid(uuid)
    place = _place(folder)
    path = place / f"{uuid}{_SUFFIX}"
    draft = place / f".{uuid}-{os.getpid()}"
    try:
        owner = folder.root.stat().st_uid
        if os.geteuid() not in {0, owner}:
            raise PrerequisiteError(
                f"what a GPU may be used for is said by the owner of {folder.root} (uid {owner})",
                hint="run as that user: sudo allot devices set-mode ...",
            )
        if allowed is None:
            path.unlink(missing_ok=True)
            return
        place.mkdir(mode=0o755, exist_ok=True)
        document = {
            "version": _VERSION,
            "id": allowed.id or os.urandom(6).hex(),
            "modes": list(allowed.modes),
            "by": allowed.by,
        }
        try:
            draft.write_text(json.dumps(document) + "\n", "utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise explained(error, path, "write what the GPU is for") from error


def users_of_gpu(shares: Iterable[Found], uuid: str) -> list[tuple[Found, str]]:
    """Return the shares that have a GPU or a slice of it, each with the mode that the GPU is in."""
    found = []
    for each in shares:
        if uuid in each.limits():
            found.append((each, each.mode))
        elif any(one.gpu == uuid for one in each.devices()):
            found.append((each, MIG))
    return found


def modes_on(shares: Iterable[Found], uuid: str) -> frozenset[str]:
    """Return the modes that a GPU is in by the shares on it: one, or none."""
    return frozenset(mode for _, mode in users_of_gpu(shares, uuid))


def _place(folder: StateFolder) -> Path:
    return folder.root / "modes"


def _is_trusted(folder: StateFolder, place: Path) -> bool:
    try:
        return place.stat().st_uid in {0, folder.root.stat().st_uid}
    except OSError:
        return False


def _read(path: Path) -> Allowed | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_LONGEST))
        if document["version"] != _VERSION:
            return _unusable(path, f"its version is {document['version']!r:.20}")
        modes = tuple(mode for mode in SETTABLE if mode in document["modes"])
        return Allowed(modes, str(document["by"]), str(document["id"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unusable(path, error.strerror or str(error))
    except (ValueError, TypeError, KeyError, RecursionError):
        return _unusable(path, "it is truncated or changed")


def _unusable(path: Path, why: str) -> Allowed:
    return Allowed(
        (), problem=f"{path} cannot be read ({why}): set it anew by `allot devices set-mode`"
    )
