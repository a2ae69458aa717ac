# SPDX-License-Identifier: Apache-2.0
"""The kubelet's device checkpoint: which container holds which ids, and its answer to `Allocate`.

The kubelet writes it before it calls `PreStartContainer` (a new file, renamed into place). So a
container is found there by its ids, as designs/identity.md explains (kubelet
pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go, v1.36; formats since v1.11 are read).
"""

import base64
import binascii
import os
import time
from collections.abc import Mapping
from functools import lru_cache
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

_TRIES: Final = 5
_PAUSE_S: Final = 0.01

_MOST_ANSWERS: Final = 4096
"""More than a node's pods have."""


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
    """A `protocols.Checkpoint` that reads the file only if it has changed.

    Several threads may use it; then they may read the file twice.
    """

    __slots__ = ("_last", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[tuple[int, ...], tuple[CheckpointEntry, ...]] = ((), ())
        """The file's identity, and its entries."""

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """Return the entries; none if the kubelet has not written the file yet.

        Raises `StateError` if it cannot be read or has an unknown format.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self._read()
            except FileNotFoundError:
                if self.path.parent.is_dir():
                    return ()
                raise StateError(
                    f"{self.path.parent} does not exist; the kubelet keeps its checkpoint there",
                    hint="mount the host's /var/lib/kubelet/device-plugins there, or name the"
                    " kubelet's socket with --kubelet-socket",
                ) from None
            except OSError as error:
                raise StateError(
                    f"cannot read the kubelet's checkpoint {self.path}: {error.strerror}",
                    hint="run the agent as root, with the kubelet's folder of device plugins"
                    " mounted",
                ) from error
            except ValueError as error:
                if not left:
                    raise StateError(
                        f"the kubelet's checkpoint {self.path} has an unknown format: {error}",
                        hint="the kubelet may be newer than this agent: look for a newer agent",
                    ) from error
            # An older kubelet, or a full disk, may leave it half written for a moment.
            time.sleep(_PAUSE_S)
        raise AssertionError  # the last try returns or raises

    def _read(self) -> tuple[CheckpointEntry, ...]:
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            # A new file may get the old one's inode and size, but not its change time too.
            identity = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            last, entries = self._last
            if identity != last:
                entries = decode(file.read())
                self._last = (identity, entries)
            return entries


def decode(data: bytes) -> tuple[CheckpointEntry, ...]:
    """Return the entries of a checkpoint; raise `ValueError` if it is not one."""
    entries = []
    for each in _decoder.decode(data).data.pod_device_entries or ():
        answer = _read_answer(each.alloc_resp or "")
        ids = each.device_ids or ()
        if isinstance(ids, Mapping):
            ids = [slot for node in ids.values() for slot in node]
        entries.append(
            CheckpointEntry(
                pod=PodUid(each.pod_uid),
                container=each.container_name,
                resource=each.resource_name,
                ids=frozenset(ids),
                share=answer.share,
                injection=answer.injection,
            )
        )
    return tuple(entries)


@lru_cache(_MOST_ANSWERS)  # answers never change, and each change of a pod writes all of them
def _read_answer(text: str) -> _Answer:
    """Return the share of an answer, and how its container gets it."""
    try:
        response = ContainerAllocateResponse.FromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError):
        return _Answer(None, None)  # another plugin's answer may have any content
    share = response.annotations.get(SHARE_ANNOTATION)
    if not share:
        return _Answer(None, None)
    if any(device.name == f"{KIND}={share}" for device in response.cdi_devices):
        return _Answer(ShareId(share), Injection.CDI)
    if any(f"/{share}/" in mount.host_path for mount in response.mounts):
        return _Answer(ShareId(share), Injection.MOUNTS)
    return _Answer(ShareId(share), Injection.NONE)
