# SPDX-License-Identifier: Apache-2.0
"""The kubelet looks again at pods that wait for a claim, as soon as it can be prepared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from driver_twin import Scene, claim, result, serving
from own_node_twin import until

from allotment.agent.kubelet import services
from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.model.errors import DoesNotFitError
from allotment.model.pods import Container, ContainerKind, Pod, PodUid
from allotment.model.shares import ShareId
from allotment.model.structs import replace
from allotment.shares.record import LoadedShare

WAITING = Pod(
    uid=PodUid("p1"),
    namespace="default",
    name="train",
    containers=(Container("c", ContainerKind.REGULAR),),
    claims={"mine": False},
)
RUNNING = replace(
    WAITING, uid=PodUid("p2"), containers=(Container("c", ContainerKind.REGULAR, is_started=True),)
)
ENDED = replace(WAITING, uid=PodUid("p3"), has_ended=True)
ELSEWHERE = replace(WAITING, uid=PodUid("p4"), namespace="other")
WITHOUT = replace(WAITING, uid=PodUid("p5"), claims={})


def hear(scene: Scene, *pods: Pod) -> None:
    for each in pods:
        scene.pods.hear(each.uid, each)


async def failed(scene: Scene) -> None:
    """A claim is refused, as the GPU is full."""
    hear(scene, WAITING, RUNNING, ENDED, ELSEWHERE, WITHOUT)
    scene.shares.refusal = DoesNotFitError("need 4Gi, have 1Gi")
    assert (await scene.prepare()).error


def change(scene: Scene, number: int) -> None:
    """Another share has begun or ended."""
    scene.driver.offer([LoadedShare(ShareId(f"{number:012}"), Path("/x"), None, None)])


def test_a_claim_that_failed_is_prepared_when_the_node_changes(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            await failed(scene)
            change(scene, 1)
            reads = scene.reads
            await until(lambda: scene.reads > reads)
            assert not scene.pods.annotated, "it is refused again: the kubelet has nothing to see"
            scene.shares.refusal = None
            change(scene, 2)
            await until(lambda: scene.pods.annotated)
            assert scene.pods.annotated == [WAITING.uid]
            assert len(scene.shares.orders) == 1
            assert not (await scene.prepare()).error

    asyncio.run(story())


def test_a_claim_that_was_released_is_prepared_no_more(folder: Path) -> None:
    theirs = claim(result(), uid="u2")
    theirs["metadata"]["name"] = "theirs"

    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            scene.others["theirs"] = theirs
            await failed(scene)
            method = services.prepare_resources(services.DRA_SERVICES["v1.DRAPlugin"])
            asked = dra.Claim(namespace="default", name="theirs", uid="u2")
            await scene.call(method, dra.NodePrepareResourcesRequest(claims=[asked]))
            assert await scene.release(), "the twin refuses all"
            scene.shares.refusal = None
            change(scene, 1)
            await until(lambda: scene.shares.orders)
            owners = [each.owner for each in scene.shares.orders]
            assert [each.uid for each in owners if each is not None] == ["u2"]

    asyncio.run(story())


@pytest.mark.parametrize("driver", ["gpu.allotment.dev", "nic.example.com"])
def test_a_registration_resumes_the_pods_of_claims_here(folder: Path, driver: str) -> None:
    """Once the pods are known: the kubelet registers an agent that has just started."""

    async def story() -> None:
        async with serving(folder, claim(result(driver=driver))) as scene:
            hear(scene, WAITING, RUNNING, ENDED, WITHOUT)
            assert not scene.pods.annotated
            reads = scene.reads
            scene.pods.is_synced = True
            hear(scene, ENDED)
            await until(lambda: scene.reads > reads)
            await until(lambda: scene.pods.annotated or driver != "gpu.allotment.dev")
            expected = [WAITING.uid] if driver == "gpu.allotment.dev" else []
            assert scene.pods.annotated == expected

    asyncio.run(story())
