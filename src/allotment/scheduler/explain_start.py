# SPDX-License-Identifier: Apache-2.0
"""Where the start of a pod went, by what the API server has of it: no traces are needed.

Kubernetes writes these times in whole seconds. Events are kept for an hour. The first launch is not
among them: only traces have it (`agent.allocation.start_traces`).
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.objects import Narrow, ObjectList
from allotment.scheduler.explain_evidence import AskedPod

_SHARE: Final = "ShareReady"
"""The agent's event about a made share (`agent.allocation.share_events`)."""


class _PodEvent(Narrow):
    reason: str = ""
    first_timestamp: str | None = None
    event_time: str | None = None


_events: Final = msgspec.json.Decoder(ObjectList[_PodEvent])


class StartStep(msgspec.Struct, frozen=True):
    """A part of a pod's start: from the step before until this."""

    text: str
    """What its end is: `a node was chosen`."""
    began: float
    """Seconds after the creation."""
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class PodStart(msgspec.Struct, frozen=True):
    """The parts of a pod's start in order, without gaps."""

    steps: tuple[StartStep, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not known, and why."""

    @property
    def seconds(self) -> float:
        """From the pod's creation until the last known step."""
        return self.steps[-1].ended if self.steps else 0.0


async def read_start(api: Api, item: AskedPod) -> PodStart:
    """Return the start of a pod that has a node; empty if it waits for one. Raises nothing."""
    if not item.spec.node_name:
        return PodStart()
    meta = item.metadata
    path = f"/api/v1/namespaces/{meta.namespace}/events"
    params = {"fieldSelector": f"involvedObject.uid={meta.uid}"}
    try:
        body = await api.get(path, asked="list events", params=params)
        events = _events.decode(body).items or ()
    except (KubeError, msgspec.MsgspecError):
        return _start_of(item, (), notes=("its events cannot be read",))
    return _start_of(item, events)


def _start_of(
    item: AskedPod, events: Sequence[_PodEvent], *, notes: tuple[str, ...] = ()
) -> PodStart:
    created = _seconds(item.metadata.creation_timestamp)
    if created is None:
        return PodStart()
    if events and not any(each.reason == _SHARE for each in events):
        notes += ("its share has no event: it is older than an hour, or was not made",)
    if _has_restarted(item):
        notes += ("a container has restarted: when it started first is not known any more",)
    steps: list[StartStep] = []
    last = 0.0
    marks = ((text, at - created) for text, at in _marks(item, events) if at is not None)
    # Steps within one second stay in their order.
    for text, at in sorted(marks, key=lambda mark: mark[1]):
        steps.append(StartStep(text, last, max(last, at)))
        last = steps[-1].ended
    return PodStart(tuple(steps), notes)


def _marks(item: AskedPod, events: Sequence[_PodEvent]) -> Iterator[tuple[str, float | None]]:
    conditions = {
        each.type: _seconds(each.last_transition_time)
        for each in item.status.conditions or ()
        if each.status == "True"
    }
    yield "a node was chosen", conditions.get("PodScheduled")
    yield "volumes and network were ready", conditions.get("PodReadyToStartContainers")
    if _has_restarted(item):
        return  # events and times may be those of the restart
    yield "its images were there", _time_of(events, "Pulled")
    yield "its share was made", _time_of(events, _SHARE)
    started = [
        _seconds(str(status.state.running.get("startedAt")))
        for status in item.status.container_statuses or ()
        if status.state is not None and status.state.running is not None
    ]
    known = [at for at in started if at is not None]
    if known and len(known) == len(item.spec.containers or ()):
        yield "its containers had started", max(known)


def _has_restarted(item: AskedPod) -> bool:
    return any(status.restart_count for status in item.status.container_statuses or ())


def _time_of(events: Sequence[_PodEvent], reason: str) -> float | None:
    """Return when the last event of a reason was seen first: of several containers, the last."""
    times = (
        _seconds(each.first_timestamp or each.event_time)
        for each in events
        if each.reason == reason
    )
    return max((at for at in times if at is not None), default=None)


def _seconds(text: str | None) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
