# SPDX-License-Identifier: Apache-2.0
"""Run the bench's programs: many at once, released at one instant, each answering in JSON lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], *, ready: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start programs that all begin when the block says `begin`, which it must.

    Each says "ready" (`ready` times, when it has several processes) before the block is entered.
    """
    reader, writer = os.pipe()
    programs = [
        subprocess.Popen(
            command, env=dict(environment), stdin=reader, stdout=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    os.close(reader)
    # One pipe for all of them: closing it is one instant.
    gate = os.fdopen(writer, "w")
    try:
        for program in programs:
            program.stdin = gate
            for _ in range(ready):
                expect(line_of(program), "ready")
        yield programs
    finally:
        gate.close()
        for program in programs:
            program.stdin = None
            if program.poll() is None:
                program.kill()
            if program.stdout is not None and not program.stdout.closed:
                program.communicate()


def begin(programs: Sequence[subprocess.Popen[str]]) -> list[list[dict[str, Any]]]:
    """Let them start at one instant, and collect the JSON lines of each."""
    for program in programs:
        if program.stdin is not None:
            program.stdin.close()
            program.stdin = None
    answers = []
    for program in programs:
        output, _ = program.communicate()
        if program.returncode != 0:
            message = f"{program.args!r} ended with {program.returncode}"
            raise RuntimeError(message)
        answers.append([json.loads(line) for line in output.splitlines() if line != "ready"])
    return answers


def expect(line: str, wanted: str) -> None:
    """Insist on an answer of a program."""
    if line != wanted:
        message = f"expected {wanted!r}, the program said {line!r}"
        raise RuntimeError(message)


def line_of(program: subprocess.Popen[str]) -> str:
    """Read the next line of an answer."""
    return "" if program.stdout is None else program.stdout.readline().rstrip("\n")
