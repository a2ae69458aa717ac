# SPDX-License-Identifier: Apache-2.0
"""Make the README's picture from a real terminal: `allot top` while programs share a GPU.

Usage: python tools/record_screen.py docs/images/top.svg

Runs the programs and `allot top` in tmux, takes what is on its screen, and lets rich draw it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 118, 26
SESSION = "allotment-picture"
SECONDS_TO_SETTLE = 6
BIN = Path(sys.executable).parent
PROGRAMS = (
    (
        "greedy",
        ("--memory", "8Gi", "--compute", "0:100"),
        "while :; do allot burn --memory 40Gi --chunk 256Mi --kernel 2ms; sleep 1; done",
    ),
    (
        "train",
        ("--memory", "24Gi", "--compute", "50:80"),
        "exec allot burn --memory 20Gi --chunk 512Mi --kernel 2ms --seconds 60",
    ),
    (
        "serve",
        ("--memory", "4Gi", "--compute", "20", "--class", "latency"),
        "exec allot burn --memory 2Gi --kernel 1ms --rate 80 --seconds 60",
    ),
    (
        "notebook",
        ("--memory", "16Gi", "--compute", "10:100"),
        "exec allot burn --memory 5Gi --kernel 1ms --seconds 60 --processes 2",
    ),
)


def _tmux(*arguments: str) -> str:
    command = ["tmux", "-L", SESSION, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _screen(environment: dict[str, str]) -> str:
    run = ["allot", "run", "--simulated", "a100-80gb"]
    programs = [
        subprocess.Popen(
            [*run, *asked, "--name", name, "--", "sh", "-c", what],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for name, asked, what in PROGRAMS
    ]
    try:
        top = f"env ALLOTMENT_STATE={environment['ALLOTMENT_STATE']} {BIN}/allot top"
        _tmux("new-session", "-d", "-s", SESSION, "-x", str(WIDTH), "-y", str(HEIGHT), top)
        time.sleep(SECONDS_TO_SETTLE)
        return _tmux("capture-pane", "-e", "-p", "-t", SESSION)
    finally:
        subprocess.run(["tmux", "-L", SESSION, "kill-server"], check=False, capture_output=True)
        for program in programs:
            os.killpg(program.pid, signal.SIGTERM)
            program.wait()


def main() -> int:
    """Write the picture to the file that the only argument names."""
    if len(sys.argv) != 2 or shutil.which("tmux") is None:  # noqa: PLR2004 - one argument
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as state:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        # Where this clone lies is nobody's business.
        screen = _screen({**os.environ, "ALLOTMENT_STATE": state, "PATH": path})
        screen = screen.replace(f"{BIN}/", "")
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen.rstrip()), soft_wrap=False)
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    # Without rich's fonts from the network: the reader's monospace font will do.
    drawn = console.export_svg(title="allot top")
    target.write_text(re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
