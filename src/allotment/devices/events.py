# SPDX-License-Identifier: Apache-2.0
"""XIDs and memory errors that GPUs report, through NVML's event sets.

Each GPU has its own set and thread, so a hanging or lost GPU does not affect the others. Waits are
bounded, so that threads can end. NVML does not report events from before the registration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from types import ModuleType
from typing import Any, Final

import msgspec

from allotment.devices.watching import NvmlSession

_WAIT_MS: Final = 1000
_SIMULATED_PAUSE_S: Final = 0.2
"""Simulated GPUs cannot wake a waiter: NVML would poll 200 times a second."""
_LOST_PAUSE_S: Final = 2.0
_DOUBLE_BIT_XID: Final = 48
_NO_INSTANCE: Final = 0xFFFFFFFF
_ENDS_WITHIN_S: Final = 1.5


class EventKind(StrEnum):
    """Kind of report."""

    XID = "xid"
    DOUBLE_BIT_ECC = "double-bit-ecc"
    SINGLE_BIT_ECC = "single-bit-ecc"


class GpuEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One report of one GPU."""

    uuid: str
    kind: EventKind
    xid: int | None
    """The XID; for an uncorrected memory error its XID, 48."""
    at: float
    """Time of receipt, in `time.monotonic` seconds."""
    gpu_instance: int | None = None
    """MIG instance; None: the whole GPU, or unknown."""
    compute_instance: int | None = None


class Listeners:
    """One thread per GPU, which calls `deliver`."""

    __slots__ = ("_deliver", "_is_closed", "_lock", "_session", "_threads")

    def __init__(self, session: NvmlSession, deliver: Callable[[GpuEvent], None]) -> None:
        self._session = session
        self._deliver = deliver
        self._lock = threading.Lock()
        """Of the two below; never held during a call of NVML."""
        self._threads: dict[int, _Listener] = {}
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def listen(self, index: int, uuid: str) -> None:
        """Receive all reports of a GPU, by NVML's number and UUID, from now on.

        It calls the driver and may hang as long as the GPU does: call it in the GPU's `Asker`. A
        GPU that cannot be registered is skipped; the next check tries again.
        """
        with self._lock:
            before = self._threads.get(index)
        if before is not None:
            if before.is_listening and before.uuid == uuid:
                return
            before.stop()
        nvml = self._session.nvml
        listener = _Listener(self._session, index, uuid, self._deliver)
        try:
            listener.register()
        except nvml.NVMLError:
            return  # some GPUs have no events: their counters are still read
        with self._lock:
            if self._is_closed:
                listener.stop()  # it releases its set, and ends
            else:
                self._threads[index] = listener
            listener.start()

    def leave(self, index: int) -> None:
        with self._lock:
            listener = self._threads.pop(index, None)
        if listener is not None:
            listener.stop()

    def listening(self) -> frozenset[str]:
        """UUIDs of registered GPUs, whose reports are received."""
        with self._lock:
            threads = tuple(self._threads.values())
        return frozenset(thread.uuid for thread in threads if thread.is_listening)

    def close(self, *, wait_s: float = _ENDS_WITHIN_S) -> bool:
        """Stop for good and wait this long for the threads. False: some hang in the driver."""
        with self._lock:
            self._is_closed = True
            threads = tuple(self._threads.values())
            self._threads.clear()
        for thread in threads:
            thread.stop()
        deadline = time.monotonic() + wait_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Listener(threading.Thread):
    """Listens to one GPU. Register it before starting it."""

    def __init__(
        self, session: NvmlSession, index: int, uuid: str, deliver: Callable[[GpuEvent], None]
    ) -> None:
        super().__init__(name=f"nvml-events-{index}", daemon=True)
        self.uuid = uuid
        self._index = index
        self._nvml = session.nvml
        self._set: Any = None
        self._deliver = deliver
        self._stopped = threading.Event()
        # If NVML polls while it waits, we poll less often.
        self._wait_ms = 0 if session.is_simulated else _WAIT_MS
        self._pause_s = _SIMULATED_PAUSE_S if session.is_simulated else 0.0

    @property
    def is_listening(self) -> bool:
        return self.is_alive() and not self._stopped.is_set()

    def register(self) -> None:
        """Register for this GPU's reports; may raise `NVMLError`, may hang."""
        nvml = self._nvml
        # By number: to find a UUID, NVML may query every GPU, also an unhealthy one.
        handle = nvml.nvmlDeviceGetHandleByIndex(self._index)
        kinds = (
            nvml.nvmlEventTypeXidCriticalError
            | nvml.nvmlEventTypeDoubleBitEccError
            | nvml.nvmlEventTypeSingleBitEccError
        )
        types = kinds & nvml.nvmlDeviceGetSupportedEventTypes(handle)
        made = nvml.nvmlEventSetCreate()
        try:
            nvml.nvmlDeviceRegisterEvents(handle, types, made)
        except nvml.NVMLError:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(made)
            raise
        self._set = made

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        nvml = self._nvml
        try:
            self._listen(nvml)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._set)

    def _listen(self, nvml: ModuleType) -> None:
        while not self._stopped.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, self._wait_ms)
            except nvml.NVMLError_Timeout:
                self._stopped.wait(self._pause_s)
            except nvml.NVMLError_GpuIsLost:
                # The set survives a GPU's return and keeps events from meanwhile.
                self._stopped.wait(_LOST_PAUSE_S)
            except nvml.NVMLError:
                return  # the next check of the GPU registers it again
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
