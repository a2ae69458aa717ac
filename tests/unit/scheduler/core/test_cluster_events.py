# SPDX-License-Identifier: Apache-2.0
"""From what is heard to the books: who is told of, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mig_profiles import profiles
from scheduler_twin import cluster_pod
from structlog.testing import capture_logs

from allotment.dialects.own.resource_claims import AllocatedDevice, Parameters, ResourceClaim
from allotment.model.clusters import (
    ClusterPod,
    NodeDevice,
    NodeInventory,
    NodeMig,
    PlacedDevice,
    PodBooking,
    TakenPart,
)
from allotment.model.mig import MigHold, MigPlace, MigSlice
from allotment.model.pods import Pod, PodUid
from allotment.model.structs import replace
from allotment.placement.cluster.cluster import Cluster
from allotment.scheduler.core.book import Book
from allotment.scheduler.core.cluster_events import ClusterEventHandler
from allotment.scheduler.core.quota import QuotaBook
from allotment.scheduler.core.waiting import LEAD, WaitingPods

UID = PodUid("u")
STRANGER = ClusterPod(
    uid=UID,
    namespace="ns",
    name="p",
    node="n1",
    asks=Pod(uid=UID, namespace="ns", name="p"),
    booking=PodBooking(uid=UID, node="n1"),
    problem="it was bound without a placement",
)


def keeper() -> ClusterEventHandler:
    return ClusterEventHandler(Book(Cluster()), QuotaBook())


def test_a_pod_without_a_placement_counts_as_such_until_it_has_ended() -> None:
    kept = keeper()
    kept.pod_put(STRANGER)
    assert kept.unplaced == {UID}
    kept.pod_put(replace(STRANGER, asks=None, booking=None, problem=""))
    assert kept.unplaced == set()


def test_a_gpu_of_which_two_nodes_tell_is_told_once() -> None:
    kept = keeper()
    device = NodeDevice(uuid="GPU-a", model="T4", memory_bytes=16)
    with capture_logs() as logs:
        for name in ("one", "two", "other"):
            uuid = "GPU-b" if name == "other" else "GPU-a"
            kept.node_put(NodeInventory(name=name, devices=(replace(device, uuid=uuid),)))
    told = [each for each in logs if each["log_level"] == "warning"]
    assert [(each["uuid"], each["nodes"]) for each in told] == [("GPU-a", ["one", "two"])]


def test_waiting_pods_are_known_until_they_are_gone() -> None:
    waiting = WaitingPods(clock=lambda: 0.0)
    kept = ClusterEventHandler(Book(Cluster()), QuotaBook(), waiting=waiting)
    pods = [replace(cluster_pod(f"p{number}"), constraints="any") for number in range(LEAD + 3)]
    for pod in pods:
        kept.pod_put(pod)
    waiting.tried(pods[0], ["x"])
    kept.pod_gone(pods[-2].uid)
    found = waiting.next()
    assert found is not None
    assert found.pod is pods[-1]
    assert waiting.next() is None


# ---- claims --------------------------------------------------------------------------------------

GIB = 1 << 30
CLAIM = PodUid("c")
UUID = "GPU-4a0ae330-0000"
NAME = "gpu-4a0ae330"


def claim(device: str = NAME, **fields: Any) -> ResourceClaim:  # noqa: ANN401
    consumed = {"memory": "60Gi", "compute": "30"}
    devices = (AllocatedDevice(request="gpu", pool="n1", device=device, consumed=consumed),)
    capacities = {"gpu": frozenset(("memory", "compute"))}
    made = ResourceClaim(
        uid=CLAIM, namespace="ml", name="c", devices=devices, capacities=capacities
    )
    return replace(made, **fields)


def node(**fields: Any) -> NodeInventory:  # noqa: ANN401
    device = NodeDevice(uuid=UUID, model="A100", memory_bytes=79 * GIB)
    return NodeInventory(
        name="n1", devices=(replace(device, **fields),), cpu_milli=64000, memory_bytes=512 * GIB
    )


class Claims:
    """A scheduler's core with one node, and what it knows of one claim."""

    def __init__(self, inventory: NodeInventory) -> None:
        self.book = Book(Cluster())
        self.events = ClusterEventHandler(self.book, QuotaBook())
        self.events.node_put(inventory)

    def booked(self) -> tuple[PlacedDevice, ...]:
        booking = self.book.cluster.booking(CLAIM)
        return () if booking is None else booking.containers[0].devices

    def fits(self, memory: str, **limits: str) -> bool:
        """Whether a pod with so much memory of one GPU has room."""
        wanted = {"allotment.dev/gpu": "1", "allotment.dev/gpu-memory": memory, **limits}
        need = self.book.needs.put(cluster_pod("p", limits=wanted))
        assert need is not None
        return bool(self.book.rank(need, ["n1"]).best)


def test_a_claim_that_no_node_has_prepared_counts_as_taken() -> None:
    world = Claims(node())
    assert world.fits("20Gi")
    world.events.claim_changed(CLAIM, claim())
    assert world.booked() == (PlacedDevice(UUID, 60 * GIB, 3000),)
    assert not world.fits("20Gi")
    assert not world.fits("1Gi", **{"allotment.dev/gpu-compute": "80"})
    assert world.fits("19Gi", **{"allotment.dev/gpu-compute": "70"})
    world.events.claim_changed(CLAIM, claim(devices=()))  # its pods have ended
    assert world.fits("79Gi")
    world.events.claim_changed(CLAIM, claim())
    assert not world.fits("20Gi")
    world.events.claim_changed(CLAIM, None)
    assert world.fits("79Gi")
    world.book.cluster.check_invariants()


def test_a_claim_counts_once_when_its_node_counts_its_share() -> None:
    world = Claims(node())
    world.events.claim_changed(CLAIM, claim())
    taken = TakenPart(60 * GIB, 3000, 1, "soft")
    prepared = replace(node(taken=taken), claims=frozenset((claim().share_id("gpu"),)))
    world.events.node_put(prepared)
    assert world.booked() == ()
    assert world.fits("19Gi")
    assert not world.fits("20Gi")
    world.events.node_put(node())  # unprepared, and still allocated
    assert not world.fits("20Gi")
    world.book.cluster.check_invariants()


def test_a_claim_counts_from_when_its_node_is_known() -> None:
    world = Claims(replace(node(), name="another"))
    world.events.claim_changed(CLAIM, claim())
    assert world.booked() == ()
    world.events.node_put(node())
    assert not world.fits("20Gi")
    world.events.node_dropped("n1")
    world.events.claim_changed(CLAIM, None)
    world.events.node_put(node())
    assert world.fits("79Gi")


def test_a_whole_gpu_leaves_nothing() -> None:
    world = Claims(node())
    world.events.claim_changed(CLAIM, claim(f"{NAME}-whole"))
    assert world.booked() == (PlacedDevice(UUID, 79 * GIB),)
    assert not world.fits("1Gi")


def test_a_gpu_of_nvidias_type_is_whole_without_amounts() -> None:
    world = Claims(node())
    world.events.claim_changed(CLAIM, claim(driver="gpu.nvidia.com", capacities={}))
    assert not world.fits("1Gi")
    world.events.claim_changed(CLAIM, claim(driver="gpu.nvidia.com"))
    assert world.fits("19Gi")


def test_a_slice_takes_its_place() -> None:
    mig = NodeMig(profiles=tuple(profiles("A100-80GB")), is_enabled=False)
    world = Claims(node(modes=("mig", "soft"), mig=mig))
    world.events.claim_changed(CLAIM, claim(f"{NAME}-mig-3g-40gb-4"))
    (placed,) = world.booked()
    assert (placed.slice, placed.guarantee) == (MigPlace("3g.40gb", 4), 4285)
    assert not world.fits("1Gi")  # a GPU with slices has no other mode
    world.book.cluster.check_invariants()
    (profile,) = (each for each in mig.profiles if each.name == "3g.40gb")
    cut = MigSlice(profile=profile.number, start=4, size=profile.size, hold=MigHold.USED)
    inventory = node(modes=("mig", "soft"), mig=replace(mig, slices=(cut,)))
    world.events.node_put(inventory)  # the slice is cut, and its share not reported yet
    assert not world.fits("1Gi")
    world.book.cluster.check_invariants()
    world.events.node_put(replace(inventory, claims=frozenset((claim().share_id("gpu"),))))
    assert world.booked() == ()
    world.book.cluster.check_invariants()


@pytest.mark.parametrize(
    "other",
    [
        claim("gpu-4a0ae330-monitor"),
        claim("gpu-ffffffff"),
        claim(parameters=(Parameters(where="w", content={"kind": "Other"}),)),
    ],
    ids=["monitor", "unknown GPU", "parameters that the node refuses"],
)
def test_what_takes_nothing_is_not_counted(other: ResourceClaim) -> None:
    world = Claims(node())
    world.events.claim_changed(CLAIM, other)
    assert world.fits("79Gi")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["allocate", "prepare", "unprepare", "free", "leave", "return"]),
            st.integers(0, 1),
        ),
        min_size=10,
        max_size=40,
    )
)
@example([("allocate", 0), ("prepare", 0), ("free", 0), ("unprepare", 0)])
@example([("prepare", 0), ("leave", 0), ("allocate", 0), ("return", 0)])
def test_each_claim_counts_once_whatever_is_heard_first(steps: list[tuple[str, int]]) -> None:
    """A claim that is allocated, prepared or both: its node may report before the watch does."""
    world = Claims(node())
    claims = [
        replace(
            claim(),
            uid=f"c{number}",
            name=f"c{number}",
            devices=(
                replace(
                    claim().devices[0], consumed={"memory": f"{1 << number}Gi", "compute": "0"}
                ),
            ),
        )
        for number in range(2)
    ]
    allocated, prepared = set[int](), set[int]()
    is_there = True
    for step, number in steps:
        uid = PodUid(f"c{number}")
        match step:
            case "allocate":
                allocated.add(number)
                world.events.claim_changed(uid, claims[number])
            case "free":
                allocated.discard(number)
                world.events.claim_changed(uid, None)
            case "prepare":
                prepared.add(number)
            case "unprepare":
                prepared.discard(number)
            case _:
                is_there = step == "return"
        taken = TakenPart(sum(GIB << each for each in prepared), 0, len(prepared), "soft")
        names = frozenset(claims[each].share_id("gpu") for each in prepared)
        if is_there:
            world.events.node_put(
                replace(node(taken=taken if prepared else TakenPart()), claims=names)
            )
            (load,) = world.book.cluster.nodes["n1"].loads
            assert load.fixed == sum(GIB << each for each in allocated | prepared)
            assert load.shares == len(allocated | prepared)
        else:
            world.events.node_dropped("n1")
        world.book.cluster.check_invariants()
