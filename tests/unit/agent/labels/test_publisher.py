# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.labels.publisher`: labels reach the node, or the file, and are taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from awaiting import until

from allotment.agent.config.schema import Config, GfdConfig
from allotment.agent.labels.publisher import Inputs, Publisher, written
from allotment.agent.resources import Offer
from allotment.devices.facts import NodeFacts
from allotment.model.errors import AllotError, NoDevicesError, StateError
from allotment.model.pods import Owner, Pod
from allotment.model.structs import replace

if TYPE_CHECKING:
    from tests.unit.agent.labels.conftest import Scene

FOREIGN = {"kubernetes.io/hostname": "one", "nvidia.com/gpu.deploy.dcgm": "true"}


@dataclass
class Node:
    """A node object that keeps to the promises of `NodeLabels`."""

    labels: dict[str, str] = field(default_factory=lambda: dict(FOREIGN))
    own: set[str] = field(default_factory=set)
    calls: int = 0
    failure: AllotError | None = None

    async def set_labels(self, labels: Mapping[str, str], *, owned_prefixes: Sequence[str]) -> None:
        self.calls += 1
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        assert all(key.startswith(tuple(owned_prefixes)) for key in labels)
        for key in self.own - set(labels):
            del self.labels[key]
        self.labels.update(labels)
        self.own = set(labels)

    @property
    def ours(self) -> dict[str, str]:
        return {key: value for key, value in self.labels.items() if key not in FOREIGN}


@dataclass
class Diary:
    """Reports, kept."""

    notes: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        raise AssertionError((subject, reason, message, is_warning))

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        assert (reason, is_warning) == ("Labels", True)
        self.notes.append(message)

    def count(self, name: str, **labels: str) -> None:
        assert not labels
        self.counts.append(name)

    def observe(self, name: str, value: float, **labels: str) -> None:
        raise AssertionError((name, value, labels))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        del name, value, labels


@dataclass
class World:
    """All that a publisher has to do with; `inputs` is what it finds next."""

    inputs: Inputs | AllotError
    node: Node = field(default_factory=Node)
    diary: Diary = field(default_factory=Diary)
    now: float = 1594644571.9

    def publisher(self, *, has_api: bool = True) -> Publisher:
        return Publisher(
            inputs=self._ask,
            node=self.node if has_api else None,
            reports=self.diary,
            clock=lambda: self.now,
        )

    def configure(self, config: Config) -> None:
        assert isinstance(self.inputs, Inputs)
        self.inputs = replace(self.inputs, config=config)

    async def _ask(self) -> Inputs:
        await asyncio.sleep(0)
        if isinstance(self.inputs, AllotError):
            raise self.inputs
        return self.inputs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gfd"


@pytest.fixture
def gfd(path: Path, tmp_path: Path) -> GfdConfig:
    return GfdConfig(output_file=str(path), machine_type_file=str(tmp_path / "none"))


@pytest.fixture
def world(scene: Scene, gfd: GfdConfig) -> World:
    facts = NodeFacts(driver_version="580.95.05", cuda_version=(13, 0), devices=(scene.mock,))
    return World(Inputs(facts=facts, offer=Offer(), config=Config(gfd=gfd)))


async def during(publisher: Publisher, story: Callable[[], Awaitable[None]]) -> None:
    """Run the publisher while something happens, and cancel it."""
    task = asyncio.create_task(publisher.run())
    try:
        await story()
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# ---- by the API ----------------------------------------------------------------------------------


def test_labels_go_to_the_node_and_stay_when_the_agent_ends(world: World, path: Path) -> None:
    publisher = world.publisher()

    async def story() -> None:
        await until(lambda: bool(world.node.ours))

    asyncio.run(during(publisher, story))
    assert world.node.ours == dict(publisher.features.labels)
    assert world.node.labels["nvidia.com/gpu.product"] == "MOCKMODEL"
    assert FOREIGN.items() <= world.node.labels.items()
    assert not path.exists()
    assert world.diary.notes == []


def test_what_changed_is_published_at_once(world: World, scene: Scene, gfd: GfdConfig) -> None:
    world.configure(Config(gfd=replace(gfd, sleep_interval_s=None)))
    publisher = world.publisher()

    async def story() -> None:
        await until(lambda: "nvidia.com/gpu.compute.major" in world.node.ours)
        assert isinstance(world.inputs, Inputs)
        blind = replace(scene.mock, compute_capability=None)
        world.inputs = replace(
            world.inputs, facts=replace(world.inputs.facts, devices=(blind, blind))
        )
        publisher.wake()
        await until(lambda: world.node.ours.get("nvidia.com/gpu.count") == "2")
        assert "nvidia.com/gpu.compute.major" not in world.node.ours, "it is no longer so"

    asyncio.run(during(publisher, story))


def test_rounds_go_on_without_a_change_and_change_nothing(world: World, gfd: GfdConfig) -> None:
    world.configure(Config(gfd=replace(gfd, sleep_interval_s=0.01)))
    publisher = world.publisher()

    async def story() -> None:
        await until(lambda: bool(world.node.ours))
        first, before = dict(world.node.ours), world.node.calls
        world.now += 3600
        await until(lambda: world.node.calls > before + 2)
        assert world.node.ours == first, "the time is that of the start"

    asyncio.run(during(publisher, story))
    assert world.node.ours["nvidia.com/gfd.timestamp"] == "1594644571"


async def rounds(publisher: Publisher, count: int) -> list[bool]:
    return [await publisher.publish() for _ in range(count)]


def test_a_new_configuration_has_a_new_time(world: World, gfd: GfdConfig) -> None:
    publisher = world.publisher()
    assert asyncio.run(rounds(publisher, 1)) == [True]
    world.now += 60
    world.configure(Config(gfd=gfd, mig_strategy="single"))
    assert asyncio.run(rounds(publisher, 1)) == [True]
    assert world.node.ours["nvidia.com/gfd.timestamp"] == "1594644631"
    world.configure(Config(gfd=replace(gfd, no_timestamp=True)))
    assert asyncio.run(rounds(publisher, 1)) == [True]
    assert "nvidia.com/gfd.timestamp" not in world.node.ours


def test_oneshot_ends_when_it_is_done(world: World, gfd: GfdConfig) -> None:
    world.configure(Config(gfd=replace(gfd, oneshot=True)))
    asyncio.run(asyncio.wait_for(world.publisher().run(), 20))
    assert world.node.calls == 1


# ---- trouble -------------------------------------------------------------------------------------


def test_trouble_leaves_the_labels_as_they_are_and_is_told_once(world: World) -> None:
    publisher = world.publisher()
    assert asyncio.run(rounds(publisher, 1)) == [True]
    before, inputs = dict(world.node.labels), world.inputs
    world.inputs = NoDevicesError("no NVIDIA driver here", hint="install the driver")
    assert asyncio.run(rounds(publisher, 3)) == [False] * 3
    assert world.diary.notes == ["no NVIDIA driver here; hint: install the driver"]
    assert world.diary.counts == ["label_failures"] * 3
    world.inputs = inputs
    world.node.failure = StateError("the API server is away")
    assert asyncio.run(rounds(publisher, 2)) == [False] * 2
    assert world.node.labels == before
    world.node.failure = None
    assert asyncio.run(rounds(publisher, 1)) == [True]
    assert world.diary.notes[1:] == ["the API server is away"]


def test_after_a_failure_it_is_tried_again_before_the_interval(
    world: World, gfd: GfdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allotment.agent.labels.publisher._FIRST_RETRY_S", 0.001)
    world.configure(Config(gfd=replace(gfd, sleep_interval_s=None)))
    world.node.failure = StateError("the API server is away")
    publisher = world.publisher()

    async def story() -> None:
        await until(lambda: world.node.calls > 2)
        world.node.failure = None
        await until(lambda: bool(world.node.ours))

    asyncio.run(during(publisher, story))


def test_notes_are_told_when_they_are_new(world: World, scene: Scene, gfd: GfdConfig) -> None:
    world.configure(Config(gfd=gfd))
    assert isinstance(world.inputs, Inputs)
    two = (scene.mock, replace(scene.mock, uuid="GPU-1", name="OTHER"))
    world.inputs = replace(world.inputs, facts=replace(world.inputs.facts, devices=two))
    assert asyncio.run(rounds(world.publisher(), 3)) == [True] * 3
    (note,) = world.diary.notes
    assert note.startswith("Multiple device types detected")


# ---- by the feature file -------------------------------------------------------------------------


def test_the_feature_file_is_written_and_goes_when_the_agent_ends(
    world: World, gfd: GfdConfig, path: Path
) -> None:
    world.configure(Config(gfd=gfd, use_node_feature_api=False))
    publisher = world.publisher()
    told: list[str] = []

    async def story() -> None:
        await until(path.exists)
        await until(lambda: bool(publisher.features.labels))
        told.append(path.read_text())  # noqa: ASYNC240 - a few bytes of a test

    asyncio.run(during(publisher, story))
    assert told == [written(publisher.features.labels)]
    assert not path.exists()
    assert world.node.ours == {}


def test_a_file_made_once_stays(world: World, gfd: GfdConfig, path: Path) -> None:
    world.configure(Config(gfd=replace(gfd, oneshot=True), use_node_feature_api=False))
    asyncio.run(asyncio.wait_for(world.publisher().run(), 20))
    assert "nvidia.com/gpu.product=MOCKMODEL\n" in path.read_text()


def test_without_an_api_server_it_is_the_file(world: World, path: Path) -> None:
    assert asyncio.run(rounds(world.publisher(has_api=False), 1)) == [True]
    assert path.exists()
    assert world.node.calls == 0


def test_the_way_changes_while_it_runs(world: World, gfd: GfdConfig, path: Path) -> None:
    publisher = world.publisher()
    by_api, by_file = Config(gfd=gfd), Config(gfd=gfd, use_node_feature_api=False)
    world.configure(by_api)
    assert asyncio.run(rounds(publisher, 1)) == [True]
    world.configure(by_file)
    assert asyncio.run(rounds(publisher, 3)) == [True] * 3
    assert world.node.labels == FOREIGN
    assert world.node.calls == 2, "cleared once is enough"
    elsewhere = path.with_name("other")
    world.configure(replace(by_file, gfd=replace(gfd, output_file=str(elsewhere))))
    assert asyncio.run(rounds(publisher, 1)) == [True]
    assert (path.exists(), elsewhere.exists()) == (False, True)
    world.configure(by_api)
    assert asyncio.run(rounds(publisher, 1)) == [True]
    assert not elsewhere.exists()
    assert world.node.ours


def test_an_agent_before_may_have_labelled_the_node(world: World, gfd: GfdConfig) -> None:
    assert asyncio.run(rounds(world.publisher(), 1)) == [True]
    assert world.node.ours
    world.configure(Config(gfd=gfd, use_node_feature_api=False))
    assert asyncio.run(rounds(world.publisher(), 1)) == [True]
    assert world.node.ours == {}
