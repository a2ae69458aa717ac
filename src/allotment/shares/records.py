# SPDX-License-Identifier: Apache-2.0
"""What is written down about a share: `share.json`, read and written as a whole."""

import json
import os
from pathlib import Path
from typing import TypeVar

from allotment.model.compute import Compute, ComputeClass
from allotment.model.errors import StateError
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import (
    Injection,
    Runner,
    Share,
    ShareDevice,
    ShareId,
    SuspendedBy,
    Suspension,
)
from allotment.shares.folders import explained

__all__ = ["RECORD", "read_record", "write_record"]

_T = TypeVar("_T")
RECORD = "share.json"
_VERSION = 3
_READABLE = {1, 2, _VERSION}  # 1 says nothing of compute: nobody asked for any; nor 2 of an owner


def write_record(directory: Path, share: Share) -> None:
    """Write a share's record into its directory in one step; raise `StateError`."""
    path = directory / RECORD
    draft = directory / f".{RECORD}-{os.getpid()}"
    try:
        try:
            draft.write_text(json.dumps(_to_document(share)) + "\n", "utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise explained(error, path, "write the share's record") from error


def read_record(directory: Path) -> Share:
    """Read the record in a share's directory.

    Raises `StateError` naming the file when it is damaged or of another version, and
    `FileNotFoundError` when the share is gone.
    """
    path = directory / RECORD
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        if directory.is_dir():
            raise _damaged(path, "it is missing") from None
        raise
    except OSError as error:
        raise explained(error, path, "read the share's record") from error
    try:
        document = json.loads(data)
        version = document["version"]
        if version in _READABLE:
            return _from_document(document)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(path, "it is truncated or changed") from error
    raise _damaged(path, f"it has version {version!r}, this program reads {_VERSION}")


def _damaged(path: Path, why: str) -> StateError:
    name = path.parent.name
    return StateError(
        f"{path}: not a usable record of a share: {why}",
        hint=f"end its programs and remove it: allot rm {name} --force",
    )


def _to_document(share: Share) -> dict[str, object]:
    runner = share.runner
    return {
        "version": _VERSION,
        "id": share.id,
        "name": share.name,
        "created": share.created,
        "mode": share.mode,
        "injection": str(share.injection),
        "machine": share.machine,
        "spec": share.spec,
        "user_id": share.user_id,
        "cdi_spec": share.cdi_spec,
        "command": list(share.command),
        "runner": None if runner is None else _process(runner),
        "owner": None if share.owner is None else _owner_document(share.owner),
        "suspension": None
        if share.suspension is None
        else {
            "since": share.suspension.since,
            "by": str(share.suspension.by),
            "complete": share.suspension.is_complete,
            "stopped": [_process(each) for each in share.suspension.stopped],
        },
        "devices": [
            {
                "uuid": device.uuid,
                "name": device.name,
                "memory_bytes": device.memory_bytes,
                "oversubscribed": device.is_oversubscribed,
                "gpu": device.gpu or None,
                "profile": device.profile or None,
                "begun_bytes": device.begun_bytes,
                "compute": {
                    "guarantee": device.compute.guarantee,
                    "ceiling": device.compute.ceiling,
                    "weight": device.compute.weight,
                    "class": str(device.compute.kind),
                    "governed": device.compute.is_governed,
                },
            }
            for device in share.devices
        ],
    }


def _owner_document(owner: Owner) -> dict[str, object]:
    return {
        "uid": owner.uid,
        "namespace": owner.namespace,
        "pod": owner.pod,
        "container": owner.container,
        "kind": str(owner.kind),
        "resource": owner.resource,
        "place": owner.place,
    }


def _process(named: Runner) -> dict[str, object]:
    return {"pid": named.pid, "start_time": named.start_time, "boot_id": named.boot_id}


def _from_document(document: dict[str, object]) -> Share:
    """Build the share, checking every field's type: the file may have been edited."""
    runner = _optional(document, "runner", dict)
    return Share(
        id=ShareId(_typed(document, "id", str)),
        name=_typed(document, "name", str),
        created=_typed(document, "created", float),
        mode=_typed(document, "mode", str),
        injection=Injection(_typed(document, "injection", str)),
        machine=_optional(document, "machine", str),
        spec=_optional(document, "spec", str),
        user_id=_typed(document, "user_id", int),
        cdi_spec=_optional(document, "cdi_spec", str),
        command=tuple(map(str, _typed(document, "command", list))),
        runner=None if runner is None else _runner(runner),
        devices=tuple(
            ShareDevice(
                uuid=_typed(device, "uuid", str),
                name=_typed(device, "name", str),
                memory_bytes=_typed(device, "memory_bytes", int),
                compute=_compute(device),
                is_oversubscribed=_flag(device, "oversubscribed"),
                gpu=_text(device, "gpu"),
                profile=_text(device, "profile"),
                begun_bytes=_number(device, "begun_bytes"),
            )
            for device in _typed(document, "devices", list)
        ),
        suspension=_suspension(document),
        owner=_owner(document),
    )


def _owner(document: dict[str, object]) -> Owner | None:
    if document.get("owner") is None:
        return None
    owner = _typed(document, "owner", dict)
    return Owner(
        uid=PodUid(_typed(owner, "uid", str)),
        namespace=_typed(owner, "namespace", str),
        pod=_typed(owner, "pod", str),
        container=_typed(owner, "container", str),
        kind=ContainerKind(_typed(owner, "kind", str)),
        resource=_typed(owner, "resource", str),
        place=_optional(owner, "place", int),
    )


def _runner(document: object) -> Runner:
    return Runner(
        pid=_typed(document, "pid", int),
        start_time=_typed(document, "start_time", int),
        boot_id=_typed(document, "boot_id", str),
    )


def _suspension(document: dict[str, object]) -> Suspension | None:
    if document.get("suspension") is None:
        return None
    suspension = _typed(document, "suspension", dict)
    return Suspension(
        since=_typed(suspension, "since", float),
        by=SuspendedBy(_typed(suspension, "by", str)),
        is_complete=_flag(suspension, "complete"),
        stopped=tuple(map(_runner, _typed(suspension, "stopped", list)))
        if "stopped" in suspension
        else (),
    )


def _compute(device: object) -> Compute:
    if not isinstance(device, dict) or "compute" not in device:
        return Compute()
    compute = _typed(device, "compute", dict)
    return Compute(
        guarantee=_typed(compute, "guarantee", int),
        ceiling=_typed(compute, "ceiling", int),
        weight=_typed(compute, "weight", int),
        kind=ComputeClass(_typed(compute, "class", str)),
        is_governed=_flag(compute, "governed"),
    )


def _flag(document: object, key: str) -> bool:
    """Return a field that is true or false; false where it is not."""
    value = document.get(key, False) if isinstance(document, dict) else None
    if not isinstance(value, bool):
        raise TypeError(key)
    return value


def _text(document: object, key: str) -> str:
    """Return a text that records of earlier releases do not have; empty where it is not."""
    value = document.get(key) if isinstance(document, dict) else None
    if value is None:
        return ""
    return _typed(document, key, str)


def _number(document: object, key: str) -> int | None:
    """Return a number that records of earlier releases do not have; None where it is not."""
    value = document.get(key) if isinstance(document, dict) else None
    return None if value is None else _typed(document, key, int)


def _typed(document: object, key: str, kind: type[_T]) -> _T:
    """Return a field that has to be there and of that type; a bool is no number."""
    if not isinstance(document, dict):
        raise TypeError(key)
    value = document[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(key)
    return value


def _optional(document: object, key: str, kind: type[_T]) -> _T | None:
    if isinstance(document, dict) and document[key] is None:
        return None
    return _typed(document, key, kind)
