# SPDX-License-Identifier: Apache-2.0
"""What GPUs are for goes from the node's annotation into the folder, and from there to all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st
from kubelet_twin import ReportsTwin
from own_node_twin import OwnNodeTwin, beside, until

from allotment.agent.announcing import announced
from allotment.agent.config.overlay import load
from allotment.agent.device_modes import (
    DEVICE_MODES,
    DRAINED,
    DRAINING,
    INVALID,
    DeviceModes,
    device_modes,
    unsuited,
)
from allotment.agent.resources import GPU_MEMORY, GPU_SHARE, plan
from allotment.model.errors import UsageError
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares import lives
from allotment.shares.folders import StateFolder
from allotment.shares.modes_of_gpus import (
    BY_NODE,
    SETTABLE,
    Allowed,
    read_allowed,
    write_allowed,
)

GI = 1 << 30
GPUS = {f"GPU-{index}": gpu(index, reserved_bytes=GI) for index in range(2)}


# ---- the annotation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", {}),
        (" ; ", {}),
        ("GPU-0=mig", {"GPU-0": ("mig",)}),
        ("GPU-0=mps,soft; GPU-1=mig", {"GPU-0": ("soft", "mps"), "GPU-1": ("mig",)}),
        ("GPU-0=soft,mps,GPU-1=mig", {"GPU-0": ("soft", "mps"), "GPU-1": ("mig",)}),
        ("GPU-0=soft\n  GPU-1=mig\n", {"GPU-0": ("soft",), "GPU-1": ("mig",)}),
        ("GPU-0=default;GPU-1=mig", {"GPU-1": ("mig",)}),
    ],
)
def test_it_is_read_as_people_write_it(text: str, found: Mapping[str, tuple[str, ...]]) -> None:
    assert device_modes(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("mig", "=mig", "GPU-0=", "GPU-0=sofd", "GPU-0=soft;GPU-0=mig", "GPU-0=x" * 9000),
        *("GPU-0=mig;/../../nvidia=mig", "GPU-0/../1=mig", "gpu-0=mig", ".GPU-0=mig"),
        *("GPU-0=mig;GPU-" + "0" * 300 + "=mig", "GPU-0\0=mig", "GPU-0=mig;..=default"),
        "MIG-1c7e=mps",
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        device_modes(text)


@given(text=st.text(st.sampled_from("GPU-01=migsoft,; default\n"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        for modes in device_modes(text).values():
            assert modes
            assert set(modes) <= set(SETTABLE)


# ---- what is told of it --------------------------------------------------------------------------


def test_schedulers_hear_of_the_modes_that_are_left() -> None:
    config = load("allotment: {devices: [{modes: [soft, mps, exclusive]}]}", source="f")
    allowed = {"GPU-0": Allowed(("mps", "mig")), "GPU-1": Allowed(("mig",))}
    offer = plan(tuple(GPUS.values()), {}, config, allowed=allowed)
    told = announced(offer, GPUS, {}, taken={}, links={}, allowed=allowed)
    assert told is not None
    first, second = told.devices
    assert (first.modes, first.problem) == (("mps",), "")
    assert second.problem == "kept for other modes than its own"
    assert offer.quantities[GPU_MEMORY] == 79 * GI
    shares = offer.resource(GPU_SHARE)
    assert shares is not None
    assert sum(each.is_healthy for each in shares.slots) * 2 == len(shares.slots)


def test_a_whole_gpu_that_is_kept_is_not_to_be_had_and_comes_back() -> None:
    config = load("", source="f")
    for allowed, healthy in (
        ({"GPU-0": Allowed(("soft",))}, [False, True]),
        ({"GPU-0": Allowed(("exclusive",))}, [True, True]),
        ({}, [True, True]),
    ):
        offer = plan(tuple(GPUS.values()), {}, config, allowed=allowed)
        resource = offer.resource("nvidia.com/gpu")
        assert resource is not None
        assert [each.is_healthy for each in resource.slots] == healthy


# ---- as things happen ----------------------------------------------------------------------------


class World:
    """A node of two GPUs, and what is said of them."""

    def __init__(self, root: Path) -> None:
        self.folder = StateFolder(root)
        self.folder.prepare()
        self.node = OwnNodeTwin(is_known=False)
        self.reports = ReportsTwin()
        self.known = set(GPUS)
        self.offered: dict[str, Sequence[str]] = {}
        self.now = 0.0
        self.modes = DeviceModes(
            self.folder,
            node=self.node,
            devices=lambda: self.known,
            reports=self.reports,
            offered=lambda: self.offered,
            clock=lambda: self.now,
        )

    def said(self) -> dict[str, tuple[str, ...]]:
        return {uuid: each.modes for uuid, each in self.modes.current.items()}

    def write(self, uuid: str, allowed: Allowed | None) -> None:
        with self.folder.locked():
            write_allowed(self.folder, uuid, allowed)

    def say(self, text: str | None) -> None:
        self.node.say({} if text is None else {DEVICE_MODES: text})

    def run(self, test: Awaitable[None]) -> None:
        beside(self.modes.run, test)

    def invalid(self) -> list[str]:
        return [text for _, reason, text in self.reports.events if reason == INVALID]


@pytest.fixture
def world(tmp_path: Path, native_dir: Path) -> World:
    assert native_dir.is_dir()
    return World(tmp_path / "state")


def test_the_annotation_holds_as_long_as_it_is_there(world: World) -> None:
    async def test() -> None:
        world.write("GPU-1", Allowed(("exclusive",)))
        world.say("GPU-0=mig")
        await until(lambda: world.said() == {"GPU-0": ("mig",), "GPU-1": ("exclusive",)})
        assert read_allowed(world.folder)["GPU-0"].by == BY_NODE
        world.say("GPU-0=soft,mps")
        await until(lambda: world.said()["GPU-0"] == ("soft", "mps"))
        world.say("GPU-0=sofd")
        await until(lambda: INVALID in world.reports.reasons("node"))
        assert world.said()["GPU-0"] == ("soft", "mps"), "it stays as it was"
        (text,) = world.invalid()
        assert "no mode 'sofd' to set (the modes are: soft, mps, mig, " in text
        world.say(None)
        await until(lambda: world.said() == {"GPU-1": ("exclusive",)})

    world.run(test())


def test_a_node_that_is_not_known_takes_nothing_back(world: World) -> None:
    async def test() -> None:
        world.write("GPU-0", Allowed(("mig",), by=BY_NODE))
        await until(lambda: world.said() == {"GPU-0": ("mig",)})
        await asyncio.sleep(0.2)
        assert world.said() == {"GPU-0": ("mig",)}

    world.run(test())


def test_what_a_command_says_is_heard(world: World) -> None:
    heard: list[None] = []
    world.modes.followers.append(lambda: heard.append(None))

    async def test() -> None:
        world.write("GPU-0", Allowed(("mps",)))
        await until(lambda: world.said() == {"GPU-0": ("mps",)})
        assert heard
        world.write("GPU-0", None)
        await until(lambda: world.said() == {})

    world.run(test())


def test_a_gpu_that_is_not_here_is_told(world: World) -> None:
    async def test() -> None:
        world.say("GPU-7=mig; GPU-1=mig")
        await until(lambda: world.said() == {"GPU-1": ("mig",)})
        assert world.invalid() == [], "it may be slower to answer than the others"
        world.now += 31
        await until(world.invalid)
        assert set(read_allowed(world.folder)) == {"GPU-1"}, "it has no file"
        (text,) = world.invalid()
        assert "GPU-7=mig suits no GPU of this node: the GPUs here are GPU-0, GPU-1" in text
        world.known.add("GPU-7")
        await until(lambda: world.said() == {"GPU-1": ("mig",), "GPU-7": ("mig",)})

    world.run(test())


def has_told(world: World, number: int) -> bool:
    return len(world.invalid()) == number


def test_what_cannot_be_meant_is_all_that_is_told_then(world: World) -> None:
    async def test() -> None:
        world.say("GPU-7=mig; GPU-1=mig")
        await until(lambda: world.said() == {"GPU-1": ("mig",)})
        world.now += 31
        await until(partial(has_told, world, 1))
        world.say("GPU-7=sofd")
        await until(partial(has_told, world, 2))
        world.now += 31
        await asyncio.sleep(1.2)  # it is looked at again
        assert "sofd" in world.invalid()[-1]
        assert has_told(world, 2)

    world.run(test())


def test_what_was_taken_back_and_is_said_again_is_told_again(world: World) -> None:
    async def test() -> None:
        for number in (1, 2):
            world.say("GPU-7=mig; GPU-1=mig")
            await until(lambda: world.said() == {"GPU-1": ("mig",)})
            world.now += 31
            await until(partial(has_told, world, number))
            world.say(None)
            await until(lambda: world.said() == {})

    world.run(test())


def test_a_node_without_gpus_says_so_in_the_end(world: World) -> None:
    async def test() -> None:
        world.known.clear()
        world.say("GPU-7=soft,mig")
        await asyncio.sleep(0.7)
        assert world.invalid() == [], "they may be slow to answer"
        world.now += 31
        await until(world.invalid)
        assert "GPU-7=soft,mig suits no GPU of this node: no GPU of" in world.invalid()[0]
        world.known |= set(GPUS)
        await until(lambda: len(world.invalid()) == 2)
        world.say(None)
        world.say("GPU-1=soft")
        await until(lambda: world.said() == {"GPU-1": ("soft",)})
        assert len(world.invalid()) == 2

    world.run(test())


def test_a_rule_that_leaves_a_gpu_for_nothing_is_told_as_configurations_change(
    world: World,
) -> None:
    async def test() -> None:
        world.offered = {"GPU-0": ("soft",), "GPU-1": ("soft", "mig")}
        world.say("GPU-0=mig; GPU-1=mig,mps")
        await until(world.invalid)
        (text,) = world.invalid()
        assert "GPU-0=mig leaves this GPU for nothing: the node's configuration has it in" in text
        assert "mode soft " in text
        assert "GPU-1" not in text
        world.offered = {"GPU-0": ("mig",), "GPU-1": ("exclusive",)}
        await until(lambda: len(world.invalid()) == 2)
        assert "GPU-1=mps,mig leaves this GPU for nothing" in world.invalid()[1]
        assert world.said()["GPU-0"] == ("mig",), "it holds all the same"

    world.run(test())


@given(
    wanted=st.dictionaries(
        st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
        st.lists(st.sampled_from(SETTABLE), min_size=1, unique=True),
    ),
    offered=st.dictionaries(
        st.sampled_from(["GPU-0", "GPU-1"]), st.lists(st.sampled_from(SETTABLE), unique=True)
    ),
)
def test_each_rule_without_its_effect_is_named_and_no_other(
    wanted: dict[str, list[str]], offered: dict[str, list[str]]
) -> None:
    text = unsuited(wanted, ["GPU-0", "GPU-1", "MIG-3"], offered)
    assert "MIG-3" not in text
    for uuid, modes in wanted.items():
        is_without = uuid == "GPU-2" or (uuid in offered and not set(modes) & set(offered[uuid]))
        assert (f"{uuid}={','.join(modes)} " in text) == is_without


def test_one_that_is_away_for_a_time_stays_what_it_is(world: World) -> None:
    async def test() -> None:
        world.write("GPU-1", Allowed(("mig",), by=BY_NODE))
        world.known.clear()
        world.say("GPU-0=mig; GPU-1=mig")
        await asyncio.sleep(0.7)
        assert world.said() == {"GPU-1": ("mig",)}
        assert INVALID not in world.reports.reasons("node"), "none is known yet"
        world.known |= set(GPUS)
        await until(lambda: world.said() == {"GPU-0": ("mig",), "GPU-1": ("mig",)})

    world.run(test())


@pytest.mark.parametrize("bad", ["/../../victim/nvidia", "GPU-" + "a" * 300])
def test_an_annotation_writes_nothing_elsewhere_and_nothing_by_half(world: World, bad: str) -> None:
    victim = world.folder.root.parent / "victim" / "nvidia.json"
    victim.parent.mkdir()
    victim.write_text("as it was")

    async def test() -> None:
        world.known.add(bad)  # the form alone refuses it
        world.say(f"GPU-0=mig; {bad}=mig")
        await until(lambda: INVALID in world.reports.reasons("node"))
        assert victim.read_text() == "as it was"
        assert read_allowed(world.folder) == {}

    world.run(test())


def test_draining_is_told_when_it_begins_and_when_it_is_over(world: World) -> None:
    order = lives.Order(Request(parse_memory("1Gi"), selectors=("GPU-00000000",)), Injection.NONE)
    devices = [gpu(0, uuid="GPU-00000000-1")]

    async def test() -> None:
        world.known = {each.uuid for each in devices}
        share, _ = await asyncio.to_thread(lives.create, world.folder, order, devices)
        world.say("GPU-00000000-1=mig")
        await until(lambda: DRAINING in world.reports.reasons("node"))
        assert share.name in world.reports.events[-1][2]
        found = lives.find(world.folder, share.id)
        await asyncio.to_thread(lives.destroy, world.folder, found, force=True)
        await until(lambda: DRAINED in world.reports.reasons("node"))

    world.run(test())
