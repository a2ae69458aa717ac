# SPDX-License-Identifier: Apache-2.0
"""Resizes of bound pods: what is booked, written and released, and when."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from resizing_twin import GIB, ResizingWorld

from allotment.placement.explain import Refusal

MEMORY = {"requests.allotment.dev/gpu-memory": "40Gi"}
PARTS = {"requests.nvidia.com/gpumem-percentage": "80"}


def gib(world: ResizingWorld, name: str) -> int:
    """What the scheduler's book has for a pod."""
    booking = world.book.booking(world.uid(name))
    assert booking is not None
    return booking.containers[0].devices[0].memory // GIB


def test_what_grows_is_booked_before_it_is_written() -> None:
    world = ResizingWorld()
    world.create("a", "20Gi")
    world.wish("a", "memory:60Gi,compute:30:80")
    world.deliver()
    world.answers.append("late")
    world.tick()
    assert gib(world, "a") == 60
    assert world.create("b", "30Gi") is False  # no room beside 60
    world.carry_out_late()
    world.settle()
    assert gib(world, "a") == world.in_force("a") // GIB == 60
    assert world.compute_in_force("a") == (3000, 8000)
    assert not world.book.resizes


def test_what_shrinks_is_released_when_its_node_reports_it() -> None:
    world = ResizingWorld()
    world.create("a", "60Gi")
    world.wish("a", "memory:10Gi")
    world.deliver()
    world.tick()
    world.deliver()
    assert gib(world, "a") == 60
    world.used["a"] = 30 * GIB
    world.run_node()
    world.deliver()
    world.tick()
    assert gib(world, "a") == 60  # its programs use 30
    assert world.create("b", "70Gi") is False
    world.used["a"] = 5 * GIB
    world.settle()
    assert gib(world, "a") == world.in_force("a") // GIB == 10
    assert world.create("b", "70Gi") is True


def test_a_report_of_an_earlier_resize_releases_nothing() -> None:
    world = ResizingWorld()
    world.create("a", "60Gi")
    world.wish("a", "memory:10Gi")
    world.settle()
    world.wish("a", "memory:60Gi")
    world.deliver()
    world.tick()
    world.wish("a", "memory:10Gi")
    world.deliver()
    world.tick()  # accepted, and the node has reported the first one alone
    world.deliver()
    world.tick()
    assert gib(world, "a") == 60
    world.settle()
    assert gib(world, "a") == 10


def test_without_its_annotation_a_pod_has_what_it_asks_for() -> None:
    world = ResizingWorld()
    world.create("a", "20Gi")
    world.wish("a", "memory:60Gi,compute:50")
    world.settle()
    world.wish("a", "")
    world.settle()
    assert gib(world, "a") == world.in_force("a") // GIB == 20
    assert world.compute_in_force("a") == (0, 10000)


REFUSALS: dict[str, tuple[str, dict[str, Any], str]] = {
    "room": ("memory:70Gi", {}, r"GPU-n0 \(A100\): need 70Gi, have 60Gi beside other pods"),
    "never": ("memory:90Gi", {}, "need 90Gi, have 60Gi"),
    "syntax": ("memory:much", {}, "allotment.dev/resize: 'much' is not an amount"),
    "word": ("gpus:2", {}, "allotment.dev/resize is 'gpus'"),
    "container": ("side=memory:1Gi", {}, "names container 'side', which is not in the pod"),
    "mps": (
        "memory:30Gi",
        {"allotment.dev/mode": "mps"},
        "has mode mps: MPS fixes the memory limit",
    ),
    "mps compute": ("compute:30", {"allotment.dev/mode": "mps"}, "MPS fixes the compute"),
}


@pytest.mark.parametrize(("wish", "annotations", "text"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_has_need_and_have_and_changes_nothing(
    wish: str, annotations: dict[str, str], text: str
) -> None:
    world = ResizingWorld()
    world.create("a", "20Gi", annotations=annotations)
    world.create("b", "20Gi", annotations=annotations)
    world.wish("a", wish)
    world.settle()
    (refusal,) = world.refused["a"][-1:]
    assert isinstance(refusal, Refusal)
    assert re.search(text, refusal.text), refusal.text
    assert gib(world, "a") == world.in_force("a") // GIB == 20


def test_under_mps_memory_shrinks_and_grows_again() -> None:
    world = ResizingWorld()
    world.create("a", "20Gi", annotations={"allotment.dev/mode": "mps"})
    for wish, size in (("memory:5Gi", 5), ("memory:15Gi", 15), ("", 20)):
        world.wish("a", wish)
        world.settle()
        assert gib(world, "a") == world.in_force("a") // GIB == size
        assert not world.book.resizes
        booking = world.book.booking(world.uid("a"))
        assert booking is not None
        assert booking.containers[0].floor == 0  # its programs take no turns


def test_guarantees_that_do_not_fit_are_refused_until_they_do() -> None:
    world = ResizingWorld()
    for name in "ab":
        world.create(name, "20Gi", annotations={"allotment.dev/compute": "0:100"})
    world.wish("a", "compute:60:100")
    world.settle()
    world.wish("b", "compute:60:100")
    world.settle()
    assert "need 60 % of compute, have 40 % beside other pods" in world.refused["b"][-1].text
    world.remove("a")
    world.settle()
    assert world.compute_in_force("b") == (6000, 10000)


def test_a_quota_counts_the_difference() -> None:
    world = ResizingWorld()
    world.limit(MEMORY)
    world.create("a", "20Gi")
    world.create("b", "10Gi")
    world.wish("a", "memory:31Gi")
    world.settle()
    assert "need 31Gi of GPU memory, have 30Gi of 40Gi" in world.refused["a"][-1].text
    world.wish("a", "memory:30Gi")
    world.settle()
    assert gib(world, "a") == 30
    assert world.quota_used() == 40 * GIB
    world.quotas.check_invariants()


def test_no_road_leads_past_a_quota() -> None:
    world = ResizingWorld()
    world.limit(MEMORY)
    # Created with the annotation, or changed before it is bound: it counts after the bind.
    world.create("a", "20Gi", annotations={"allotment.dev/resize": "memory:50Gi"})
    world.create("b", "10Gi")
    world.settle()
    assert (gib(world, "a"), world.quota_used()) == (20, 30 * GIB)
    # Two at once: each alone fits.
    world.wish("a", "memory:28Gi")
    world.wish("b", "memory:18Gi")
    world.settle()
    assert sorted((gib(world, "a"), gib(world, "b"))) in ([10, 28], [18, 20])
    # Removed after another pod got the room.
    world.wish("b", "memory:2Gi")
    world.wish("a", "memory:38Gi")
    world.settle()
    assert (gib(world, "a"), gib(world, "b")) == (38, 2)
    world.wish("b", "")
    world.settle()
    assert gib(world, "b") == 2
    assert "need 10Gi of GPU memory, have 2Gi of 40Gi" in world.refused["b"][-1].text
    # While no scheduler runs, and twice in the meantime.
    world.wish("b", "memory:3Gi")
    world.wish("b", "memory:30Gi")
    world.restart_scheduler()
    world.settle()
    assert (gib(world, "b"), world.quota_used()) == (2, 40 * GIB)
    world.quotas.check_invariants()


def test_a_quota_of_parts_counts_what_is_booked() -> None:
    world = ResizingWorld()
    world.limit(PARTS)
    world.create("a", "", annotations={"allotment.dev/memory": "20%"})
    world.create("b", "", annotations={"allotment.dev/memory": "20%"})
    world.wish("a", "memory:70%")
    world.settle()
    assert "need 70 % of a GPU's memory, have 60 % of 80 %" in world.refused["a"][-1].text
    world.wish("a", "memory:60%")
    world.settle()
    assert (gib(world, "a"), world.quota_used()) == (48, 8000)
    # Its node refuses to shrink it: the larger part counts, also for the next scheduler.
    world.used["a"] = 40 * GIB
    world.wish("a", "memory:10%")
    world.settle()
    assert (gib(world, "a"), world.quota_used()) == (48, 8000)
    world.restart_scheduler()
    assert world.quota_used() == 8000
    world.used.clear()
    world.settle()
    assert world.quota_used() == 3000
    world.used["b"] = 12 * GIB
    world.wish("b", "memory:5Gi")
    world.settle()
    assert (gib(world, "b"), world.quota_used()) == (16, 3000)
    world.wish("b", "")
    world.used.clear()
    world.settle()
    world.wish("a", "memory:8Gi")  # bytes are no part, as at creation
    world.settle()
    assert (gib(world, "a"), world.quota_used()) == (8, 2000)
    world.wish("a", "")
    world.settle()
    assert (gib(world, "a"), world.quota_used()) == (16, 4000)


def test_a_write_without_an_answer_is_repeated_to_the_letter() -> None:
    world = ResizingWorld()
    world.create("a", "20Gi")
    world.wish("a", "memory:30Gi")
    world.deliver()
    world.answers += ["late", "late"]
    world.tick()
    world.tick()
    assert not world.written
    assert len(world.asked) == 2
    assert world.asked[0] == world.asked[1]
    world.settle()
    assert gib(world, "a") == 30


def _change_pod(world: ResizingWorld, chance: random.Random) -> None:
    name = chance.choice("abc")
    gibibytes, percent = chance.choice((5, 20, 30, 40, 60, 80)), chance.choice((0, 30, 60))
    if name not in world.pods:
        world.create(name, f"{gibibytes}Gi", percent=percent)
        return
    kind = chance.choices(("wish", "use", "remove"), (4, 1, 1))[0]
    if kind == "wish":
        compute = chance.choice(("", f",compute:{percent}:100"))
        world.wish(name, chance.choice(("", f"memory:{gibibytes}Gi{compute}")))
    elif kind == "use":
        world.used[name] = min(gibibytes * GIB, world.in_force(name))
    else:
        world.remove(name)


def _step(world: ResizingWorld, chance: random.Random) -> None:
    """Anything that can happen next: to a pod, to a message, to the scheduler."""
    kind = chance.choices(
        ("pod", "deliver", "tick", "node", "hear", "late", "restart"), (8, 5, 6, 3, 3, 1, 1)
    )[0]
    if kind == "pod":
        _change_pod(world, chance)
    elif kind == "deliver":
        world.deliver(most=chance.choice((1, 2, 9)))
    elif kind == "tick":
        world.answers.extend(chance.choices(("ok", "lost", "late"), (4, 1, 1), k=2))
        world.tick()
    elif kind == "node":
        world.run_node()
    elif kind == "hear":
        world.hear(most=chance.choice((1, 9)))
    elif kind == "late" and world.late:
        world.carry_out_late()
    elif kind == "restart":
        world.restart_scheduler()


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_promised_twice_in_any_order(seed: int) -> None:
    world, chance = ResizingWorld(), random.Random(seed)  # noqa: S311 - no secret
    if seed % 2:
        world.limit({"requests.allotment.dev/gpu-memory": "60Gi"})
    for _ in range(100):
        _step(world, chance)
        world.check()
    world.used.clear()
    world.settle()
    world.check()
    before = {uid: world.book.booking(uid) for uid in map(world.uid, world.pods)}
    for name in world.pods:
        if name not in world.refused:
            assert gib(world, name) == world.in_force(name) // GIB
    used = world.quota_used() if world.hard else 0
    assert used in {0, sum(gib(world, name) for name in world.pods) * GIB}
    world.restart_scheduler()
    assert {uid: world.book.booking(uid) for uid in before} == before
    assert not world.hard or world.quota_used() == used
