# SPDX-License-Identifier: Apache-2.0
"""What runs on a cluster to try things in: started again when it ends, as Kubernetes would."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from testbed.sandbox import Process
from testbed.waiting import tail

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# One that ran for so long ends for another reason than the last time.
_HEALTHY_S = 60.0


class Held:
    """A process that is started again when it ends, for as long as the cluster is there.

    Call `look` about once a second. What ends at once is started after 1 s, 2 s, and so on to 60.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        *,
        again: Callable[[], Process],
        log: Path,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes one that was started just now; `say` gets texts for people, with its name."""
        self._name = name
        self._process: Process | None = process
        self._again = again
        self._log = log
        self._say = say
        self._now = now
        self._started_at = now()
        self._start_at = 0.0
        self._pause_s = _FIRST_PAUSE_S

    def look(self) -> None:
        """Says that it ended, and starts it again when the pause is over."""
        if self._process is not None:
            if not self._process.is_running:
                self._tell_end(self._process)
                self._process = None
        elif self._now() >= self._start_at:
            self._process = self._again()
            self._started_at = self._now()
            self._say(f"the {self._name} is started again: process {self._process.pid}")

    def _tell_end(self, process: Process) -> None:
        lived_s = self._now() - self._started_at
        self._pause_s = (
            _FIRST_PAUSE_S if lived_s >= _HEALTHY_S else min(self._pause_s, _LONGEST_PAUSE_S)
        )
        self._start_at = self._now() + self._pause_s
        how, log = _how(process.wait(1)), tail(self._log, lines=8)
        again = f"it is started again in {self._pause_s:g} s"
        self._say(f"the {self._name} ended {how}; {again}\n{log}")
        self._pause_s *= 2


def _how(status: int) -> str:
    return f"with {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
