# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.health.watching`: the loop, on an inventory and reports of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from gpus import gpu

from allotment.agent.config.schema import EvictPolicy, HealthConfig
from allotment.agent.health.records import HealthState, Memory, Need, Record, Rules
from allotment.agent.health.watching import HealthWatch, condition
from allotment.agent.health.xids import XidPolicy, policy_of
from allotment.agent.inventory import Gone, Hidden, Sighting, Silent
from allotment.devices.events import EventKind, GpuEvent
from allotment.devices.watching import Look, ReadFailure, Vitals
from allotment.model.devices import Device
from allotment.model.pods import ContainerKind, Owner, Pod, PodUid

ONE, OTHER = "GPU-1", "GPU-2"
QUICK = Rules(test_pause_s=0.01, calm_s=0.0)


def device(uuid: str) -> Device:
    return gpu(uuid=uuid, name="Tesla T4")


def owner(name: str) -> Owner:
    return Owner(
        uid=PodUid(f"uid-{name}"),
        namespace="lab",
        pod=name,
        container="train",
        kind=ContainerKind.REGULAR,
        resource="allotment.dev/gpu",
    )


def xid(number: int, uuid: str = ONE) -> GpuEvent:
    return GpuEvent(uuid=uuid, kind=EventKind.XID, xid=number, at=0.0)


def answered(uuid: str = ONE, vitals: Vitals | None = None) -> Look:
    return Look(device(uuid), vitals or Vitals())


@dataclass
class Reported:
    """`Reports` that keep what they are told."""

    said: list[tuple[str, str, str]] = field(default_factory=list)
    counted: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        del is_warning
        self.said.append((str(subject), reason, message))

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        del is_warning
        self.said.append(("node", reason, message))

    def count(self, name: str, **labels: str) -> None:
        self.counted.append((name, tuple(labels.values())))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError(name, value, labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError(name, value, labels)


@dataclass
class Machine:
    """`Gpus` that answer a test as they are told, each after a while."""

    results: dict[str, list[Look | str]] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    tested: list[str] = field(default_factory=list)
    hearers: list[Callable[[str, Sighting], None]] = field(default_factory=list)

    def subscribe(self, hearer: Callable[[str, Sighting], None]) -> None:
        self.hearers.append(hearer)

    async def test(self, uuid: str) -> Look | str:
        self.tested.append(uuid)
        if uuid in self.slow:
            await asyncio.sleep(3600)
        results = self.results.get(uuid, [])
        return results.pop(0) if results else Look(device(uuid), Vitals())

    def sees(self, *sightings: Sighting, uuid: str = ONE) -> None:
        for sighting in sightings:
            if isinstance(sighting, GpuEvent):
                uuid = sighting.uuid
            if isinstance(sighting, Look):
                uuid = sighting.device.uuid
            for hearer in self.hearers:
                hearer(uuid, sighting)


@dataclass
class Scene:
    """A watch with what is around it."""

    gpus: Machine
    health: HealthWatch
    reports: Reported

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - anything may make it hold
                await asyncio.sleep(0.005)

    def state(self, uuid: str = ONE) -> HealthState:
        return self.health.records[uuid].state


@asynccontextmanager
async def scene(
    *,
    policy: XidPolicy | None = None,
    owners: Mapping[str, Sequence[Owner]] | None = None,
    memory: Memory | None = None,
) -> AsyncIterator[Scene]:
    gpus, reports = Machine(), Reported()
    known = owners or {}
    health = HealthWatch(
        gpus=gpus,
        policy=policy or XidPolicy(),
        reports=reports,
        owners=lambda uuid: known.get(uuid, ()),
        memory=memory,
        rules=QUICK,
    )
    task = asyncio.create_task(health.run())
    try:
        yield Scene(gpus, health, reports)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def play(script: Coroutine[object, object, None]) -> None:
    asyncio.run(script)


def test_which_gpus_lose_their_pods_is_a_policy() -> None:
    async def script() -> None:
        async with scene() as on:
            on.gpus.sees(answered(), answered(OTHER), xid(95))
            on.gpus.sees(ReadFailure(message="GPU is lost", is_lost=True), uuid=OTHER)
            assert on.health.to_evict("never") == {}
            assert list(on.health.to_evict("lost")) == [OTHER]
            assert sorted(on.health.to_evict("unhealthy")) == [ONE, OTHER]

    play(script())


def test_an_error_that_needs_a_reset_takes_out_that_gpu_and_all_owners_are_told() -> None:
    async def script() -> None:
        async with scene(owners={ONE: [owner("a"), owner("b")], OTHER: [owner("c")]}) as on:
            on.gpus.sees(answered(), answered(OTHER), xid(95))
            assert on.health.unhealthy == {ONE: "XID 95 (uncontained memory error): reset the GPU"}
            assert on.reports.counted == [("device_xids", (ONE, "95"))]
            assert [(who, reason) for who, reason, _ in on.reports.said] == [
                ("node", "GpuUnhealthy"),
                ("lab/a/train", "GpuUnhealthy"),
                ("lab/b/train", "GpuUnhealthy"),
            ]
            assert on.reports.said[0][2] == (
                "GPU-1 (Tesla T4): XID 95 (uncontained memory error): reset the GPU; no new"
                " container gets it; its programs continue: lab/a/train, lab/b/train"
            )

    play(script())


def test_a_lost_gpu_comes_back_by_itself_once_it_passes_its_tests() -> None:
    async def script() -> None:
        async with scene(owners={ONE: [owner("a")]}) as on:
            on.gpus.sees(answered(), ReadFailure(message="NVML: GPU is lost", is_lost=True))
            assert ONE in on.health.unhealthy
            on.gpus.sees(answered())
            await on.until(lambda: on.health.unhealthy == {})
            assert on.gpus.tested == [ONE, ONE]
            assert ("device_recoveries", (ONE,)) in on.reports.counted
            assert [reason for _, reason, _ in on.reports.said] == [
                "GpuUnhealthy",
                "GpuUnhealthy",
                "GpuTested",
                "GpuRecovered",
                "GpuRecovered",
            ]

    play(script())


def test_a_test_that_fails_takes_a_suspect_out() -> None:
    async def script() -> None:
        async with scene() as on:
            on.gpus.results[ONE] = ["it does not answer", Look(device(ONE), Vitals())]
            on.gpus.sees(answered(), xid(31))
            assert on.health.unhealthy == {}
            await on.until(lambda: ONE in on.health.unhealthy)
            await on.until(lambda: on.health.unhealthy == {})

    play(script())


def test_what_the_driver_says_in_a_test_counts() -> None:
    async def script() -> None:
        async with scene() as on:
            on.gpus.results[ONE] = [Look(device(ONE), Vitals(recovery_action=1))] * 3
            on.gpus.sees(answered(), xid(154))
            await on.until(lambda: ONE in on.health.unhealthy)
            assert "the driver says that the GPU needs a reset" in on.health.unhealthy[ONE]

    play(script())


def test_a_test_without_end_holds_up_no_other() -> None:
    async def script() -> None:
        async with scene() as on:
            on.gpus.slow.add(ONE)
            on.gpus.sees(answered(), answered(OTHER), xid(31), xid(31, OTHER))
            await on.until(lambda: on.state(OTHER) is HealthState.HEALTHY)
            assert on.state() is HealthState.SUSPECT
            assert on.gpus.tested.count(ONE) == 1

    play(script())


def test_a_programs_error_is_told_once_a_minute() -> None:
    async def script() -> None:
        async with scene(owners={ONE: [owner("a")]}) as on:
            on.gpus.sees(answered(), *[xid(31)] * 1000)
            assert [who for who, _, _ in on.reports.said] == ["node", "lab/a/train"]
            assert len(on.reports.counted) == 1000

    play(script())


def test_changes_are_told_and_repetitions_are_not() -> None:
    async def script() -> None:
        async with scene() as on:
            changes = on.health.changes()
            assert await anext(changes) == {}
            on.gpus.sees(answered(), answered(), xid(43), xid(95), xid(95), answered())
            assert set(await anext(changes)) == {ONE}
            waiting = asyncio.ensure_future(anext(changes))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            on.gpus.sees(answered(OTHER), Silent(20.0), uuid=OTHER)
            assert set(await waiting) == {ONE, OTHER}
            await changes.aclose()

    play(script())


def test_the_configuration_changes_while_it_runs() -> None:
    async def script() -> None:
        async with scene() as on:
            on.gpus.sees(answered())
            policy = policy_of(HealthConfig(xid_actions=((95, "ignore"), (31, "reset-gpu"))), {})
            on.health.reconfigure(policy, auto_recover=True)
            on.gpus.sees(xid(95))
            assert on.health.unhealthy == {}
            on.gpus.sees(xid(31))
            assert ONE in on.health.unhealthy

    play(script())


def test_switched_off_nothing_is_unhealthy_and_nobody_hears_of_it() -> None:
    async def script() -> None:
        policy = policy_of(HealthConfig(), {"DP_DISABLE_HEALTHCHECKS": "all"})
        async with scene(policy=policy) as on:
            lost = ReadFailure(message="lost", is_lost=True)
            on.gpus.sees(answered(), xid(95), lost)
            assert on.health.unhealthy == {}
            assert on.reports.said == []

    play(script())


def test_a_gpu_that_was_replaced_is_forgotten(tmp_path: Path) -> None:
    async def script() -> None:
        async with scene(memory=Memory(tmp_path)) as on:
            on.gpus.sees(answered(), xid(95))
            assert Memory(tmp_path).read()
            on.gpus.sees(Gone())
            assert set(on.health.unhealthy) == {ONE}
            on.gpus.sees(Gone(is_replaced=True), answered(OTHER))
            assert set(on.health.records) == {OTHER}
            assert not Memory(tmp_path).read()

    play(script())


def test_the_next_agent_keeps_it_out_until_a_reset(tmp_path: Path) -> None:
    async def script() -> None:
        async with scene(memory=Memory(tmp_path)) as on:
            on.gpus.sees(answered(vitals=Vitals(energy_mj=900)), xid(119))
        async with scene(memory=Memory(tmp_path)) as on:
            assert on.health.unhealthy == {}, "whether it is here is not known yet"
            on.gpus.sees(answered(vitals=Vitals(energy_mj=950)))
            assert set(on.health.unhealthy) == {ONE}
            on.gpus.sees(answered(vitals=Vitals(energy_mj=4)))
            await on.until(lambda: on.health.unhealthy == {})
        assert not Memory(tmp_path).read()

    play(script())


def test_one_that_is_away_when_the_agent_starts_was_away(tmp_path: Path) -> None:
    """A lost GPU waits for a reset. Being back after it was gone is one, whoever saw it go."""

    async def script() -> None:
        async with scene(memory=Memory(tmp_path)) as on:
            on.gpus.sees(answered(), xid(79), ReadFailure(message="lost", is_lost=True))
        async with scene(memory=Memory(tmp_path)) as on:
            on.gpus.sees(answered(OTHER))
            assert set(on.health.to_evict("lost")) == {ONE}
            assert condition(on.health.records).message.startswith("1 of 2 GPUs are healthy")
            on.gpus.sees(answered())
            assert set(on.health.unhealthy) == {ONE}
            assert on.health.to_evict("lost") == {}
            await on.until(lambda: on.health.unhealthy == {})
            assert not Memory(tmp_path).read()

    play(script())


def test_a_gpu_that_was_lost_while_no_agent_ran_is_lost(tmp_path: Path) -> None:
    """Of one that waits for a reset, or has shares, it is known that it was here."""

    async def script() -> None:
        async with scene(memory=Memory(tmp_path)) as on:
            on.gpus.sees(answered(), answered(OTHER), xid(95))
        async with scene(memory=Memory(tmp_path), owners={OTHER: [owner("a")]}) as on:
            assert set(on.health.remembered) == {ONE}
            changes = on.health.changes()
            assert await anext(changes) == {}
            for uuid, lost in ((ONE, {ONE}), (OTHER, {ONE, OTHER})):
                on.gpus.sees(Gone(), uuid=uuid)
                assert set(on.health.to_evict("lost")) == lost
                async with asyncio.timeout(20):
                    assert set(await anext(changes)) == lost
            await changes.aclose()
            assert {("node", "GpuUnhealthy"), ("lab/a/train", "GpuUnhealthy")} == {
                (who, reason) for who, reason, _ in on.reports.said
            }
        assert set(Memory(tmp_path).read()) == {ONE, OTHER}

    play(script())


@pytest.mark.parametrize("policy", ["lost", "unhealthy"])
def test_the_pods_of_a_gpu_that_only_the_agent_cannot_see_stay(
    tmp_path: Path, policy: EvictPolicy
) -> None:
    async def script() -> None:
        async with scene(memory=Memory(tmp_path), owners={OTHER: [owner("a")]}) as on:
            on.gpus.sees(answered())
            on.gpus.sees(Hidden(), uuid=OTHER)
            assert set(on.health.unhealthy) == {OTHER}
            assert on.health.to_evict(policy) == {}
            assert "cannot see it" in condition(on.health.records).message
            told = [(who, reason) for who, reason, _ in on.reports.said]
            assert told == [("node", "GpuUnhealthy"), ("lab/a/train", "GpuUnhealthy")]
        assert not Memory(tmp_path).read()

    play(script())


def test_a_folder_that_cannot_be_written_is_said_and_health_goes_on(tmp_path: Path) -> None:
    async def script() -> None:
        async with scene(memory=Memory(tmp_path / "none")) as on:
            on.gpus.sees(answered(), xid(95))
            assert set(on.health.unhealthy) == {ONE}
            assert "HealthNotKept" in [reason for _, reason, _ in on.reports.said]

    play(script())


# ---- the condition -------------------------------------------------------------------------------

WELL = Record()
ILL = Record(state=HealthState.UNHEALTHY, need=Need.RESET, reason="ECC")
BACK = Record(state=HealthState.RECOVERING, reason="ECC", test_at=1.0)


@pytest.mark.parametrize(
    ("records", "problem", "expected"),
    [
        ({}, "no NVML", ("Unknown", "NoInventory", "no NVML")),
        ({}, None, ("Unknown", "NoGpus", "no GPU has answered")),
        ({ONE: WELL, OTHER: WELL}, None, ("True", "AllHealthy", "2 of 2 GPUs are healthy")),
        (
            {OTHER: BACK, ONE: ILL, "GPU-3": WELL},
            None,
            (
                "False",
                "Unhealthy",
                "1 of 3 GPUs are healthy; GPU-1 is unhealthy: ECC; GPU-2 is being tested after ECC",
            ),
        ),
    ],
)
def test_the_condition_sums_it_up(
    records: Mapping[str, Record], problem: str | None, expected: tuple[str, str, str]
) -> None:
    found = condition(records, problem=problem)
    assert (found.type, found.status, found.reason, found.message) == ("GpuHealthy", *expected)


def test_the_condition_stays_short() -> None:
    many = {f"GPU-{number}": ILL for number in range(100)}
    assert len(condition(many).message) == 1024
