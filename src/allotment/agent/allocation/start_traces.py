# SPDX-License-Identifier: Apache-2.0
"""The node's part of pods' traces: from `Allocate` to the first launch. Only with an endpoint.

Calls of the kubelet are noted as they end, and recorded by a loop: no container waits for its
trace. The programs' steps are read in their ledgers, a few times a second until the first launch.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

import msgspec

from allotment import ledger
from allotment.agent.allocation.claims import claimants
from allotment.agent.allocation.tenants import Tenants
from allotment.agent.configuring import AgentSettings
from allotment.agent.protocols import Checkpoint, Pods
from allotment.metrics.tracing import PodTraces, open_traces
from allotment.model.errors import AllotError, LedgerError
from allotment.model.pods import ContainerKind, Pod, PodUid
from allotment.model.shares import Share, ShareId
from allotment.modes.turns import link_names
from allotment.shares.folders import StateFolder
from allotment.shares.placing import ShareOrder

_LOOK_S: Final = 0.25
_SLOW_LOOK_S: Final = 2.0
"""A minute after the share was made."""
_MOST_S: Final = 3600.0
"""A program that has launched nothing by then is not watched any longer."""
_KNOWN_S: Final = 15.0
"""For the API server to report a pod."""
_MOST_CALLS: Final = 1024
_NS: Final = 1_000_000_000


class _Call(msgspec.Struct, frozen=True):
    """A call of the kubelet that has ended."""

    name: str
    began_ns: int
    ended_ns: int
    problem: str
    resource: str = ""
    ids: frozenset[str] = frozenset()
    claim: tuple[str, str] = ("", "")
    """Namespace and name, in place of resource and ids."""
    shares: tuple[ShareId, ...] = ()
    allocated: tuple[int, int] | None = None
    """Begin and end of `Allocate`, if it is known."""


class _Steps(msgspec.Struct, frozen=True):
    """What a share's ledger says of its programs."""

    program_ns: int = 0
    """When its first program began, after the epoch; 0: none has used CUDA yet."""
    has_memory: bool = False
    has_launched: bool = False
    counts_launches: bool = False
    """A share of a device asks for compute. Otherwise the shim counts no launches."""


class _Watched(msgspec.Struct):
    """A share whose programs have not launched yet."""

    pod: Pod
    share: ShareId
    container: str
    ready_ns: int
    looked_ns: int
    program_ns: int = 0
    memory_ns: int = 0


class StartTraces:
    """Records the node's spans of each pod's first start."""

    def __init__(
        self,
        traces: PodTraces,
        *,
        folder: StateFolder,
        pods: Pods,
        checkpoint: Checkpoint,
        shares: Callable[[], Collection[Share]],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock_ns` returns nanoseconds after the epoch."""
        self._traces = traces
        self._folder = folder
        self._pods = pods
        self._checkpoint = checkpoint
        self._shares = shares
        self._clock_ns = clock_ns
        self._calls: deque[_Call] = deque(maxlen=_MOST_CALLS)
        self._allocated: dict[tuple[str, frozenset[str]], tuple[int, int]] = {}
        self._recorded: dict[tuple[PodUid, str], str] = {}
        """The last outcome of the calls for each container, by pod."""
        self._begun: set[PodUid] = set()
        """Pods whose start is over."""
        self._watched: dict[tuple[PodUid, ShareId], _Watched] = {}
        self._wake = asyncio.Event()

    def allocated(self, resource: str, ids: frozenset[str], written: str) -> None:
        """Note when the front gave out ids (`ALLOCATED_KEY`)."""
        began, _, ended = written.partition("-")
        if began.isdecimal() and ended.isdecimal():
            self._allocated[resource, ids] = int(began), int(ended)

    @contextmanager
    def pre_start(self, resource: str, ids: frozenset[str]) -> Iterator[None]:
        """Measure a call of `PreStartContainer`."""
        allocated = self._allocated.pop((resource, ids), None)
        about = {"resource": resource, "ids": ids, "allocated": allocated}
        with self._measured("PreStartContainer", **about):
            yield

    @contextmanager
    def prepare_claim(self, orders: Sequence[ShareOrder]) -> Iterator[None]:
        """Measure the making of a claim's shares (`NodePrepareResources`)."""
        owner = orders[0].owner if orders else None
        claim = (owner.namespace, owner.pod) if owner else ("", "")
        shares = tuple(order.id for order in orders)
        with self._measured("NodePrepareResources", claim=claim, shares=shares):
            yield

    @contextmanager
    def _measured(self, name: str, **about: Any) -> Iterator[None]:  # noqa: ANN401 - of `_Call`
        began_ns, problem = self._clock_ns(), ""
        try:
            yield
        except AllotError as error:
            problem = error.one_line()
            raise
        except BaseException as error:
            problem = type(error).__name__
            raise
        finally:
            self._calls.append(_Call(name, began_ns, self._clock_ns(), problem, **about))
            self._wake.set()

    async def run(self) -> None:
        """Record what was noted, and follow the shares to their first launches."""
        while True:
            pause_s = await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()

    async def close(self) -> None:
        """Export what is left, for a moment at most."""
        await self._traces.close()

    async def look(self) -> float | None:
        """Look once; return the seconds until the next time, None: at the next call."""
        for _ in range(len(self._calls)):
            call = self._calls.popleft()
            if not await self._recorded_call(call):
                self._calls.append(call)
        present = {pod.uid for pod in self._pods.all()}
        self._begun &= present
        self._recorded = {key: text for key, text in self._recorded.items() if key[0] in present}
        watched = tuple(self._watched.items())
        if watched:
            ids = {share for (_, share), _ in watched}
            found = await asyncio.to_thread(lambda: {each: self._steps(each) for each in ids})
            for key, share in watched:
                self._follow(key, share, found[share.share])
        if not self._watched:
            return _LOOK_S if self._calls else None
        youngest = max(share.ready_ns for share in self._watched.values())
        is_new = self._clock_ns() - youngest < 60 * _NS
        return _LOOK_S if is_new or self._calls else _SLOW_LOOK_S

    async def _recorded_call(self, call: _Call) -> bool:
        """Record a call in the traces of its pods; return False to try again."""
        targets: list[tuple[Pod, str, tuple[ShareId, ...]]] = []
        if call.ids:
            entries = await asyncio.to_thread(self._entries, call)
            for pod in (self._pods.get(each.pod) for each in entries[:1]):
                if pod is not None:
                    names = ",".join(each.container for each in entries)
                    shares = tuple(each.share for each in entries if each.share is not None)
                    targets.append((pod, names, shares))
        else:
            namespace, name = call.claim
            targets += (
                (pod, "", call.shares)
                for pod in self._pods.all()
                if pod.namespace == namespace and name in pod.claims
            )
        if not targets:
            return self._clock_ns() - call.ended_ns > _KNOWN_S * _NS
        for pod, container, share_ids in targets:
            self._record(call, pod, container, share_ids)
        return True

    def _entries(self, call: _Call) -> Any:  # noqa: ANN401 - CheckpointEntry, or none
        try:
            return claimants(self._checkpoint.entries(), call.resource, call.ids)
        except AllotError:
            return ()

    def _record(
        self, call: _Call, pod: Pod, container: str, share_ids: Collection[ShareId]
    ) -> None:
        about = {"k8s.container.name": container} if container else {}
        first = container.split(",", maxsplit=1)[0]
        known = pod.container(first)
        is_restart = known is not None and (known.restarts > 0 or known.is_started)
        outcome = call.problem and "refused"
        key = (pod.uid, container or "/".join(call.claim))
        if pod.uid in self._begun or self._recorded.get(key) == outcome or is_restart:
            return  # a restart, or the kubelet's repetition
        if call.allocated is not None:
            began_ns, ended_ns = call.allocated
            self._traces.record(
                "Allocate", pod, began_ns=began_ns, ended_ns=ended_ns, attributes=about
            )
        shares = {share.id: share for share in self._shares() if share.id in share_ids}
        modes = sorted({share.mode for share in shares.values()})
        self._traces.record(
            call.name,
            pod,
            began_ns=call.began_ns,
            ended_ns=call.ended_ns,
            attributes={
                **about,
                **({"allotment.mode": ",".join(modes)} if modes else {}),
                **({"allotment.shares": ",".join(shares)} if shares else {}),
                **({"allotment.claim": "/".join(call.claim)} if call.claim[1] else {}),
            },
            problem=call.problem,
        )
        self._recorded[key] = outcome
        for share in () if call.problem else shares.values():
            owner = share.owner
            if owner is not None and owner.kind is not ContainerKind.INIT:
                self._watched[pod.uid, share.id] = _Watched(
                    pod, share.id, owner.container, call.ended_ns, call.ended_ns
                )

    # ---- the programs ----------------------------------------------------------------------------

    def _steps(self, share: ShareId) -> _Steps | None:
        """Read a share's ledger; None: it has none, or it is gone."""
        directory = self._folder.share(share)
        try:
            found = ledger.read(directory)
            counts = any(
                ledger.read_contract(directory / link_names(index).contract).is_governed
                for index, device in enumerate(found.policy.devices)
                if device.seat is not None
            )
        except LedgerError:
            return None
        booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        starts = [each.start_time for each in found.processes if each.start_time]
        return _Steps(
            program_ns=booted_ns + min(starts) * _NS // os.sysconf("SC_CLK_TCK") if starts else 0,
            has_memory=any(device.peak > 0 for device in found.devices),
            has_launched=any(device.launches or device.gpu_ns for device in found.devices),
            counts_launches=counts,
        )

    def _follow(self, key: tuple[PodUid, ShareId], share: _Watched, steps: _Steps | None) -> None:
        now = self._clock_ns()
        pod = self._pods.get(share.pod.uid)
        about = {"k8s.container.name": share.container, "allotment.shares": share.share}
        resolution = {"allotment.resolution_ms": (now - share.looked_ns) // 1_000_000}
        if steps is not None and steps.program_ns and not share.program_ns:
            # A program can write its ledger: its time counts within what is certain.
            share.program_ns = min(max(steps.program_ns, share.ready_ns), now)
            self._traces.record(
                "program start",
                share.pod,
                began_ns=share.ready_ns,
                ended_ns=share.program_ns,
                attributes=about,
            )
        begun_ns = share.program_ns or share.ready_ns
        if steps is not None and steps.has_memory and not share.memory_ns:
            share.memory_ns = now
            self._traces.record(
                "first allocation",
                share.pod,
                began_ns=begun_ns,
                ended_ns=now,
                attributes={**about, **resolution},
            )
        share.looked_ns = now
        if steps is not None and steps.has_launched:
            self._traces.record(
                "first launch",
                share.pod,
                began_ns=begun_ns,
                ended_ns=now,
                attributes={**about, **resolution},
            )
            self._end(key, now, "first launch")
        elif steps is not None and share.memory_ns and not steps.counts_launches:
            self._end(key, share.memory_ns, "first allocation")
        elif pod is None or pod.has_ended:
            self._end(key, share.memory_ns or share.program_ns or share.ready_ns, "pod ended")
        elif steps is None:  # a mode without a ledger: its programs are not seen
            container = pod.container(share.container)
            if container is None or container.is_started:
                self._end(key, share.ready_ns, "share made")
        elif now - share.ready_ns > _MOST_S * _NS:
            self._end(key, share.memory_ns or begun_ns, "no launch within an hour")

    def _end(self, key: tuple[PodUid, ShareId], ended_ns: int, last_step: str) -> None:
        """Record the trace's first span, from the pod's creation on, once."""
        share = self._watched.pop(key)
        if share.pod.uid in self._begun:
            return
        self._begun.add(share.pod.uid)
        try:
            created = datetime.fromisoformat(share.pod.created).timestamp()
        except ValueError:
            return  # the API server writes another format: the other spans remain
        self._traces.record_whole(
            share.pod,
            began_ns=int(created) * _NS,
            ended_ns=ended_ns,
            attributes={"allotment.last_step": last_step},
        )


def open_starts(
    settings: AgentSettings,
    *,
    folder: StateFolder,
    pods: Pods,
    checkpoint: Checkpoint,
    shares: Callable[[], Collection[Share]],
) -> StartTraces | None:
    """Return the traces, if an endpoint is configured. Raises as `open_traces`."""
    traces = open_traces(
        settings.otlp_endpoint,
        settings.environment,
        service="allotment-agent",
        attributes={"k8s.node.name": settings.node},
    )
    if traces is None:
        return None
    return StartTraces(traces, folder=folder, pods=pods, checkpoint=checkpoint, shares=shares)


class TracedTenants(Tenants):
    """Tenants whose calls are measured."""

    def __init__(self, starts: StartTraces, **parts: Any) -> None:  # noqa: ANN401
        """`parts`: those of `Tenants`."""
        super().__init__(**parts)
        self._starts = starts

    async def pre_start(self, resource: str, ids: frozenset[str]) -> None:
        with self._starts.pre_start(resource, ids):
            await super().pre_start(resource, ids)

    async def prepare_claim(self, uid: PodUid, orders: Sequence[ShareOrder]) -> tuple[Share, ...]:
        with self._starts.prepare_claim(orders):
            return await super().prepare_claim(uid, orders)
