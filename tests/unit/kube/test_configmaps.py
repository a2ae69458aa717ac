# SPDX-License-Identifier: Apache-2.0
"""A config map as it comes, changes and goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api_server_twin import Server, impatient, listed, run, until

from allotment.kube.quotas import FollowedConfigMap


def an_object(version: str, data: dict[str, str] | None) -> dict[str, Any]:
    return {"metadata": {"name": "c", "uid": "u", "resourceVersion": version}, "data": data}


def test_its_values_come_once_each_and_the_first_when_it_is_known(
    server: Server,
) -> None:
    server.lists.append(listed())
    watch = server.new_watch()
    server.watches.extend([ConnectionRefusedError("away")] * 3)
    again = server.new_watch()
    followed = FollowedConfigMap(server.client(), namespace="here", name="c", backoff=impatient())
    seen: list[Mapping[str, str] | None] = []
    changes = [
        ("ADDED", {"default": "version: v1"}),
        ("MODIFIED", {"default": "version: v1"}),
        ("MODIFIED", {"default": "version: v1", "big": "version: v1"}),
        ("MODIFIED", None),
        ("DELETED", None),
    ]

    async def test() -> None:
        async for data in followed.values():
            seen.append(data)
            if len(changes) == 1:
                watch.end()
                await until(lambda: followed.problem is not None)
                await until(lambda: followed.problem is None)
            while changes:
                kind, then = changes.pop(0)
                (watch if changes else again).send(
                    {"type": kind, "object": an_object(str(9 - len(changes)), then)}
                )
                if then != seen[-1]:
                    break
            if not changes and seen[-1] is None:
                return

    run(followed.run(), test())
    assert seen == [
        None,
        {"default": "version: v1"},
        {"default": "version: v1", "big": "version: v1"},
        {},
        None,
    ]
    request = server.requests[0]
    assert request.path == "/api/v1/namespaces/here/configmaps"
    assert request.params["fieldSelector"] == "metadata.name=c"
