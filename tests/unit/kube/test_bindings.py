# SPDX-License-Identifier: Apache-2.0
"""How a bound pod's placement and wish are written."""

from __future__ import annotations

import asyncio
import json

import pytest
from api_server_twin import Server, answered, pod, refused
from scheduler_twin import cluster_pod

from allotment.kube.bindings import Bindings, write_wish
from allotment.kube.clients import PatchKind
from allotment.kube.errors import ConflictError
from allotment.kube.objects import NOMINATOR
from allotment.model.pods import PodUid
from allotment.model.structs import replace

BOUND = pod(version="7", spec={"nodeName": "n1"})


def test_a_placement_is_replaced_at_one_version_through_the_status() -> None:
    """Which needs no right to change containers."""
    server = Server()
    server.lists.append(answered(BOUND))
    server.writes += [answered(BOUND), refused(409)]

    async def main() -> None:
        async with server.client() as api:
            bindings = Bindings(api)
            uid = PodUid(BOUND["metadata"]["uid"])
            found = await bindings.read(uid=uid, namespace="ml", name="train")
            assert found is not None
            assert (found.node, found.version) == ("n1", "7")
            await bindings.place_again(found, "{}", version=found.version)
            with pytest.raises(ConflictError):
                await bindings.place_again(found, "{}", version="6")

    asyncio.run(main())
    request = server.asked("writes")[0]
    assert request.path.endswith("/pods/train/status")
    metadata = server.bodies()[0]["metadata"]
    assert metadata["resourceVersion"] == "7"
    assert metadata["uid"] == BOUND["metadata"]["uid"]
    assert metadata["annotations"] == {"allotment.dev/placement": "{}"}


def test_a_nomination_is_for_one_version_of_a_pod() -> None:
    server = Server()
    waiting = pod(version="7")
    server.writes += [answered(waiting), refused(409)]
    found = replace(cluster_pod("train"), uid=PodUid(waiting["metadata"]["uid"]), version="7")

    async def main() -> None:
        async with server.client() as api:
            bindings = Bindings(api)
            await bindings.nominate(found, "n1")
            with pytest.raises(ConflictError):
                await bindings.nominate(found, "n1")

    asyncio.run(main())
    request = server.asked("writes")[0]
    assert request.path.endswith("/pods/train/status")
    assert request.params == {"fieldManager": NOMINATOR, "fieldValidation": "Ignore"}
    assert request.content_type == PatchKind.STRATEGIC
    assert server.bodies()[0] == {
        "metadata": {"uid": waiting["metadata"]["uid"], "resourceVersion": "7"},
        "status": {"nominatedNodeName": "n1"},
    }


def test_a_wish_is_changed_where_it_was_read() -> None:
    server = Server()
    item = json.loads(json.dumps(BOUND))
    item["metadata"]["annotations"] = {"allotment.dev/resize": "memory:4Gi"}
    server.lists.append(answered(item))
    server.writes.append(answered(item))

    async def main() -> str:
        async with server.client() as api:
            return await write_wish(api, "ml", "train", lambda text: f"{text},weight:2")

    assert asyncio.run(main()) == "memory:4Gi,weight:2"
    (body,) = server.bodies()
    assert body["metadata"]["annotations"] == {"allotment.dev/resize": "memory:4Gi,weight:2"}
    assert body["metadata"]["resourceVersion"] == "7"


def test_a_wish_is_for_the_pod_as_it_is_at_last() -> None:
    """The kubelet may write the status at any time: the user does not have to try again."""
    server = Server()
    for version in ("7", "8"):
        server.lists.append(answered(pod(version=version, spec={"nodeName": "n1"})))
    server.writes += [refused(409), answered(BOUND)]

    async def main() -> str:
        async with server.client() as api:
            return await write_wish(api, "ml", "train", lambda _: "memory:2Gi")

    assert asyncio.run(main()) == "memory:2Gi"
    assert [each["metadata"]["resourceVersion"] for each in server.bodies()] == ["7", "8"]
