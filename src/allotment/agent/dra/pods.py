# SPDX-License-Identifier: Apache-2.0
"""The pods that use a node's claims: which would have no CUDA, and which wait for a claim.

The kubelet looks again at a pod whose claim could not be prepared only after 60 to 90 s: its pod
worker gets no error (kubelet pkg/kubelet/kuberuntime/kuberuntime_manager.go, `SyncPod`, v1.36). It
looks at once at a pod that has changed. So an annotation of the pod is written when the cause ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, NoReturn

import structlog

from allotment.agent.kubelet.proto import dra_pb2 as dra
from allotment.agent.protocols import Pods
from allotment.dialects.own.resource_claims import ResourceClaim
from allotment.kube.clients import Api
from allotment.kube.resource_claims import read_claim
from allotment.kube.watching import Signal
from allotment.model.errors import AllotError, NotFoundError, StateError, UsageError
from allotment.model.pods import Pod
from allotment.model.reported import Reported
from allotment.shares.placing import ShareOrder, why_not_together

_log = structlog.get_logger("allotment.agent")

RETRIED: Final = "claims.allotment.dev/retried"
"""An annotation of a pod: when the agent last asked the kubelet to look at its claims again."""
_GATHER_S: Final = 0.5
"""Changes within this time cause one more try."""
_FORGET_S: Final = 180.0
"""The kubelet asks again sooner for a claim that it still needs."""


class ClaimPods:
    """The pods of claims on this node. For one event loop; needs `run` running."""

    def __init__(
        self,
        api: Api,
        *,
        driver: str,
        pool: str,
        pods: Pods,
        orders: Callable[[ResourceClaim], Mapping[str, ShareOrder]],
        retry: Callable[[dra.Claim], Awaitable[bool]],
        pod_s: float,
    ) -> None:
        """`orders` returns what a claim's requests become, and raises `AllotError`.

        `retry` prepares a claim that failed, and returns whether it did. `pod_s`: the longest wait
        for a claim's pod to be reported.
        """
        self._api = api
        self._driver = driver
        self._pool = pool
        self._pods = pods
        self._orders = orders
        self._retry = retry
        self._pod_s = pod_s
        self._failed: dict[str, tuple[float, dra.Claim]] = {}
        self._books: object = None
        self._changed = Signal()
        self._is_registered = asyncio.Event()
        self._refused = Reported[str]()

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._retry_failed())
            group.create_task(self._resume())
        raise AssertionError  # neither ends by itself

    # ---- containers without CUDA -----------------------------------------------------------------

    async def check(self, claim: ResourceClaim, orders: Mapping[str, ShareOrder]) -> None:
        """Refuse shares that leave a container without CUDA. Raises `UsageError`, `KubeError`."""
        waiting = (self._pods.wait_for(each, timeout_s=self._pod_s) for each in claim.pods)
        known = {claim.name: orders}
        for pod in filter(None, await asyncio.gather(*waiting)):
            for container in () if pod.has_ended or pod.is_ending else pod.containers:
                uses = container.claims
                if all(each.name != claim.name for each in uses):
                    continue
                for name in {each.name for each in uses} - known.keys():
                    known[name] = await self._orders_beside(claim, name)
                used = {
                    order.id: order
                    for each in uses
                    for request, order in known[each.name].items()
                    if each.request in {"", request.partition("/")[0]}
                }
                if why := why_not_together([*used.values()]):
                    raise UsageError(
                        f"container {container.name} of pod {pod} would have no CUDA: {why}",
                        hint="claim one part that is large enough, or in one claim parts of"
                        f" different GPUs (constraint distinctAttribute: {self._driver}/uuid), or"
                        " use a container for each; then create the pod and its claims again",
                    )

    async def _orders_beside(self, claim: ResourceClaim, name: str) -> Mapping[str, ShareOrder]:
        """Return the orders of another claim; none while it has a fault of its own."""
        try:
            found = await read_claim(
                self._api, namespace=claim.namespace, name=name, uid=None, driver=self._driver
            )
            return self._orders(found)
        except (NotFoundError, StateError, UsageError):
            return {}

    # ---- claims that failed ----------------------------------------------------------------------

    def failed(self, claim: dra.Claim) -> None:
        """Try a claim again when the node changes."""
        self._failed[claim.uid] = time.monotonic(), claim

    def settled(self, uid: str) -> None:
        """Try a claim no more: it is prepared or released."""
        self._failed.pop(uid, None)

    def is_failed(self, uid: str) -> bool:
        return uid in self._failed

    def renew(self, books: object) -> None:
        """Try claims again if the node's books differ from those before."""
        if books != self._books:
            self._books = books
            self._changed.notify()

    async def _retry_failed(self) -> NoReturn:
        """Prepare what failed as soon as the cause has ended: the kubelet then finds it ready."""
        async for _ in self._changed.changes():
            oldest = time.monotonic() - _FORGET_S
            self._failed = {uid: each for uid, each in self._failed.items() if each[0] > oldest}
            await asyncio.gather(*(self._retry_one(each) for _, each in self._failed.values()))
            await asyncio.sleep(_GATHER_S)
        raise AssertionError  # changes never end

    async def _retry_one(self, claim: dra.Claim) -> None:
        if await self._retry(claim):
            users = (each for each in self._pods.all() if each.namespace == claim.namespace)
            await self._resync(each for each in users if claim.name in each.claims)

    # ---- pods whose kubelet found no driver ------------------------------------------------------

    def registered(self) -> None:
        """Resume the pods that wait: the kubelet may have met no driver until now."""
        self._is_registered.set()

    async def _resume(self) -> NoReturn:
        while True:
            await self._is_registered.wait()
            self._is_registered.clear()
            async for _ in self._pods.changes():
                if self._pods.is_synced:
                    break
            waiting = [each for each in self._pods.all() if each.claims and _waits(each)]
            await self._resync([each for each in waiting if await self._serves(each)])

    async def _serves(self, pod: Pod) -> bool:
        """Whether a claim of the pod has a device of this driver here, as far as it is known."""
        for name in pod.claims:
            try:
                found = await read_claim(
                    self._api, namespace=pod.namespace, name=name, uid=None, driver=self._driver
                )
            except AllotError:  # the kubelet looks by itself, if later
                continue
            if any(each.pool == self._pool for each in found.devices):
                return True
        return False

    async def _resync(self, pods: Iterable[Pod]) -> None:
        """Make the kubelet look at pods that wait."""
        for pod in filter(_waits, pods):
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                await self._pods.annotate(pod, {RETRIED: now})
            except AllotError as error:  # the kubelet looks by itself, if later
                if self._refused.is_new(RETRIED, error.message):
                    _log.warning(error.message, hint=error.hint)
            else:
                _log.info("asked the kubelet to look at a pod's claims again", pod=str(pod))


def _waits(pod: Pod) -> bool:
    """Whether no container of a pod has started."""
    is_over = pod.has_ended or pod.is_ending or pod.is_static
    return not is_over and not any(each.is_started for each in pod.containers)
