# SPDX-License-Identifier: Apache-2.0
"""Telling people: one call makes the log line, the event and the figure. It never fails.

What is to be told must not break what is told about: a figure that is not in the table, an event
that cannot be made, are written to the log and forgotten.

Nor must it slow down what it tells of. An event costs the API server more than the agent's whole
part in a pod's start: that all is well with many pods is told in turn, with the times when it was.
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

__all__ = ["AgentReports"]

_log = structlog.get_logger("allotment.agent")

_AT_ONCE: Final = 5
_EACH_S: Final = 0.5
"""So many events of pods with which all is well are made at once, and then one in each time."""
_MOST_HELD: Final = 512


class AgentReports:
    """Implements `protocols.Reports`. To be called in the event loop's thread.

    `events` None: there is no API server (one machine, tests); the log has it all the same.
    """

    def __init__(
        self,
        *,
        node: str,
        metrics: AgentMetrics,
        events: Events | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take where it all goes; `clock` gives seconds since the epoch."""
        self._node = node
        self._metrics = metrics
        self._events = events
        self._clock = clock
        self._held: deque[tuple[Reference, str, str, float]] = deque()
        self._left = _AT_ONCE
        self._timer: asyncio.TimerHandle | None = None

    def pod(self, subject: Pod | Owner, reason: str, message: str, *, is_warning: bool) -> None:
        """Make an event on a pod."""
        match subject:
            case Pod(uid=uid, namespace=namespace, name=name):
                about = Reference("Pod", name, uid, namespace)
            case Owner(uid=uid, namespace=namespace, pod=name):
                about = Reference("Pod", name, uid, namespace)
            case _:
                assert_never(subject)
        self._tell(about, reason, message, is_warning=is_warning)

    def node(self, reason: str, message: str, *, is_warning: bool) -> None:
        """Make an event on this node. Its uid is its name, as in the kubelet's own events."""
        about = Reference("Node", self._node, self._node)
        self._tell(about, reason, message, is_warning=is_warning)

    def count(self, name: str, **labels: str) -> None:
        """Add one to a counter."""
        try:
            self._metrics.count(name, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("not a figure", name=name, labels=labels, error=str(error))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        try:
            self._metrics.observe(name, value, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("not a figure", name=name, labels=labels, error=str(error))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        try:
            self._metrics.set(name, value, labels=labels)
        except (KeyError, ValueError) as error:
            _log.error("not a figure", name=name, labels=labels, error=str(error))

    def _tell(self, about: Reference, reason: str, message: str, *, is_warning: bool) -> None:
        log = _log.warning if is_warning else _log.info
        subject = f"{about.namespace}/{about.name}" if about.namespace else about.name
        log(message, reason=reason, about=f"{about.kind.lower()} {subject}")
        if self._events is None:
            return
        if is_warning or about.kind != "Pod":
            self._events.tell(about, reason=reason, message=message, is_warning=is_warning)
            return
        self._held.append((about, reason, message, self._clock()))
        self._pass_on()

    def pass_on_all(self) -> None:
        """Pass on what is held back: the program ends."""
        self._left = len(self._held)
        self._pass_on()

    def _pass_on(self) -> None:
        """Make as many of the events that can wait as is their turn."""
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
        self._pass_on()
