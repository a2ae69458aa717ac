# SPDX-License-Identifier: Apache-2.0
"""Compiles and runs every C test program, plain and sanitized (native/tests/README.md)."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import build_native
import native_programs

NATIVE = build_native.NATIVE
PROGRAMS = sorted((NATIVE / "tests").rglob("test_*.c"))
BUILDS = ("plain", "address,undefined")
HEADER_PACKAGES = {"cuda.h": "nvidia-cuda-runtime", "nvml.h": "nvidia-nvml-dev"}
DECLARED = ("sources", "sanitizers", "machine", "needs", "libraries", "measures")
CANNOT_RUN_HERE = 77
SIMULATED = {"nvml", "simulated"}
# A leak in a test program is a bug of the test; leaks of libraries show in their own tests.
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=99",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99:second_deadlock_stack=1",
}


def needs(program: Path) -> dict[str, list[str]]:
    """The `name: words` lines of the program's first comment."""
    found = {}
    for line in program.read_text().splitlines():
        if not line.startswith("//"):
            break
        if match := re.fullmatch(rf"// ({'|'.join(DECLARED)}): (.*)", line):
            found[match[1]] = match[2].split()
    return found


def header_folder(header: str) -> Path:
    """The folder of an NVIDIA header, or a skip."""
    package = HEADER_PACKAGES[header]
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{header} is in {package}, which is not installed")
    return next(Path(str(file.locate())).parent for file in files if file.name == header)


def sources(declared: dict[str, list[str]]) -> list[str]:
    """The sources that a program names, relative to native/, patterns resolved."""
    return [
        str(path.relative_to(NATIVE))
        for pattern in declared.get("sources", [])
        for path in sorted(NATIVE.glob(pattern))
    ]


def starts_threads(program: Path, declared: dict[str, list[str]]) -> bool:
    """Whether a run has several threads: its own, its sources', or the simulated driver's.

    ThreadSanitizer sees one process. It finds nothing where that has one thread.
    """
    parts = [program, *(NATIVE / source for source in sources(declared))]
    return "libraries" in declared or any("pthread_create" in part.read_text() for part in parts)


def builds(program: Path) -> list[str]:
    """The builds that the program declares, or those that suit it."""
    declared = needs(program)
    suitable = [*BUILDS, *(["thread"] if starts_threads(program, declared) else [])]
    return declared.get("sanitizers", suitable)


def is_thorough(program: Path, build: str) -> bool:
    """Whether only `make test-all` runs this build.

    What runs in a user's process (ledger, leases, the shim's parts) is sanitized in every run, but
    for the long programs that stop it at every step.
    """
    is_long = program.parent.name in SIMULATED or program.stem == "test_crashes"
    return build != "plain" and is_long


def cases() -> list[object]:
    """One for each program and each of its builds."""
    found: list[object] = []
    for program in PROGRAMS:
        declared = needs(program)
        for build in builds(program):
            marks = [pytest.mark.measured] if "measures" in declared else []
            if is_thorough(program, build):
                marks.append(pytest.mark.thorough)
            name = f"{program.relative_to(NATIVE / 'tests')}[{build}]"
            found.append(pytest.param(program, build, id=name, marks=marks))
    return found


def link_program(program: Path, build: str, *, compiler: list[str], parts: list[Path]) -> Path:
    """Compiles `program` and links it with `parts`: objects and libraries."""
    recipe = build_native.read_recipe()
    sanitizers = [f"-fsanitize={build}", "-fno-sanitize-recover=all", "-Wno-error"]
    command = [
        *compiler,
        *recipe["cflags"],
        *recipe.get(f"{os.uname().machine}.cflags", []),
        # Asserts are how a program fails; frames and line numbers are how one reads it.
        *("-UNDEBUG", "-g", "-O1", "-fno-omit-frame-pointer"),
        # An assertion's words are optional.
        "-Wno-format-zero-length",
        *([] if build == "plain" else sanitizers),
        *(f"-isystem{header_folder(header)}" for header in needs(program).get("needs", [])),
        str(program),
        *map(str, parts),
        *(f"-Wl,-rpath,{part.parent}" for part in parts if ".so" in part.name),
        *recipe["libs"],
        *native_programs.link_options("" if build == "plain" else build),
    ]
    folder = native_programs.build_folder("" if build == "plain" else build) / "programs"
    output = folder / program.relative_to(NATIVE / "tests").with_suffix("")
    return native_programs.compile_program(command, program, parts, output)


@pytest.mark.parametrize(("program", "build"), cases())
@pytest.mark.timeout(300)  # the first of a build compiles what it links with
def test_program(
    program: Path,
    build: str,
    *,
    tmp_path: Path,
    machine: Callable[[str], Path],
    native_objects: Callable[[list[str], str], list[Path]],
    request: pytest.FixtureRequest,
) -> None:
    declared = needs(program)
    is_plain = build == "plain"
    compiler = request.getfixturevalue("cc" if is_plain else "sanitizing_cc")
    parts = native_objects(sources(declared), "" if is_plain else build)
    if libraries := declared.get("libraries"):
        folder = request.getfixturevalue("native_dir" if is_plain else "native_build")
        folder = folder if is_plain else folder(build, *libraries)
        parts += [folder / name for name in libraries]
    executable = link_program(program, build, compiler=compiler, parts=parts)
    environment = {**os.environ, **SANITIZER_OPTIONS}
    if spec := declared.get("machine"):
        environment["ALLOTMENT_SIMULATED_MACHINE"] = str(machine(spec[0]))
    command = [str(executable)]
    if build == "thread" and (setarch := shutil.which("setarch")):
        # gcc 12's runtime does not know the address randomisation of newer kernels.
        command = [setarch, "-R", *command]
    folder = tmp_path / "work"
    folder.mkdir()
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == CANNOT_RUN_HERE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"


def test_there_are_programs() -> None:
    assert PROGRAMS
