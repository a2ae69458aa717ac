# SPDX-License-Identifier: Apache-2.0
"""Host programs of native/tests/shim: built plain or sanitized, run in a share under the shim."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import build_native

SOURCES = build_native.NATIVE / "tests" / "shim"
GIB = 1 << 30
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
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
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
        done = self.run(
            [self.program(name), case], self.environment(share, **variables), cwd=cwd
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


@pytest.fixture
def share_of(tmp_path: Path, machine: Callable[[str], Path]) -> Callable[..., Share]:
    """Makes a share: `share_of("a100-80gb:4", order=(2, 0), limits=(4 * GIB, GIB))`."""
    made = 0

    def make(
        spec: str = "a100-80gb:2",
        *,
        order: Sequence[int] = (0, 1),
        limits: Sequence[int] = (4 * GIB, 2 * GIB),
        knows_contexts: bool = True,
    ) -> Share:
        # Late: most tests here make no share.
        from allotment import ledger
        from allotment.devices import simulated

        nonlocal made
        made += 1
        path = machine(spec)
        devices = [simulated.read_machine(path).devices[i] for i in order]
        directory = tmp_path / f"share-{made}"
        directory.mkdir()
        policy = ledger.Policy(
            share_id=f"share-{made}",
            share_name="test",
            devices=tuple(
                ledger.DevicePolicy(
                    uuid=device.uuid,
                    memory_limit=limit,
                    context_bytes=device.context_bytes if knows_contexts else 0,
                )
                for device, limit in zip(devices, limits, strict=True)
            ),
        )
        ledger.create(directory, policy)
        return Share(directory, path, tuple(device.uuid for device in devices))

    return make


@pytest.fixture(scope="session")
def shim_hosts(
    cc: list[str],
    native_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> ShimHosts:
    """Host programs and shim without sanitizers."""
    return ShimHosts(cc, native_dir, "plain", tmp_path_factory.mktemp("shim-plain"))


@pytest.fixture(scope="session")
def sanitized_hosts(
    sanitizing_cc: list[str],
    native_build: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], ShimHosts]:
    """Host programs, shim and simulated driver, all built with the sanitizers asked for."""
    made: dict[str, ShimHosts] = {}

    def make(sanitizers: str) -> ShimHosts:
        if sanitizers not in made:
            folder = tmp_path_factory.mktemp(f"shim-{sanitizers.replace(',', '-')}")
            libraries = native_build(sanitizers)
            made[sanitizers] = ShimHosts(sanitizing_cc, libraries, sanitizers, folder)
        return made[sanitizers]

    return make
