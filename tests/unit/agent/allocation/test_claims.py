# SPDX-License-Identifier: Apache-2.0
"""Who holds these ids, and which of them may be starting."""

from __future__ import annotations

from typing import Any

import pytest
from kubelet_twin import OFFER, UNIT

from allotment.agent.allocation.claims import claimants, needs_pod, starts_of, superseded, work_for
from allotment.agent.allocation.orders import share_of
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import GPU_MEMORY, GPU_SHARE
from allotment.model.errors import IdentityError
from allotment.model.pods import Container, ContainerKind, Owner, Pod, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace

INIT, REGULAR, SIDECAR = ContainerKind.INIT, ContainerKind.REGULAR, ContainerKind.SIDECAR
IDS = frozenset({"share::0"})


def entry(
    container: str, share: str | None, *, pod: str = "uid-1", **changes: object
) -> CheckpointEntry:
    made = CheckpointEntry(
        pod=PodUid(pod),
        container=container,
        resource=GPU_SHARE,
        ids=IDS,
        share=None if share is None else ShareId(share),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def container(name: str, kind: ContainerKind, *, memory: int = 1, **state: Any) -> Container:  # noqa: ANN401 - any field
    return Container(name, kind, {GPU_SHARE: 1, GPU_MEMORY: memory * UNIT}, **state)


def pod(*containers: Container) -> Pod:
    return Pod(uid=PodUid("uid-1"), namespace="team", name="train", containers=containers)


def share(name: str, container: str, *, pod: str = "uid-1", kind: ContainerKind = REGULAR) -> Share:
    owner = Owner(
        uid=PodUid(pod),
        namespace="team",
        pod="train",
        container=container,
        kind=kind,
        resource=GPU_SHARE,
    )
    return Share(
        id=ShareId(name),
        name=str(owner),
        created=0.0,
        mode="soft",
        devices=(ShareDevice("GPU-soft-0", "T4", UNIT),),
        injection=Injection.CDI,
        owner=owner,
    )


def test_all_containers_of_the_pod_with_just_these_ids() -> None:
    table = [
        entry("init", "a"),
        entry("main", "b"),
        entry("both", "c", ids=frozenset({"share::0", "share::1"})),
        entry("other", "d", resource="nvidia.com/gpu"),
    ]
    assert [each.container for each in claimants(table, GPU_SHARE, IDS)] == ["init", "main"]


def test_nobody_holds_them() -> None:
    with pytest.raises(IdentityError, match="has no container that holds share::0"):
        claimants([], GPU_SHARE, IDS)


def test_of_several_pods_none_is_guessed() -> None:
    table = [entry("main", "a"), entry("main", "b", pod="uid-2")]
    with pytest.raises(IdentityError, match="to several pods: uid-1, uid-2") as refused:
        claimants(table, GPU_SHARE, IDS)
    assert refused.value.hint


def test_the_pod_need_not_be_known_where_all_is_there() -> None:
    claims = (entry("main", "a"),)
    shares = {ShareId("a"): share("a", "main")}
    assert not needs_pod(claims, shares)
    assert needs_pod(claims, {})
    work = work_for(None, claims, OFFER, shares, is_repeated=False)
    assert [each.id for each in work.make] == ["a"]
    assert work.keep == {"a"}
    assert work.make[0].devices == ("GPU-soft-0",)


def test_an_unknown_pod_is_waited_for() -> None:
    with pytest.raises(IdentityError, match="has not reported pod uid-1 yet"):
        work_for(None, (entry("main", "a"),), OFFER, {}, is_repeated=False)


CLAIMS = (entry("main", "m"), entry("init", "i"))


@pytest.mark.parametrize(
    ("init", "main", "is_repeated", "made", "starting"),
    [
        ({}, {}, False, {"i", "m"}, "i"),
        ({"is_started": True}, {}, False, {"i", "m"}, "m"),
        ({"is_started": True, "has_finished": True}, {}, False, {"m"}, "m"),
        ({"is_started": True, "has_finished": True}, {}, True, {"i", "m"}, "m"),
        (
            {"is_started": True, "has_finished": True},
            {"is_started": True, "has_finished": True},
            False,
            {"i", "m"},
            "m",
        ),
    ],
    ids=["nothing heard", "init runs", "init over", "asked again", "all over: a new sandbox"],
)
def test_all_that_may_be_starting_are_prepared(
    init: dict[str, bool],
    main: dict[str, bool],
    *,
    is_repeated: bool,
    made: set[str],
    starting: str,
) -> None:
    subject = pod(container("init", INIT, **init), container("main", REGULAR, **main))
    work = work_for(subject, CLAIMS, OFFER, {}, is_repeated=is_repeated)
    assert {str(each.id) for each in work.make} == made
    assert work.starting == starting


def test_large_ones_first_so_that_small_ones_can_use_their_place() -> None:
    subject = pod(container("init", INIT, memory=1), container("main", REGULAR, memory=3))
    work = work_for(subject, CLAIMS, OFFER, {}, is_repeated=False)
    assert [each.id for each in work.make] == ["m", "i"]


def test_an_id_is_of_one_container_for_ever() -> None:
    shares = {ShareId("a"): share("a", "main", pod="uid-2")}
    with pytest.raises(IdentityError, match=r"share a belongs to team/train/main"):
        work_for(
            pod(container("main", REGULAR)), (entry("main", "a"),), OFFER, shares, is_repeated=False
        )


def test_what_an_earlier_answer_left_is_ended() -> None:
    claims = (entry("main", "new"),)
    shares = {ShareId(each): share(each, name) for each, name in (("old", "main"), ("x", "other"))}
    assert superseded(claims, shares) == ("old",)
    work = work_for(pod(container("main", REGULAR)), claims, OFFER, shares, is_repeated=False)
    assert work.end == ("old",)


def test_what_another_plugin_gave_has_always_the_same_id() -> None:
    one, other = entry("main", None), entry("side", None)
    assert share_of(one) == share_of(replace(one)) != share_of(other)
    assert len(share_of(one)) == 12


@pytest.mark.parametrize("injection", [Injection.CDI, Injection.MOUNTS, Injection.NONE, None])
def test_only_who_cannot_start_by_mistake_may_be_left_without(injection: Injection | None) -> None:
    """A sidecar restarts; the share of the init container before it is gone, the API is away."""
    claims = (
        entry("init", "i", injection=injection),
        entry("side", "s", injection=Injection.CDI),
    )
    shares = {ShareId("s"): share("s", "side", kind=SIDECAR)}
    if injection is not Injection.CDI:
        assert needs_pod(claims, shares)
        with pytest.raises(IdentityError, match="has not reported pod uid-1 yet"):
            work_for(None, claims, OFFER, shares, is_repeated=False)
        return
    assert not needs_pod(claims, shares)
    work = work_for(None, claims, OFFER, shares, is_repeated=False)
    assert (work.starting, [each.id for each in work.make]) == ("s", ["s"])
    assert set(work.failed) == {"i"}


def test_a_later_start_is_no_repetition() -> None:
    before = pod(container("init", INIT, is_started=True), container("side", SIDECAR))
    claims = (entry("init", "i"), entry("side", "s"))
    started = replace(
        before, containers=(before.containers[0], replace(before.containers[1], restarts=1))
    )
    assert starts_of(before, claims) == starts_of(before, claims) != starts_of(started, claims)
    assert starts_of(None, claims) == ()
