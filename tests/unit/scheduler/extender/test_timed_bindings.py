# SPDX-License-Identifier: Apache-2.0
"""Each answer to a binding has its time; where there is none, there is no time."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from allotment.kube.bindings import Binding
from allotment.kube.errors import ConflictError, KubeError, UnreachableError
from allotment.model.clusters import ClusterPod
from allotment.model.pods import PodUid
from allotment.scheduler.extender.binder import TimedBindings


class Answers:
    """An API server that answers as the test says."""

    error: KubeError | None = None

    async def bind(self, binding: Binding) -> None:
        del binding
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        return ClusterPod(uid=uid, namespace=namespace, name=name)


def test_answers_are_timed_and_silence_is_not() -> None:
    api, seconds = Answers(), list[float]()
    timed = TimedBindings(api, on_answer=seconds.append)
    binding = Binding(uid=PodUid("u"), namespace="a", name="p", node="n")
    for error, number in ((None, 1), (ConflictError("late"), 2), (UnreachableError("away"), 2)):
        api.error = error
        with suppress(KubeError):
            asyncio.run(timed.bind(binding))
        assert len(seconds) == number
    assert min(seconds) > 0.005
    found = asyncio.run(timed.read(uid=PodUid("u"), namespace="a", name="p"))
    assert found == ClusterPod(uid=PodUid("u"), namespace="a", name="p")
