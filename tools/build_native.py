# SPDX-License-Identifier: Apache-2.0
"""Builds the native libraries as they ship: with ziglang's C compiler, for glibc 2.17, stripped.

Why zig: one machine builds for x86-64 and arm64 against an old glibc, from a package that pip can
install, so neither a wheel nor `make native` needs a compiler, make or a container. Sources and
flags are in `native/recipe.mk`, which `native/Makefile` reads as well.

It knows nothing of hatch or of the package, and uses the standard library only, because the
build hook imports it in an isolated environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
INSTALLED = ROOT / "src" / "allotment" / "_native"
ARCHITECTURES = ("x86_64", "aarch64")
GLIBC = "2.17"


class NativeBuildError(RuntimeError):
    """A native library could not be built; the compiler's words are in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One shared library of the recipe, with its flags resolved for one architecture."""

    name: str
    output: Path
    """Below the folder of the architecture, as in `simulated/libcuda.so.1`."""
    sources: tuple[Path, ...]
    """Relative to `native/`."""
    flags: tuple[str, ...]


def read_recipe(path: Path = NATIVE / "recipe.mk") -> dict[str, list[str]]:
    """The recipe's `name = words` lines. Nothing else of make's language is understood."""
    recipe: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, separator, words = line.partition("=")
            if not separator:
                message = f"{path}: expected `name = words`, not {line!r}"
                raise NativeBuildError(message)
            recipe[name.strip()] = words.split()
    return recipe


def libraries(arch: str, native: Path = NATIVE) -> list[Library]:
    """The libraries of the recipe that have at least one source, in the recipe's order."""
    recipe = read_recipe(native / "recipe.mk")

    def words(name: str) -> list[str]:
        return recipe.get(name, [])

    found = []
    for name in words("libraries"):
        sources = sorted(
            {
                path.relative_to(native)
                for pattern in words(f"{name}.sources")
                for path in native.glob(pattern)
            }
        )
        if sources:
            flags = [
                *words("cflags"),
                *words(f"{arch}.cflags"),
                *words(f"{name}.cflags"),
                *words("ldflags"),
                *words("plain.ldflags"),
                *words(f"{name}.ldflags"),
            ]
            library = Library(
                name=name,
                output=Path(words(f"{name}.output")[0]),
                sources=tuple(sources),
                flags=tuple(flags),
            )
            found.append(library)
    return found


def compile_command(
    library: Library, arch: str, *, output: Path, compiler: list[str] | None = None
) -> list[str]:
    """The one command that makes `library`, to be run in `native/`.

    The prefix map and `-s` make the result independent of where and when it was built.
    """
    target = ["-target", f"{arch}-linux-gnu.{GLIBC}"]
    return [
        *(compiler or [sys.executable, "-m", "ziglang", "cc", *target]),
        *library.flags,
        "-g0",
        f"-ffile-prefix-map={NATIVE}=native",
        *(str(source) for source in library.sources),
        *read_recipe()["libs"],
        "-s",
        "-o",
        str(output),
    ]


def is_current(library: Library, output: Path) -> bool:
    """Whether `output` is newer than everything it could be made from."""
    if not output.exists():
        return False
    made = output.stat().st_mtime_ns
    inputs = [NATIVE / source for source in library.sources]
    inputs += [NATIVE / "recipe.mk", *NATIVE.rglob("*.h"), *NATIVE.rglob("*.map")]
    # Folders count: a deleted source changes its folder alone.
    inputs += sorted({path.parent for path in inputs})
    return all(path.stat().st_mtime_ns <= made for path in inputs)


def build(arch: str, into: Path, *, force: bool = False) -> list[Path]:
    """Builds the libraries of `arch` into `into`/<arch>/ and returns their paths.

    A library is put in place by a rename, so a process that has the old one mapped keeps it.
    Raises `NativeBuildError` when a compilation fails.
    """
    built = []
    for library in libraries(arch):
        output = into / arch / library.output
        if force or not is_current(library, output):
            output.parent.mkdir(parents=True, exist_ok=True)
            part = output.with_name(output.name + ".part")
            # Standard error: the build hook's and the callers' standard output is others'.
            print(f"compiling {library.name} for {arch} ...", file=sys.stderr, flush=True)
            command = compile_command(library, arch, output=part)
            # zig's wrapper opens no terminal; a captured error is shown whole, once.
            done = subprocess.run(command, cwd=NATIVE, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                message = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
                raise NativeBuildError(message)
            part.chmod(0o755)
            part.replace(output)
        built.append(output)
    return built


def main() -> None:
    """`python tools/build_native.py [--arch ARCH]... [--into FOLDER]`."""
    parser = argparse.ArgumentParser(description="Build the native libraries as they ship.")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    parser.add_argument("--into", type=Path, default=INSTALLED)
    parser.add_argument("--force", action="store_true", help="build what is up to date, too")
    parser.add_argument("--quiet", action="store_true", help="do not name what is there")
    arguments = parser.parse_args()
    for arch in arguments.arch or [platform.machine()]:
        try:
            built = build(arch, arguments.into.resolve(), force=arguments.force)
        except NativeBuildError as error:
            sys.exit(f"error: the native libraries for {arch} could not be built\n\n{error}")
        if not arguments.quiet:
            print(*(os.path.relpath(path) for path in built), sep="\n")


if __name__ == "__main__":
    main()
