# SPDX-License-Identifier: Apache-2.0
"""Runs a client of NVML beside a program that uses a GPU: `client_session.py GPU BYTES CLIENT...`.

`--terminal PATTERN` before the client gives it a terminal of its own (160 by 50) until the pattern
has appeared there, and a moment longer, and prints all that appeared. The first line of the output
is the pid of the program.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

HOLDER = Path(__file__).parents[1] / "native" / "cuda_holder.py"
LONGEST_S = 40.0
MOMENT_S = 1.0
CONTROL = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


def in_terminal(pattern: str, command: list[str]) -> str:
    """Return the text that a full-screen program writes, without its control sequences."""
    child, terminal = pty.fork()
    if child == 0:
        # Before the program starts: it would draw everything again for another size.
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
        os.environ["TERM"] = "xterm"
        os.execvp(command[0], command)
    written = b""
    end, is_drawn = time.monotonic() + LONGEST_S, False
    while (left := end - time.monotonic()) > 0:
        if not select.select([terminal], [], [], left)[0]:
            continue
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        if not is_drawn and re.search(pattern.encode(), CONTROL.sub(b"", written)):
            end, is_drawn = time.monotonic() + MOMENT_S, True
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return CONTROL.sub(b"", written).decode(errors="replace")


def main() -> int:
    gpu, size, *client = sys.argv[1:]
    with subprocess.Popen(
        [sys.executable, HOLDER, gpu, size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            return 1
        sys.stdout.write(f"{holder.pid}\n")
        sys.stdout.flush()
        try:
            if client[0] == "--terminal":
                sys.stdout.write(in_terminal(client[1], client[2:]))
                return 0
            return subprocess.run(client, check=False).returncode
        finally:
            holder.kill()


if __name__ == "__main__":
    sys.exit(main())
