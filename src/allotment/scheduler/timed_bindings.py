# SPDX-License-Identifier: Apache-2.0
"""How long the API server takes to bind: what a pod waits for that nothing here can shorten."""

import time
from collections.abc import Callable

from allotment.kube.bindings import Binding
from allotment.kube.cluster_feed import ClusterPod
from allotment.kube.errors import KubeError, UnreachableError
from allotment.model.pods import PodUid
from allotment.scheduler.binding import ApiBindings

__all__ = ["TimedBindings"]


class TimedBindings:
    """Binds as another one does, and tells how long each answer took."""

    def __init__(self, api: ApiBindings, *, on_answer: Callable[[float], None]) -> None:
        """`on_answer` is told the seconds of each answer, a refusal among them."""
        self._api = api
        self._on_answer = on_answer

    async def bind(self, binding: Binding) -> None:
        """Bind, or raise `KubeError`. Without an answer, there is no time of it."""
        began = time.perf_counter()
        try:
            await self._api.bind(binding)
        except UnreachableError:
            raise
        except KubeError:
            self._on_answer(time.perf_counter() - began)
            raise
        self._on_answer(time.perf_counter() - began)

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod; None: there is none of this uid. Raises `KubeError`."""
        return await self._api.read(uid=uid, namespace=namespace, name=name)
