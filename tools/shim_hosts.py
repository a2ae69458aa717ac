# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the shim's host programs (native/tests/shim) in shares.

They are plain programs that use a GPU, with the shim preloaded, as any user's would be.
Apart from the tests that use it, so that they can name its types.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import build_native

#: Programs that bring the driver in by themselves, instead of being linked with it.
UNLINKED = {"host_plugin", "host_lookup"}
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

    def _compile(self, name: str, *options: str | Path, output: str) -> Path:
        sanitize = [] if self.build == "plain" else [f"-fsanitize={self.build}"]
        command = [*self.compiler, "-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra"]
        command += ["-Werror", "-Wno-unused-parameter", "-I.", "-Iinclude", "-fPIC"]
        command += ["-mcx16"] if os.uname().machine == "x86_64" else ["-mno-outline-atomics"]
        command += [*sanitize, f"tests/shim/{name}.c", *map(str, options), "-o"]
        path = self.folder / output
        done = subprocess.run(
            [*command, str(path)],
            cwd=build_native.NATIVE,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
        return path

    def program(self, name: str) -> Path:
        """The host program of that name."""
        if name not in self._built:
            linked = [] if name in UNLINKED else ["-l:libcuda.so.1", "-l:libnvidia-ml.so.1"]
            engine = build_native.NATIVE.glob("simulated/engine/*.c")
            self._built[name] = self._compile(
                name,
                "ledger.c",
                *engine,
                f"-L{self.simulated}",
                *linked,
                "-ldl",
                "-lpthread",
                output=name,
            )
        return self._built[name]

    def library(self, name: str, *options: str, output: str) -> Path:
        """A shared library that host programs open."""
        if output not in self._built:
            (self.folder / output).parent.mkdir(exist_ok=True)
            self._built[output] = self._compile(
                name, "-shared", f"-L{self.simulated}", *options, output=output
            )
        return self._built[output]

    def cases(self, name: str) -> list[str]:
        """What a host program can be asked to do."""
        done = subprocess.run(
            [str(self.program(name))],
            capture_output=True,
            text=True,
            check=True,
            env={"LD_LIBRARY_PATH": str(self.simulated)},
        )
        return done.stdout.split()

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
            timeout=50,
        )

    def expect(self, name: str, case: str, share: Share, *, cwd: Path, **variables: str) -> None:
        """Runs one case of a host program, which must end well and silently."""
        done = self.run([self.program(name), case], self.environment(share, **variables), cwd=cwd)
        if (done.returncode, done.stdout, done.stderr) != (0, "", ""):
            raise AssertionError(f"ended with {done.returncode}\n{done.stdout}{done.stderr}")
