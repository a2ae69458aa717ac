# SPDX-License-Identifier: Apache-2.0
"""Debian's packages in packages.txt: loaded by apt, checked by their digests, and taken in part.

apt works in a folder of its own, so that it needs no rights and the machine's packages, lists and
architectures stay as they are. Its mirrors are the machine's.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from image import HERE, PYTHON, Architecture, ImageError, digest, run

SUITE = "trixie"
PINS = HERE / "packages.txt"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# What the image takes of a package. Licences stay; there is no shell, apt, manual or translation.
_TAKEN = re.compile(
    r"(bin|sbin|lib|lib64|dev|etc|proc|root|run|sys|tmp|var)"
    r"|etc/(debian_version|os-release)|usr/lib/os-release"
    r"|usr/lib(64)?/ld-linux[^/]*"
    r"|usr/lib/[^/]+-linux-gnu/(?!libmvec|libexpatw|libthread_db|libmemusage|libpcprofile"
    r"|libBrokenLocale|libc_malloc_debug|libnss_)[^/]+\.so[^/]*"
    rf"|usr/lib/python{re.escape(PYTHON)}/.+"
    rf"|usr/bin/(python{re.escape(PYTHON)}|test|true|unshare)"
    r"|usr/sbin/ldconfig"
    r"|usr/share/common-licenses/.+"
    r"|usr/share/doc/[^/]+(/copyright)?"
)
# Of the standard library: tests, tools of developers, and what needs libraries that are not there.
_LEFT_OUT = re.compile(
    rf"usr/lib/python{re.escape(PYTHON)}/("
    r"(test|idlelib|tkinter|turtledemo|lib2to3|ensurepip|venv|pydoc_data|sqlite3|curses|dbm|_pyrepl"
    r"|__phello__)(/.*)?"
    r"|(turtle|sitecustomize|__hello__|pydoc|doctest|_pydecimal)\.py|EXTERNALLY-MANAGED"
    r"|lib-dynload/(_test|_ctypes_test|_xxtest|xx|_curses|_dbm|_sqlite3|readline"
    r"|_codecs_|_multibytecodec).*)"
)
# An empty cache of the loader: NVIDIA's hooks renew a cache only where there is one.
_EMPTY_CACHE = b"glibc-ld.so.cache1.1" + bytes(8) + b"\x02" + bytes(19)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One pinned .deb."""

    name: str
    version: str
    architecture: str
    sha256: str


def read_pins(path: Path = PINS) -> list[Package]:
    """The lines `NAME VERSION ARCHITECTURE SHA256` of packages.txt."""
    lines = [line.split() for line in path.read_text("utf-8").splitlines()]
    return [
        Package(name=line[0], version=line[1], architecture=line[2], sha256=line[3])
        for line in lines
        if line and line[0] != "#"
    ]


def is_taken(name: str) -> bool:
    """Whether the image has this file of a package."""
    inside = name.removeprefix("./").rstrip("/")
    return bool(_TAKEN.fullmatch(inside)) and not _LEFT_OUT.fullmatch(inside)


def load(pins: Sequence[Package], cache: Path, *, mirror: str | None = None) -> dict[Package, Path]:
    """The files of the packages, from `cache` or by apt.

    Raises:
        ImageError: apt does not have one of them, or has another content.
    """
    debs = cache / "debs"
    debs.mkdir(parents=True, exist_ok=True)

    def find() -> dict[Package, Path]:
        digests = {digest(path): path for path in debs.glob("*.deb")}
        return {pin: digests[pin.sha256] for pin in pins if pin.sha256 in digests}

    there = find()
    missing = [pin for pin in pins if pin not in there]
    if missing:
        wanted = [f"{pin.name}:{pin.architecture}={pin.version}" for pin in missing]
        _download(wanted, cache / "apt", debs, mirror=mirror)
    found = find()
    if lacking := [pin.name for pin in pins if pin not in found]:
        raise ImageError(
            f"other content than packages.txt names: {', '.join(sorted(set(lacking)))}\n\n"
            "hint: python tools/build_image.py --renew-pins"
        )
    return found


def renew_pins(cache: Path, *, mirror: str | None = None) -> None:
    """Writes the newest versions of the same packages into packages.txt."""
    before = read_pins()
    debs = cache / "newest"
    shutil.rmtree(debs, ignore_errors=True)
    debs.mkdir(parents=True)
    wanted = [f"{pin.name}:{pin.architecture}" for pin in before]
    _download(wanted, cache / "apt", debs, mirror=mirror)
    comments = [line for line in PINS.read_text("utf-8").splitlines() if line.startswith("#")]
    fields = "${Package} ${Version} ${Architecture}"
    pins = [
        f"{run(['dpkg-deb', '--show', f'--showformat={fields}', path])} {digest(path)}"
        for path in debs.glob("*.deb")
    ]
    PINS.write_text("\n".join([*comments, *sorted(pins)]) + "\n", "utf-8")


def unpack(debs: Sequence[Path], root: Path) -> None:
    """Puts what the image takes of the packages below `root`, and the accounts."""
    status = root / "var" / "lib" / "dpkg" / "status.d"  # where scanners of images look
    status.mkdir(parents=True)
    for deb in debs:
        fields = run(["dpkg-deb", "--field", deb])
        name = re.search(r"^Package: (.+)$", fields, re.MULTILINE)
        (status / (name[1] if name else deb.name)).write_text(fields, "utf-8")
        content = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=False
        )
        if content.returncode:
            raise ImageError(f"{deb}: {content.stderr.decode(errors='replace').strip()}")
        with tarfile.open(fileobj=io.BytesIO(content.stdout)) as tar:
            tar.extractall(root, [each for each in tar if is_taken(each.name)], filter="tar")
    (root / "usr" / "bin" / "python3").symlink_to(f"python{PYTHON}")
    etc = root / "etc"
    (etc / "passwd").write_text(
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        "nonroot:x:65532:65532:nonroot:/:/usr/sbin/nologin\n"
        "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
        "ascii",
    )
    (etc / "group").write_text("root:x:0:\nnonroot:x:65532:\nnogroup:x:65534:\n", "ascii")
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n", "ascii")
    (etc / "ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n", "ascii")
    (etc / "ld.so.conf.d").mkdir()
    (etc / "ld.so.cache").write_bytes(_EMPTY_CACHE)


def compile_python(
    folder: Path, base: Path, architecture: Architecture, *, keep_sources: bool
) -> None:
    """Compiles all Python below `folder` by the image's own Python in `base`.

    `base` is of this machine's architecture; compiled Python is the same for all. A layer changes
    times, so nothing compares them with the sources. Without these, a traceback has the file and
    the line, and not its text.
    """
    python: list[str | Path] = [base / architecture.loader, "--library-path"]
    python += [base / architecture.libraries, base / "usr" / "bin" / f"python{PYTHON}", "-s", "-S"]
    compiled = ["--invalidation-mode", "unchecked-hash", *([] if keep_sources else ["-b"])]
    run(
        [*python, "-m", "compileall", "-q", "-f", "-s", folder, "-p", "/", *compiled, folder],
        environment={
            "PYTHONHOME": str(base / "usr"),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LC_ALL": "C.UTF-8",
        },
    )
    if not keep_sources:
        for path in folder.rglob("*.py"):
            path.unlink()


def _mirrors(mirror: str | None) -> dict[str, str]:
    """The suites and the mirror that has each."""
    if mirror:
        return {SUITE: mirror}
    fields = run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"])
    found: dict[str, str] = {}
    for line in fields.splitlines():
        release, _, address = line.partition(" ")
        if release.endswith("-security"):
            found.setdefault(f"{SUITE}-security", address)
        elif "-" not in release:
            found.setdefault(SUITE, address)
    if SUITE not in found:
        raise ImageError(
            "apt has no mirror of Debian on this machine\n\nhint: --mirror ADDRESS names one"
        )
    return found


def _download(packages: Sequence[str], folder: Path, into: Path, *, mirror: str | None) -> None:
    """Loads packages by an apt that has `folder` for all that it writes."""
    if not _KEYRING.exists():
        raise ImageError(f"no {_KEYRING}\n\nhint: apt-get install debian-archive-keyring")
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    sources = folder / "debian.sources"
    sources.write_text(
        "\n".join(
            f"Types: deb\nURIs: {address}\nSuites: {suite}\nComponents: main\n"
            f"Architectures: amd64 arm64\nSigned-By: {_KEYRING}\n"
            for suite, address in _mirrors(mirror).items()
        ),
        "utf-8",
    )
    configuration = folder / "apt.conf"
    configuration.write_text(
        f"""#clear APT::Update;
#clear Acquire::IndexTargets::deb::DEP-11;
#clear Acquire::IndexTargets::deb::Contents-deb;
#clear APT::Architectures;
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; "arm64"; }};
APT::Sandbox::User "";
Acquire::Languages "none";
Dir::State "{folder}";
Dir::State::lists "{folder}/lists";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
Dir::Etc::sourcelist "{sources}";
Dir::Etc::sourceparts "-";
""",
        "utf-8",
    )
    try:
        run(["apt-get", "-qq", "-c", configuration, "update"])
        run(["apt-get", "-qq", "-c", configuration, "download", *packages], cwd=into)
    except ImageError as error:
        raise ImageError(
            f"{error}\n\nhint: where a mirror has later versions, "
            "python tools/build_image.py --renew-pins; --mirror ADDRESS names another mirror"
        ) from error
