# SPDX-License-Identifier: Apache-2.0
"""What GPUs report by themselves: XIDs and memory errors, through NVML's event sets.

Each GPU has a set and a thread of its own, so that one that hangs while it is registered, or is
lost, keeps its own news to itself and nobody else's. Waits are bounded, so that threads end when
they are told. What happened before a GPU was registered NVML does not tell.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
_LOST_PAUSE_S: Final = 2.0
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

    __slots__ = ("_deliver", "_is_closed", "_lock", "_session", "_threads")

    def __init__(self, session: Session, deliver: Callable[[GpuEvent], None]) -> None:
        self._session = session
        self._deliver = deliver
        self._lock = threading.Lock()
        """Of the two below; never held during a call of NVML."""
        self._threads: dict[int, _Listener] = {}
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing is listened to any more, whatever is asked for."""
        return self._is_closed

    def listen(self, index: int, uuid: str) -> None:
        """Hear whatever a GPU, by NVML's number and UUID, reports after this call.

        It asks the driver, and may hang as long as the GPU does: it belongs in the GPU's `Asker`.
        A GPU that cannot be registered is not heard; whoever looks at it next tries it again.
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
            return  # some GPUs know no events: their counters are looked at all the same
        with self._lock:
            if self._is_closed:
                listener.stop()  # it lets its set go, and ends
            else:
                self._threads[index] = listener
            listener.start()

    def leave(self, index: int) -> None:
        """Listen to a GPU no more."""
        with self._lock:
            there = self._threads.pop(index, None)
        if there is not None:
            there.stop()

    def listening(self) -> frozenset[str]:
        """Return the UUIDs of those that are registered: what they report now is heard."""
        with self._lock:
            threads = tuple(self._threads.values())
        return frozenset(each.uuid for each in threads if each.is_listening)

    def close(self, *, wait_s: float = _ENDS_WITHIN_S) -> bool:
        """Stop for good, and wait so long for the threads. False: some hang in the driver still."""
        with self._lock:
            self._is_closed = True
            threads = tuple(self._threads.values())
            self._threads.clear()
        for each in threads:
            each.stop()
        deadline = time.monotonic() + wait_s
        for each in threads:
            each.join(max(0.0, deadline - time.monotonic()))
        return not any(each.is_alive() for each in threads)


class _Listener(threading.Thread):
    """Listens to one GPU. It is to be registered before it is started."""

    def __init__(
        self, session: Session, index: int, uuid: str, deliver: Callable[[GpuEvent], None]
    ) -> None:
        super().__init__(name=f"nvml-events-{index}", daemon=True)
        self.uuid = uuid
        self._index = index
        self._nvml = session.nvml
        self._set: Any = None
        self._deliver = deliver
        self._stopped = threading.Event()
        # Where NVML looks while it waits, we look now and then.
        self._wait_ms = 0 if session.is_simulated else _WAIT_MS
        self._pause_s = _SIMULATED_PAUSE_S if session.is_simulated else 0.0

    @property
    def is_listening(self) -> bool:
        """Whether what the GPU reports now is heard."""
        return self.is_alive() and not self._stopped.is_set()

    def register(self) -> None:
        """Have the driver keep this GPU's reports from now on; may raise `NVMLError`, may hang."""
        nvml = self._nvml
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
        """Deliver what comes, until told to stop or the set is of no more use."""
        while not self._stopped.is_set():
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, self._wait_ms)
            except nvml.NVMLError_Timeout:
                self._stopped.wait(self._pause_s)
            except nvml.NVMLError_GpuIsLost:
                # The set goes on when the GPU is back, and has what happened meanwhile.
                self._stopped.wait(_LOST_PAUSE_S)
            except nvml.NVMLError:
                return  # whoever looks at the GPU next registers it anew
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
