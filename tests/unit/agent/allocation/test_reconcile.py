# SPDX-License-Identifier: Apache-2.0
"""Which shares have served their time, and which are missing."""

from __future__ import annotations

import pytest
from kubelet_twin import NVIDIA_GPU, OFFER

from allotment.agent.allocation.orders import share_of
from allotment.agent.allocation.reconcile import Findings, Why, reconcile, released
from allotment.agent.protocols import CheckpointEntry
from allotment.agent.resources import GPU_MEMORY, GPU_SHARE
from allotment.model.compute import Compute
from allotment.model.pods import Container, ContainerKind, Owner, Pod, PodUid
from allotment.model.shares import Injection, Share, ShareDevice, ShareId
from allotment.model.structs import replace

GI = 1 << 30
NOW = 1000.0
UID = PodUid("uid-1")
OWNER = Owner(
    uid=UID,
    namespace="team",
    pod="train",
    container="main",
    kind=ContainerKind.REGULAR,
    resource=GPU_SHARE,
)
SHARE = Share(
    id=ShareId("a"),
    name=str(OWNER),
    created=NOW - 60,
    mode="soft",
    devices=(),
    injection=Injection.CDI,
    owner=OWNER,
)
ENTRY = CheckpointEntry(
    pod=UID, container="main", resource=GPU_SHARE, ids=frozenset({"share::0"}), share=ShareId("a")
)
MAIN = Container("main", ContainerKind.REGULAR, {GPU_SHARE: 1}, is_started=True)
POD = Pod(uid=UID, namespace="team", name="train", containers=(MAIN,))
FINISHED = replace(POD, containers=(replace(MAIN, has_finished=True),))


def look(
    *shares: Share,
    pod: Pod | None = POD,
    entries: tuple[CheckpointEntry, ...] | None = (ENTRY,),
    is_synced: bool = True,
) -> Findings:
    return reconcile(
        {each.id: each for each in shares},
        {} if pod is None else {pod.uid: pod},
        is_synced=is_synced,
        entries=entries,
        offer=OFFER,
        now=NOW,
    )


@pytest.mark.parametrize(
    ("share", "pod", "is_synced", "why"),
    [
        (SHARE, POD, True, None),
        (SHARE, None, True, Why.POD_GONE),
        (SHARE, None, False, None),
        (SHARE, replace(POD, has_ended=True), True, Why.POD_ENDED),
        (SHARE, FINISHED, True, Why.CONTAINER_FINISHED),
        (replace(SHARE, created=NOW - 1), FINISHED, True, None),
        (replace(SHARE, created=NOW - 1), None, True, Why.POD_GONE),
        (replace(SHARE, created=NOW + 9999), FINISHED, True, Why.CONTAINER_FINISHED),
        (replace(SHARE, owner=None), None, True, None),
        (replace(SHARE, owner=replace(OWNER, container="gone")), POD, True, None),
    ],
    ids=[
        "runs",
        "pod gone",
        "pod not heard of",
        "pod ended",
        "finished",
        "finished, and new",
        "gone, and new",
        "clock set back",
        "nobody's",
        "of no container",
    ],
)
def test_what_has_served_its_time(
    share: Share, pod: Pod | None, *, is_synced: bool, why: Why | None
) -> None:
    found = look(share, pod=pod, is_synced=is_synced)
    assert [each.why for each in found.due] == ([] if why is None else [why])


def test_when_to_look_again() -> None:
    assert look(replace(SHARE, created=NOW - 4), pod=FINISHED).next_in_s == pytest.approx(6)
    assert look(SHARE).next_in_s is None


def test_a_share_without_an_entry_stays_while_its_pod_does() -> None:
    assert look(SHARE, entries=()).due == ()
    assert look(SHARE, entries=None).due == ()


def test_a_successor_ends_a_share_only_once_it_is_there() -> None:
    newer = replace(ENTRY, share=ShareId("b"))
    assert look(SHARE, entries=(newer,)).due == ()
    found = look(SHARE, replace(SHARE, id=ShareId("b")), entries=(newer,))
    assert [(each.share.id, each.why) for each in found.due] == [("a", Why.SUPERSEDED)]


OTHERS = replace(ENTRY, resource=NVIDIA_GPU, ids=frozenset({"GPU-whole-0"}), share=None)


@pytest.mark.parametrize(
    ("entry", "pod", "is_missing"),
    [
        (ENTRY, POD, True),
        (ENTRY, None, False),
        (ENTRY, FINISHED, False),
        (ENTRY, replace(POD, containers=(replace(MAIN, is_started=False),)), False),
        (ENTRY, replace(POD, has_ended=True), False),
        (replace(ENTRY, resource="nvidia.com/other"), POD, False),
        (OTHERS, POD, True),
        (OTHERS, replace(POD, containers=(replace(MAIN, is_started=False),)), True),
        (OTHERS, FINISHED, False),
        (replace(OTHERS, ids=frozenset({"0000:3b:00.0"}), resource="example.com/nic"), POD, False),
        (replace(ENTRY, share=None), POD, False),
    ],
    ids=[
        "runs",
        "pod not heard of",
        "finished",
        "will ask when it starts",
        "pod ended",
        "not offered",
        "other plugin's, runs",
        "other plugin's, will never ask",
        "other plugin's, finished",
        "no GPU",
        "no device",
    ],
)
def test_what_is_missing(entry: CheckpointEntry, pod: Pod | None, *, is_missing: bool) -> None:
    found = look(pod=pod, entries=(entry,))
    assert found.missing == ((entry,) if is_missing else ())
    there = replace(SHARE, id=share_of(entry))
    assert look(there, pod=pod, entries=(entry,)).missing == ()


def test_who_runs_with_what_an_earlier_answer_gave_is_not_missing() -> None:
    newer = replace(ENTRY, share=ShareId("b"))
    assert look(SHARE, entries=(newer,)).missing == ()


def test_a_slice_releases_nothing_when_another_container_is_resized() -> None:
    """It has more than its container asks for; kube-scheduler never counted that."""
    asked = {GPU_SHARE: 1, GPU_MEMORY: 8 * GI}
    containers = tuple(Container(name, ContainerKind.REGULAR, asked) for name in ("main", "cut"))
    soft = replace(SHARE, devices=(ShareDevice("GPU-1", "H100", 6 * GI),))
    slice_ = replace(
        SHARE,
        id=ShareId("b"),
        mode="mig",
        owner=replace(OWNER, container="cut"),
        devices=(ShareDevice("MIG-1", "H100", 10 * GI, compute=Compute(1428)),),
    )
    found = released((soft, slice_), (replace(POD, containers=containers),))
    assert found == {GPU_MEMORY: 2 * GI}
