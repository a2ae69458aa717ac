# SPDX-License-Identifier: Apache-2.0
"""The node's GPUs, watched: what there is, who answers, and what they report.

    watch = GpuWatch(machine=None)              # the driver's, or a simulated machine's
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch.run())
        await watch.first_look()                # whoever answers soon is listed
        async for inventory in watch.changes(): # devices, and the problems of those that are silent

Every GPU is asked by a thread of its own every few seconds (`devices.watching`) and listened to by
another (`devices.events`); the loop only takes in what they say. A GPU that hangs in every call
therefore costs idle threads, and nobody waits for it. NVML keeps no report for whoever comes later,
so a GPU is registered before its first answer is taken in: whoever knows of it is told of it.

A GPU that has answered once stays listed, with a problem while it is silent, lost or gone: the node
has it, and cannot use it. Only when another one is found in its place is it dropped. What MIG has
cut it into is asked with it, so that slices are listed and withdrawn as they come and go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from allotment.agent.health.sightings import Answered, Failed, Gone, Sighting, Silent
from allotment.devices.events import GpuEvent, Listeners
from allotment.devices.sources import Inventory, Problem
from allotment.devices.watching import Asker, Failure, Look, Session
from allotment.model.devices import Device
from allotment.model.errors import AllotError, NoDevicesError

__all__ = ["Bells", "GpuWatch"]

PATIENCE_S: Final = 1.5
"""How long a GPU may take to answer before it is called silent, and the others go on."""
QUIET_S: Final = 0.5
"""At the start, how long the others wait after the last answer for those that have said nothing:
these are listed when they answer."""
POLL_S: Final = 5.0
LOOK_AGAIN_S: Final = 1.0
"""So long a GPU that reports something is not looked at again: some report without end."""
TEST_S: Final = 8.0
"""How long a test waits for a GPU: a slow one, which has to be woken first, is no sick one."""
START_S: Final = 60.0
"""How long NVML may take to start. Without persistence mode, seconds for each GPU are usual."""
_RETRY_MOST_S: Final = 30.0
_NOT_IN_TIME: Final = "it has not answered in time"

T = TypeVar("T")


class Bells:
    """Wakes everyone who waits for changes; changes while one is busy make one waking."""

    __slots__ = ("_bells",)

    def __init__(self) -> None:
        self._bells: set[asyncio.Event] = set()

    def ring(self) -> None:
        """Something changed."""
        for bell in self._bells:
            bell.set()

    @contextmanager
    def hung(self) -> Iterator[asyncio.Event]:
        """Take part, for as long as the block runs."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)


class _Gpu:
    """One of NVML's numbers, while NVML is initialised."""

    __slots__ = ("asked", "asker", "failure", "index", "is_silent", "looked_again_at", "uuid")

    def __init__(self, index: int) -> None:
        self.index = index
        self.asker = Asker(f"nvml-{index}")
        self.asked: Future[Look | Failure] | None = None
        """The question that it was asked last."""
        self.looked_again_at = float("-inf")
        """When it was asked for a report's sake last."""
        self.uuid: str | None = None
        self.failure: Failure | None = None
        self.is_silent = False

    @property
    def problem(self) -> str | None:
        """Return what keeps it from being used; None: nothing."""
        if self.is_silent:
            return _NOT_IN_TIME
        return None if self.failure is None else self.failure.message


class GpuWatch:
    """The GPUs of this node. All of it belongs to one event loop; `run` has to be running."""

    def __init__(
        self,
        *,
        machine: Path | None = None,
        fails_without: bool = False,
        offerable: Callable[[Sequence[Device]], tuple[Device, ...]] = tuple,
        patience_s: float = PATIENCE_S,
        poll_s: float = POLL_S,
        test_s: float = TEST_S,
    ) -> None:
        """Watch the driver's GPUs, or those of a simulated machine.

        `fails_without`: `run` raises `NoDevicesError` when NVML cannot be had at the start
        (`failOnInitError`); else it is tried again, and `problem` says why there are none.
        `offerable` chooses among a GPU's MIG devices, in its thread.
        """
        self._session = Session(machine)
        self._fails_without = fails_without
        self._offerable = offerable
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._test_s = test_s
        self._nvml = Asker("nvml")
        self._surveyed: Future[tuple[int, bool]] | None = None
        self._signature: object = None
        self._gpus: list[_Gpu] = []
        self._devices: dict[str, Device] = {}
        self._slices: dict[str, tuple[Device, ...]] = {}
        """The MIG devices that each GPU told of last, by its UUID."""
        self._listeners = Listeners(self._session, self._deliver)
        self._problem: str | None = "the GPUs have not been looked at yet"
        self._looked = asyncio.Event()
        self._heard_all = asyncio.Event()
        self._failed: NoDevicesError | None = None
        self._bells = Bells()
        self._hearers: list[Callable[[Sighting], None]] = []
        self._current = Inventory(devices=(), problems=())
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- what others see ----

    @property
    def current(self) -> Inventory:
        """Every GPU that has answered since the start, and a problem for each that does not now.

        The problems of GPUs that never answered have no device.
        """
        return self._current

    @property
    def problem(self) -> str | None:
        """Return why GPUs cannot be looked at at all; None: they are."""
        return self._problem

    def listening(self) -> frozenset[str]:
        """Return the UUIDs of those whose reports are heard."""
        return self._listeners.listening()

    async def first_look(self) -> Inventory:
        """Wait until those that answer soon have answered, or it is known that none can.

        Raises `NoDevicesError` where NVML is a must and is not there.
        """
        await self._looked.wait()
        if self._failed is not None:
            raise self._failed
        return self._current

    async def changes(self) -> AsyncGenerator[Inventory, None]:
        """Yield what there is, now and each time that it has changed."""
        with self._bells.hung() as bell:
            last = None
            while True:
                bell.clear()
                if self._current != last:
                    last = self._current
                    yield last
                else:
                    await bell.wait()

    def hear(self, hearer: Callable[[Sighting], None]) -> None:
        """Call `hearer` in the event loop with everything that is seen from now on."""
        self._hearers.append(hearer)

    async def test(self, uuid: str) -> Look | str:
        """Ask a GPU at once; return what it says, or what is wrong, within `test_s`."""
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the GPU was not asked
            return str(error) or type(error).__name__
        return answer if isinstance(answer, Look) else answer.message

    # ---- the loop ----

    async def run(self) -> None:
        """Watch until cancelled. Raises `NoDevicesError`, see `fails_without`."""
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
        """See to it that NVML is there, and that its GPUs are ours. False: it is not."""
        asked = self._nvml.ask(self._count)
        if asked is None:
            return bool(self._gpus)  # it is being asked still; the GPUs go on as they are
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
                self._forget_gpus(Failure(message=error.message, is_driver=True))
            return False
        if is_new:
            self._forget_gpus(None)
        self._take_stock(count)
        self._set_problem(None if count else "the driver has no GPU")
        return True

    def _count(self) -> tuple[int, bool]:
        """Open NVML, or open it anew where it does not see what is there; in its own thread."""
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
                # From the beginning next time: what was initialised on nothing stays so.
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
        """Tell whether nobody is in a call, which would be on a library that has been shut down."""
        if self._is_anyone_asked():
            return False
        return self._listeners.close()

    def _is_anyone_asked(self) -> bool:
        return any(each.asker.asked_at is not None for each in self._gpus)

    def _take_stock(self, count: int) -> None:
        """Have one GPU for each of NVML's numbers; what was known of devices stays known."""
        if self._listeners.is_closed:
            self._listeners = Listeners(self._session, self._deliver)
        for gpu in self._gpus[count:]:
            gpu.asker.close()
            self._listeners.leave(gpu.index)
        self._gpus[count:] = [_Gpu(index) for index in range(len(self._gpus), count)]

    def _forget_gpus(self, failure: Failure | None) -> None:
        for gpu in self._gpus:
            gpu.asker.close()
            if failure is not None and gpu.uuid is not None:
                self._tell(_failed(gpu.uuid, failure))
        self._listeners.close(wait_s=0)
        self._gpus = []
        if failure is not None:
            self._update()

    async def _poll(self) -> None:
        """Ask every GPU that is not still thinking, and give them time to answer."""
        asked = [gpu for gpu in self._gpus if self._ask(gpu)]
        is_first = not self._looked.is_set()
        quiet_s = min(QUIET_S, self._patience_s) if is_first else self._patience_s
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._patience_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(latest) as end:
                while any(gpu.asked is not None and not gpu.asked.done() for gpu in asked):
                    self._heard_all.clear()
                    await self._heard_all.wait()
                    if is_first:
                        end.reschedule(min(latest, loop.time() + quiet_s))
        now = time.monotonic()
        for gpu in self._gpus:
            since = gpu.asker.asked_at
            for_s = 0.0 if since is None else now - since
            # Half: another look at it may have been asked for in the meantime.
            if for_s >= quiet_s / 2:
                gpu.is_silent = True
                if gpu.uuid is not None:
                    self._tell(Silent(uuid=gpu.uuid, for_s=for_s))
        present = {gpu.uuid for gpu in self._gpus}
        if all(gpu.uuid is not None for gpu in self._gpus):
            for uuid in self._devices:
                if uuid not in present:
                    self._tell(Gone(uuid=uuid))
        self._update()

    def _ask(self, gpu: _Gpu) -> bool:
        """Ask how it is. False: it is still thinking about the last time."""
        session, listeners, index = self._session, self._listeners, gpu.index
        offerable = self._offerable

        def look() -> Look | Failure:
            found = session.look(index)
            if isinstance(found, Look):
                listeners.listen(index, found.device.uuid)
                found = replace(found, slices=offerable(found.slices))
            return found

        asked = gpu.asker.ask(look)
        if asked is None:
            return False
        gpu.asked = asked
        asked.add_done_callback(lambda done: self._call(self._heard, gpu, done))
        return True

    async def _outcome(self, asked: Future[T], timeout_s: float) -> T:
        """Wait for an answer, which may come later and be nobody's; raise `TimeoutError`."""
        bell = asyncio.Event()
        asked.add_done_callback(lambda _: self._call(bell.set))
        async with asyncio.timeout(timeout_s):
            await bell.wait()
        return asked.result()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Call in the event loop, from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed: nobody wants to know any more
                self._loop.call_soon_threadsafe(function, *arguments)

    def _heard(self, gpu: _Gpu, done: Future[Look | Failure]) -> None:
        """Take in an answer, whenever it comes."""
        self._heard_all.set()
        if gpu not in self._gpus or done.cancelled():
            return  # of an NVML that was left
        gpu.is_silent = False
        error = done.exception()
        answer = Failure(message=str(error)) if error is not None else done.result()
        if isinstance(answer, Failure):
            gpu.failure = answer
            if gpu.uuid is not None:
                self._tell(_failed(gpu.uuid, answer))
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
                self._tell(Gone(uuid=uuid, is_replaced=True))
        self._devices[device.uuid] = device
        self._slices[device.uuid] = look.slices
        self._tell(Answered(uuid=device.uuid, device=device, vitals=look.vitals))

    def _deliver(self, event: GpuEvent) -> None:
        """Pass on a report; in the thread of its listener."""
        self._call(self._hear_report, event)

    def _hear_report(self, event: GpuEvent) -> None:
        """Take in a report, and look how the GPU is: what is lost may be back at the next poll."""
        self._tell(event)
        now = time.monotonic()
        for gpu in self._gpus:
            # Not by when it was asked at all: between two rounds it may have been lost and found.
            if gpu.uuid == event.uuid and now - gpu.looked_again_at >= LOOK_AGAIN_S:
                gpu.looked_again_at = now
                self._ask(gpu)

    def _tell(self, sighting: Sighting) -> None:
        for hearer in self._hearers:
            hearer(sighting)

    def _set_problem(self, problem: str | None) -> None:
        if problem != self._problem:
            self._problem = problem
            self._bells.ring()

    def _update(self) -> None:
        """Publish what there is, if that is something else than before."""
        problems = []
        by_uuid = {gpu.uuid: gpu for gpu in self._gpus if gpu.uuid is not None}
        for gpu in self._gpus:
            if gpu.problem is not None:
                device = self._devices.get(gpu.uuid or "")
                problems.append(Problem(gpu.index, gpu.uuid, gpu.problem, device))
        if all(gpu.uuid is not None for gpu in self._gpus):
            gone = self._problem or "the driver does not list it any more"
            for uuid, device in self._devices.items():
                if uuid not in by_uuid:
                    problems.append(Problem(device.index, uuid, gone, device))
        devices = sorted(self._devices.values(), key=lambda each: (each.index, each.uuid))
        slices = tuple(each for gpu in devices for each in self._slices.get(gpu.uuid, ()))
        made = Inventory(devices=tuple(devices), problems=tuple(problems), slices=slices)
        if made != self._current:
            self._current = made
            self._bells.ring()

    async def _close(self) -> None:
        """Let NVML go; a thread that hangs in it is left to hang."""
        hangs = self._is_anyone_asked()
        for gpu in self._gpus:
            gpu.asker.close()
        hangs = not await asyncio.to_thread(self._listeners.close) or hangs
        self._gpus = []
        # The driver's library is not shut down under a call; the process is about to end anyway.
        if self._session.is_simulated or not hangs:
            await self._shut_down()
        self._nvml.close()

    async def _shut_down(self) -> None:
        """Let NVML go in its thread, which may be asking something just now."""
        if self._surveyed is not None:
            with suppress(TimeoutError, AllotError):
                await self._outcome(self._surveyed, START_S)
        asked = self._nvml.ask(self._session.close)
        if asked is not None:
            with suppress(TimeoutError):
                await self._outcome(asked, self._patience_s)


def _failed(uuid: str, failure: Failure) -> Failed:
    return Failed(
        uuid=uuid,
        message=failure.message,
        is_lost=failure.is_lost,
        needs_reset=failure.needs_reset,
        is_driver=failure.is_driver,
    )
