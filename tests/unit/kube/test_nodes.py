# SPDX-License-Identifier: Apache-2.0
"""What is written into the node: only ours, only what differs, and again whenever it is undone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from api_server_twin import Server, answered, impatient, listed, refused, run, until
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.errors import KubeError
from allotment.kube.inventories import DEVICES
from allotment.kube.nodes import (
    LABELS_ANNOTATION,
    NodeCondition,
    NodeFields,
    OwnNode,
    Wanted,
    format_quantity,
    plan_metadata,
    plan_removal,
    plan_status,
    remove_fields,
)
from allotment.model.quantities import MAX_BYTES, parse_whole

Patch = Any  # JSON

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MEMORY = "allotment.dev/gpu-memory"
COMPUTE = "allotment.dev/gpu-compute"
OWNED = frozenset({MEMORY, COMPUTE})

amounts = st.integers(0, MAX_BYTES)
keys = st.sampled_from(["nvidia.com/a", "nvidia.com/b", "allotment.dev/c", "zone", "team"])
values = st.sampled_from(["", "1", "2", "x-y"])
labels = st.dictionaries(keys, values)
quantity_names = st.sampled_from([MEMORY, COMPUTE])
wants = st.builds(
    Wanted,
    quantities=st.none() | st.dictionaries(quantity_names, amounts),
    labels=st.none() | labels,
    conditions=st.dictionaries(
        st.just("GpuHealthy"),
        st.builds(NodeCondition, status=st.sampled_from(["True", "False"]), reason=values),
    ),
    annotations=st.dictionaries(st.just(DEVICES), st.none() | values),
)
nodes = st.builds(
    NodeFields,
    name=st.just("n1"),
    uid=st.just("u"),
    labels=labels,
    annotations=st.builds(
        lambda ours, others: {**ours, **others},
        st.dictionaries(st.just(LABELS_ANNOTATION), st.lists(keys, unique=True).map(",".join)),
        st.dictionaries(st.sampled_from([DEVICES, "team"]), values),
    ),
    capacity=st.dictionaries(
        st.sampled_from(["cpu", "allotment.dev/gpu", MEMORY, COMPUTE]),
        amounts.map(str) | st.just("500m"),
    ),
)


def merged(there: Mapping[str, Any], change: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge as the API server does (RFC 7386)."""
    both = {**there, **(change or {})}
    return {key: value for key, value in both.items() if value is not None}


def applied(node: NodeFields, metadata: Patch, status: Patch) -> NodeFields:
    metadata = (metadata or {}).get("metadata", {})
    status = (status or {}).get("status", {})
    conditions = {
        each["type"]: NodeCondition(
            status=each["status"], reason=each["reason"], message=each["message"]
        )
        for each in status.get("conditions", ())
    }
    return NodeFields(
        name=node.name,
        uid=node.uid,
        labels=merged(node.labels, metadata.get("labels")),
        annotations=merged(node.annotations, metadata.get("annotations")),
        capacity=merged(node.capacity, status.get("capacity")),
        allocatable=merged(node.allocatable, status.get("allocatable")),
        conditions={**node.conditions, **conditions},
    )


def plans(node: NodeFields, wanted: Wanted) -> tuple[Patch, Patch]:
    return plan_metadata(node, wanted), plan_status(node, wanted, owned=OWNED, now=NOW)


@given(nodes, wants)
def test_what_is_written_is_all_that_is_needed_and_touches_nobody_elses(
    node: NodeFields, wanted: Wanted
) -> None:
    after = applied(node, *plans(node, wanted))
    assert plans(after, wanted) == (None, None)
    ours = set(node.annotations.get(LABELS_ANNOTATION, "").split(",")) | set(wanted.labels or {})
    for key in node.labels.keys() | after.labels.keys():
        if key not in ours:
            assert node.labels.get(key) == after.labels.get(key)
    for name in ("cpu", "allotment.dev/gpu"):
        assert node.capacity.get(name) == after.capacity.get(name)
    assert node.annotations.get("team") == after.annotations.get("team")
    if DEVICES in wanted.annotations:
        assert after.annotations.get(DEVICES) == wanted.annotations[DEVICES]
    else:
        assert after.annotations.get(DEVICES) == node.annotations.get(DEVICES)
    if wanted.labels is not None:
        assert wanted.labels.items() <= after.labels.items()
        assert set(filter(None, after.annotations.get(LABELS_ANNOTATION, "").split(","))) == set(
            wanted.labels
        )
    if wanted.quantities is not None:
        for there in (after.capacity, after.allocatable):
            ours_there = {name: parse_whole(there[name]) for name in OWNED & there.keys()}
            assert ours_there == wanted.quantities


@given(nodes, labels, labels)
def test_labels_of_ours_go_when_they_are_no_longer_wanted_and_others_stay(
    node: NodeFields, first: dict[str, str], second: dict[str, str]
) -> None:
    strangers = {key: value for key, value in node.labels.items() if key not in first}
    clean = NodeFields(name="n1", uid="u", labels=strangers)
    once = applied(clean, *plans(clean, Wanted(labels=first)))
    twice = applied(once, *plans(once, Wanted(labels=second)))
    none = applied(twice, *plans(twice, Wanted(labels={})))
    assert none.annotations == {}
    assert none.labels == {key: value for key, value in strangers.items() if key not in second}


@given(amounts)
def test_a_quantity_is_written_as_people_read_it(amount: int) -> None:
    assert parse_whole(format_quantity(amount)) == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (200, "200"), (25600, "25600"), (1 << 20, "1Mi"), (158 << 30, "158Gi")],
)
def test_quantities_look_so(amount: int, text: str) -> None:
    assert format_quantity(amount) == text


def test_a_condition_has_the_time_of_its_transition_only_where_it_is_one() -> None:
    def written(before: NodeCondition | None, after: NodeCondition) -> Patch:
        conditions = {"GpuHealthy": before} if before else {}
        node = NodeFields(name="n1", uid="u", conditions=conditions)
        plan: Any = plan_status(
            node, Wanted(conditions={"GpuHealthy": after}), owned=OWNED, now=NOW
        )
        return plan and plan["status"]["conditions"][0]

    healthy = NodeCondition(status="True", reason="AllHealthy", message="2 GPUs")
    sick = NodeCondition(status="False", reason="Xid79", message="1 of 2 GPUs")
    assert written(healthy, healthy) is None
    assert written(None, healthy)["lastTransitionTime"] == "2026-11-21T12:00:00Z"
    assert written(healthy, sick)["lastTransitionTime"] == "2026-11-21T12:00:00Z"
    other = NodeCondition(status="False", reason="Xid48", message="1 of 2 GPUs")
    assert "lastTransitionTime" not in written(sick, other)


# ---- the loop ------------------------------------------------------------------------------------


def an_object(version: str = "1", **parts: object) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "n1",
            "uid": parts.pop("uid", "u1"),
            "resourceVersion": version,
            "labels": parts.pop("labels", {"zone": "a"}),
            "annotations": parts.pop("annotations", {}),
        },
        "status": {
            "capacity": parts.pop("capacity", {"cpu": "4"}),
            "allocatable": parts.pop("allocatable", {"cpu": "4"}),
            "nodeInfo": {"containerRuntimeVersion": "containerd://2.3.7"},
        },
    }


@pytest.fixture
def node(server: Server) -> OwnNode:
    return OwnNode(server.client(), name="n1", owned=OWNED, backoff=impatient())


def test_it_writes_what_is_wanted_and_again_when_the_kubelet_or_an_admin_undoes_it(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(listed(an_object()))
    server.writes.append(answered({}))
    watch = server.new_watch()
    full = {"cpu": "4", MEMORY: "8Gi", COMPUTE: "200"}

    async def test() -> None:
        await node.set_capacity({MEMORY: 8 << 30, COMPUTE: 200})
        await until(server.bodies)
        assert not node.is_settled
        watch.send({"type": "MODIFIED", "object": an_object("2", capacity=full, allocatable=full)})
        await until(lambda: node.is_settled)
        watch.send({"type": "DELETED", "object": an_object("3")})
        watch.send({"type": "ADDED", "object": an_object("4", uid="u2")})
        await until(lambda: len(server.bodies()) == 2)

    run(node.run(), test())
    assert {each.params["fieldSelector"] for each in server.asked("lists")} == {"metadata.name=n1"}
    patch = server.asked("writes")[0]
    assert patch.path == "/api/v1/nodes/n1/status"
    assert patch.content_type == "application/strategic-merge-patch+json"
    ours = {MEMORY: "8Gi", COMPUTE: "200"}
    assert server.bodies() == [{"status": {"capacity": ours, "allocatable": ours}}] * 2


def test_what_is_always_undone_is_written_less_and_less_often(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(listed(an_object()))
    server.writes.append(answered({}))
    watch = server.new_watch()

    def shows(capacity: object) -> bool:
        return node.current is not None and node.current.capacity == capacity

    async def test() -> None:
        await node.set_capacity({MEMORY: 1 << 30})
        for version in range(2, 400):
            cpu = {"cpu": str(version)}
            watch.send({"type": "MODIFIED", "object": an_object(str(version), capacity=cpu)})
            await until(partial(shows, cpu))

    run(node.run(), test())
    assert 1 <= len(server.bodies()) <= 6


def test_labels_are_there_when_the_call_returns(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(
        listed(
            an_object(
                labels={"zone": "a", "nvidia.com/old": "1"},
                annotations={LABELS_ANNOTATION: "nvidia.com/old"},
            )
        )
    )
    server.writes.append(answered({}))
    watch = server.new_watch()

    async def answer() -> None:
        await until(server.bodies)
        watch.send(
            {
                "type": "MODIFIED",
                "object": an_object(
                    "2",
                    labels={"zone": "a", "nvidia.com/new": "2"},
                    annotations={LABELS_ANNOTATION: "nvidia.com/new"},
                ),
            }
        )

    async def test() -> None:
        answering = asyncio.create_task(answer())
        await node.set_labels({"nvidia.com/new": "2"}, owned_prefixes=("nvidia.com/",))
        assert node.is_settled
        await answering
        with pytest.raises(ValueError, match="zone"):
            await node.set_labels({"zone": "b"}, owned_prefixes=("nvidia.com/",))

    run(node.run(), test())
    assert server.bodies() == [
        {
            "metadata": {
                "labels": {"nvidia.com/new": "2", "nvidia.com/old": None},
                "annotations": {LABELS_ANNOTATION: "nvidia.com/new"},
            }
        }
    ]


def test_an_annotation_is_put_right_when_others_edit_it_and_removed_when_it_has_to_be(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(listed(an_object(annotations={"team": "a"})))
    server.writes.append(answered({}))
    watch = server.new_watch()

    def say(version: str, text: str | None) -> None:
        ours = {} if text is None else {DEVICES: text}
        written = an_object(version, annotations={"team": "a", **ours})
        watch.send({"type": "MODIFIED", "object": written})

    async def test() -> None:
        node.set_annotation(DEVICES, "right")
        await until(lambda: len(server.bodies()) == 1)
        say("2", "right")
        await until(lambda: node.is_settled)
        say("3", "forged")
        await until(lambda: len(server.bodies()) == 2)
        say("4", "right")
        await until(lambda: node.is_settled)
        node.set_annotation(DEVICES, None)
        await until(lambda: len(server.bodies()) == 3)
        say("5", None)
        await until(lambda: node.is_settled)

    run(node.run(), test())
    assert {each.path for each in server.asked("writes")} == {"/api/v1/nodes/n1"}
    texts = [each["metadata"]["annotations"] for each in server.bodies()]
    assert texts == [{DEVICES: "right"}, {DEVICES: "right"}, {DEVICES: None}]


def test_a_refused_write_is_told_and_tried_again(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(listed(an_object()))
    server.new_watch()
    server.writes.extend([refused(409), refused(403, "nodes is forbidden"), answered({})])

    async def test() -> None:
        await until(lambda: node.current)
        with pytest.raises(KubeError):
            await node.set_labels({"nvidia.com/new": "2"})
        await until(lambda: len(server.bodies()) >= 3 and node.problem is None)

    run(node.run(), test())


def test_without_a_node_it_waits_for_one(
    node: OwnNode,
    server: Server,
) -> None:
    server.lists.append(listed())
    server.writes.append(refused(404))
    watch = server.new_watch()

    async def test() -> None:
        await node.set_condition("GpuHealthy", "True", reason="AllHealthy", message="")
        await until(lambda: node.is_synced)
        assert not node.is_settled
        assert not server.bodies()
        watch.send({"type": "ADDED", "object": an_object("4")})
        await until(server.bodies)
        assert node.current is not None
        assert node.current.container_runtime == "containerd://2.3.7"

    run(node.run(), test())


# ---- what is left when the agents are gone -------------------------------------------------------

UNWANTED = Wanted(
    quantities=dict.fromkeys(OWNED, 0),
    conditions={"GpuHealthy": NodeCondition(status="Unknown")},
    annotations={DEVICES: None},
)


@given(nodes)
def test_after_a_removal_nothing_of_ours_is_left(node: NodeFields) -> None:
    metadata, status = plan_removal(node, unwanted=UNWANTED)
    ours = {key for key in node.annotations.get(LABELS_ANNOTATION, "").split(",") if key}
    changes: Patch = (metadata or {}).get("metadata", {})
    assert set(changes.get("labels", {})) == ours & node.labels.keys()
    written: Patch = (status or {}).get("status", {})
    for part, current in (("capacity", node.capacity), ("allocatable", node.allocatable)):
        assert written.get(part, {}) == dict.fromkeys(OWNED & current.keys())
    gone = [each["type"] for each in written.get("conditions", [])]
    assert gone == [each for each in node.conditions if each == "GpuHealthy"]


def test_nodes_without_anything_of_ours_are_not_written(server: Server) -> None:
    condition = {"type": "GpuHealthy", "status": "True"}
    ours = {"metadata": {"name": "a"}, "status": {"conditions": [condition]}}
    server.lists.append(listed(ours, {"metadata": {"name": "b"}, "status": {}}))
    server.writes.append(answered({}))
    assert asyncio.run(remove_fields(server.client(), unwanted=UNWANTED)) == ("a",)
    assert server.bodies() == [
        {"status": {"conditions": [{"$patch": "delete", "type": "GpuHealthy"}]}}
    ]
