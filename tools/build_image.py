# SPDX-License-Identifier: Apache-2.0
"""Builds the container image for amd64 and arm64: `python tools/build_image.py`.

It needs Python's build environment (`make image` makes it), apt and dpkg-deb; no Docker engine, no
root. In `build/image` it leaves an OCI layout, its archive, and an SBOM of each architecture. The
same commit gives the same digest where zlib is the same.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from image import ARCHITECTURES, ROOT, Architecture, ImageError, debian, digest, run, sbom, wheels
from image.layers import Layer, write_layer
from image.layout import Image, encode, write_archive, write_layout

OUTPUT = ROOT / "build" / "image"
# What a node loads, and what it keeps. OpenBLAS, gRPC and OpenSSL are half of it.
MOST_COMPRESSED = 60_000_000
MOST_UNPACKED = 140_000_000
SBOM = "usr/share/sbom/allotment.spdx.json"
CONFIG = {
    "Entrypoint": ["allot"],
    "User": "65532:65532",
    "WorkingDir": "/",
    "Env": [
        "PATH=/usr/local/bin:/usr/bin:/usr/sbin",
        "LANG=C.UTF-8",
        "PYTHONUNBUFFERED=1",
    ],
}


def build(
    names: Sequence[str],
    output: Path,
    *,
    cache: Path,
    reference: str | None = None,
    wheel: Path | None = None,
    mirror: str | None = None,
) -> str:
    """Builds the images of these architectures into `output` and returns the index's digest.

    Raises:
        ImageError: a part is missing, or an image is too large.
    """
    version = project_version()
    epoch, labels = commit_of(version)
    machine = {each.machine: each for each in ARCHITECTURES.values()}.get(platform.machine())
    if machine is None:
        raise ImageError(f"{platform.machine()} cannot run the image's Python, which compiles")
    chosen = [ARCHITECTURES[name] for name in names]
    pins = debian.read_pins()
    needed = {each.name for each in (*chosen, machine)}
    debs = debian.load([pin for pin in pins if pin.architecture in needed], cache, mirror=mirror)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        scratch = Path(folder)
        wheel = wheel or wheels.build_allotment(scratch / "wheel", epoch)
        bases = {}
        for each in {*chosen, machine}:
            bases[each.name] = scratch / each.name / "base"
            own = [debs[pin] for pin in pins if pin.architecture == each.name]
            debian.unpack(own, bases[each.name])
        images = []
        for each in chosen:
            parts = {
                "Debian's Python": bases[each.name],
                "requirements": scratch / each.name / "requirements",
                "Allotment": scratch / each.name / "allotment",
            }
            loaded = wheels.load(cache, each)
            wheels.install_requirements([*loaded], parts["requirements"], each)
            wheels.install_allotment(wheel, parts["Allotment"], each)
            bill = encode(
                sbom.describe(
                    version=version,
                    architecture=each,
                    debs=[pin for pin in pins if pin.architecture == each.name],
                    wheels={**loaded, wheel: digest(wheel)},
                    epoch=epoch,
                )
            )
            (output / f"sbom-{each.name}.spdx.json").write_bytes(bill)
            inside = parts["Allotment"] / SBOM
            inside.parent.mkdir(parents=True)
            inside.write_bytes(bill)
            for what, part in parts.items():
                keep = what == "Allotment"
                debian.compile_python(part, bases[machine.name], machine, keep_sources=keep)
            layers = [
                (what, write_layer(part, scratch / f"{each.name}-{n}", epoch=epoch, modes=MODES))
                for n, (what, part) in enumerate(parts.items())
            ]
            _report(each, layers)
            images.append(Image(architecture=each.name, layers=layers, config=CONFIG))
        reference = reference or f"docker.io/library/allotment:{version}"
        layout = scratch / "layout"
        index = write_layout(layout, images, name=reference, epoch=epoch, labels=labels)
        archive = output / f"allotment-{version}.tar"
        write_archive(layout, scratch / archive.name)
        shutil.rmtree(output / "layout", ignore_errors=True)
        layout.rename(output / "layout")
        (scratch / archive.name).rename(archive)
    return index


MODES = {"tmp": 0o1777}


def _report(architecture: Architecture, layers: Sequence[tuple[str, Layer]]) -> None:
    """Prints the sizes.

    Raises:
        ImageError: it is too large.
    """
    compressed = sum(layer.size for _, layer in layers)
    unpacked = sum(layer.unpacked for _, layer in layers)
    parts = ", ".join(f"{what} {layer.unpacked / 1e6:.1f}" for what, layer in layers)
    print(
        f"linux/{architecture.name}: {compressed / 1e6:.1f} MB compressed, "
        f"{unpacked / 1e6:.1f} MB unpacked ({parts})",
        flush=True,
    )
    if compressed > MOST_COMPRESSED or unpacked > MOST_UNPACKED:
        raise ImageError(
            f"more than {MOST_COMPRESSED / 1e6:.0f} MB compressed, or {MOST_UNPACKED / 1e6:.0f} "
            "unpacked\n\nhint: tools/image/debian.py and wheels.py have what is left out"
        )


def project_version() -> str:
    text = (ROOT / "src" / "allotment" / "__init__.py").read_text("utf-8")
    match = re.search(r'^__version__\b.*"(.+)"', text, re.MULTILINE)
    if match is None:
        raise ImageError("src/allotment/__init__.py has no __version__")
    return match[1]


def commit_of(version: str) -> tuple[int, dict[str, str]]:
    """The commit's time, and the image's labels. Without git, SOURCE_DATE_EPOCH has the time."""
    labels = {
        "org.opencontainers.image.title": "allotment",
        "org.opencontainers.image.description": "Share GPUs among programs and containers",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.url": "https://allotment.dev",
        "org.opencontainers.image.documentation": "https://allotment.dev/docs",
    }
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if (ROOT / ".git").exists():
        git = ["git", "-C", str(ROOT)]
        stamp, commit = run([*git, "log", "-1", "--format=%ct %H"]).split()
        epoch = epoch or stamp
        changed = run([*git, "status", "--porcelain", "--untracked-files=no"]).strip()
        labels["org.opencontainers.image.revision"] = commit + ("-dirty" if changed else "")
    if epoch is None:
        raise ImageError("no commit here\n\nhint: SOURCE_DATE_EPOCH=SECONDS sets the image's time")
    return int(epoch), labels


def main() -> None:
    """Reads the options and builds, or renews the pins."""
    parser = argparse.ArgumentParser(description="Build the container image without Docker.")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: both")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--cache", type=Path, default=OUTPUT / "cache", help="packages and wheels")
    parser.add_argument("--name", help="the image's reference, with its tag")
    parser.add_argument("--wheel", type=Path, help="use this wheel of Allotment")
    parser.add_argument("--mirror", help="address of a mirror of Debian; default: the machine's")
    parser.add_argument("--renew-pins", action="store_true", help="newest .debs; wheels' digests")
    given = parser.parse_args()
    cache = given.cache.resolve()
    try:
        if given.renew_pins:
            debian.renew_pins(cache, mirror=given.mirror)
            wheels.renew_pins()
            return
        digest = build(
            given.arch or [*ARCHITECTURES],
            given.output.resolve(),
            cache=cache,
            reference=given.name,
            wheel=given.wheel and given.wheel.resolve(),
            mirror=given.mirror,
        )
    except ImageError as error:
        sys.exit(f"error: {error}")
    print(f"{given.output / 'layout'}: {digest}")


if __name__ == "__main__":
    main()
