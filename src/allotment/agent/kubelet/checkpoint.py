# SPDX-License-Identifier: Apache-2.0
"""The kubelet's device checkpoint: which container holds which ids, and what it was answered.

The kubelet writes it before it asks for `PreStartContainer` (a new file, renamed into place), so
that there a container can be found by its ids, which is what identity rests on (kubelet
pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go, v1.36; shapes since v1.11 are understood).
"""

import base64
import binascii
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from google.protobuf.message import DecodeError

from allotment.agent.kubelet.proto.deviceplugin_pb2 import ContainerAllocateResponse
from allotment.agent.protocols import SHARE_ANNOTATION, CheckpointEntry
from allotment.model.errors import StateError
from allotment.model.pods import PodUid
from allotment.model.shares import Injection, ShareId
from allotment.shares.cdi import KIND

__all__ = ["KubeletCheckpoint", "decode"]

_TRIES: Final = 5
_PAUSE_S: Final = 0.01

_Identity = tuple[int, int, int, int]


class _Entry(msgspec.Struct, frozen=True, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str]] | list[str] | None = msgspec.field(
        name="DeviceIDs", default=None
    )
    """By NUMA node (-1: none); a list before v1.20."""
    alloc_resp: str | None = None
    """Base64 of a ContainerAllocateResponse."""


class _Data(msgspec.Struct, frozen=True, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None


class _File(msgspec.Struct, frozen=True, rename="pascal"):
    data: _Data


class _Answer(NamedTuple):
    share: ShareId | None
    injection: Injection | None


_decoder: Final = msgspec.json.Decoder(_File)


class KubeletCheckpoint:
    """A `protocols.Checkpoint`: reads the file when it is another one than last time.

    To be used by one thread at a time, or by several: they may then read it twice.
    """

    __slots__ = ("_answers", "_entries", "_identity", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: _Identity | None = None
        self._entries: tuple[CheckpointEntry, ...] = ()
        # Answers stay as they are, and every change of any pod writes all of them anew.
        self._answers: dict[str, _Answer] = {}

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """Return who holds what; nobody anything where the kubelet has not written yet.

        Raises `StateError` when it cannot be read or is of no known shape.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self._read()
            except FileNotFoundError:
                if self.path.parent.is_dir():
                    return ()
                raise StateError(
                    f"{self.path.parent} is not there, where the kubelet keeps its checkpoint",
                    hint="mount the host's /var/lib/kubelet/device-plugins there, or name the"
                    " kubelet's socket with --kubelet-socket",
                ) from None
            except OSError as error:
                raise StateError(
                    f"cannot read the kubelet's checkpoint {self.path}: {error.strerror}",
                    hint="the agent has to run as root, with the kubelet's folder of device"
                    " plugins mounted",
                ) from error
            except ValueError as error:
                if not left:
                    raise StateError(
                        f"the kubelet's checkpoint {self.path} is of no known shape: {error}",
                        hint="this kubelet may be newer than this agent: see whether there is a"
                        " newer one",
                    ) from error
            # An older kubelet, or a full disk, may leave it half written for a moment.
            time.sleep(_PAUSE_S)
        raise AssertionError  # the last try returns or raises

    def _read(self) -> tuple[CheckpointEntry, ...]:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            # A file that replaced it may have its inode and size, but not its time of change too.
            identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if identity == self._identity:
                return self._entries
            data = file.read()
        answers: dict[str, _Answer] = {}
        entries = decode(data, known=self._answers, found=answers)
        self._entries, self._answers, self._identity = entries, answers, identity
        return entries


def decode(
    data: bytes,
    *,
    known: Mapping[str, _Answer] | None = None,
    found: dict[str, _Answer] | None = None,
) -> tuple[CheckpointEntry, ...]:
    """Return the entries of a checkpoint; `ValueError` where it is none.

    `known` are answers that were read earlier; those of this checkpoint go to `found`.
    """
    known = {} if known is None else known
    found = {} if found is None else found
    entries: list[CheckpointEntry] = []
    for each in _decoder.decode(data).data.pod_device_entries or ():
        text = each.alloc_resp or ""
        if text not in found:
            found[text] = known[text] if text in known else _read(text)
        entries.append(
            CheckpointEntry(
                pod=PodUid(each.pod_uid),
                container=each.container_name,
                resource=each.resource_name,
                ids=frozenset(_ids(each.device_ids)),
                share=found[text].share,
                injection=found[text].injection,
            )
        )
    return tuple(entries)


def _ids(device_ids: Mapping[str, Sequence[str]] | Sequence[str] | None) -> Sequence[str]:
    if isinstance(device_ids, Mapping):
        return [each for node in device_ids.values() for each in node]
    return device_ids or ()


def _read(text: str) -> _Answer:
    """Return what of an answer concerns its share."""
    try:
        response = ContainerAllocateResponse.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError):
        # Other plugins' answers stand in the same file; what they wrote is no business of ours.
        return _Answer(None, None)
    share = response.annotations.get(SHARE_ANNOTATION)
    if not share:
        return _Answer(None, None)
    if any(device.name == f"{KIND}={share}" for device in response.cdi_devices):
        return _Answer(ShareId(share), Injection.CDI)
    if any(f"/{share}/" in mount.host_path for mount in response.mounts):
        return _Answer(ShareId(share), Injection.MOUNTS)
    return _Answer(ShareId(share), Injection.NONE)
