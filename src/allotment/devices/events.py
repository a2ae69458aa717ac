# SPDX-License-Identifier: Apache-2.0
"""What GPUs report by themselves: XIDs and memory errors, through NVML's event sets.

Each GPU has a set and a thread of its own, so that one that hangs while it is registered, or is
lost, keeps its own news to itself and nobody else's. Waits are bounded, so that threads end when
they are told. What happened before a GPU was registered NVML does not tell.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any, Final

from allotment.devices.watching import Session

__all__ = ["EventKind", "GpuEvent", "Listeners"]

_WAIT_MS: Final = 1000
_SIMULATED_PAUSE_S: Final = 0.2
"""Simulated GPUs have no bell: NVML would look 200 times a second while it waits."""
_RETRY_S: Final = 2.0
_DOUBLE_BIT_XID: Final = 48
_NO_INSTANCE: Final = 0xFFFFFFFF
_ENDS_WITHIN_S: Final = 1.5


class EventKind(StrEnum):
    """What a GPU reports."""

    XID = "xid"
    DOUBLE_BIT_ECC = "double-bit-ecc"
    SINGLE_BIT_ECC = "single-bit-ecc"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEvent:
    """One report of one GPU."""

    uuid: str
    kind: EventKind
    xid: int | None
    """Of an XID; of an uncorrected memory error 48, which is the XID that says so."""
    at: float
    """When it was heard, in `time.monotonic` seconds."""
    gpu_instance: int | None = None
    """Which MIG instance; None: the whole GPU, or the driver does not say."""
    compute_instance: int | None = None


class Listeners:
    """Threads that listen to GPUs, each to one. `deliver` is called in them."""

    __slots__ = ("_deliver", "_session", "_threads")

    def __init__(self, session: Session, deliver: Callable[[GpuEvent], None]) -> None:
        self._session = session
        self._deliver = deliver
        self._threads: dict[tuple[int, str], _Listener] = {}

    def follow(self, gpus: Iterable[tuple[int, str]]) -> None:
        """Listen to these GPUs, by NVML's number and UUID, and to no others."""
        wanted = set(gpus)
        for key in set(self._threads) - wanted:
            self._threads.pop(key).stop()
        for key in wanted - set(self._threads):
            index, uuid = key
            listener = _Listener(self._session, index, uuid, self._deliver)
            self._threads[key] = listener
            listener.start()

    def listening(self) -> frozenset[str]:
        """Return the UUIDs of those that are registered: what they report now is heard."""
        return frozenset(
            each.uuid for each in self._threads.values() if each.is_registered.is_set()
        )

    def close(self) -> bool:
        """Stop, and wait for the threads for a moment. False: some hang in the driver still."""
        for each in self._threads.values():
            each.stop()
        deadline = time.monotonic() + _ENDS_WITHIN_S
        for each in self._threads.values():
            each.join(max(0.0, deadline - time.monotonic()))
        ended = not any(each.is_alive() for each in self._threads.values())
        self._threads.clear()
        return ended


class _Listener(threading.Thread):
    def __init__(
        self, session: Session, index: int, uuid: str, deliver: Callable[[GpuEvent], None]
    ) -> None:
        super().__init__(name=f"nvml-events-{index}", daemon=True)
        self.uuid = uuid
        self.is_registered = threading.Event()
        self._index = index
        self._nvml = session.nvml
        self._deliver = deliver
        self._stopped = threading.Event()
        # Where NVML looks while it waits, we look now and then.
        self._wait_ms = 0 if session.is_simulated else _WAIT_MS
        self._pause_s = _SIMULATED_PAUSE_S if session.is_simulated else 0.0

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        nvml = self._nvml
        while not self._stopped.is_set():
            try:
                registered = self._register(nvml)
            except nvml.NVMLError_NotSupported:
                return  # a GPU without events: its counters are looked at all the same
            except nvml.NVMLError:
                self._stopped.wait(_RETRY_S)
                continue
            self.is_registered.set()
            try:
                self._listen(nvml, registered)
            finally:
                self.is_registered.clear()
                with suppress(nvml.NVMLError):
                    nvml.nvmlEventSetFree(registered)

    def _register(self, nvml: ModuleType) -> Any:  # noqa: ANN401 - nvidia-ml-py's event set
        # By number: to find a UUID, NVML may ask every GPU, the sick one too.
        handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        wanted = (
            nvml.nvmlEventTypeXidCriticalError
            | nvml.nvmlEventTypeDoubleBitEccError
            | nvml.nvmlEventTypeSingleBitEccError
        )
        types = wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle)
        made = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, types, made)
        except nvml.NVMLError:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(made)
            raise
        return made

    def _listen(self, nvml: ModuleType, registered: object) -> None:
        """Deliver what comes, until told to stop or the set is of no more use."""
        while not self._stopped.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(registered, self._wait_ms)
            except nvml.NVMLError_Timeout:
                self._stopped.wait(self._pause_s)
            except nvml.NVMLError_GpuIsLost:
                # The set goes on when the GPU is back, and has what happened meanwhile.
                self._stopped.wait(_RETRY_S)
            except nvml.NVMLError:
                self._stopped.wait(_RETRY_S)
                return
            else:
                if not self._stopped.is_set():
                    self._deliver(self._event(nvml, data))

    def _event(self, nvml: ModuleType, data: Any) -> GpuEvent:  # noqa: ANN401 - a C structure
        kind, xid = EventKind.XID, int(data.eventData) or None
        if data.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            kind, xid = EventKind.DOUBLE_BIT_ECC, _DOUBLE_BIT_XID
        elif data.eventType == nvml.nvmlEventTypeSingleBitEccError:
            kind, xid = EventKind.SINGLE_BIT_ECC, None
        return GpuEvent(
            uuid=self.uuid,
            kind=kind,
            xid=xid,
            at=time.monotonic(),
            gpu_instance=_instance(data.gpuInstanceId),
            compute_instance=_instance(data.computeInstanceId),
        )


def _instance(number: int) -> int | None:
    return None if number == _NO_INSTANCE else int(number)
