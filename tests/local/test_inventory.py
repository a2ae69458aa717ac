# SPDX-License-Identifier: Apache-2.0
"""The agent's inventory and health on simulated machines whose GPUs break in every way they can."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from allotment.agent.health.records import HealthState, Need, Rules
from allotment.agent.health.watching import HealthWatch
from allotment.agent.health.xids import XidPolicy
from allotment.agent.inventory import Gone, GpuWatch, Hidden, Sighting
from allotment.devices import faults, layout
from allotment.devices.events import GpuEvent
from allotment.devices.simulated import SimulatedMachine, reset_gpu
from allotment.devices.watching import OFF_BUS, Look, NvmlSession
from allotment.model.errors import NoDevicesError
from allotment.model.pods import Owner, Pod

pytestmark = pytest.mark.usefixtures("native_dir")

FOR_EVER_US = 60_000_000
"""For each call, while the fault stands."""


class Silence:
    """`Reports` to nobody."""

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        pass

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        pass

    def count(self, name: str, **labels: str) -> None:
        pass

    def observe(self, name: str, value: float, **labels: str) -> None:
        pass

    def gauge(self, name: str, value: float, **labels: str) -> None:
        pass


@asynccontextmanager
async def watching(
    watch: GpuWatch, *others: Coroutine[object, object, None]
) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in (watch.run(), *others)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        # All of them have to have ended: NVML is the whole process's.
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [each for each in ended if not isinstance(each, asyncio.CancelledError)] == []


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(90):
        while not holds():  # noqa: ASYNC110 - anything may make it hold
            await asyncio.sleep(0.02)


def uuids_of(path: Path) -> list[str]:
    return [device.uuid for device in SimulatedMachine(path).devices()]


def listed(watch: GpuWatch) -> list[str]:
    return [device.uuid for device in watch.current.devices]


def troubled(watch: GpuWatch) -> dict[str | None, str]:
    return {problem.uuid: problem.message for problem in watch.current.problems}


def quick(path: Path, patience_s: float = 20.0) -> GpuWatch:
    """A watch that looks often. Only where a GPU hangs is the patience ever used up."""
    return GpuWatch(machine=path, patience_s=patience_s, poll_s=0.1, test_s=patience_s)


def test_of_16_gpus_one_hangs_and_the_others_are_there(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb:16")
    uuids = uuids_of(path)
    faults.set_fault(path, 3, hang_us=FOR_EVER_US)

    async def script() -> None:
        watch = GpuWatch(machine=path)
        async with watching(watch):
            inventory = await watch.first_look()
            assert [each.uuid for each in inventory.devices] == uuids[:3] + uuids[4:]
            (problem,) = inventory.problems
            assert (problem.index, problem.message) == (3, "it has not answered in time")
            assert watch.problem is None

    asyncio.run(script())


def test_at_the_start_who_is_late_keeps_nobody_waiting_and_comes_after(
    machine: Callable[[str], Path],
) -> None:
    path = machine("a100-80gb:4")
    uuids = uuids_of(path)
    faults.set_fault(path, 2, hang_us=FOR_EVER_US)

    async def script() -> None:
        # Who is asked for the first time may take so long; the others are not to wait for that.
        watch = GpuWatch(machine=path, patience_s=3600, poll_s=0.1)
        async with watching(watch):
            inventory = await watch.first_look()
            assert [each.uuid for each in inventory.devices] == uuids[:2] + uuids[3:]
            (problem,) = inventory.problems
            assert (problem.index, problem.uuid) == (2, None)
            faults.clear_faults(path)
            await until(lambda: listed(watch) == uuids and not watch.current.problems)

    asyncio.run(script())


def test_a_gpu_is_listened_to_before_it_is_listed_however_late_it_is(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4:3")
    uuids = uuids_of(path)
    faults.set_fault(path, 1, hang_us=FOR_EVER_US)

    async def script() -> None:
        # The second look is an hour away: that who is late is heard is not its doing.
        watch, heard = GpuWatch(machine=path, patience_s=0.5, poll_s=3600.0), list[GpuEvent]()
        watch.subscribe(lambda _, seen: heard.append(seen) if isinstance(seen, GpuEvent) else None)
        async with watching(watch), asyncio.timeout(90):
            async for inventory in watch.changes():
                assert {device.uuid for device in inventory.devices} <= watch.listening()
                if len(inventory.devices) == len(uuids):
                    break
                faults.set_fault(path, 1, hang_us=0)
            # NVML keeps no report for whoever comes later.
            for index in range(len(uuids)):
                faults.set_fault(path, index, xid=31)
            await until(lambda: {each.uuid for each in heard} == set(uuids))

    asyncio.run(script())


def test_a_gpu_that_hangs_later_stays_listed_and_costs_one_thread(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4:3")
    uuids = uuids_of(path)

    async def script() -> None:
        watch = quick(path, patience_s=2.0)
        async with watching(watch):
            await watch.first_look()
            await until(lambda: watch.listening() == set(uuids))
            threads = set(threading.enumerate())
            faults.set_fault(path, 1, hang_us=FOR_EVER_US)
            answers: list[tuple[str, Sighting]] = []
            watch.subscribe(lambda *seen: answers.append(seen))
            await until(lambda: troubled(watch) == {uuids[1]: "it has not answered in time"})
            assert listed(watch) == uuids
            for _ in range(4):
                assert isinstance(await watch.test(uuids[1]), str)
                assert isinstance(await watch.test(uuids[2]), Look)
            assert set(threading.enumerate()) <= threads
            others = [uuid for uuid, each in answers if isinstance(each, Look) and uuid != uuids[1]]
            assert len(others) > 10, "it held up the others"
            faults.set_fault(path, 1, hang_us=0)
            await until(lambda: troubled(watch) == {})

    asyncio.run(script())


def test_a_gpu_that_hangs_delays_one_scrape_and_no_other_gpu(
    machine: Callable[[str], Path],
) -> None:
    path = machine("a100-80gb:4")
    uuids = uuids_of(path)

    async def script() -> None:
        watch = quick(path, patience_s=1.0)
        async with watching(watch):
            await watch.first_look()
            first = await asyncio.to_thread(watch.reports, patience_s=60)
            assert set(first) == set(uuids)
            assert first[uuids[0]].gauges.sm_clock_mhz
            faults.set_fault(path, 1, hang_us=FOR_EVER_US)
            hung = await asyncio.to_thread(watch.reports, patience_s=1)
            assert set(hung) == {*uuids} - {uuids[1]}
            began = time.monotonic()
            again = await asyncio.to_thread(watch.reports, patience_s=60)
            assert set(again) == set(hung)
            assert time.monotonic() - began < 30  # it has not waited for that one
            faults.set_fault(path, 1, hang_us=0)

    asyncio.run(script())


def test_a_gpu_that_is_lost_stays_listed_and_comes_back(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    uuids = uuids_of(path)

    async def script() -> None:
        watch = quick(path)
        async with watching(watch):
            await watch.first_look()
            changes = watch.changes()
            assert (await anext(changes)).problems == ()
            faults.set_fault(path, 0, lost=True)
            inventory = await anext(changes)
            (problem,) = inventory.problems
            assert (problem.uuid, problem.message) == (uuids[0], "NVML: GPU is lost")
            assert problem.device is not None
            assert listed(watch) == uuids
            faults.set_fault(path, 0, lost=False)
            assert (await anext(changes)).problems == ()
            await changes.aclose()

    asyncio.run(script())


@pytest.mark.parametrize("is_hung", [False, True])
def test_a_gpu_that_was_lost_before_the_start_is_gone(
    machine: Callable[[str], Path], *, is_hung: bool
) -> None:
    """Another one that hangs may be the expected one: then no decision is possible."""
    path = machine("t4:3")
    uuids = uuids_of(path)
    faults.set_fault(path, 0, lost=True)
    if is_hung:
        faults.set_fault(path, 1, hang_us=FOR_EVER_US)

    async def script() -> None:
        gone = set[str]()
        watch = GpuWatch(machine=path, patience_s=0.5, poll_s=0.1, expected=lambda: uuids)
        watch.subscribe(lambda uuid, seen: gone.add(uuid) if isinstance(seen, Gone) else None)
        async with watching(watch):
            await watch.first_look()
            if is_hung:
                await watch.test(uuids[2])
                assert gone == set()
                faults.set_fault(path, 1, hang_us=0)
            await until(lambda: gone == {uuids[0]})
            assert uuids[0] not in listed(watch)

    asyncio.run(script())


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_a_gpu_that_the_agent_may_not_use_is_hidden_and_not_gone(
    machine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    """Its programs go on, unless it has fallen off the bus; NVML does not list it either way."""
    path = machine("t4:3")
    uuids, other = uuids_of(path), "GPU-00000000-1111-2222-3333-444444444444"
    monkeypatch.setenv("ALLOTMENT_SIMULATED_DEVICES", ",".join(uuids[1:]))
    if lost is not None:
        faults.set_fault(path, lost, lost=True)

    async def script() -> None:
        seen = dict[str, Sighting]()
        watch = GpuWatch(machine=path, patience_s=2.0, poll_s=0.1, expected=lambda: [*uuids, other])
        watch.subscribe(lambda uuid, sighting: seen.update({uuid: sighting}))
        async with watching(watch):
            await until(lambda: seen.keys() == {*uuids, other})
            assert seen[uuids[0]] == (Gone(reason=OFF_BUS) if lost == 0 else Hidden())
            if lost == 1:
                assert seen[uuids[1]] == Gone(reason=OFF_BUS)
            else:
                assert isinstance(seen[uuids[1]], Look)
            assert isinstance(seen[uuids[2]], Look)
            assert seen[other] == Gone()

    asyncio.run(script())


def test_a_missing_gpu_is_not_called_lost_before_the_kernel_answers(
    machine: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = machine("t4:2")
    uuids = uuids_of(path)
    monkeypatch.setenv("ALLOTMENT_SIMULATED_DEVICES", uuids[1])
    may_answer = threading.Event()

    def no_gpus(_: NvmlSession) -> Mapping[str, bool]:
        may_answer.wait()
        return {}

    monkeypatch.setattr(NvmlSession, "driver_gpus", no_gpus)

    async def script() -> None:
        seen = dict[str, Sighting]()
        watch = GpuWatch(machine=path, patience_s=0.5, poll_s=0.1, expected=lambda: uuids)
        watch.subscribe(lambda uuid, sighting: seen.update({uuid: sighting}))
        async with watching(watch):
            await until(lambda: isinstance(seen.get(uuids[0]), Hidden))
            may_answer.set()
            await until(lambda: isinstance(seen[uuids[0]], Gone))

    try:
        asyncio.run(script())
    finally:
        may_answer.set()


def test_a_gpu_that_reports_something_is_looked_at_before_its_time(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4:2")
    uuids = uuids_of(path)

    async def script() -> None:
        watch = GpuWatch(machine=path, patience_s=20.0, poll_s=3600.0)
        async with watching(watch):
            await watch.first_look()
            await until(lambda: watch.listening() == set(uuids))
            await asyncio.sleep(1.0)  # those that have just been looked at are not
            faults.set_fault(path, 0, lost=True)
            await until(lambda: set(troubled(watch)) == {uuids[0]})

    asyncio.run(script())


def test_another_uuid_in_the_same_place_is_another_gpu(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    uuids = uuids_of(path)
    new = "GPU-00000000-1111-2222-3333-444444444444"

    async def script() -> None:
        watch, seen = quick(path), list[tuple[str, Sighting]]()
        watch.subscribe(lambda *sighting: seen.append(sighting))
        async with watching(watch):
            await watch.first_look()
            rename_gpu(path, 1, new)
            await until(lambda: listed(watch) == [uuids[0], new])
            assert (uuids[1], Gone(is_replaced=True)) in seen
            await until(lambda: watch.listening() == {uuids[0], new})

    asyncio.run(script())


def rename_gpu(path: Path, index: int, uuid: str) -> None:
    at = layout.MACHINE_FIELDS["gpus"][0] + index * layout.GPU_SIZE + layout.GPU_FIELDS["uuid"][0]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(uuid.encode().ljust(48, b"\0"))


def test_a_driver_that_is_loaded_anew_with_other_gpus_is_noticed(
    machine: Callable[[str], Path],
) -> None:
    path, other = machine("t4:2"), machine("h200:3")

    async def script() -> None:
        watch = quick(path)
        async with watching(watch):
            await watch.first_look()
            assert len(watch.current.devices) == 2
            wanted = uuids_of(other)
            shutil.move(other, path)
            await until(lambda: set(wanted) <= set(listed(watch)))
            await until(lambda: watch.listening() == set(wanted))
            gone = set(listed(watch)) - set(wanted)
            assert set(troubled(watch)) == gone, "what is gone is listed with a problem"

    asyncio.run(script())


def test_however_early_it_is_ended_nvml_is_let_go(machine: Callable[[str], Path]) -> None:
    paths = [machine("t4:2"), machine("h200:3")]

    async def script() -> None:
        for number in range(30):
            watch = GpuWatch(machine=paths[number % 2], poll_s=0.001)
            async with watching(watch):
                await asyncio.sleep(number * 0.001)
        for path in paths:
            watch = GpuWatch(machine=path)
            async with watching(watch):
                await watch.first_look()
                assert listed(watch) == uuids_of(path)

    asyncio.run(script())


def test_without_nvml_there_is_no_gpu_until_there_is(machine: Callable[[str], Path]) -> None:
    path = machine("t4")
    faults.set_driver_fault(path, nvml_not_loaded=True)

    async def script() -> None:
        watch = quick(path)
        async with watching(watch):
            inventory = await watch.first_look()
            assert (inventory.devices, inventory.problems) == ((), ())
            assert "Driver Not Loaded" in (watch.problem or "")
            faults.clear_faults(path)
            await until(lambda: watch.problem is None)
            await until(lambda: len(watch.current.devices) == 1)

    asyncio.run(script())


def test_without_nvml_the_agent_fails_where_that_is_wanted(machine: Callable[[str], Path]) -> None:
    path = machine("t4")
    faults.set_driver_fault(path, nvml_not_loaded=True)

    async def script() -> None:
        watch = GpuWatch(machine=path, fails_without=True)
        running = asyncio.create_task(watch.run())
        with pytest.raises(NoDevicesError, match="Driver Not Loaded"):
            await watch.first_look()
        with pytest.raises(NoDevicesError):
            await running

    asyncio.run(script())


def test_health_of_gpus_that_break_in_different_ways(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb:5")
    uuids = uuids_of(path)
    lost, hung, hurt, buggy, fine = uuids

    async def script() -> None:
        watch, events = quick(path, patience_s=2.0), list[GpuEvent]()
        rules = Rules(silence_s=4.0, test_pause_s=0.1)
        health = HealthWatch(gpus=watch, policy=XidPolicy(), reports=Silence(), rules=rules)
        watch.subscribe(lambda _, seen: events.append(seen) if isinstance(seen, GpuEvent) else None)
        async with watching(watch, health.run()):
            await watch.first_look()
            await until(lambda: watch.listening() == set(uuids))
            faults.set_fault(path, 0, lost=True)
            faults.set_fault(path, 1, hang_us=FOR_EVER_US)
            faults.set_fault(path, 2, counters={"ecc_volatile_uncorrected": 2})
            faults.set_fault(path, 3, xid=31)
            await until(lambda: set(health.unhealthy) == {lost, hung, hurt})
            await until(lambda: health.records[buggy].state is HealthState.HEALTHY)
            await until(lambda: {each.uuid for each in events} == {lost, hurt, buggy})
            assert health.records[fine].state is HealthState.HEALTHY
            assert isinstance(await watch.test(fine), Look)
            # What was lost is found; what hung answers; the reset clears the counts.
            faults.clear_faults(path)
            await until(lambda: health.unhealthy == {})

    asyncio.run(script())


def test_a_gpu_that_needs_a_reset_is_back_after_it(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb:2,t4")
    broken = uuids_of(path)[2]

    async def script() -> None:
        watch = quick(path)
        rules = Rules(test_pause_s=0.01)
        health = HealthWatch(gpus=watch, policy=XidPolicy(), reports=Silence(), rules=rules)
        async with watching(watch, health.run()):
            await watch.first_look()
            await until(lambda: watch.listening() == set(uuids_of(path)))
            faults.set_fault(path, 2, xid=119)
            await until(lambda: set(health.unhealthy) == {broken})
            assert health.records[broken].need is Need.RESET
            reset_gpu(path, 2)
            await until(lambda: health.unhealthy == {})

    asyncio.run(script())


def test_a_real_librarys_gpus_are_watched_likewise(
    machine: Callable[[str], Path], native_dir: Path
) -> None:
    # Found by its name and without a file to read from, the simulated library is any driver's.
    path = machine("a100-80gb:2")
    code = """
import asyncio, sys
from pathlib import Path
from allotment.agent.inventory import GpuWatch
from allotment.devices import faults
path = Path(sys.argv[1])
async def script():
    seen = []
    watch = GpuWatch(patience_s=5.0, poll_s=0.1)
    watch.subscribe(lambda _, each: seen.append(each))
    running = asyncio.create_task(watch.run())
    inventory = await watch.first_look()
    assert [device.simulated for device in inventory.devices] == [False, False]
    while len(watch.listening()) < 2:
        await asyncio.sleep(0.02)
    faults.set_fault(path, 1, xid=31)
    while not any(getattr(each, "xid", None) == 31 for each in seen):
        await asyncio.sleep(0.02)
    looked = await watch.test(inventory.devices[0].uuid)
    assert looked.vitals.energy_mj is not None, looked
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
asyncio.run(asyncio.wait_for(script(), 90))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, path],
        env={
            **os.environ,
            "ALLOTMENT_SIMULATED_MACHINE": str(path),
            "LD_LIBRARY_PATH": str(native_dir / "simulated"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
