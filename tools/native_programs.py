# SPDX-License-Identifier: Apache-2.0
"""Builds C test programs into native/build/, each once for all pytest processes.

`native/Makefile` builds what programs are linked with; a program itself is compiled and linked
here. Builds of one set of sanitizers wait for each other behind a file lock, and a program is made
again only when its command, a header or what it is linked with has changed.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import build_native

BUILD = build_native.NATIVE / "build"


#: Set by `make coverage-native`: what has no sanitizers counts the lines that run, for gcov.
COUNTS_LINES = bool(os.environ.get("NATIVE_COVERAGE"))


def build_folder(sanitizers: str) -> Path:
    """Where native/Makefile builds with these sanitizers; "" is none."""
    variant = sanitizers or ("coverage" if COUNTS_LINES else "")
    return BUILD / "-".join([platform.machine(), *filter(None, variant.split(","))])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from building into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(compiler: Sequence[str], targets: Sequence[str], *, sanitizers: str = "") -> Path:
    """Builds targets of native/Makefile (none: every library) and returns their folder."""
    return _make_once(tuple(compiler), tuple(targets), sanitizers)


@functools.cache
def _make_once(compiler: tuple[str, ...], targets: tuple[str, ...], sanitizers: str) -> Path:
    folder = build_folder(sanitizers)
    # This make is no part of one that may have started the tests.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    with locked(folder):
        done = subprocess.run(
            [
                *("make", "-C", str(build_native.NATIVE), "-s", "-j2"),
                *(f"CC={' '.join(compiler)}", f"SANITIZE={sanitizers}"),
                *(["COVERAGE=1"] if COUNTS_LINES and not sanitizers else []),
                *(str((folder / name).relative_to(build_native.NATIVE)) for name in targets),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return folder


def objects(compiler: Sequence[str], sources: Sequence[str], *, sanitizers: str = "") -> list[Path]:
    """Compiles sources of native/ for programs to be linked with."""
    if not sources:
        return []
    if COUNTS_LINES and not sanitizers:
        sources = [*sources, "tests/count_before_exit.c"]
    names = [f"objects/tests/{source}.o" for source in sources]
    folder = make(compiler, names, sanitizers=sanitizers)
    return [folder / name for name in names]


def link_options(sanitizers: str = "") -> list[str]:
    """What the linker needs besides the objects."""
    return ["-lgcov"] if COUNTS_LINES and not sanitizers else []


@functools.cache
def _headers() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(build_native.NATIVE.rglob("*.h")):
        digest.update(path.read_bytes())
    return digest.digest()


def _digest(command: Sequence[str], source: Path, parts: Sequence[Path]) -> str:
    digest = hashlib.sha256(_headers())
    digest.update("\0".join(command).encode())
    digest.update(source.read_bytes())
    for part in parts:
        digest.update(f"{part} {part.stat().st_mtime_ns}\0".encode())
    return digest.hexdigest()


def compile_program(
    command: Sequence[str], source: Path, parts: Sequence[Path], output: Path
) -> Path:
    """Runs `command` for `output`, unless that is there and of the same source, headers and parts.

    `command` lacks its `-o`. `parts` are the files that it links.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    digest, mark = _digest(command, source, parts), output.with_name(f"{output.name}.digest")
    with locked(output.parent):
        if output.exists() and mark.exists() and mark.read_text() == digest:
            return output
        done = subprocess.run(
            [*command, "-o", str(output)],
            cwd=build_native.NATIVE,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
        mark.write_text(digest)
    return output
