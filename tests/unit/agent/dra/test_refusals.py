# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a claim or the node: an error for that claim alone, and nothing half made.

tests/cluster has the event that the kubelet makes of the error.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from driver_twin import DEVICE, Scene, claim, result, serving
from own_node_twin import until

from allotment.agent.dra.driver import SOON_S
from allotment.kube.clients import HttpRequest
from allotment.model.errors import DoesNotFitError

KUBELETS_PATIENCE_S = 45
"""With a driver's call (PluginClientTimeout)."""
OTHER_NODE = claim(result(pool="n2"))


def test_what_is_wrong_is_told_for_its_claim_alone(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            assert "gone, or another one has its name" in (await scene.prepare(uid="u2")).error
            scene.claim = None
            assert "gone" in (await scene.prepare()).error
            scene.claim = {**claim(), "status": {}}
            assert "is not allocated" in (await scene.prepare()).error
            scene.claim = claim(result(device="gpu-0-monitor"))
            assert "type monitor gives no part" in (await scene.prepare()).error
            scene.claim = claim(result())
            scene.shares.refusal = DoesNotFitError("need 4Gi, have 1Gi")
            assert "need 4Gi, have 1Gi" in (await scene.prepare()).error
            scene.is_down = True
            assert "503" in (await scene.prepare()).error
            assert not scene.shares.orders

    asyncio.run(story())


def test_a_claim_whose_monitor_fails_keeps_nothing_unless_it_runs(folder: Path) -> None:
    admin = result("watch", "gpu-0-monitor", adminAccess=True, shareID="")

    async def story() -> None:
        async with serving(folder, claim(admin, result()), look_s=60) as scene:
            (folder / "cdi").touch()
            assert "cannot write the CDI spec: Not a directory" in (await scene.prepare()).error
            assert scene.shares.released == ["u1"]
            assert not list((folder / "state" / "monitors").iterdir())
            (folder / "cdi").unlink()
            scene.shares.released.clear()
            assert (await scene.prepare()).error == ""
            (folder / "cdi").rename(folder / "away")
            (folder / "cdi").touch()
            assert "Not a directory" in (await scene.prepare()).error
            assert scene.shares.released == [], "its containers may run"
            assert list((folder / "state" / "monitors").iterdir())
            (folder / "cdi").unlink()
            assert (await scene.prepare()).error == ""

    asyncio.run(story())


def test_what_a_failed_claim_could_not_release_is_released_at_its_next_failure(
    folder: Path,
) -> None:
    admin = result("watch", "gpu-0-monitor", adminAccess=True, shareID="")

    async def story() -> None:
        async with serving(folder, claim(admin, result()), look_s=60) as scene:
            (folder / "cdi").touch()
            scene.shares.is_busy = True
            assert "Not a directory" in (await scene.prepare()).error
            assert scene.shares.released == ["u1"]
            assert scene.shares.shares, "it is there yet"
            scene.shares.is_busy = False
            assert "Not a directory" in (await scene.prepare()).error
            assert scene.shares.released == ["u1", "u1"]
            (folder / "cdi").unlink()
            assert (await scene.prepare()).error == ""
            (folder / "cdi").rename(folder / "away")
            (folder / "cdi").touch()
            assert "Not a directory" in (await scene.prepare()).error
            assert scene.shares.released == ["u1", "u1"], "its containers may run"

    asyncio.run(story())


def test_a_device_that_leaves_the_node_meanwhile_takes_no_other_answer_with_it(
    folder: Path,
) -> None:
    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            scene.shares.is_open.clear()
            preparing = asyncio.create_task(scene.prepare())
            await until(lambda: scene.reads)
            await asyncio.sleep(0.1)
            scene.state.devices = {}
            scene.driver.offer([])
            scene.shares.is_open.set()
            assert (await preparing).error == ""

    asyncio.run(story())


def test_a_device_of_another_nodes_pool_is_not_this_nodes(folder: Path) -> None:
    async def story() -> None:
        async with serving(folder, OTHER_NODE) as scene:
            assert "gpu-0 is not on node n1" in (await scene.prepare()).error
            assert not scene.shares.orders

    asyncio.run(story())


def test_a_claim_of_a_gpu_that_is_gone_is_told_before_the_kubelet_gives_up(folder: Path) -> None:
    """It was allocated before. The API server may be as slow as the client lets it be."""
    slowest = HttpRequest(method="GET", path="/").timeout.total
    assert slowest is not None
    assert slowest + SOON_S < KUBELETS_PATIENCE_S

    async def story() -> None:
        async with serving(folder, claim(result())) as scene:
            scene.state.devices = {}
            scene.driver.offer([])
            said = (await scene.prepare()).error
            assert "ResourceClaim default/mine: gpu-0 is not on node n1" in said
            assert "its GPU is lost or was replaced: delete the pod" in said
            assert not scene.shares.orders
            scene.state.devices = {DEVICE.uuid: DEVICE}
            scene.driver.offer([])
            assert (await scene.prepare()).error == ""

    asyncio.run(story())


def test_slices_that_the_server_does_not_take_are_told(folder: Path) -> None:
    """Its API may be an older one, or the agent's rights."""

    async def story() -> None:
        async with serving(folder) as scene:
            scene.refuses_slices = True
            scene.state.unusable = {DEVICE.uuid: "XID 79"}
            scene.driver.offer([])
            await until(lambda: scene.reports.reasons("node"))
            assert set(scene.reports.reasons("node")) == {"ClaimsNotServed"}

    asyncio.run(story())


def test_a_folder_that_cannot_have_sockets_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        scene = Scene(tmp_path / ("long" * 30), None)
        task = asyncio.create_task(scene.driver.run())
        async with asyncio.timeout(20):
            await until(lambda: scene.reports.reasons("node") == ["ClaimsNotServed"])
        assert not task.done(), "the rest of the agent goes on"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(story())
