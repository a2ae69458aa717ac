# SPDX-License-Identifier: Apache-2.0
"""A server of the cluster: its command line, its log, whether it answers; start and stop."""

from __future__ import annotations

import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed.sandbox import Process, Sandbox
from testbed.waiting import TestbedError, tail, wait_until


@dataclass(slots=True)
class Component:
    """One server. The same command line each time it is started; the log goes on."""

    name: str
    sandbox: Sandbox
    command: tuple[str, ...]
    is_ready: Callable[[], bool]
    """Asked until it is true, each time after a start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 120
    """For how long it may come up; a busy machine takes ten times an idle one's."""
    _process: Process | None = None

    @property
    def log(self) -> Path:
        """What it wrote to standard output and standard error, of all its runs."""
        return self.sandbox.state / "logs" / f"{self.name}.log"

    @property
    def process(self) -> Process:
        """The running program."""
        if self._process is None or not self._process.is_running:
            raise TestbedError(f"{self.name} is not running\n{tail(self.log)}")
        return self._process

    def launch(self) -> None:
        """Starts it without waiting until it answers."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            self._process = self.sandbox.popen(
                self.command, environment=self.environment, stdout=log, stderr=log
            )

    def wait_ready(self) -> None:
        """Waits until it answers.

        Raises:
            TestbedError: it died, or did not answer in time; with the log's tail.
        """
        wait_until(
            lambda: bool(self.process) and self.is_ready(),
            f"answer from {self.name}",
            timeout_s=self.timeout_s,
            explain=lambda: tail(self.log),
        )

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self.launch()
        self.wait_ready()

    def stop(self, *, number: int = signal.SIGTERM) -> None:
        """Ends it by this signal; nothing where it is not running."""
        if self._process is not None:
            self._process.stop(number=number)
        self._process = None

    def restart(self, *, number: int = signal.SIGTERM) -> None:
        """Ends it by this signal, starts it and waits until it answers."""
        self.stop(number=number)
        self.start()


def answers(url: str) -> Callable[[], bool]:
    """A check that a URL is answered with success. Nobody's certificate is looked at."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # No proxy of the machine's stands between us and the sandbox.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )

    def check() -> bool:
        try:
            with opener.open(url, timeout=2) as response:
                return int(response.status) < 300
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False
        except OSError:  # nobody listens yet
            return False

    return check
