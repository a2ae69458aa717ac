# SPDX-License-Identifier: Apache-2.0
"""Nodes move from another system's plugin to the agent, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from migrated_cluster import AGENT, MigratedCluster

from allotment.kube.migrations import Departure, MovedNode
from allotment.kube.moving import Mover, is_shut, opened, shut
from allotment.model.errors import AllotError, BusyError, NotFoundError

PLUGIN = "gpu/nvidia-device-plugin"
LABEL = "nvidia.com/gpu.deploy.device-plugin"
MOVED, HERE = "allotment.dev/moved-from", "allotment.dev/agent"
ON, OFF = {LABEL: "true"}, {LABEL: "false"}


@pytest.fixture
def cluster() -> MigratedCluster:
    """Two nodes with a plugin, and an agent that waits for nodes."""
    made = MigratedCluster()
    made.add_node("a", labels=ON)
    made.add_node("b", labels=ON)
    made.add_daemon_set(PLUGIN, image="k8s-device-plugin", selector=ON)
    made.add_daemon_set(AGENT, image="allotment", selector={HERE: "true"})
    made.add_pod("ml/old", "a", {"nvidia.com/gpu": "1"})
    return made


def leaving(node: str = "a", **changes: object) -> Departure:
    given_: dict[str, Any] = {
        "node": node,
        "system": "nvidia",
        "labels": OFF,
        "annotations": ("hami.io/node-handshake",),
        "daemon_sets": (PLUGIN,),
        "resources": r"nvidia\.com/gpu",
    }
    return Departure(**(given_ | changes))


def do(
    cluster: MigratedCluster,
    change: Callable[[Mover], Awaitable[object]],
    *,
    timeout_s: float = 0.2,
) -> list[str]:
    """Return what was reported."""
    said: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(20), cluster.api() as api:
            await change(Mover(api, report=said.append, timeout_s=timeout_s, poll_s=0.005))

    asyncio.run(main())
    return said


def take(cluster: MigratedCluster, node: str = "a", **changes: object) -> list[str]:
    return do(cluster, lambda mover: mover.take_over(leaving(node, **changes)))


def give(cluster: MigratedCluster, node: str = "a", *, keeps_pods: bool = False) -> list[str]:
    return do(cluster, lambda mover: mover.give_back(node, keeps_pods=keeps_pods))


def test_a_node_moves_and_pods_stay(cluster: MigratedCluster) -> None:
    cluster.nodes["a"]["metadata"]["annotations"]["hami.io/node-handshake"] = "Reported"
    said = take(cluster)
    assert cluster.on("a") == {AGENT}
    assert cluster.on("b") == {PLUGIN}
    assert cluster.labels("a") == {**OFF, MOVED: "nvidia", HERE: "true"}
    assert not cluster.is_cordoned("a")
    assert "ml/old" in cluster.users
    assert "hami.io/node-handshake" not in cluster.nodes["a"]["metadata"]["annotations"]
    assert cluster.record("a") == {
        "system": "nvidia",
        "labels": {LABEL: "true"},
        "daemonSets": [PLUGIN],
        "cordoned": True,
        "step": "moved",
    }
    assert said == [
        "node a: cordoned",
        "node a: the old plugin has left",
        "node a: the agent is ready",
    ]


def test_the_agent_never_meets_the_plugin(cluster: MigratedCluster) -> None:
    """Two plugins of one resource: the end of the old one would take the new one's devices away."""
    together = []
    original = cluster.reconcile

    def watched() -> None:
        original()
        together.append(cluster.on("a") >= {AGENT, PLUGIN})

    cluster.reconcile = watched  # type: ignore[method-assign]
    take(cluster)
    give(cluster)
    assert not any(together)


def test_no_pod_can_arrive_while_no_plugin_is_there(cluster: MigratedCluster) -> None:
    open_without = []
    cluster.on_write = lambda _: open_without.append(
        not cluster.is_cordoned("a") and not cluster.on("a")
    )
    take(cluster)
    give(cluster)
    assert not any(open_without)
    assert not cluster.is_cordoned("a")


def test_a_node_returns_as_it_was(cluster: MigratedCluster) -> None:
    before = cluster.labels("a")
    take(cluster)
    give(cluster)
    assert cluster.labels("a") == before
    assert cluster.record("a") is None
    assert cluster.on("a") == {PLUGIN}
    assert not cluster.is_cordoned("a")


def test_a_cordon_of_the_user_stays(cluster: MigratedCluster) -> None:
    cluster.nodes["a"]["spec"]["unschedulable"] = True
    take(cluster)
    assert cluster.is_cordoned("a")
    give(cluster)
    assert cluster.is_cordoned("a")


def test_a_cordon_after_the_move_stays(cluster: MigratedCluster) -> None:
    take(cluster)
    cluster.nodes["a"]["spec"]["unschedulable"] = True
    give(cluster)
    assert cluster.is_cordoned("a")


def test_a_label_that_is_set_again_is_taken_off_again(cluster: MigratedCluster) -> None:
    """As an operator may do. The record keeps the first value."""
    take(cluster)
    cluster.nodes["a"]["metadata"]["labels"].update(ON)
    cluster.reconcile()
    take(cluster)
    assert cluster.on("a") == {AGENT}
    give(cluster)
    assert cluster.labels("a") == ON


def test_a_plugin_that_stays_is_named_and_the_next_apply_goes_on(cluster: MigratedCluster) -> None:
    cluster.stuck.add(PLUGIN)
    with pytest.raises(BusyError, match=r"node a waited 0.2 s for the old plugin to leave: gpu/"):
        take(cluster)
    assert cluster.is_cordoned("a")
    assert HERE not in cluster.labels("a")
    cluster.stuck.clear()
    take(cluster)
    assert cluster.on("a") == {AGENT}
    record = cluster.record("a")
    assert record is not None
    assert record["labels"] == {LABEL: "true"}
    give(cluster)
    assert cluster.labels("a") == ON


def test_an_agent_that_does_not_start_leaves_a_way_back(cluster: MigratedCluster) -> None:
    cluster.sick.add(AGENT)
    with pytest.raises(BusyError, match="for the agent: no agent is ready") as error:
        take(cluster)
    assert "allot migrate back a" in (error.value.hint or "")
    give(cluster)
    assert cluster.labels("a") == ON
    assert not cluster.is_cordoned("a")


def test_a_pod_that_starts_is_waited_for(cluster: MigratedCluster) -> None:
    cluster.add_pod("ml/late", "a", {"nvidia.com/gpu": "1"}, phase="Pending")
    with pytest.raises(BusyError, match="ml/late is starting"):
        take(cluster)
    assert cluster.on("a") == {PLUGIN}
    cluster.add_pod("ml/late", "a", {"cpu": "1"}, phase="Pending")
    take(cluster)


@pytest.mark.parametrize("number", range(5))
def test_each_interruption_goes_on_with_a_second_apply(
    cluster: MigratedCluster, number: int
) -> None:
    """Ctrl-C before each write: what was written is enough."""
    count = 0

    def interrupt(_: str) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise KeyboardInterrupt

    cluster.on_write = interrupt
    try:
        take(cluster)
    except KeyboardInterrupt:
        pass
    else:
        assert number == 4
    cluster.on_write = lambda _: None
    take(cluster)
    assert cluster.on("a") == {AGENT}
    assert not cluster.is_cordoned("a")
    give(cluster)
    assert cluster.labels("a") == ON
    assert not cluster.is_cordoned("a")


def test_a_node_that_moved_is_left_alone(cluster: MigratedCluster) -> None:
    take(cluster)
    writes = len(cluster.writes)
    assert take(cluster) == []
    assert len(cluster.writes) == writes


def test_a_node_of_another_system_is_refused(cluster: MigratedCluster) -> None:
    take(cluster)
    with pytest.raises(BusyError, match="node a was moved from nvidia"):
        take(cluster, system="hami")


def test_pods_with_shares_hold_a_node(cluster: MigratedCluster) -> None:
    take(cluster)
    cluster.add_pod("ml/new", "a", {"allotment.dev/gpu": "1"})
    with pytest.raises(BusyError, match="ml/new"):
        give(cluster)
    assert cluster.on("a") == {AGENT}
    give(cluster, keeps_pods=True)
    assert cluster.on("a") == {PLUGIN}


def claim(cluster: MigratedCluster, driver: str, pod: str = "ml/user") -> None:
    result = {"driver": driver, "pool": "a"}
    namespace, _, name = pod.partition("/")
    users = [{"resource": "pods", "name": name}]
    status = {"allocation": {"devices": {"results": [result]}}, "reservedFor": users}
    cluster.add("claims", f"{namespace}/claim", status=status)


@pytest.mark.parametrize("driver", ["gpu.nvidia.com", "gpu.allotment.dev"])
def test_pods_with_claims_hold_a_node(cluster: MigratedCluster, driver: str) -> None:
    take(cluster)
    claim(cluster, "nic.example.com", "ml/other")
    claim(cluster, driver)
    with pytest.raises(BusyError, match=r"would not count: ml/user$"):
        give(cluster)
    assert cluster.on("a") == {AGENT}
    give(cluster, keeps_pods=True)
    assert cluster.on("a") == {PLUGIN}


def test_pods_that_start_before_the_cordon_hold_a_node(cluster: MigratedCluster) -> None:
    take(cluster)
    cluster.on_write = lambda _: cluster.add_pod("ml/new", "a", {"allotment.dev/gpu": "1"})
    with pytest.raises(BusyError, match="ml/new; it stays cordoned"):
        give(cluster)
    cluster.on_write = lambda _: None
    assert cluster.on("a") == {AGENT}
    take(cluster)
    assert not cluster.is_cordoned("a")


def test_claims_that_come_before_the_cordon_hold_a_node(cluster: MigratedCluster) -> None:
    cluster.on_write = lambda _: claim(cluster, "gpu.nvidia.com")
    with pytest.raises(BusyError, match="node a: claims end: ml/user; it stays cordoned"):
        take(cluster, claims_of="gpu.nvidia.com", ends_pods="claims end", resources="(?!)")
    assert cluster.on("a") == {PLUGIN}
    cluster.on_write = lambda _: None
    give(cluster)
    assert not cluster.is_cordoned("a")


def test_a_plugin_that_was_deleted_cannot_come_back(cluster: MigratedCluster) -> None:
    take(cluster)
    del cluster.daemon_sets[PLUGIN]
    with pytest.raises(NotFoundError, match=f"DaemonSet {PLUGIN} is gone"):
        give(cluster)
    assert cluster.on("a") == {AGENT}


def test_only_moved_nodes_go_back(cluster: MigratedCluster) -> None:
    with pytest.raises(NotFoundError, match="node b was not moved"):
        give(cluster, "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sets: sets.pop(AGENT), "the agent is not installed"),
        (
            lambda sets: sets[AGENT]["spec"]["template"]["spec"].pop("nodeSelector"),
            "runs on all nodes",
        ),
    ],
)
def test_the_agent_has_to_wait_for_its_nodes(
    cluster: MigratedCluster, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    do(cluster, lambda mover: mover.check_agent())
    change(cluster.daemon_sets)
    with pytest.raises(AllotError, match=message):
        do(cluster, lambda mover: mover.check_agent())


# ---- DaemonSets without a label ------------------------------------------------------------------


def test_a_plugin_without_a_label_avoids_moved_nodes(cluster: MigratedCluster) -> None:
    cluster.add_daemon_set(PLUGIN, image="k8s-device-plugin")
    do(cluster, lambda mover: mover.shut_out([PLUGIN]))
    assert cluster.on("a") == cluster.on("b") == {PLUGIN}
    take(cluster, labels={})
    assert cluster.on("a") == {AGENT}
    assert cluster.on("b") == {PLUGIN}
    writes = len(cluster.writes)
    do(cluster, lambda mover: mover.shut_out([PLUGIN]))
    assert len(cluster.writes) == writes
    do(cluster, lambda mover: mover.let_in())
    assert is_shut(cluster.affinity(PLUGIN)), "a node is still away"
    give(cluster)
    do(cluster, lambda mover: mover.let_in())
    assert cluster.affinity(PLUGIN) is None
    assert cluster.on("a") == {PLUGIN}


@pytest.mark.parametrize("number", range(8))
def test_a_rule_that_an_upgrade_removed_is_put_back(cluster: MigratedCluster, number: int) -> None:
    """Also after Ctrl-C before any of the writes: the agent is started again after the plugin."""

    async def apply(mover: Mover) -> None:
        await mover.take_agents_off([PLUGIN])
        await mover.shut_out([PLUGIN])
        await mover.take_over(leaving(labels={}))

    cluster.add_daemon_set(PLUGIN, image="k8s-device-plugin")
    do(cluster, apply)
    cluster.add_daemon_set(PLUGIN, image="k8s-device-plugin")
    assert cluster.on("a") == {AGENT, PLUGIN}
    count = 0

    def look(path: str) -> None:
        nonlocal count
        count += 1
        if count == number + 1:
            raise KeyboardInterrupt
        assert "/daemonsets/" not in path or AGENT not in cluster.on("a")

    cluster.on_write = look
    try:
        do(cluster, apply)
    except KeyboardInterrupt:
        do(cluster, apply)
    else:
        assert number == 7
    assert cluster.on("a") == {AGENT}
    assert not cluster.is_cordoned("a")


def test_a_rule_goes_into_each_term(cluster: MigratedCluster) -> None:
    """Terms are alternatives: one without the rule would let the plugin in."""
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in (LABEL, "other")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    affinity = {"nodeAffinity": required, "podAntiAffinity": {"x": []}}
    cluster.add_daemon_set(PLUGIN, affinity=affinity)
    do(cluster, lambda mover: mover.shut_out([PLUGIN]))
    take(cluster, labels={})
    assert cluster.on("a") == {AGENT}
    give(cluster)
    do(cluster, lambda mover: mover.let_in())
    assert cluster.affinity(PLUGIN) == affinity


def test_a_daemon_set_that_changed_meanwhile_is_read_again(cluster: MigratedCluster) -> None:
    reads = 0

    def race(path: str) -> None:
        nonlocal reads
        reads += 1
        if reads == 1:
            assert path.endswith("/daemonsets/nvidia-device-plugin")
            cluster.daemon_sets[PLUGIN]["metadata"]["resourceVersion"] = "9"

    cluster.on_read = race
    do(cluster, lambda mover: mover.shut_out([PLUGIN]))
    assert is_shut(cluster.affinity(PLUGIN))
    assert reads == 2


_RULES = st.fixed_dictionaries({"key": st.sampled_from("abc"), "operator": st.just("Exists")})
_TERMS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"matchExpressions": st.lists(_RULES, min_size=1, max_size=2)}),
        st.fixed_dictionaries({"matchFields": st.lists(_RULES, min_size=1, max_size=1)}),
        st.just({}),
    ),
    min_size=1,
    max_size=3,
).filter(any)
_NODES = st.fixed_dictionaries(
    {},
    optional={
        "requiredDuringSchedulingIgnoredDuringExecution": st.fixed_dictionaries(
            {"nodeSelectorTerms": _TERMS}
        ),
        "preferredDuringSchedulingIgnoredDuringExecution": st.just([{"weight": 1}]),
    },
).filter(bool)
_AFFINITIES: st.SearchStrategy[dict[str, Any] | None] = st.one_of(
    st.none(),
    st.just({}),
    st.fixed_dictionaries({}, optional={"nodeAffinity": _NODES, "podAffinity": st.just({"y": 1})}),
)


@given(_AFFINITIES)
def test_the_rule_goes_without_a_trace(affinity: dict[str, Any] | None) -> None:
    ruled = shut(affinity)
    assert is_shut(ruled)
    assert not is_shut(affinity)
    assert shut(ruled) == ruled
    assert opened(ruled) == (affinity or {})
    assert opened(affinity) == (affinity or {})


def test_an_unreadable_record_is_named() -> None:
    node = msgspec.convert(
        {"metadata": {"name": "a", "annotations": {"allotment.dev/migration": "{"}}}, MovedNode
    )
    with pytest.raises(AllotError, match=r"node a: annotation .* is unreadable"):
        _ = node.record
