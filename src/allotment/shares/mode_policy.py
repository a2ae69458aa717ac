# SPDX-License-Identifier: Apache-2.0
"""The modes that new shares of each GPU may have, as set by an administrator: one file a GPU.

    modes/UUID.json    {"version": 1, "id": "...", "modes": ["mig"], "by": "command"}

A GPU without a file takes every mode. Placing reads the file, and setting replaces it, under the
state folder's lock: so no share of another mode follows. A GPU *drains* while shares of other modes
are on it; no file records that. In a folder for all users only the owner's files count.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from allotment.files import atomic_write
from allotment.model.devices import Device
from allotment.model.errors import PrerequisiteError, StateError, UsageError
from allotment.model.formats import meant
from allotment.model.modes import MIG, MODES, has_only_slices
from allotment.shares.folders import StateFolder, explained
from allotment.shares.record import LoadedShare

DEFAULT: Final = "default"
"""In the place of modes: all modes."""
BY_COMMAND: Final = "command"
"""Set by `allot devices set-mode`."""
BY_NODE: Final = "node"
"""Set by the node's annotation."""

KEPT: Final = "kept for mode"
"""The beginning of a refusal."""
_VERSION: Final = 1
_SUFFIX: Final = ".json"
_LONGEST: Final = 4096
"""Bytes of a file that is read."""
_UUID: Final = re.compile(r"GPU-[0-9a-f-]{1,64}")
"""As the driver writes them. It becomes a file's name, and may be typed by people."""


class ModePolicy(msgspec.Struct, frozen=True):
    """The modes that new shares of one GPU may have."""

    modes: tuple[str, ...]
    """Empty if the file cannot be read: `problem` has the reason."""
    by: str = BY_COMMAND
    id: str = ""
    """Of this decision: a later one with the same modes has another."""
    problem: str = ""

    def __str__(self) -> str:
        return ", ".join(self.modes)


def parse_modes(text: str) -> tuple[str, ...] | None:
    """Read `mig` or `soft,mps`; None for `default`. Raises `UsageError`.

    The answer is in the order of `MODES`, each mode once.
    """
    words = [word.strip().lower() for word in text.split(",")]
    if words == [DEFAULT]:
        return None
    unknown = [word for word in words if word not in MODES]
    if unknown:
        raise UsageError(
            f"there is no mode {unknown[0]!r} to set{meant(unknown[0], MODES)}",
            hint=f"the modes are: {', '.join(MODES)}, several by commas; `{DEFAULT}` is all",
        )
    return tuple(mode for mode in MODES if mode in words)


def check_uuid(uuid: str) -> None:
    """Raise `UsageError` for an impossible UUID: it would become a file's name."""
    if not _UUID.fullmatch(uuid):
        raise UsageError(f"{uuid[:80]!r} is no GPU's UUID", hint="`allot devices` shows them")


def refusal(allowed: ModePolicy | None, mode: str) -> str:
    """Return why a GPU with this policy takes no new share of a mode; empty: it does."""
    if allowed is None or mode in allowed.modes:
        return ""
    if allowed.problem:
        return allowed.problem
    source = "the node's annotation" if allowed.by == BY_NODE else "`allot devices set-mode`"
    return f"{KEPT} {' or '.join(allowed.modes)} by {source}"


def refusal_on(policies: Mapping[str, ModePolicy], device: Device, mode: str) -> str:
    """Return why a GPU or MIG device takes no new share of a mode; empty: it does.

    A share in a MIG device may have any mode, and its GPU is in mode `mig`.
    """
    if device.slice_of is None:
        return refusal(policies.get(device.uuid), mode)
    return refusal(policies.get(device.slice_of.gpu), MIG)


def narrowed(modes: Collection[str], allowed: ModePolicy | None) -> frozenset[str]:
    """Return which of a GPU's configured modes its policy allows."""
    return frozenset(modes) if allowed is None else frozenset(modes) & frozenset(allowed.modes)


def read_mode_policies(folder: StateFolder) -> Mapping[str, ModePolicy]:
    """Return the policy of each restricted GPU, by UUID.

    A GPU with an unreadable file takes no shares until its policy is set again.
    """
    try:
        names = os.listdir(folder.modes)  # noqa: PTH208 - asked at each start
        owners = {0, folder.root.stat().st_uid}
        if folder.modes.lstat().st_uid not in owners:  # another user of a shared folder
            return {}
    except OSError:
        return {}
    return {
        uuid: policy
        for name in names
        if name.endswith(_SUFFIX)
        and _UUID.fullmatch(uuid := name.removesuffix(_SUFFIX))
        and (policy := _read(folder.modes / name)) is not None
    }


def mode_policy_of(folder: StateFolder, uuid: str) -> ModePolicy | None:
    """Return one GPU's policy; None: unrestricted."""
    return read_mode_policies(folder).get(uuid)


def is_for(folder: StateFolder, uuid: str, mode: str) -> bool:
    """Whether a GPU's policy allows new shares of a mode."""
    return not refusal(mode_policy_of(folder, uuid), mode)


def is_for_mig_alone(folder: StateFolder, uuid: str) -> bool:
    """Whether a GPU is for MIG only, and so its MIG mode stays on without a slice."""
    allowed = mode_policy_of(folder, uuid)
    return allowed is not None and has_only_slices(allowed.modes)


def write_mode_policy(folder: StateFolder, uuid: str, allowed: ModePolicy | None) -> None:
    """Replace a GPU's policy; None: unrestricted.

    The caller holds the folder's lock. Raises `StateError`, `PrerequisiteError` in another user's
    folder, or `UsageError` for an impossible UUID.
    """
    check_uuid(uuid)
    path = folder.modes / f"{uuid}{_SUFFIX}"
    try:
        owner = folder.root.stat().st_uid
        if os.geteuid() not in {0, owner}:
            raise PrerequisiteError(
                f"only the owner of {folder.root} (uid {owner}) sets the modes of a GPU",
                hint="run as that user: sudo allot devices set-mode ...",
            )
        if allowed is None:
            path.unlink(missing_ok=True)
            return
        folder.modes.mkdir(mode=0o755, exist_ok=True)
        maker = folder.modes.lstat().st_uid
        if maker not in {0, owner}:  # then it is not read
            raise StateError(
                f"{folder.modes} belongs to another user (uid {maker})",
                hint=f"let root remove it: rm -r {folder.modes}",
            )
        document = {
            "version": _VERSION,
            "id": allowed.id or os.urandom(6).hex(),
            "modes": list(allowed.modes),
            "by": allowed.by,
        }
        atomic_write(path, json.dumps(document) + "\n")
    except OSError as error:
        raise explained(error, path, "write the GPU's modes") from error


def users_of_gpu(shares: Iterable[LoadedShare], uuid: str) -> list[tuple[LoadedShare, str]]:
    """Return the shares on a GPU or its slices, each with the mode that the GPU has for it."""
    users = []
    for loaded in shares:
        if uuid in loaded.limits():
            users.append((loaded, loaded.mode))
        elif any(device.gpu == uuid for device in loaded.devices()):
            users.append((loaded, MIG))
    return users


def modes_on(shares: Iterable[LoadedShare], uuid: str) -> frozenset[str]:
    """Return the modes that the shares on a GPU give it: one, or none."""
    return frozenset(mode for _, mode in users_of_gpu(shares, uuid))


def _read(path: Path) -> ModePolicy | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_LONGEST))
        if document["version"] != _VERSION:
            return _unusable(path, f"its version is {document['version']!r:.20}")
        modes = tuple(mode for mode in MODES if mode in document["modes"])
        return ModePolicy(modes, str(document["by"]), str(document["id"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unusable(path, error.strerror or str(error))
    except (ValueError, TypeError, KeyError, RecursionError):
        return _unusable(path, "it is truncated or changed")


def _unusable(path: Path, why: str) -> ModePolicy:
    return ModePolicy(
        (), problem=f"{path} cannot be read ({why}): set it anew by `allot devices set-mode`"
    )
