# SPDX-License-Identifier: Apache-2.0
"""Claims that are allocated and get no share: a container has no CUDA, or its GPU is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from driver_twin import DEVICE, DRIVER, claim, result, serving
from gpus import gpu
from own_node_twin import until

from allotment.model.pods import Container, ContainerKind, Pod, PodUid, UsedClaim
from allotment.model.structs import replace
from allotment.shares.mode_policy import ModePolicy

OTHER = gpu(1)
POD = PodUid("p1")
BOTH = (UsedClaim("mine", "a"), UsedClaim("mine", "b"))


def used(found: dict[str, Any]) -> dict[str, Any]:
    """A claim that the pod may use."""
    found["status"]["reservedFor"] = [{"resource": "pods", "name": "train", "uid": POD}]
    return found


def pod(*containers: tuple[UsedClaim, ...]) -> Pod:
    return Pod(
        uid=POD,
        namespace="default",
        name="train",
        containers=tuple(
            Container(f"c{place}", ContainerKind.REGULAR, claims=claims)
            for place, claims in enumerate(containers)
        ),
    )


def in_mode(request: str, mode: object = "mps") -> dict[str, Any]:
    parameters = {"apiVersion": "allotment.dev/v1", "kind": "ShareConfig", "mode": mode}
    opaque = {"driver": DRIVER, "parameters": parameters}
    return {"requests": [request], "opaque": opaque}


def answer(folder: Path, found: dict[str, Any], user: Pod, **others: dict[str, Any]) -> str:
    """The answers to the kubelet, on a node with two GPUs."""

    async def story() -> str:
        async with serving(folder, used(found)) as scene:
            scene.state.devices = {each.uuid: each for each in (DEVICE, OTHER)}
            scene.driver.offer([])
            scene.others = others
            scene.pods.hear(POD, user)
            error = str((await scene.prepare()).error)
            assert bool(error) is not bool(scene.shares.orders), "nothing is made of a refused one"
            return error

    return asyncio.run(story())


def of_pair(device: str) -> dict[str, Any]:
    return claim(result("a"), result("b/first", device, shareID="s2"))


@pytest.mark.parametrize(
    "claims", [pytest.param((UsedClaim("mine"),), id="all"), pytest.param(BOTH, id="each named")]
)
def test_two_parts_of_one_gpu_in_a_container_are_refused(
    folder: Path, claims: tuple[UsedClaim, ...]
) -> None:
    error = answer(folder, of_pair("gpu-0"), pod((), claims))
    assert "container c1 of pod default/train would have no CUDA" in error
    both = "request a of default/mine and request b/first of default/mine"
    assert f"{both} have parts of one GPU ({DEVICE.uuid})" in error
    assert f"distinctAttribute: {DRIVER}/uuid" in error


def test_parts_of_two_gpus_and_containers_with_a_part_each_are_served(folder: Path) -> None:
    assert answer(folder, of_pair("gpu-1"), pod(BOTH)) == ""
    assert answer(folder, of_pair("gpu-0"), pod(BOTH[:1], BOTH[1:])) == ""
    # One request is one share, of all that it has of a GPU.
    assert answer(folder, claim(result("a"), result("a", shareID="s2")), pod(BOTH[:1])) == ""


def test_a_pod_that_ends_keeps_no_claim_from_another_pod(folder: Path) -> None:
    assert answer(folder, of_pair("gpu-0"), replace(pod(BOTH), is_ending=True)) == ""
    assert answer(folder, of_pair("gpu-0"), replace(pod(BOTH), has_ended=True)) == ""


def test_two_claims_in_a_container_are_one_as_the_other(folder: Path) -> None:
    uses = (UsedClaim("mine"), UsedClaim("second", "gpu"))
    second = claim(result(shareID="s2"), result("more", "gpu-1"), uid="u2")
    second["metadata"]["name"] = "second"
    error = answer(folder, claim(result()), pod(uses), second=second)
    assert "request gpu of default/mine and request gpu of default/second have parts" in error
    apart = (UsedClaim("mine"), UsedClaim("second", "more"))
    assert answer(folder, claim(result()), pod(apart), second=second) == ""
    assert answer(folder, claim(result()), pod(uses[:1], uses[1:]), second=second) == ""
    # The other claim's faults are reported for the other claim.
    waits = {**second, "status": {}}
    assert answer(folder, claim(result()), pod(uses), second=waits) == ""


def test_modes_that_go_with_no_other_are_refused(folder: Path) -> None:
    whole = answer(folder, of_pair("gpu-1-whole"), pod(BOTH))
    assert "request b/first of default/mine has whole GPUs, and the others have parts" in whole
    mps = of_pair("gpu-1")
    mps["status"]["allocation"]["devices"]["config"] = [in_mode("b")]
    assert "one of them has mode mps" in answer(folder, mps, pod(BOTH))


def test_a_claim_that_is_in_use_is_prepared_again(folder: Path) -> None:
    """After a restart of the kubelet, while another pod has come to it."""

    async def story() -> None:
        async with serving(folder, used(of_pair("gpu-0"))) as scene:
            scene.pods.hear(POD, pod(BOTH[:1]))
            assert (await scene.prepare()).error == ""
            scene.pods.hear(POD, pod(BOTH))
            assert (await scene.prepare()).error == ""

    asyncio.run(story())


def test_a_pod_that_is_not_reported_refuses_no_claim(folder: Path) -> None:
    """Then the program itself says why it has no CUDA (native/shim)."""

    async def story() -> None:
        async with serving(folder, used(of_pair("gpu-0"))) as scene:
            assert (await scene.prepare()).error == ""

    asyncio.run(story())


def test_a_toleration_gives_no_part_of_a_gpu_that_is_kept_for_other_modes(folder: Path) -> None:
    asked = {"deviceClassName": "share.allotment.dev", "tolerations": [{"operator": "Exists"}]}
    tolerant = claim(result(), requests=[{"name": "gpu", "exactly": asked}])

    async def story() -> None:
        async with serving(folder, tolerant) as scene:
            scene.state.mode_policies = {DEVICE.uuid: ModePolicy(("mig",))}
            scene.driver.offer([])
            error = (await scene.prepare()).error
            assert "request gpu" in error
            assert "mig by `allot devices set-mode`" in error
            assert not scene.shares.orders
            scene.claim = claim(result())  # it was allocated before
            assert not (await scene.prepare()).error
            scene.claim = tolerant  # what has its share keeps it
            assert not (await scene.prepare()).error

    asyncio.run(story())


def test_a_claim_has_a_mode_that_its_gpu_may_have(folder: Path) -> None:
    """A device serves several modes: kube-scheduler cannot read which one a claim has."""
    found = claim(result())
    allocated = found["status"]["allocation"]["devices"]

    async def story() -> None:
        async with serving(folder, found) as scene:
            scene.state.mode_policies = {DEVICE.uuid: ModePolicy(("soft", "exclusive"))}
            allocated["config"] = [in_mode("gpu", ["mps", "soft"])]
            scene.driver.offer([])
            assert not (await scene.prepare()).error
            assert [each.request.modes for each in scene.shares.orders] == [("soft",)]
            assert not await scene.release()
            scene.shares.shares = ()
            allocated["config"] = [in_mode("gpu")]
            error = (await scene.prepare()).error
            assert f"mode mps: GPU {DEVICE.uuid}: kept for mode soft or exclusive" in error
            assert len(scene.shares.orders) == 1
            scene.state.mode_policies = {}  # no device of the pool has changed
            scene.driver.offer([])
            await until(lambda: len(scene.shares.orders) > 1)

    asyncio.run(story())
