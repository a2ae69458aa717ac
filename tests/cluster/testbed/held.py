# SPDX-License-Identifier: Apache-2.0
"""The agent of a cluster to try things in: started again when it ends, as a DaemonSet would."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from testbed.cluster import Cluster
from testbed.sandbox import Process
from testbed.waiting import tail

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# One that ran for so long ends for another reason than the last time.
_HEALTHY_S = 60.0


class HeldAgent:
    """`allot agent` with these flags, for as long as the cluster is there.

    Call `look` about once a second. What ends at once is started after 1 s, 2 s, and so on to 60.
    """

    def __init__(
        self,
        cluster: Cluster,
        flags: Sequence[str],
        *,
        simulated: str,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts nothing yet; `say` gets a text for people."""
        self._cluster = cluster
        self._flags = tuple(flags)
        self._simulated = simulated
        self._say = say
        self._now = now
        self._process: Process | None = None
        self._started_at = 0.0
        self._start_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def start(self) -> Process:
        """Starts it."""
        self._process = self._cluster.start_agent(*self._flags, simulated=self._simulated)
        self._started_at = self._now()
        return self._process

    def look(self) -> None:
        """Says that it ended, and starts it again when the pause is over."""
        if self._process is not None:
            if not self._process.is_running:
                self._tell_end(self._process)
                self._process = None
        elif self._now() >= self._start_at:
            self._say(f"the agent is started again: process {self.start().pid}")

    def _tell_end(self, process: Process) -> None:
        lived_s = self._now() - self._started_at
        self._pause_s = (
            _FIRST_PAUSE_S if lived_s >= _HEALTHY_S else min(self._pause_s, _LONGEST_PAUSE_S)
        )
        self._start_at = self._now() + self._pause_s
        how, log = _how(process.wait(1)), tail(self._cluster.log("agent"), lines=8)
        self._say(f"the agent ended {how}; it is started again in {self._pause_s:g} s\n{log}")
        self._pause_s *= 2


def _how(status: int) -> str:
    return f"with {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
