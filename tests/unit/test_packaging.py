# SPDX-License-Identifier: Apache-2.0
"""What ships: the wheel's contents, what its libraries ask of a machine, pins, licences."""

from __future__ import annotations

import email
import email.message
import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection
from packaging.tags import compatible_tags
from packaging.utils import parse_wheel_filename

import allotment
import build_native

LIBRARIES = (
    "liballotment-ledger.so",
    "liballotment-shim.so",
    "simulated/libcuda.so.1",
    "simulated/libnvidia-ml.so.1",
)
PROGRAMS = ("simulated/nvidia-cuda-mps-control", "simulated/nvidia-smi")
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# All of them parts of glibc; ld-linux is its loader, needed where thread-local storage is.
ALLOWED_NEEDED = re.compile(
    r"libc\.so\.6|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|ld-linux-[\w-]+\.so\.[12]"
)
EPOCH = "1767225600"

pytestmark = pytest.mark.timeout(300)


def build_wheel(root: Path, into: Path) -> Path:
    """Builds the wheel as a release does; one at a time, as all build the libraries in `build`."""
    (root / "build").mkdir(exist_ok=True)
    with (root / "build" / ".wheel-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)],
            cwd=root,
            env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(root, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked: Path) -> email.message.Message:
    (path,) = unpacked.glob("*.dist-info/METADATA")
    return email.message_from_string(path.read_text())


every_library = pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in MACHINES for name in (*LIBRARIES, *PROGRAMS)],
    ids=lambda value: value,
)


def library(unpacked: Path, arch: str, name: str) -> ELFFile:
    """One of the wheel's libraries, opened."""
    path = unpacked / "allotment" / "_native" / arch / name
    return ELFFile(io.BytesIO(path.read_bytes()))


def dynamic(elf: ELFFile, tag: str, attribute: str) -> list[str]:
    """The values of one tag of the dynamic section."""
    section = elf.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return [getattr(entry, attribute) for entry in section.iter_tags(tag)]


def exports(elf: ELFFile) -> list[str]:
    """The names that the library defines for others."""
    table = elf.get_section_by_name(".dynsym")
    assert isinstance(table, SymbolTableSection)
    return sorted(
        symbol.name
        for symbol in table.iter_symbols()
        if symbol.name
        and symbol["st_shndx"] != "SHN_UNDEF"
        and symbol["st_info"]["bind"] in {"STB_GLOBAL", "STB_WEAK"}
    )


def test_wheel_serves_both_architectures_and_no_other_platform(wheel: Path) -> None:
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert {tag.platform for tag in tags} == {
        f"{policy}_{arch}" for policy in ("manylinux_2_17", "manylinux2014") for arch in MACHINES
    }
    for platform in ("manylinux_2_17_x86_64", "manylinux_2_17_aarch64"):
        assert tags & set(compatible_tags((3, 11), platforms=[platform]))


def test_wheel_carries_every_library_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = sorted(name for name in archive.namelist() if "/_native/" in name)
    assert packed == sorted(
        f"allotment/_native/{arch}/{name}" for arch in MACHINES for name in (*LIBRARIES, *PROGRAMS)
    )


def test_wheel_has_the_manifests_that_doctor_compares_with(wheel: Path, root: Path) -> None:
    folder = root / "deploy" / "manifests"
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            Path(name).name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("allotment/_manifests/")
        }
    assert packed == {path.name: path.read_bytes() for path in folder.iterdir()}


UPLOT = {  # 1.6.32, as in its package of the same name on npm
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def test_wheel_has_the_page_with_uplot_as_published(unpacked: Path, root: Path) -> None:
    room = Path("allotment") / "web"
    for folder in ("static", "templates"):
        names = {path.name for path in (root / "src" / room / folder).iterdir()}
        assert {path.name for path in (unpacked / room / folder).iterdir()} == names
    for name, digest in UPLOT.items():
        content = (unpacked / room / "static" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest


@pytest.mark.thorough
def test_wheel_is_the_same_when_built_again(wheel: Path, root: Path, tmp_path: Path) -> None:
    again = build_wheel(root, tmp_path)
    assert (
        hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(wheel.read_bytes()).digest()
    )


@every_library
def test_library_is_of_its_architecture_and_stripped(unpacked: Path, arch: str, name: str) -> None:
    elf = library(unpacked, arch, name)
    assert elf["e_machine"] == MACHINES[arch]
    assert elf.get_section_by_name(".symtab") is None
    assert elf.get_section_by_name(".debug_info") is None


@every_library
def test_library_runs_on_glibc_2_17(unpacked: Path, arch: str, name: str) -> None:
    section = library(unpacked, arch, name).get_section_by_name(".gnu.version_r")
    assert isinstance(section, GNUVerNeedSection)
    newest = max(
        tuple(map(int, version.name.removeprefix("GLIBC_").split(".")))
        for _, versions in section.iter_versions()
        for version in versions
    )
    assert newest <= (2, 17)


@every_library
def test_library_needs_only_glibc(unpacked: Path, arch: str, name: str) -> None:
    needed = dynamic(library(unpacked, arch, name), "DT_NEEDED", "needed")
    assert [n for n in needed if not ALLOWED_NEEDED.fullmatch(n)] == []


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize("name", LIBRARIES)
def test_library_has_its_true_soname(unpacked: Path, arch: str, name: str) -> None:
    assert dynamic(library(unpacked, arch, name), "DT_SONAME", "soname") == [Path(name).name]


@every_library
def test_library_tells_nothing_of_where_it_was_built(
    unpacked: Path, root: Path, arch: str, name: str
) -> None:
    content = (unpacked / "allotment" / "_native" / arch / name).read_bytes()
    assert str(root).encode() not in content
    assert b"/home/" not in content


@pytest.mark.parametrize("arch", MACHINES)
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("liballotment-ledger.so", r"allot_(ledger|contract|leases?)_\w+"),
        ("simulated/libcuda.so.1", r"cu[A-Z]\w+"),
        ("simulated/libnvidia-ml.so.1", r"(nvml[A-Z]|allotSimulated)\w+"),
    ],
    ids=["ledger", "cuda", "nvml"],
)
def test_library_exports_its_interface_alone(
    unpacked: Path, arch: str, name: str, pattern: str
) -> None:
    names = exports(library(unpacked, arch, name))
    assert names
    assert [n for n in names if not re.fullmatch(pattern, n)] == []


@pytest.mark.parametrize("arch", MACHINES)
def test_shim_exports_are_the_agreed_ones(unpacked: Path, arch: str) -> None:
    # A new name here interposes in every program of a share: renew the list on purpose.
    golden = Path(__file__).with_name("shim_exports.txt")
    assert exports(library(unpacked, arch, "liballotment-shim.so")) == golden.read_text().split()


def test_metadata_names_the_licence_and_carries_its_text(
    metadata: email.message.Message, unpacked: Path
) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    (text,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in text.read_text()


def test_wheel_has_no_dependency_beyond_the_agreed_ones(metadata: email.message.Message) -> None:
    lines = metadata.get_all("Requires-Dist", [])
    names = {line: re.split(r"[<>=!~;\s]", line)[0] for line in lines}
    always = {name for line, name in names.items() if "extra ==" not in line}
    assert always == {"pyyaml", "click", "msgspec", "nvidia-ml-py", "rich"}
    extra = {name for line, name in names.items() if "extra == 'kubernetes'" in line}
    node = {"aiohttp", "grpcio", "prometheus-client", "protobuf", "structlog"}
    scheduler = {"cryptography", "numpy"}
    page = {"aiohttp", "jinja2"}
    assert extra == node | scheduler | page
    assert {name for line, name in names.items() if "extra == 'web'" in line} == page
    assert {name for line, name in names.items() if "extra == 'simulate'" in line} == {"numpy"}
    tracing = {name for line, name in names.items() if "extra == 'tracing'" in line}
    assert tracing == {"opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"}
    assert always | extra | tracing == set(names.values())


def test_version_is_that_of_the_package(metadata: email.message.Message) -> None:
    assert metadata["Version"] == allotment.__version__


def test_command_is_declared(unpacked: Path) -> None:
    (path,) = unpacked.glob("*.dist-info/entry_points.txt")
    declared = path.read_text().splitlines()
    assert "allot = allotment.cli:main" in declared
    assert "kubectl-allot = allotment.cli:main" in declared


def test_wheel_has_the_man_pages(root: Path, unpacked: Path) -> None:
    (folder,) = unpacked.glob("*.data/data/share/man/man1")
    pages = {path.name for path in folder.iterdir()}
    assert pages == {path.name for path in (root / "man").iterdir()}


def test_installed_wheel_finds_its_libraries(wheel: Path, tmp_path: Path) -> None:
    into = tmp_path / "site"
    install = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(into)]
    subprocess.run([sys.executable, "-m", *install, str(wheel)], check=True)
    looked = "from allotment import libraries; print(libraries.library_path(libraries.SHIM))"
    found = subprocess.run(
        [sys.executable, "-c", looked],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(into)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(into)


def test_sdist_has_every_file_and_runs_tests_without_git(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=root, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True
    )
    tracked = [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    assert [name for name in tracked if not (source / name).is_file()] == []
    # Links in the repository.
    for folder in ("manifests", "monitoring"):
        files = [path.name for path in (root / "deploy" / folder).rglob("*.*")]
        chart = source / "deploy" / "charts" / "allotment" / folder
        assert sorted(path.name for path in chart.rglob("*.*")) == sorted(files)
    # These read pages of every room, and what is generated. The site is built elsewhere.
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not site"]
    done = subprocess.run(
        [*pytest_, "tests/unit/test_documents.py"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_constraints_are_pins_without_addresses(root: Path) -> None:
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if not re.fullmatch(r"[\w.-]+==(\d+!)?[\w.]+", line)] == []


def test_every_requirement_is_pinned(root: Path) -> None:
    pinned = {
        normalised(line.split("==")[0])
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((root / "pyproject.toml").read_text())
    groups = project["dependency-groups"].values()
    required = {
        normalised(re.split(r"[<>=!~;\s]", entry)[0])
        for entry in [
            *project["build-system"]["requires"],
            *project["project"]["dependencies"],
            *(entry for group in groups for entry in group if isinstance(entry, str)),
        ]
    }
    assert required - pinned == set()


def normalised(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_source_file_says_its_licence(root: Path) -> None:
    rooms = ("bench", "examples", "native", "src", "tests", "tools")
    kinds = {".py", ".c", ".h", ".S", ".mk", ".sh", ".inc"}
    unlicensed = [
        path
        for room in rooms
        for path in (root / room).rglob("*")
        if path.suffix in kinds and "build" not in path.relative_to(root).parts
        if "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:300]
    ]
    assert unlicensed == []


def test_recipe_names_every_c_file(root: Path) -> None:
    # A file in a folder that no pattern reaches would be silently left out.
    built = {s for lib in build_native.libraries("x86_64") for s in lib.sources}
    native = root / "native"
    there = {p.relative_to(native) for p in native.rglob("*.[cS]")}
    left_out = {p for p in there if p.parts[0] not in {"tests", "build"}} - built
    assert left_out == set()
