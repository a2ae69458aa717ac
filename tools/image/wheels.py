# SPDX-License-Identifier: Apache-2.0
"""The wheels of the image and of the packages: the pinned requirements, and Allotment's own.

A file of pins has the versions of constraints.txt with the digests of the wheels of both
architectures. pip loads and checks them, and installs them without running anything of theirs.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from image import ARCHITECTURES, HERE, PYTHON, ROOT, Architecture, ImageError, digest, run

PINS = HERE / "requirements.txt"
EXTRAS = ("kubernetes", "tracing")
PACKAGES = f"usr/local/lib/python{PYTHON}/dist-packages"
# glibc of Debian 13 is 2.41.
_POLICIES = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")

# Of installed packages: what only tests, compilers and type checkers read, and pip's own records.
_LEFT_OUT = re.compile(
    r".+\.(pyi|pyx|pxd|pxi|c|h|cpp|hpp|a|f90|f)|(.+/)?py\.typed"
    r"|(bin|share|include)/.*"
    r"|[^/]+\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json|sboms/.*)"
    r"|numpy/(.+/)?tests/.*|numpy/(f2py|_core/(include|lib)|random/(_examples|lib))/.*"
    r"|numpy/_core/_(simd|.+_tests)\..*|numpy/conftest\.py"
    r"|pygments/lexers/(?!(__init__|_mapping|python|special)\.py).*"
    r"|google/.+\.proto"
)
# The command's two names, as pip writes them.
_COMMANDS = ("allot", "kubectl-allot")
_COMMAND = f"""#!/usr/bin/python{PYTHON}
import sys
from allotment.cli import main
sys.exit(main())
"""


def required(extras: Sequence[str] = EXTRAS) -> list[str]:
    """The project's requirements with those of the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = [project["optional-dependencies"][extra] for extra in extras]
    return [*project["dependencies"], *(each for extra in optional for each in extra)]


def read_pins(path: Path = PINS) -> dict[str, tuple[str, set[str]]]:
    """Name to version and digests, of the lines `NAME==VERSION --hash=sha256:DIGEST ...`."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", line):
            found[match[1]] = (match[2], set(re.findall(r"--hash=sha256:(\w+)", line)))
    return found


def load(
    cache: Path, architecture: Architecture, *, pins_file: Path = PINS, python: str = PYTHON
) -> dict[Path, str]:
    """The wheels of one architecture and one Python, with their digests, from `cache` or by pip.

    Raises:
        ImageError: the index does not have one of them, or has another content.
    """
    folder = cache / "wheels" / f"{architecture.name}-{python}"
    folder.mkdir(parents=True, exist_ok=True)
    pins = read_pins(pins_file)
    wanted = set().union(*(digests for _, digests in pins.values()))

    def find() -> dict[Path, str]:
        found = {path: digest(path) for path in sorted(folder.glob("*.whl"))}
        return {path: each for path, each in found.items() if each in wanted}

    if len(find()) < len(pins):
        pip = ["download", "--quiet", "--no-deps", "--require-hashes"]
        pip += ["--requirement", str(pins_file), "--dest", str(folder)]
        run([*_pip(), *pip, *_target(architecture, python)])
    found = find()
    if len(found) != len(pins):
        raise ImageError(f"{len(found)} wheels for {len(pins)} requirements in {folder}")
    return found


def renew_pins(
    pins_file: Path = PINS, *, extras: Sequence[str] = EXTRAS, pythons: Sequence[str] = (PYTHON,)
) -> None:
    """Writes the wheels of the versions in constraints.txt into a file of pins."""
    digests: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for architecture, python in product(ARCHITECTURES.values(), pythons):
            folder = Path(scratch) / f"{architecture.name}-{python}"
            pip = ["download", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
            target = _target(architecture, python)
            run([*_pip(), *pip, "--dest", folder, *target, *required(extras)])
            for path in folder.glob("*.whl"):
                name, version, *_ = path.name.split("-")
                digests.setdefault(f"{normalised(name)}=={version}", set()).add(digest(path))
    comments = [line for line in pins_file.read_text("utf-8").splitlines() if line.startswith("#")]
    pins = [
        " ".join([pin, *(f"--hash=sha256:{each}" for each in sorted(found))])
        for pin, found in sorted(digests.items())
    ]
    pins_file.write_text("\n".join([*comments, *pins]) + "\n", "utf-8")


def install_requirements(wheels: Sequence[Path], root: Path, architecture: Architecture) -> None:
    """Installs the loaded wheels below `root`, with the authorities that TLS trusts."""
    pip = ["--require-hashes", "--requirement", str(PINS)]
    install(pip, wheels[0].parent, root / PACKAGES, architecture)
    # Where Debian's OpenSSL looks. The package ca-certificates would need a shell.
    store = root / "usr" / "lib" / "ssl" / "cert.pem"
    store.parent.mkdir(parents=True)
    store.symlink_to(f"/{PACKAGES}/certifi/cacert.pem")


def install_allotment(wheel: Path, root: Path, architecture: Architecture) -> None:
    """Installs Allotment's wheel below `root`, and its command.

    The wheel serves both architectures. The image has the libraries of its own.
    """
    install_own_package(wheel, root / PACKAGES, architecture)
    commands = root / "usr" / "local" / "bin"
    commands.mkdir(parents=True)
    for name in _COMMANDS:
        (commands / name).write_text(_COMMAND, "utf-8")
        (commands / name).chmod(0o755)


def install_own_package(wheel: Path, packages: Path, architecture: Architecture) -> None:
    """Installs Allotment's package alone, with the native libraries of one architecture."""
    version = wheel.name.split("-")[1]
    install([f"allotment=={version}"], wheel.parent, packages, architecture)
    for other in ARCHITECTURES.values():
        if other != architecture:
            shutil.rmtree(packages / "allotment" / "_native" / other.machine)


def build_allotment(folder: Path, epoch: int) -> Path:
    """Builds Allotment's wheel as a release does."""
    shutil.rmtree(folder, ignore_errors=True)
    (ROOT / "build").mkdir(exist_ok=True)
    # Tests build it too, in the same folder.
    with (ROOT / "build" / ".wheel-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=ROOT,
            environment={**os.environ, "SOURCE_DATE_EPOCH": str(epoch)},
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def normalised(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _target(architecture: Architecture, python: str) -> list[str]:
    """Options of pip for another Python, whatever Python runs pip."""
    platforms = [f"--platform={policy}_{architecture.machine}" for policy in _POLICIES]
    abi = f"cp{python.replace('.', '')}"
    words = ["--implementation=cp", f"--python-version={python}", f"--abi={abi}", "--abi=abi3"]
    return ["--only-binary=:all:", *words, "--abi=none", *platforms]


def install(
    requirements: Sequence[str],
    wheels: Path,
    packages: Path,
    architecture: Architecture,
    *,
    python: str = PYTHON,
) -> None:
    """Lets pip install from a folder of wheels into `packages`, and removes what nothing needs."""
    # The machine's own settings would add other folders of wheels.
    pip = [*_pip(), "--isolated", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    run(
        [
            *pip,
            "--find-links",
            wheels,
            "--target",
            packages,
            *_target(architecture, python),
            *requirements,
        ]
    )
    for path in sorted(packages.rglob("*"), reverse=True):  # a folder after its content
        if path.is_dir():
            if not any(path.iterdir()):
                path.rmdir()
        elif _LEFT_OUT.fullmatch(path.relative_to(packages).as_posix()):
            path.unlink()
        elif re.search(r"\.so\b", path.name) and packages / "allotment" not in path.parents:
            path.write_bytes(without_symbols(path.read_bytes()))


def without_symbols(library: bytes) -> bytes:
    """A 64-bit ELF library cut behind what its program headers name: symbols and debug sections.

    The loader reads no more, and what it reads stays where it is: `strip` moves parts of libraries
    that auditwheel has changed, and has to know their architecture.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        return library
    (first,) = struct.unpack_from("<Q", library, 0x20)
    size, count = struct.unpack_from("<HH", library, 0x36)
    headers = [struct.unpack_from("<II6Q", library, first + n * size) for n in range(count)]
    end = max(offset + length for _, _, offset, _, _, length, _, _ in headers)
    cut = bytearray(library[: max(end, first + size * count)])
    # No section headers: their place, number and names.
    struct.pack_into("<Q", cut, 0x28, 0)
    struct.pack_into("<HH", cut, 0x3C, 0, 0)
    return bytes(cut)
