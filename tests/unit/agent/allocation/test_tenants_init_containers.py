# SPDX-License-Identifier: Apache-2.0
"""`Tenants` between twins: init containers hand their ids on, sidecars keep theirs."""

from __future__ import annotations

from kubelet_twin import ROOM, State
from tenancy_scene import INIT, SIDECAR, Scene, part, story

from allotment.model.shares import ShareId


@story
async def test_init_containers_hand_their_ids_on(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT, memory=2), part(memory=ROOM))
    ids = {each.ids for each in node.kubelet.table}
    assert len(ids) == 1
    assert await node.start(pod, "init") == ""
    assert len(node.store.shares) == 2
    # On one device: neither needs its place while the other runs.
    devices = {each.devices[0].uuid for each in node.store.shares.values()}
    assert len(devices) == 1
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    assert await node.start(pod) == ""
    assert pod.containers[1].share == node.share_of(pod)


@story
async def test_the_one_that_starts_is_prepared_last(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT, memory=2), part(memory=4))
    await node.start(pod, "init")
    assert node.store.prepared[-1] == node.share_of(pod, "init")
    node.hear()  # it runs
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    assert await node.start(pod) == ""
    assert node.store.prepared[-1] == node.share_of(pod)


@story
async def test_what_was_left_to_an_init_container_comes_back_once_it_is_known_to_be_over(
    node: Scene,
) -> None:
    pod = node.admit("1", part("init", INIT, memory=4), part(memory=2))
    await node.start(pod, "init")
    node.kubelet.news.clear()  # nobody says that it runs, or has ended
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.kubelet.news.clear()
    assert await node.start(pod) == ""
    assert node.store.prepared[-1] == node.share_of(pod, "init")
    node.hear()
    await node.tenants.look()
    assert node.store.prepared[-1] == node.share_of(pod)


@story
async def test_a_new_sandbox_starts_init_containers_again(node: Scene) -> None:
    pod = node.admit("1", part("init", INIT), part())
    await node.start(pod, "init")
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    await node.start(pod)
    node.hear()
    node.store.clock += 600
    await node.tenants.look()
    # What an init container had stays its own for as long as the pod is there.
    assert set(node.store.shares) == {node.share_of(pod, "init"), node.share_of(pod)}
    node.kubelet.new_sandbox(pod)
    # The API server still has it as finished.
    assert await node.start(pod, "init") == ""
    assert pod.containers[0].state is State.RUNNING


@story
async def test_a_sidecar_restarts_on_a_full_node_whatever_its_init_container_had(
    node: Scene,
) -> None:
    """It is asked for with the ids of an init container that has ended, and needs no room."""
    pod = node.admit(
        "1", part("first", INIT, memory=5), part("sc", SIDECAR, memory=1), part(memory=1)
    )
    await node.start(pod, "first")
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert await node.start(pod, "sc") == ""
    assert await node.start(pod) == ""
    node.hear()
    await node.lose(pod, "first")
    for number in range(2):
        filler = node.admit(f"full-{number}", part(memory=ROOM - 2 * (1 - number)))
        assert await node.start(filler) == ""
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        node.hear()
        assert await node.start(pod, "sc") == ""
        node.hear()
        node.store.clock += 15  # as in a crash loop
    # Nobody hears of its starts, nor a new agent of anything.
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        assert await node.start(pod, "sc") == ""
    assert node.store.prepared.count(ShareId(str(node.share_of(pod, "first")))) > 1
    node.start_agent(is_synced=False)
    await node.tenants.adopt()
    node.kubelet.finish(pod, pod.containers[1], for_good=False)
    assert await node.start(pod, "sc") == ""


@story
async def test_who_has_finished_is_not_prepared_anew_for_a_sidecar_that_crashes(
    node: Scene,
) -> None:
    pod = node.admit(
        "1", part("first", INIT, memory=5), part("sc", SIDECAR, memory=1), part(memory=1)
    )
    await node.start(pod, "first")
    node.hear()
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert await node.start(pod, "sc") == ""
    assert await node.start(pod) == ""
    node.hear()
    await node.lose(pod, "first")
    told = list(node.reports.events)
    for _ in range(4):
        node.kubelet.finish(pod, pod.containers[1], for_good=False)
        node.hear()
        assert await node.start(pod, "sc") == ""
        node.hear()
        node.store.clock += 15
    assert node.share_of(pod, "first") not in node.store.shares
    assert node.reports.events == told


@story
async def test_no_room_for_what_comes_later_keeps_no_init_container_waiting(node: Scene) -> None:
    for number in range(2):
        await node.start(node.admit(f"full-{number}", part(memory=ROOM - 1)))
    pod = node.admit("1", part("init", INIT, memory=1), part(memory=2))
    for _ in range(2):  # it fails, and is started again
        assert await node.start(pod, "init") == ""
        node.kubelet.finish(pod, pod.containers[0], for_good=False)
        node.hear()
    assert await node.start(pod, "init") == ""
    node.kubelet.finish(pod, pod.containers[0], for_good=True)
    node.hear()
    assert (await node.start(pod)).startswith("need 2 of each")
    last = node.reports.events[-1]
    assert last[1] == "ShareRefused"
    assert last[2].startswith("container main: need 2")


@story
async def test_sidecars_keep_their_ids(node: Scene) -> None:
    pod = node.admit("1", part("side", SIDECAR, memory=2), part(memory=2))
    assert await node.start(pod, "side") == ""
    assert len(node.store.shares) == 1
    assert await node.start(pod) == ""
    assert len({each.share for each in pod.containers}) == 2
