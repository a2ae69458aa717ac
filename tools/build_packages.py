# SPDX-License-Identifier: Apache-2.0
"""Builds the .deb and the .rpm of both architectures: `python tools/build_packages.py`.

A package serves any distribution with one of `PYTHONS` as its python3: Allotment is Python and
libraries of libc alone, and of the requirements the compiled modules carry their Python in their
names, so those of all Pythons lie side by side. It has no interpreter of its own: the distribution
keeps that secure. The same commit gives the same bytes.

It needs Python's build environment (`make packages` makes it) and Go, which builds nfpm.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from build_image import commit_of, project_version
from image import ARCHITECTURES, ROOT, Architecture, ImageError, digest, run, wheels
from image.layout import time_of

OUTPUT = ROOT / "build" / "packages"
STATIC = ROOT / "deploy" / "packages"
PINS = ROOT / "tools" / "package" / "requirements.txt"
EXTRAS = ("web",)
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TOO_NEW = "3.15"
NFPM = "github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.45.2"

HOME = Path("usr/lib/allotment")
DOCUMENTS = Path("usr/share/doc/allotment")
CONFIG = Path("etc/allotment/config.yaml")
# `python3` below a pyvenv.cfg has these packages and no others, and so have the interpreters that
# `allot` starts by `sys.executable`; no variable tells the programs of a share of them.
_VENV = "home = /usr/bin\ninclude-system-site-packages = false\n"
_COMMAND = f"""#!/{HOME}/bin/python3 -I
import sys
from allotment.cli import main
sys.exit(main())
"""
_FILES = {
    "config.yaml": CONFIG,
    "sysusers.conf": Path("usr/lib/sysusers.d/allotment.conf"),
    "tmpfiles.conf": Path("usr/lib/tmpfiles.d/allotment.conf"),
    "allotment-web.service": Path("usr/lib/systemd/system/allotment-web.service"),
}
_COMPLETIONS = {
    "bash": {"": "usr/share/bash-completion/completions/allot"},
    "zsh": {
        "deb": "usr/share/zsh/vendor-completions/_allot",
        "rpm": "usr/share/zsh/site-functions/_allot",
    },
    "fish": {"": "usr/share/fish/vendor_completions.d/allot.fish"},
}
_DESCRIPTION = """\
Shares GPUs among programs and users
Each program gets its part of a GPU's memory and time, and cannot take more.
/etc/allotment/config.yaml has what each user gets and may have."""


def build(
    names: Sequence[str], output: Path, *, cache: Path, wheel: Path | None = None
) -> dict[Path, str]:
    """Builds the packages of these architectures into `output`, and returns their digests.

    Raises:
        ImageError: a part is missing.
    """
    number = project_version()
    epoch, _ = commit_of(number)
    output.mkdir(parents=True, exist_ok=True)
    nfpm = _nfpm(cache)
    built = {}
    with tempfile.TemporaryDirectory(dir=output) as folder:
        scratch = Path(folder)
        wheel = wheel or wheels.build_allotment(scratch / "wheel", epoch)
        for architecture in (ARCHITECTURES[name] for name in names):
            root = scratch / architecture.name
            _fill(root, wheel, architecture, cache=cache, scratch=scratch)
            _settle(root, epoch)
            for packager in ("deb", "rpm"):
                config = scratch / f"{architecture.name}-{packager}.json"
                config.write_text(
                    json.dumps(_config(root, architecture, packager, number, epoch)), "utf-8"
                )
                words = ["package", "--packager", packager, "--config", config]
                run(
                    [nfpm, *words, "--target", scratch],
                    environment={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
                )
        for path in sorted([*scratch.glob("*.deb"), *scratch.glob("*.rpm")]):
            target = path.rename(output / path.name)
            built[target] = digest(target)
    return built


def _fill(
    root: Path, wheel: Path, architecture: Architecture, *, cache: Path, scratch: Path
) -> None:
    """Lays out all files of a package below `root`."""
    packages = root / HOME / "packages"
    for python in PYTHONS:
        loaded = wheels.load(cache, architecture, pins_file=PINS, python=python)
        alone = scratch / f"{architecture.name}-{python}"
        pip = ["--require-hashes", "--requirement", str(PINS)]
        wheels.install(pip, next(iter(loaded)).parent, alone, architecture, python=python)
        merge(alone, packages)
        _link(root / HOME / "lib" / f"python{python}" / "site-packages", "../../packages")
    own = scratch / f"{architecture.name}-own"
    wheels.install_own_package(wheel, own, architecture)
    merge(own, packages)
    _link(root / HOME / "bin" / "python3", "/usr/bin/python3")
    _write(root / HOME / "pyvenv.cfg", _VENV)
    _write(root / "usr/bin/allot", _COMMAND, mode=0o755)
    for name, path in _FILES.items():
        _write(root / path, (STATIC / name).read_bytes())
    for page in (ROOT / "man").glob("*.1"):
        content = gzip.compress(page.read_bytes(), mtime=0)
        _write(root / "usr/share/man/man1" / f"{page.name}.gz", content)
    for shell, paths in _COMPLETIONS.items():
        for target in paths.values():
            _write(root / target, _completion(shell))
    _write(root / DOCUMENTS / "copyright", (ROOT / "LICENSE").read_bytes())
    _write(root / DOCUMENTS / "CHANGELOG.md", (ROOT / "CHANGELOG.md").read_bytes())
    _write(root / DOCUMENTS / "examples/config.yaml", (STATIC / "config.yaml").read_bytes())


def merge(folder: Path, into: Path) -> None:
    """Adds one Python's packages to those of the others.

    Raises:
        ImageError: two have a file of one name that differs: they cannot lie side by side.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        # The record of the wheel that was installed: its tag names one Python.
        if path.is_dir() or (name.name == "WHEEL" and name.parts[0].endswith(".dist-info")):
            continue
        target = into / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        elif target.read_bytes() != path.read_bytes():
            raise ImageError(f"{name} differs between the wheels of two versions of Python")


def _write(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _completion(shell: str) -> str:
    """The script that `allot completion` prints."""
    from click.shell_completion import get_completion_class

    from allotment.cli import main as command

    kind = get_completion_class(shell)
    if kind is None:
        raise ImageError(f"click completes nothing in {shell}")
    return kind(command, {}, "allot", "_ALLOT_COMPLETE").source()


def _settle(root: Path, epoch: int) -> None:
    """Gives all files the modes and the time that do not depend on who builds them."""
    for path in sorted(root.rglob("*"), reverse=True):
        if not path.is_symlink():
            is_open = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if is_open else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)


def _config(
    root: Path, architecture: Architecture, packager: str, number: str, epoch: int
) -> dict[str, Any]:
    """Nfpm's configuration: YAML, of which JSON is a part."""
    python = {
        "deb": [f"python3 (>= {PYTHONS[0]})", f"python3 (<< {TOO_NEW})", "passwd"],
        "rpm": [f"python3 >= {PYTHONS[0]}", f"python3 < {TOO_NEW}", "shadow-utils"],
    }
    scripts = {"postinstall": "postinst", "preremove": "prerm", "postremove": "postrm"}
    return {
        "name": "allotment",
        "arch": architecture.name,
        "platform": "linux",
        "version": number,
        "release": "1",
        "section": "utils",
        "priority": "optional",
        "maintainer": "Allotment's developers <packages@allotment.dev>",
        "description": _DESCRIPTION,
        "homepage": "https://allotment.dev",
        "license": "Apache-2.0",
        "mtime": time_of(epoch),
        "depends": python[packager],
        "contents": list(_contents(root, packager)),
        "scripts": {each: str(STATIC / name) for each, name in scripts.items()},
        "deb": {"triggers": {"interest_noawait": ["/usr/bin/python3"]}},
        "rpm": {"buildhost": "localhost", "group": "System Environment/Base"},
    }


def _contents(root: Path, packager: str) -> Iterator[dict[str, Any]]:
    """One entry for each file, and one for each folder that is the package's own."""
    others = {
        path for paths in _COMPLETIONS.values() for kind, path in paths.items()
        if kind not in {"", packager}
    }  # fmt: skip
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        entry: dict[str, Any] = {"dst": f"/{name}", "file_info": {"owner": "root", "group": "root"}}
        if path.is_symlink():
            yield {**entry, "src": str(path.readlink()), "type": "symlink"}
        elif path.is_dir():
            if any(part.startswith("allotment") for part in name.parts):
                entry["file_info"]["mode"] = 0o755
                yield {**entry, "type": "dir"}
        elif str(name) not in others:
            entry["file_info"]["mode"] = path.stat().st_mode & 0o7777
            kind = {"type": "config|noreplace"} if name == CONFIG else {}
            yield {**entry, "src": str(path), **kind}


def _nfpm(cache: Path) -> Path:
    """The program that writes packages, built by Go as its module proxy and checksums have it."""
    program = cache / NFPM.rpartition("@")[2] / "nfpm"
    if not program.exists():
        if shutil.which("go") is None:
            raise ImageError("no go on this machine\n\nhint: install Go 1.24 or later (go.dev)")
        run(
            ["go", "install", "-trimpath", NFPM],
            environment={**os.environ, "GOBIN": str(program.parent), "CGO_ENABLED": "0"},
        )
    return program


def main() -> None:
    """Reads the options and builds, or renews the pins."""
    parser = argparse.ArgumentParser(description="Build the .deb and the .rpm.")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--cache", type=Path, default=OUTPUT / "cache", help="wheels, and nfpm")
    parser.add_argument("--wheel", type=Path, help="use this wheel of Allotment")
    parser.add_argument("--renew-pins", action="store_true", help="the wheels' digests")
    given = parser.parse_args()
    try:
        if given.renew_pins:
            wheels.renew_pins(PINS, extras=EXTRAS, pythons=PYTHONS)
            return
        built = build(
            given.arch or [*ARCHITECTURES],
            given.output.resolve(),
            cache=given.cache.resolve(),
            wheel=given.wheel and given.wheel.resolve(),
        )
    except ImageError as error:
        sys.exit(f"error: {error}")
    for path, each in built.items():
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, sha256:{each}")


if __name__ == "__main__":
    main()
