# SPDX-License-Identifier: Apache-2.0
"""What GPUs are for goes from the node's annotation into the folder, and from there to all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from functools import partial
from pathlib import Path

import pytest
from gpus import gpu
from hypothesis import given
from hypothesis import strategies as st
from kubelet_twin import ReportsTwin
from own_node_twin import OwnNodeTwin, beside, until

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
from allotment.agent.inventory_publisher import build_inventory
from allotment.agent.node_state import NodeState
from allotment.agent.resources import GPU_MEMORY, GPU_SHARE, Offer, plan
from allotment.model.errors import UsageError
from allotment.model.modes import MODES
from allotment.model.quantities import parse_memory
from allotment.model.requests import Request
from allotment.model.shares import Injection
from allotment.shares import lifecycle
from allotment.shares.folders import StateFolder
from allotment.shares.mode_policy import (
    BY_NODE,
    ModePolicy,
    read_mode_policies,
    write_mode_policy,
)
from allotment.shares.placing import ShareOrder

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
            assert set(modes) <= set(MODES)


# ---- what is told of it --------------------------------------------------------------------------


def test_schedulers_hear_of_the_modes_that_are_left() -> None:
    config = load("allotment: {devices: [{modes: [soft, mps, exclusive]}]}", source="f")
    allowed = {"GPU-0": ModePolicy(("mps", "mig")), "GPU-1": ModePolicy(("mig",))}
    offer = plan(tuple(GPUS.values()), {}, config, allowed=allowed)
    told = build_inventory(
        NodeState(offer=offer, devices=GPUS, mode_policies=allowed), {}, taken={}
    )
    assert told is not None
    first, second = told.devices
    assert (first.modes, first.problem) == (("mps",), "")
    assert second.problem == "its mode policy allows none of its modes"
    assert offer.quantities[GPU_MEMORY] == 79 * GI
    shares = offer.resource(GPU_SHARE)
    assert shares is not None
    assert sum(each.is_healthy for each in shares.slots) * 2 == len(shares.slots)


def test_a_whole_gpu_that_is_kept_is_not_to_be_had_and_comes_back() -> None:
    config = load("", source="f")
    for allowed, healthy in (
        ({"GPU-0": ModePolicy(("soft",))}, [False, True]),
        ({"GPU-0": ModePolicy(("exclusive",))}, [True, True]),
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
        self.state = NodeState()
        self.know(*GPUS)
        self.now = 0.0
        self.modes = DeviceModes(
            self.folder,
            state=self.state,
            node=self.node,
            reports=self.reports,
            clock=lambda: self.now,
        )

    def know(self, *uuids: str) -> None:
        self.state.devices = {uuid: gpu(uuid=uuid) for uuid in uuids}

    def offer(self, **modes: tuple[str, ...]) -> None:
        """Offers the first GPU and the second in these modes."""
        shared = dict(zip(GPUS, modes.values(), strict=True))
        first = {uuid: each[0] for uuid, each in shared.items()}
        self.state.offer = Offer(modes=first, shared=shared)

    def said(self) -> dict[str, tuple[str, ...]]:
        return {uuid: each.modes for uuid, each in self.state.mode_policies.items()}

    def write(self, uuid: str, allowed: ModePolicy | None) -> None:
        with self.folder.locked():
            write_mode_policy(self.folder, uuid, allowed)

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
        world.write("GPU-1", ModePolicy(("exclusive",)))
        world.say("GPU-0=mig")
        await until(lambda: world.said() == {"GPU-0": ("mig",), "GPU-1": ("exclusive",)})
        assert read_mode_policies(world.folder)["GPU-0"].by == BY_NODE
        world.say("GPU-0=soft,mps")
        await until(lambda: world.said()["GPU-0"] == ("soft", "mps"))
        world.say("GPU-0=sofd")
        await until(lambda: INVALID in world.reports.reasons("node"))
        assert world.said()["GPU-0"] == ("soft", "mps"), "it stays as it was"
        (text,) = world.invalid()
        assert "no mode 'sofd' to set (did you mean 'soft'?); the mode policies stay" in text
        world.say(None)
        await until(lambda: world.said() == {"GPU-1": ("exclusive",)})

    world.run(test())


def test_a_node_that_is_not_known_takes_nothing_back(world: World) -> None:
    async def test() -> None:
        world.write("GPU-0", ModePolicy(("mig",), by=BY_NODE))
        await until(lambda: world.said() == {"GPU-0": ("mig",)})
        await asyncio.sleep(0.2)
        assert world.said() == {"GPU-0": ("mig",)}

    world.run(test())


def test_what_a_command_says_is_heard(world: World) -> None:
    async def test() -> None:
        changes = world.state.changed.changes()
        await anext(changes)
        world.write("GPU-0", ModePolicy(("mps",)))
        await anext(changes)
        assert world.said() == {"GPU-0": ("mps",)}
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
        assert set(read_mode_policies(world.folder)) == {"GPU-1"}, "it has no file"
        (text,) = world.invalid()
        assert "GPU-7=mig names no GPU of this node: its GPUs are GPU-0, GPU-1" in text
        world.know(*GPUS, "GPU-7")
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
        world.know()
        world.say("GPU-7=soft,mig")
        await asyncio.sleep(0.7)
        assert world.invalid() == [], "they may be slow to answer"

        def is_told_in_the_end() -> object:
            world.now += 31
            return world.invalid()

        await until(is_told_in_the_end)
        assert "GPU-7=soft,mig names no GPU of this node: none of" in world.invalid()[0]
        world.know(*GPUS)
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
        world.offer(first=("soft",), second=("soft", "mig"))
        world.say("GPU-0=mig; GPU-1=mig,mps")
        await until(world.invalid)
        (text,) = world.invalid()
        assert "GPU-0=mig leaves this GPU without a mode: the node's configuration allows" in text
        assert "allows soft " in text
        assert "GPU-1" not in text
        world.offer(first=("mig",), second=("exclusive",))
        await until(lambda: len(world.invalid()) == 2)
        assert "GPU-1=mps,mig leaves this GPU without a mode" in world.invalid()[1]
        assert world.said()["GPU-0"] == ("mig",), "it holds all the same"

    world.run(test())


@given(
    wanted=st.dictionaries(
        st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
        st.lists(st.sampled_from(MODES), min_size=1, unique=True),
    ),
    offered=st.dictionaries(
        st.sampled_from(["GPU-0", "GPU-1"]), st.lists(st.sampled_from(MODES), unique=True)
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
        world.write("GPU-1", ModePolicy(("mig",), by=BY_NODE))
        world.know()
        world.say("GPU-0=mig; GPU-1=mig")
        await asyncio.sleep(0.7)
        assert world.said() == {"GPU-1": ("mig",)}
        assert INVALID not in world.reports.reasons("node"), "none is known yet"
        world.know(*GPUS)
        await until(lambda: world.said() == {"GPU-0": ("mig",), "GPU-1": ("mig",)})

    world.run(test())


@pytest.mark.parametrize("bad", ["/../../victim/nvidia", "GPU-" + "a" * 300])
def test_an_annotation_writes_nothing_elsewhere_and_nothing_by_half(world: World, bad: str) -> None:
    victim = world.folder.root.parent / "victim" / "nvidia.json"
    victim.parent.mkdir()
    victim.write_text("as it was")

    async def test() -> None:
        world.know(*GPUS, bad)  # the form alone refuses it
        world.say(f"GPU-0=mig; {bad}=mig")
        await until(lambda: INVALID in world.reports.reasons("node"))
        assert victim.read_text() == "as it was"
        assert read_mode_policies(world.folder) == {}

    world.run(test())


def test_draining_is_told_when_it_begins_and_when_it_is_over(world: World) -> None:
    order = ShareOrder(Request(parse_memory("1Gi"), selectors=("GPU-00000000",)), Injection.NONE)
    devices = [gpu(0, uuid="GPU-00000000-1")]

    async def test() -> None:
        world.know(*(each.uuid for each in devices))
        share, _ = await asyncio.to_thread(lifecycle.create, world.folder, order, devices)
        world.say("GPU-00000000-1=mig")
        await until(lambda: DRAINING in world.reports.reasons("node"))
        assert share.name in world.reports.events[-1][2]
        found = lifecycle.find(world.folder, share.id)
        await asyncio.to_thread(lifecycle.destroy, world.folder, found, force=True)
        await until(lambda: DRAINED in world.reports.reasons("node"))

    world.run(test())
