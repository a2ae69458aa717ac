# SPDX-License-Identifier: Apache-2.0
"""Bookings of one pod's shares: what Kubernetes counts, never less than what is in use at once."""

from itertools import permutations
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from allotment.model.accounting import holders, overlap, phases
from allotment.model.pods import ContainerKind, Owner, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace
from allotment.shares.booking import booked
from allotment.shares.record import LoadedShare

INIT, SIDECAR, REGULAR = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.REGULAR


def pod(kinds: list[ContainerKind], amounts: list[int], *, uid: str = "one") -> list[LoadedShare]:
    """A pod's shares, init containers and sidecars first, as a specification has them."""
    ordered = sorted(kinds, key=lambda kind: kind is REGULAR)
    return [share(uid, place, kind, amounts[place]) for place, kind in enumerate(ordered)]


def share(uid: str, place: int, kind: ContainerKind, amount: int) -> LoadedShare:
    owner = Owner(
        uid=PodUid(uid),
        namespace="lab",
        pod=uid,
        container=f"c{place}",
        kind=kind,
        resource="allotment.dev/gpu",
        place=place,
    )
    share_id = ShareId(f"{uid}-{place}")
    record = Share(
        id=share_id,
        name=str(owner),
        created=0.0,
        mode="soft",
        devices=(ShareDevice("GPU-0", "T4", amount),),
        injection=Injection.CDI,
        owner=owner,
    )
    return LoadedShare(share_id, Path("/none"), record, None)


def as_kubernetes_counts(found: list[LoadedShare]) -> int:
    """The pod's effective request: k8s.io/component-helpers/resource, PodRequests."""
    sidecars, most = 0, 0
    for each in found:
        assert each.owner
        amount = each.limits()["GPU-0"]
        if each.owner.kind is SIDECAR:
            sidecars += amount
            most = max(most, sidecars)
        elif each.owner.kind is INIT:
            most = max(most, sidecars + amount)
    regular = sum(
        each.limits()["GPU-0"] for each in found if each.owner and each.owner.kind is REGULAR
    )
    return max(most, sidecars + regular)


pods = st.lists(st.sampled_from(ContainerKind), min_size=1, max_size=6).flatmap(
    lambda kinds: st.tuples(
        st.just(kinds), st.lists(st.integers(1, 9), min_size=len(kinds), max_size=len(kinds))
    )
)


@given(pods)
def test_a_pod_is_booked_as_kubernetes_counts_it(
    of: tuple[list[ContainerKind], list[int]],
) -> None:
    found = pod(*of)
    (booking,) = booked(found).values()
    assert booking.memory == as_kubernetes_counts(found)
    assert booking.shares == len(found)


@given(pods, st.data())
def test_what_fits_beside_the_others_is_what_the_pod_may_grow_to(
    of: tuple[list[ContainerKind], list[int]], data: st.DataObject
) -> None:
    """A container finds room exactly where Kubernetes' count of the whole pod stays within it."""
    found = pod(*of)
    last = data.draw(st.sampled_from(found))
    others = [each for each in found if each is not last]
    assert last.owner
    capacity = data.draw(st.integers(as_kubernetes_counts(others) if others else 0, 60))
    seen = booked(others, seen_by=last.owner).get("GPU-0")
    room = capacity - (seen.memory if seen else 0)
    assert (last.limits()["GPU-0"] <= room) == (as_kubernetes_counts(found) <= capacity)


@given(pods)
def test_pods_add_up(of: tuple[list[ContainerKind], list[int]]) -> None:
    one, other = pod(*of), pod(*of, uid="other")
    (both,) = booked(one + other).values()
    assert both.memory == 2 * as_kubernetes_counts(one)


@given(pods, st.data())
def test_guarantees_in_force_were_booked_whoever_starts_when(
    of: tuple[list[ContainerKind], list[int]], data: st.DataObject
) -> None:
    found = pod(*of)
    members = [(each.id, each.owner) for each in found if each.owner]
    amounts = {each.id: each.limits()["GPU-0"] for each in found}
    now: set[ShareId] = set()
    starts = data.draw(st.lists(st.sampled_from(members), max_size=12))
    known: dict[ShareId, Owner] = {}
    for key, owner in starts:
        known[key] = owner
        now = holders(owner, list(known.items()), now)
        assert key in now
        assert sum(amounts[each] for each in now) <= as_kubernetes_counts(found)


@given(pods)
def test_when_all_run_all_have_theirs(of: tuple[list[ContainerKind], list[int]]) -> None:
    """In the order in which the kubelet starts them."""
    found = pod(*of)
    now: set[ShareId] = set()
    members: list[tuple[ShareId, Owner]] = []
    for each in found:
        assert each.owner
        members.append((each.id, each.owner))
        now = holders(each.owner, members, now)
    running = {each.id for each in found if each.owner and each.owner.kind is not INIT}
    assert running <= now if any(owner.kind is REGULAR for _, owner in members) else True


def test_who_overlaps_whom() -> None:
    init, sidecar, later, main = (
        share("one", place, kind, 1).owner
        for place, kind in enumerate((INIT, SIDECAR, INIT, REGULAR))
    )
    assert init
    assert sidecar
    assert later
    assert main
    pairs = {
        (one.place, other.place)
        for one, other in permutations((init, sidecar, later, main), 2)
        if overlap(one, other)
    }
    assert pairs == {(1, 2), (2, 1), (1, 3), (3, 1)}
    # Where nobody knows the order, an init container is taken to be alone.
    unknown = replace(sidecar, place=None)
    assert not overlap(unknown, later)
    assert overlap(unknown, main)


def test_phases_name_everyone() -> None:
    found = pod([INIT, SIDECAR, INIT, REGULAR], [1, 1, 1, 1])
    members = [(each.id, each.owner) for each in found if each.owner]
    assert sorted(map(sorted, phases(members))) == [
        ["one-0"],
        ["one-1", "one-2"],
        ["one-1", "one-3"],
    ]


def test_two_shares_of_one_container_are_in_use_together() -> None:
    first = share("one", 0, INIT, 4)
    assert first.share
    assert first.owner
    owner = replace(first.owner, resource="nvidia.com/gpu")
    again = replace(first, id=ShareId("x"), share=replace(first.share, owner=owner))
    (booking,) = booked([first, again]).values()
    assert booking.memory == 8
