# SPDX-License-Identifier: Apache-2.0
"""Compile the bench's C programs and run them: many at once, released at one instant.

Each answers in JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from allotment.libraries import SIMULATED, library_path
from bench.harness.machine import ROOT

SOURCES: Final = ROOT / "bench" / "programs"
_FLAGS: Final = ("-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter")
_PARTS: Final = ("driver", "lanes")
_DROPPED: Final = ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


@contextlib.contextmanager
def running(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str], *, ready: int = 1
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start programs that all begin when the block calls `begin`, which it must.

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


def bare_environment(machine: Path | None) -> dict[str, str]:
    """Return the environment of a program that is in no share; on a simulated machine, if any."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _DROPPED and not name.startswith("ALLOTMENT_")
    }
    if machine is not None:
        kept["LD_LIBRARY_PATH"] = str(library_path(SIMULATED))
        kept["ALLOTMENT_SIMULATED_MACHINE"] = str(machine)
    return kept


def command_environment(state: str) -> dict[str, str]:
    """Return the environment of `allot` with this state folder.

    Its first call keeps what Python compiles, as an installation does.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ALLOTMENT_") and name != "PYTHONDONTWRITEBYTECODE"
    } | {"ALLOTMENT_STATE": state, "PYTHONPYCACHEPREFIX": f"{state}/compiled"}


def build_programs(folder: Path, names: Collection[str]) -> Path:
    """Compile the bench's C programs with the machine's compiler, else with ziglang's."""
    folder.mkdir()
    compiler = _compiler()
    for name in names:
        source = SOURCES / f"{name}.c"
        parts = [part for part in _PARTS if f'#include "{part}.h"' in source.read_text()]
        # What one part is made of, another needs.
        parts = ["driver", "lanes"] if "lanes" in parts else parts
        sources = [source, *(SOURCES / f"{part}.c" for part in parts)]
        subprocess.run(
            [
                *compiler,
                *_FLAGS,
                f"-I{ROOT / 'native'}",
                f"-I{ROOT / 'native' / 'include'}",
                *map(str, sources),
                "-o",
                str(folder / source.stem),
                "-ldl",
                "-lpthread",
            ],
            check=True,
        )
    return folder


def _compiler() -> list[str]:
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        try:
            subprocess.run([name, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return [name]
    return [sys.executable, "-m", "ziglang", "cc"]
