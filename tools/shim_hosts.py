# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the shim's host programs (native/tests/shim) in shares.

They are plain programs that use a GPU, with the shim preloaded, as any user's would be.
Apart from the tests that use it, so that they can name its types.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import build_native
import native_programs

SOURCES = build_native.NATIVE / "tests" / "shim"
#: Programs that bring the driver in by themselves, instead of being linked with it.
UNLINKED = {"host_plugin", "host_lookup"}
#: How long a case may take, with a sanitizer on a busy machine.
PATIENCE_S = 60
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=99",
}


@dataclass(frozen=True, slots=True)
class Share:
    """A share directory on a simulated machine."""

    directory: Path
    machine: Path
    uuids: tuple[str, ...]


def case_names(program: str) -> list[str]:
    """The cases of a host program, from its table."""
    text = (SOURCES / f"{program}.c").read_text()
    table = text[text.index("static const test_case cases[]") :]
    return re.findall(r'\{"(\w+)",', table)


@dataclass(frozen=True, slots=True)
class ShimHosts:
    """Builds and runs host programs. `build` is "plain" or a set of sanitizers."""

    compiler: Sequence[str]
    libraries: Path
    build: str
    folder: Path
    _built: dict[str, Path] = field(default_factory=dict)

    @property
    def shim(self) -> Path:
        """The preloaded library."""
        return self.libraries / "liballotment-shim.so"

    @property
    def simulated(self) -> Path:
        """The folder of the simulated driver."""
        return self.libraries / "simulated"

    def _compile(
        self, name: str, *options: str | Path, parts: Sequence[Path] = (), output: str
    ) -> Path:
        sanitize = [] if self.build == "plain" else [f"-fsanitize={self.build}"]
        command = [*self.compiler, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra"]
        command += ["-Werror", "-Wno-unused-parameter", "-I.", "-Iinclude", "-fPIC"]
        command += ["-mcx16"] if os.uname().machine == "x86_64" else ["-mno-outline-atomics"]
        source = SOURCES / f"{name}.c"
        command += [*sanitize, str(source), *map(str, parts), *map(str, options)]
        command += native_programs.link_options("" if self.build == "plain" else self.build)
        linked = [*parts, *sorted(self.simulated.glob("*.so.1"))]
        return native_programs.compile_program(command, source, linked, self.folder / output)

    def program(self, name: str) -> Path:
        """The host program of that name."""
        if name not in self._built:
            drivers = [] if name in UNLINKED else ["-l:libcuda.so.1", "-l:libnvidia-ml.so.1"]
            engine = sorted(build_native.NATIVE.glob("simulated/engine/*.c"))
            sources = [str(path.relative_to(build_native.NATIVE)) for path in engine]
            self._built[name] = self._compile(
                name,
                f"-L{self.simulated}",
                *drivers,
                "-ldl",
                "-lpthread",
                parts=native_programs.objects(
                    self.compiler,
                    ["ledger.c", *sources],
                    sanitizers="" if self.build == "plain" else self.build,
                ),
                output=name,
            )
        return self._built[name]

    def library(self, name: str, *options: str, output: str) -> Path:
        """A shared library that host programs open."""
        if output not in self._built:
            self._built[output] = self._compile(
                name, "-shared", f"-L{self.simulated}", *options, output=output
            )
        return self._built[output]

    def environment(self, share: Share | None, **variables: str) -> dict[str, str]:
        """What a program in the share sees (None: in no share)."""
        found = {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": str(self.shim),
            "LD_LIBRARY_PATH": f"{self.simulated}:{self.folder}",
            **SANITIZER_OPTIONS,
        }
        if share is not None:
            found["ALLOTMENT_SHARE"] = str(share.directory)
            found["ALLOTMENT_SIMULATED_MACHINE"] = str(share.machine)
        return found | variables

    def run(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        *,
        cwd: Path | None = None,
        timeout_s: float = 50,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end."""
        words = [str(word) for word in command]
        if self.build == "thread" and (setarch := shutil.which("setarch")):
            # gcc 12's runtime does not know the address randomisation of newer kernels.
            words = [setarch, "-R", *words]
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            env=dict(environment),
            cwd=cwd,
            timeout=timeout_s,
        )

    def expect(self, name: str, case: str, share: Share, *, cwd: Path, **variables: str) -> None:
        """Runs one case of a host program, which must end well and silently."""
        done = self.run([self.program(name), case], self.environment(share, **variables), cwd=cwd)
        if (done.returncode, done.stdout, done.stderr) != (0, "", ""):
            raise AssertionError(f"ended with {done.returncode}\n{done.stdout}{done.stderr}")

    def expect_each(
        self,
        name: str,
        cases: Sequence[str],
        make_share: Callable[[str], Share],
        *,
        folder: Path,
        rounds: int = 1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Runs cases of a host program in one process, each in a child and in its own share.

        Each must end well and silently; those that do not are listed with what they wrote. With
        several `rounds` one of them must: for figures that a busy machine may spoil.
        """
        failures: dict[str, str] = dict.fromkeys(cases, "did not run")
        for number in range(rounds):
            shares = {case: make_share(case) for case in failures}
            failures = self._run_each(name, shares, folder / f"round-{number}", variables or {})
            if not failures:
                return
        listed = "\n".join(f"{case}: {failure}" for case, failure in failures.items())
        raise AssertionError(f"{name}, {self.build}:\n{listed}")

    def _run_each(
        self, name: str, shares: Mapping[str, Share], folder: Path, variables: Mapping[str, str]
    ) -> dict[str, str]:
        """What is wrong with each case that failed."""
        for case, share in shares.items():
            (folder / case).mkdir(parents=True)
            (folder / case / "share").symlink_to(share.directory)
            (folder / case / "machine").symlink_to(share.machine)
        (folder / "work").mkdir()
        environment = self.environment(None, **variables)
        environment["ALLOTMENT_SHARE"] = str(folder / "now" / "share")
        command: list[str | Path] = [self.program(name), "--each", folder, *shares]
        done = self.run(
            command, environment, cwd=folder / "work", timeout_s=PATIENCE_S * len(shares)
        )
        statuses = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
        failures = {
            case: failure
            for case in shares
            if (failure := _failure(folder / case / "output", statuses.get(case)))
        }
        if (done.returncode, done.stderr) != (0, "") and not failures:
            raise AssertionError(f"{name} ended with {done.returncode}\n{done.stderr}")
        return failures


def _failure(output: Path, status: str | None) -> str | None:
    """What is wrong with a case that ended with this wait status (None: did not end)."""
    if status is None:
        return "did not end"
    text = output.read_text("utf-8", "replace")
    code = os.waitstatus_to_exitcode(int(status))
    if code == 0 and text == "":
        return None
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    return f"{ended}\n{text}"
