# SPDX-License-Identifier: Apache-2.0
"""`allotment.devices.events` and `watching` on simulated machines: reports, vitals, hung GPUs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allotment.devices import faults
from allotment.devices.events import EventKind, GpuEvent, Listeners
from allotment.devices.nvml import Nvml
from allotment.devices.simulated import SimulatedMachine
from allotment.devices.watching import Asker, Look, NvmlSession, ReadFailure
from allotment.model.errors import NoDevicesError

pytestmark = pytest.mark.usefixtures("native_dir")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail(what)


@contextmanager
def opened(path: Path) -> Iterator[NvmlSession]:
    session = NvmlSession(path)
    session.open()
    try:
        yield session
    finally:
        session.close()


@contextmanager
def heard(path: Path) -> Iterator[tuple[list[GpuEvent], Listeners, list[str]]]:
    """Everything that a machine's GPUs report, each being listened to unless it hangs."""
    events: list[GpuEvent] = []
    uuids = [device.uuid for device in SimulatedMachine(path).devices()]
    with opened(path) as session:
        listeners = Listeners(session, events.append)
        for index, uuid in enumerate(uuids):
            threading.Thread(target=listeners.listen, args=(index, uuid), daemon=True).start()
        try:
            yield events, listeners, uuids
        finally:
            listeners.close()


def test_an_xid_is_heard_once_and_from_its_gpu(machine: Callable[[str], Path]) -> None:
    path = machine("t4:3")
    faults.set_fault(path, 1, xid=13)  # before: not heard
    with heard(path) as (events, listeners, uuids):
        wait_until(lambda: listeners.listening() == set(uuids), "they do not register")
        faults.set_fault(path, 1, xid=31)
        faults.set_fault(path, 2, xid=79)
        wait_until(lambda: len(events) == 2, f"heard {events}")
        found = {(event.uuid, event.kind, event.xid) for event in events}
    assert found == {(uuids[1], EventKind.XID, 31), (uuids[2], EventKind.XID, 79)}


def test_an_uncorrected_memory_error_is_xid_48(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb")
    with heard(path) as (events, listeners, uuids):
        wait_until(lambda: bool(listeners.listening()), "it does not register")
        faults.set_fault(path, 0, counters={"ecc_volatile_uncorrected": 1})
        wait_until(lambda: bool(events), "nothing is heard")
    (event,) = events
    assert (event.uuid, event.kind, event.xid) == (uuids[0], EventKind.DOUBLE_BIT_ECC, 48)
    assert (event.gpu_instance, event.compute_instance) == (None, None)


def test_a_gpu_that_hangs_or_is_lost_keeps_no_other_from_being_heard(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4:3")
    others = set(threading.enumerate())
    faults.set_fault(path, 0, hang_us=60_000_000)
    with heard(path) as (events, listeners, uuids):
        wait_until(lambda: listeners.listening() == {uuids[1], uuids[2]}, "they do not register")
        faults.set_fault(path, 1, lost=True)
        faults.set_fault(path, 2, xid=31)
        wait_until(lambda: len(events) == 2, f"heard {events}")
        assert {(event.uuid, event.xid) for event in events} == {(uuids[1], 79), (uuids[2], 31)}
        faults.set_fault(path, 1, lost=False, xid=13)
        wait_until(lambda: len(events) == 3, "what it reports when it is back is not heard")
        assert listeners.close(), "none of those that were registered hangs"
        # Who is registered only now, in the middle of an agent's end, is let go.
        faults.set_fault(path, 0, hang_us=0)
        wait_until(lambda: not set(threading.enumerate()) - others, "its threads go on")
        assert listeners.listening() == set()


def test_what_is_reported_right_after_it_is_listened_to_is_heard(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4")
    (device,) = SimulatedMachine(path).devices()
    with opened(path) as session:
        for xid in range(1, 20):
            events: list[GpuEvent] = []
            listeners = Listeners(session, events.append)
            listeners.listen(0, device.uuid)
            faults.set_fault(path, 0, xid=xid)
            wait_until(lambda: bool(events), "nothing is heard")  # noqa: B023 - of this round
            assert listeners.close()
            assert [event.xid for event in events] == [xid]


def test_another_gpu_in_the_same_place_is_listened_to_by_its_own_name(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4")
    with heard(path) as (events, listeners, uuids):
        wait_until(lambda: listeners.listening() == set(uuids), "it does not register")
        listeners.listen(0, "GPU-another")
        assert listeners.listening() == {"GPU-another"}
        faults.set_fault(path, 0, xid=31)
        wait_until(lambda: bool(events), "nothing is heard")
    assert [event.uuid for event in events] == ["GPU-another"]


def test_who_is_not_followed_any_more_is_not_heard(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    others = set(threading.enumerate())  # of tests with GPUs that hang
    with heard(path) as (events, listeners, uuids):
        wait_until(lambda: len(listeners.listening()) == 2, "they do not register")
        wait_until(lambda: len(set(threading.enumerate()) - others) == 2, "not a thread for each")
        listeners.leave(0)
        listeners.listen(1, uuids[1])  # as it is
        wait_until(lambda: len(set(threading.enumerate()) - others) == 1, "its thread goes on")
        faults.set_fault(path, 0, xid=31)
        faults.set_fault(path, 1, xid=31)
        wait_until(lambda: bool(events), "nothing is heard")
        assert [event.uuid for event in events] == [uuids[1]]
    assert set(threading.enumerate()) <= others


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


# ---- looks ---------------------------------------------------------------------------------------


def test_a_look_has_device_and_vitals(machine: Callable[[str], Path]) -> None:
    path = machine("a100-80gb,t4,rtx4090")
    with opened(path) as session:
        assert session.count() == 3
        looks = [session.look(index) for index in range(3)]
        assert all(isinstance(look, Look) for look in looks)
        ampere, turing, ada = (look.vitals for look in looks if isinstance(look, Look))
        assert [look.device for look in looks if isinstance(look, Look)] == list(
            SimulatedMachine(path).devices()
        )
        assert (ampere.ecc_uncorrected, ampere.is_repair_pending) == (0, False)
        assert ampere.is_repair_failed is False
        assert (turing.is_repair_pending, turing.is_repair_failed) == (False, None)
        assert ada.ecc_uncorrected in {0, None}
        faults.set_fault(
            path, 0, counters={"ecc_volatile_uncorrected": 2, "ecc_volatile_corrected": 7}
        )
        look = session.look(0)
        assert isinstance(look, Look)
        assert (look.vitals.ecc_uncorrected, look.vitals.ecc_corrected) == (2, 7)


def test_an_error_says_what_kind_it_is(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    faults.set_fault(path, 0, lost=True)
    with opened(path) as session:
        lost = session.look(0)
        assert lost == ReadFailure(message="NVML: GPU is lost", is_lost=True)
        beyond = session.look(5)
        assert isinstance(beyond, ReadFailure)
        assert not beyond.is_lost


def test_a_session_outlives_others_that_come_and_go(machine: Callable[[str], Path]) -> None:
    path = machine("t4:2")
    with opened(path) as session:
        for _ in range(3):
            with Nvml(machine=path) as source:
                assert len(source.inventory().devices) == 2
            assert isinstance(session.look(0), Look)
    other = machine("h200")
    with Nvml(machine=other) as source:
        (device,) = source.inventory().devices
    assert device.name == "NVIDIA H200"


def test_a_driver_that_is_not_loaded_is_said_and_tried_again(
    machine: Callable[[str], Path],
) -> None:
    path = machine("t4")
    faults.set_driver_fault(path, nvml_not_loaded=True)
    session = NvmlSession(path)
    with pytest.raises(NoDevicesError, match="Driver Not Loaded"):
        session.open()
    with pytest.raises(NoDevicesError, match="not initialised"):
        session.count()
    faults.clear_faults(path)
    session.open()
    assert session.count() == 1
    session.close()


# ---- askers --------------------------------------------------------------------------------------


def test_one_question_at_a_time_and_one_thread() -> None:
    asker, release = Asker("asker-test"), threading.Event()
    first = asker.ask(lambda: release.wait(30))
    assert first is not None
    assert [asker.ask(time.monotonic) for _ in range(100)] == [None] * 100
    assert threads("asker-test") == 1
    release.set()
    assert first.result(30)
    second = asker.ask(lambda: 7)
    assert second is not None
    assert second.result(30) == 7
    asker.close()
    wait_until(lambda: threads("asker-test") == 0, "its thread goes on")
    assert asker.ask(lambda: 8) is None, "it was closed"


def test_an_answer_may_ask_the_next_question() -> None:
    asker, done = Asker("asker-test"), threading.Event()
    first = asker.ask(lambda: 1)
    assert first is not None

    def again(_: object) -> None:
        if asker.ask(lambda: 2) is not None:
            done.set()

    first.add_done_callback(again)
    assert done.wait(30)
    asker.close()


def test_an_error_is_the_answer() -> None:
    asker = Asker("asker-test")
    asked = asker.ask(lambda: 1 // 0)
    assert asked is not None
    with pytest.raises(ZeroDivisionError):
        asked.result(30)
    assert asker.asked_at is None
    asker.close()
