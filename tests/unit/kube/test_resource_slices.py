# SPDX-License-Identifier: Apache-2.0
"""A pool's slices at the API server: all of one generation, whatever cut a write off."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from api_server_twin import Reply, Watch, answered, api_of, impatient, listed, run, until

from allotment.kube.clients import HttpRequest
from allotment.kube.resource_claims import OwnSlices

CONTENTS: tuple[dict[str, Any], ...] = ({"sharedCounters": []}, {"devices": [{"name": "gpu-0"}]})


def stored(number: int, generation: int, content: dict[str, Any]) -> dict[str, Any]:
    pool = {"name": "n1", "generation": generation, "resourceSliceCount": len(CONTENTS)}
    spec = {"driver": "gpu.example.com", "nodeName": "n1", "pool": pool, **content}
    name = f"n1-gpu.example.com-{number:02d}"
    return {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": spec}


class Slices:
    """A server with these generations, whose watch tells nothing."""

    def __init__(self, *generations: int) -> None:
        self.items = [
            stored(number, generation, CONTENTS[number])
            for number, generation in enumerate(generations)
        ]
        self.writes = 0

    def answer(self, request: HttpRequest) -> Reply:
        if request.params.get("watch"):
            return Reply(200, Watch().stream())
        if request.method == "GET":
            return listed(*self.items)
        self.writes += 1
        item = next(each for each in self.items if request.path.endswith(each["metadata"]["name"]))
        changed = json.loads(request.body or b"")["spec"]
        return answered({**item, "spec": {**item["spec"], **changed}})


def kept(server: Slices) -> OwnSlices:
    slices = OwnSlices(
        api_of(server.answer), node="n1", driver="gpu.example.com", backoff=impatient()
    )
    slices.want(CONTENTS, node_uid="u")
    return slices


def test_slices_of_two_generations_get_a_new_one_once() -> None:
    server = Slices(2, 1)
    slices = kept(server)

    async def story() -> None:
        await until(lambda: server.writes == 2)
        await until(lambda: slices.is_settled)
        slices.want(CONTENTS, node_uid="another")  # it looks again, while the watch is late
        await asyncio.sleep(0.2)
        assert server.writes == 2

    run(slices.run(), story())


def test_slices_as_they_are_wanted_are_not_written() -> None:
    server = Slices(3, 3)
    slices = kept(server)

    async def story() -> None:
        await until(lambda: slices.is_settled)
        await asyncio.sleep(0.1)
        assert server.writes == 0

    run(slices.run(), story())
