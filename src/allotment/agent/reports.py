# SPDX-License-Identifier: Apache-2.0
"""Reports what happened: one call writes the log line, the event and the metric. It never fails.

A figure that is not in the table, or an event that cannot be made, is only logged. Events of
healthy pods are rate-limited, with their original times: an event costs the API server more than
the agent's part in the start of a pod.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, assert_never

import structlog

from allotment.kube.events import Events, Reference
from allotment.metrics.agent import AgentMetrics
from allotment.model.pods import Owner, Pod

_log = structlog.get_logger("allotment.agent")

_AT_ONCE: Final = 5
_EACH_S: Final = 0.5
"""Events of healthy pods: a burst of `_AT_ONCE`, then one per `_EACH_S`."""
_MOST_HELD: Final = 512
_CLAIMS: Final = "resource.k8s.io/v1"


class AgentReports:
    """Implements `protocols.Reports`, for the event loop's thread.

    `events` None: no API server; the log is written all the same.
    """

    def __init__(
        self,
        *,
        node: str,
        metrics: AgentMetrics,
        events: Events | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns seconds since the epoch."""
        self._node = node
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._held: deque[tuple[Reference, str, str, float]] = deque()
        self._left = _AT_ONCE
        self._timer: asyncio.TimerHandle | None = None

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        match subject:
            case Pod(uid=uid, namespace=namespace, name=name):
                about = Reference("Pod", name, uid, namespace)
            case Owner(uid=uid, namespace=namespace, pod=name, is_claim=is_claim):
                about = Reference("Pod", name, uid, namespace)
                if is_claim:
                    about = Reference("ResourceClaim", name, uid, namespace, _CLAIMS)
            case _:
                assert_never(subject)
        self._report(about, reason, message, is_warning=is_warning)

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        """The event's uid is the node's name, as in the kubelet's own events."""
        about = Reference("Node", self._node, self._node)
        self._report(about, reason, message, is_warning=is_warning)

    def count(self, name: str, **labels: str) -> None:
        try:
            self._metrics.count(name, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("unknown metric", name=name, labels=labels, error=str(error))

    def observe(self, name: str, value: float, **labels: str) -> None:
        try:
            self._metrics.observe(name, value, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("unknown metric", name=name, labels=labels, error=str(error))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        try:
            self._metrics.set(name, value, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("unknown metric", name=name, labels=labels, error=str(error))

    def _report(self, about: Reference, reason: str, message: str, *, is_warning: bool) -> None:
        log = _log.warning if is_warning else _log.info
        subject = f"{about.namespace}/{about.name}" if about.namespace else about.name
        log(message, reason=reason, about=f"{about.kind.lower()} {subject}")
        if self._events is None:
            return
        if is_warning or about.kind != "Pod":
            self._events.tell(about, reason=reason, message=message, is_warning=is_warning)
            return
        self._held.append((about, reason, message, self._clock()))
        self._send()

    def send_all(self) -> None:
        """Send all held events: the program ends."""
        self._left = len(self._held)
        self._send()

    def _send(self) -> None:
        """Send as many held events as the rate allows."""
        while self._held and (self._left > 0 or len(self._held) > _MOST_HELD):
            self._left = max(0, self._left - 1)
            about, reason, message, at = self._held.popleft()
            if self._events is not None:
                self._events.tell(about, reason=reason, message=message, is_warning=False, at=at)
        if self._timer is None and self._left < _AT_ONCE:
            self._timer = asyncio.get_running_loop().call_later(_EACH_S, self._next_turn)

    def _next_turn(self) -> None:
        self._timer = None
        self._left = min(_AT_ONCE, self._left + 1)
        self._send()
