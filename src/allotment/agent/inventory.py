# SPDX-License-Identifier: Apache-2.0
"""Watches the node's GPUs: which exist, which answer, and what they report.

    watch = GpuWatch(machine=None)              # the driver, or a simulated machine
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch.run())
        await watch.first_look()
        async for inventory in watch.changes():

Each GPU has a thread that asks (`devices.watching`) and one that listens (`devices.events`): a hung
GPU blocks nothing else. Registration for reports precedes the first answer, because NVML does not
repeat reports. A GPU stays listed, with a problem, until another takes its place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from allotment.devices.events import GpuEvent, Listeners
from allotment.devices.sources import Inventory, Problem
from allotment.devices.watching import (
    OFF_BUS,
    Asker,
    Look,
    NvmlSession,
    ReadFailure,
    Report,
    hidden_gpus,
)
from allotment.kube.watching import Signal
from allotment.model.devices import Device
from allotment.model.errors import AllotError, NoDevicesError
from allotment.model.structs import replace


class Silent(msgspec.Struct, frozen=True):
    """The GPU was asked `for_s` seconds ago, and has not answered."""

    for_s: float


class Gone(msgspec.Struct, frozen=True, kw_only=True):
    """No program can use the GPU. With `is_replaced`, another GPU is in its place."""

    reason: str = "the driver no longer lists it"
    is_replaced: bool = False


class Hidden(msgspec.Struct, frozen=True):
    """The kernel's driver lists the GPU, and NVML does not: it may serve its programs as ever."""

    reason: str = (
        "the kernel's driver lists it, and this agent cannot see it: look at NVIDIA_VISIBLE_DEVICES"
        " and the device nodes of the agent's container, else at the kernel's log"
    )


_UNANSWERED: Final = "NVML no longer lists it, and the kernel's list of GPUs cannot be read"

Sighting = Look | ReadFailure | Silent | Gone | Hidden | GpuEvent
"""What was observed of one GPU."""


PATIENCE_S: Final = 1.5
"""How long a GPU may take to answer before it counts as silent."""
QUIET_S: Final = 0.5
"""At the start, how long to wait after the latest answer for the GPUs that have not answered."""
POLL_S: Final = 5.0
LOOK_AGAIN_S: Final = 1.0
"""The shortest time between two looks for a report: some GPUs report without end."""
TEST_S: Final = 8.0
"""The time limit of a test: a GPU may have to wake up first."""
START_S: Final = 60.0
"""The time limit for NVML's start: seconds for each GPU without persistence mode."""
_RETRY_MOST_S: Final = 30.0
_NOT_IN_TIME: Final = "it has not answered in time"

T = TypeVar("T")


class _Gpu:
    """The GPU at one NVML index, while NVML is initialised."""

    __slots__ = (
        "asked",
        "asker",
        "failure",
        "index",
        "is_silent",
        "looked_again_at",
        "reporter",
        "uuid",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.asker = Asker(f"nvml-{index}")
        self.reporter = Asker(f"nvml-report-{index}")
        """For metrics alone: a scrape does not delay a look."""
        self.asked: Future[Look | ReadFailure] | None = None
        """The latest question."""
        self.looked_again_at = float("-inf")
        """When a report last caused a question."""
        self.uuid: str | None = None
        self.failure: ReadFailure | None = None
        self.is_silent = False

    @property
    def is_asked(self) -> bool:
        return self.asker.asked_at is not None or self.reporter.asked_at is not None

    def close(self) -> None:
        self.asker.close()
        self.reporter.close()

    @property
    def problem(self) -> str | None:
        if self.is_silent:
            return _NOT_IN_TIME
        return None if self.failure is None else self.failure.message


class GpuWatch:
    """The GPUs of this node. For one event loop; needs `run` running."""

    def __init__(
        self,
        *,
        machine: Path | None = None,
        fails_without: bool = False,
        offerable: Callable[[Sequence[Device]], tuple[Device, ...]] = tuple,
        expected: Callable[[], Iterable[str]] = tuple,
        patience_s: float = PATIENCE_S,
        poll_s: float = POLL_S,
        test_s: float = TEST_S,
    ) -> None:
        """Watch the driver's GPUs, or those of a simulated machine.

        `fails_without`: `run` raises `NoDevicesError` if NVML fails at the start; else it retries.
        `offerable` filters a GPU's MIG devices, in its thread. `expected` returns the UUIDs of GPUs
        that were here before the start: those that no driver lists are gone.
        """
        self._session = NvmlSession(machine)
        self._fails_without = fails_without
        self._offerable = offerable
        self._expected = expected
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._test_s = test_s
        self._nvml = Asker("nvml")
        self._kernel = Asker("kernel")
        self._surveyed: Future[tuple[int, bool]] | None = None
        self._signature: object = None
        self._gpus: list[_Gpu] = []
        self._devices: dict[str, Device] = {}
        self._missing: Mapping[str, Gone | Hidden] = {}
        self._slices: dict[str, tuple[Device, ...]] = {}
        """Each GPU's MIG devices, by its UUID, as last reported."""
        self._listeners = Listeners(self._session, self._deliver)
        self._problem: str | None = "the GPUs have not been inspected yet"
        self._looked = asyncio.Event()
        self._answered = asyncio.Event()
        self._failed: NoDevicesError | None = None
        self._signal = Signal()
        self._observers: list[Callable[[str, Sighting], None]] = []
        self._current = Inventory(devices=(), problems=())
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def current(self) -> Inventory:
        """Every GPU that has answered since the start, and a problem for each that does not now.

        The problems of GPUs that never answered have no device.
        """
        return self._current

    @property
    def problem(self) -> str | None:
        """Why no GPU can be inspected; None: they can."""
        return self._problem

    def listening(self) -> frozenset[str]:
        """Return the UUIDs of GPUs whose reports arrive."""
        return self._listeners.listening()

    async def first_look(self) -> Inventory:
        """Wait for the GPUs that answer soon, or for a failure.

        Raises `NoDevicesError` if NVML fails and `fails_without` is set.
        """
        await self._looked.wait()
        if self._failed is not None:
            raise self._failed
        return self._current

    async def changes(self) -> AsyncGenerator[Inventory, None]:
        """Yield the inventory, now and at each change."""
        last = None
        async for _ in self._signal.changes():
            if self._current != last:
                last = self._current
                yield last

    def subscribe(self, observer: Callable[[str, Sighting], None]) -> None:
        """Call `observer` in the event loop with each GPU's UUID and each later sighting of it."""
        self._observers.append(observer)

    async def test(self, uuid: str) -> Look | str:
        """Ask a GPU at once; return its answer, or the problem, within `test_s`."""
        gpu = next((each for each in self._gpus if each.uuid == uuid), None)
        if gpu is None:
            return "the driver does not list it"
        self._ask(gpu)
        if gpu.asked is None:
            return _NOT_IN_TIME
        try:
            answer = await self._outcome(gpu.asked, self._test_s)
        except TimeoutError:
            return _NOT_IN_TIME
        except Exception as error:  # noqa: BLE001 - the GPU was not asked, whatever the reason
            return str(error) or type(error).__name__
        return answer if isinstance(answer, Look) else answer.message

    def reports(self, *, patience_s: float) -> Mapping[str, Report]:
        """Ask every GPU for its figures; return those that answer in time, by UUID.

        Call it in any thread, one at a time. A GPU that hangs delays one call, not the next ones.
        """
        asked = {
            gpu.uuid: future
            for gpu in tuple(self._gpus)
            if gpu.uuid is not None
            and not gpu.is_silent
            and (future := gpu.reporter.ask(partial(self._session.report, gpu.index))) is not None
        }
        wait(asked.values(), timeout=patience_s)
        return {
            uuid: answer
            for uuid, future in asked.items()
            if future.done()
            and future.exception() is None
            and isinstance(answer := future.result(), Report)
        }

    # ---- the loop ----

    async def run(self) -> None:
        """Watch until cancelled. Raises `NoDevicesError` with `fails_without`."""
        self._loop = asyncio.get_running_loop()
        pause_s = self._poll_s
        try:
            while True:
                if await self._survey():
                    pause_s = self._poll_s
                    await self._poll()
                else:
                    pause_s = min(max(pause_s, 1.0) * 1.5, _RETRY_MOST_S)
                self._looked.set()
                await asyncio.sleep(pause_s)
        except NoDevicesError as error:
            self._failed = error
            raise
        finally:
            self._looked.set()
            await self._close()

    async def _survey(self) -> bool:
        """Open NVML if needed, and take one `_Gpu` for each index. False: NVML is missing."""
        asked = self._nvml.ask(self._count)
        if asked is None:
            return bool(self._gpus)  # the question is still open
        self._surveyed = asked
        try:
            count, is_new = await self._outcome(asked, START_S)
        except TimeoutError:
            self._set_problem(f"NVML has not started within {START_S:.0f} s")
            return bool(self._gpus)
        except AllotError as error:
            if self._fails_without and not self._looked.is_set():
                raise NoDevicesError(error.message, hint=error.hint) from error
            self._set_problem(error.message)
            if not self._is_anyone_asked():
                self._forget_gpus(ReadFailure(message=error.message, is_driver=True))
            return False
        if is_new:
            self._forget_gpus(None)
        self._take_stock(count)
        self._set_problem(None if count else "the driver has no GPU")
        return True

    def _count(self) -> tuple[int, bool]:
        """Open NVML, or reopen it if it does not match the driver; in its own thread."""
        signature = self._session.signature()
        is_new = self._needs_restart(signature) and self._may_restart()
        if is_new:
            self._session.close()
        try:
            self._session.open()
            self._session.refresh()
            count = self._session.count()
        except AllotError:
            if self._may_restart():
                # Begin anew next time: an NVML initialised without a driver stays without.
                self._session.close()
                self._signature = None
            raise
        is_new = is_new or self._signature is None
        self._signature = (signature,)
        return count, is_new

    def _needs_restart(self, signature: object) -> bool:
        if self._signature is None:
            return False
        failures = [each.failure for each in self._gpus]
        is_driver_gone = bool(failures) and all(each and each.is_driver for each in failures)
        return self._signature != (signature,) or is_driver_gone or not self._gpus

    def _may_restart(self) -> bool:
        """Return whether no call runs: it would use a library that has been shut down."""
        if self._is_anyone_asked():
            return False
        return self._listeners.close()

    def _is_anyone_asked(self) -> bool:
        return any(each.is_asked for each in self._gpus)

    def _take_stock(self, count: int) -> None:
        """Keep one `_Gpu` for each NVML index; known devices stay known."""
        if self._listeners.is_closed:
            self._listeners = Listeners(self._session, self._deliver)
        for gpu in self._gpus[count:]:
            gpu.close()
            self._listeners.leave(gpu.index)
        self._gpus[count:] = [_Gpu(index) for index in range(len(self._gpus), count)]

    def _forget_gpus(self, failure: ReadFailure | None) -> None:
        for gpu in self._gpus:
            gpu.close()
            if failure is not None and gpu.uuid is not None:
                self._observe(gpu.uuid, failure)
        self._listeners.close(wait_s=0)
        self._gpus = []
        if failure is not None:
            self._update()

    async def _poll(self) -> None:
        """Ask every GPU without an open question, and wait for the answers."""
        asked = [gpu for gpu in self._gpus if self._ask(gpu)]
        is_first = not self._looked.is_set()
        quiet_s = min(QUIET_S, self._patience_s) if is_first else self._patience_s
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._patience_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(latest) as end:
                while any(gpu.asked is not None and not gpu.asked.done() for gpu in asked):
                    self._answered.clear()
                    await self._answered.wait()
                    if is_first:
                        end.reschedule(min(latest, loop.time() + quiet_s))
        now = time.monotonic()
        for gpu in self._gpus:
            since = gpu.asker.asked_at
            for_s = 0.0 if since is None else now - since
            # Half: a report may have caused another question meanwhile.
            if for_s >= quiet_s / 2:
                gpu.is_silent = True
                if gpu.uuid is not None:
                    self._observe(gpu.uuid, Silent(for_s))
        present = {gpu.uuid for gpu in self._gpus}
        # One that has not said its UUID yet may be any, unless it is lost itself.
        if all(gpu.uuid or (gpu.failure and gpu.failure.is_lost) for gpu in self._gpus):
            await self._observe_missing({*self._devices, *self._expected()} - present)
        self._update()

    async def _observe_missing(self, uuids: AbstractSet[str]) -> None:
        """Observe GPUs that NVML does not list: gone, or hidden from this process."""
        asked = self._kernel.ask(self._session.driver_gpus) if uuids else None
        # Until the kernel answers, none is offered, and no pod is evicted for it.
        self._missing = dict.fromkeys(uuids, Hidden(_UNANSWERED))
        with suppress(TimeoutError, AllotError):
            if asked is not None:
                listed = await self._outcome(asked, self._patience_s)
                hidden = hidden_gpus(listed, [gpu.uuid for gpu in self._gpus])
                lost = {uuid for uuid in uuids if listed.get(uuid)}
                self._missing = (
                    dict.fromkeys(uuids, Gone())
                    | dict.fromkeys(lost, Gone(reason=OFF_BUS))
                    | dict.fromkeys(hidden & uuids, Hidden())
                )
        for uuid, sighting in self._missing.items():
            self._observe(uuid, sighting)

    def _ask(self, gpu: _Gpu) -> bool:
        """False: the previous question is still open."""
        session, listeners, index = self._session, self._listeners, gpu.index
        offerable = self._offerable

        def look() -> Look | ReadFailure:
            answer = session.look(index)
            if isinstance(answer, Look):
                listeners.listen(index, answer.device.uuid)
                answer = replace(answer, slices=offerable(answer.slices))
            return answer

        asked = gpu.asker.ask(look)
        if asked is None:
            return False
        gpu.asked = asked
        asked.add_done_callback(lambda done: self._call(self._take_answer, gpu, done))
        return True

    async def _outcome(self, asked: Future[T], timeout_s: float) -> T:
        """Wait for an answer; raise `TimeoutError`. A later answer is dropped."""
        bell = asyncio.Event()
        asked.add_done_callback(lambda _: self._call(bell.set))
        async with asyncio.timeout(timeout_s):
            await bell.wait()
        return asked.result()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call in the event loop, from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # closed: the agent ends
                self._loop.call_soon_threadsafe(function, *arguments)

    def _take_answer(self, gpu: _Gpu, done: Future[Look | ReadFailure]) -> None:
        self._answered.set()
        if gpu not in self._gpus or done.cancelled():
            return  # of an NVML that was closed
        gpu.is_silent = False
        error = done.exception()
        answer = ReadFailure(message=str(error)) if error is not None else done.result()
        if isinstance(answer, ReadFailure):
            gpu.failure = answer
            if gpu.uuid is not None:
                self._observe(gpu.uuid, answer)
        else:
            gpu.failure = None
            self._see(gpu, answer)
        self._update()

    def _see(self, gpu: _Gpu, look: Look) -> None:
        device = look.device
        gpu.uuid = device.uuid
        for uuid, other in list(self._devices.items()):
            if uuid != device.uuid and other.pci_bus_id == device.pci_bus_id:
                del self._devices[uuid]
                self._slices.pop(uuid, None)
                self._observe(uuid, Gone(is_replaced=True))
        self._devices[device.uuid] = device
        self._slices[device.uuid] = look.slices
        self._observe(device.uuid, look)

    def _deliver(self, event: GpuEvent) -> None:
        """Pass a report to the event loop; in the thread of its listener."""
        self._call(self._take_report, event)

    def _take_report(self, event: GpuEvent) -> None:
        """Take a report, and ask the GPU: by the next poll a lost one may be back."""
        self._observe(event.uuid, event)
        now = time.monotonic()
        for gpu in self._gpus:
            # Not by the time of any question: the GPU may be lost and found between two polls.
            if gpu.uuid == event.uuid and now - gpu.looked_again_at >= LOOK_AGAIN_S:
                gpu.looked_again_at = now
                self._ask(gpu)

    def _observe(self, uuid: str, sighting: Sighting) -> None:
        for observer in self._observers:
            observer(uuid, sighting)

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._signal.notify()

    def _update(self) -> None:
        """Publish the inventory if it changed."""
        problems = []
        by_uuid = {gpu.uuid: gpu for gpu in self._gpus if gpu.uuid is not None}
        for gpu in self._gpus:
            if gpu.problem is not None:
                device = self._devices.get(gpu.uuid or "")
                problems.append(Problem(gpu.index, gpu.uuid, gpu.problem, device))
        if all(gpu.uuid is not None for gpu in self._gpus):
            for uuid, device in self._devices.items():
                if uuid not in by_uuid:
                    missing = self._missing.get(uuid, Gone())
                    why = (isinstance(missing, Gone) and self._problem) or missing.reason
                    problems.append(Problem(device.index, uuid, why, device))
        devices = sorted(self._devices.values(), key=lambda each: (each.index, each.uuid))
        slices = tuple(each for gpu in devices for each in self._slices.get(gpu.uuid, ()))
        made = Inventory(devices=tuple(devices), problems=tuple(problems), slices=slices)
        if made != self._current:
            self._current = made
            self._signal.notify()

    async def _close(self) -> None:
        """Close NVML; threads that hang in it are left."""
        hangs = self._is_anyone_asked()
        for gpu in self._gpus:
            gpu.close()
        hangs = not await asyncio.to_thread(self._listeners.close) or hangs
        self._gpus = []
        # The library cannot be shut down under a call, and the process ends anyway.
        if self._session.is_simulated or not hangs:
            await self._shut_down()
        self._nvml.close()
        self._kernel.close()

    async def _shut_down(self) -> None:
        """Close NVML in its own thread, after an open question."""
        if self._surveyed is not None:
            with suppress(TimeoutError, AllotError):
                await self._outcome(self._surveyed, START_S)
        asked = self._nvml.ask(self._session.close)
        if asked is not None:
            with suppress(TimeoutError):
                await self._outcome(asked, self._patience_s)
