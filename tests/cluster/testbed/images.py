# SPDX-License-Identifier: Apache-2.0
"""The images of the cluster's containers, from what this machine has.

| image | holds |
|---|---|
| `PAUSE` | what holds a pod's namespaces |
| `BUSYBOX` | a shell and its tools |
| `TOOLS` | busybox, the Python that runs the tests, the project and what it needs at run time |

| `ALLOTMENT` | the same as `TOOLS`, as the image of a release is named and called |
| `KUBE_SCHEDULER` | the cluster's own kube-scheduler, as Kubernetes' image is named |

The last two are made where they are asked for: by `allotment_image` and `kube_scheduler_image`.
`TOOLS` runs `allot burn` and `allot agent` as they are in this working tree. It has a layer each
for Python, the dependencies and the source, so that a change of the source costs one small layer.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from testbed.build import CACHE, ROOT, binaries_path, locked, run
from testbed.layers import Layer, forget_unused, make_image, make_layer
from testbed.versions import KUBERNETES
from testbed.waiting import TestbedError

PAUSE = "localhost/allotment/pause:test"
BUSYBOX = "localhost/allotment/busybox:test"
TOOLS = "localhost/allotment/tools:test"
ALLOTMENT = "docker.io/library/allotment"
KUBE_SCHEDULER = f"registry.k8s.io/kube-scheduler:v{KUBERNETES}"

_FOLDER = CACHE / "images"
_PATH = "/usr/local/bin:/usr/bin:/bin:/sbin"
_SOURCE = "/opt/allotment/source"
_DEPENDENCIES = "/opt/allotment/dependencies"
# Of the standard library: large, and of no use in a container; or made for other paths.
_UNUSED = re.compile(
    r"test|idlelib|lib2to3|turtledemo|ensurepip|site-packages|__pycache__|config-.*|_?tkinter.*"
)


def build_images() -> list[Path]:
    """Makes the images that are not cached and returns the tars of all.

    Raises:
        TestbedError: a part is missing on this machine, or the tree's native libraries are.
    """
    with locked(_FOLDER / "lock"):
        images = [
            make_image(_FOLDER, PAUSE, [_pause_layer()], entrypoint=["/pause"]),
            make_image(_FOLDER, BUSYBOX, [_busybox_layer()], environment={"PATH": _PATH}),
            _tools_image(TOOLS),
        ]
        forget_unused(_FOLDER)
        return images


def allotment_image(tag: str) -> Path:
    """The tar of an image that a chart's default values name, but for the tag: of this tree."""
    with locked(_FOLDER / "lock"):
        return _tools_image(f"{ALLOTMENT}:{tag}", entrypoint=["allot"])


def kube_scheduler_image() -> Path:
    """The tar of an image with the kube-scheduler that was built for the cluster."""
    program = binaries_path() / "kube-scheduler"

    def fill(root: Path) -> None:
        _copy_to(program, root / "usr" / "local" / "bin" / program.name)

    with locked(_FOLDER / "lock"):
        layer = make_layer(_FOLDER, _key("kube-scheduler", str(program).encode()), fill)
        return make_image(_FOLDER, KUBE_SCHEDULER, [layer], environment={"PATH": _PATH})


def _tools_image(name: str, *, entrypoint: Sequence[str] = ()) -> Path:
    return make_image(
        _FOLDER,
        name,
        [_busybox_layer(), _python_layer(), _dependencies_layer(), _source_layer()],
        entrypoint=entrypoint,
        environment={
            "PATH": _PATH,
            "PYTHONPATH": f"{_SOURCE}:{_DEPENDENCIES}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )


def find_busybox() -> Path:
    """The statically linked busybox of this machine.

    Raises:
        TestbedError: there is none.
    """
    found = shutil.which("busybox")
    if found is None:
        raise TestbedError("no busybox (Debian: apt-get install busybox-static)")
    return Path(found)


# ---- layers --------------------------------------------------------------------------------------


def _pause_layer() -> Layer:
    source = Path(__file__).with_name("pause.c")

    def fill(root: Path) -> None:
        compiler = ["gcc"]
        if not shutil.which("gcc"):
            target = f"{platform.machine()}-linux-musl"
            compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target]
        run([*compiler, "-Os", "-static", "-s", "-o", str(root / "pause"), str(source)])

    return make_layer(_FOLDER, _key("pause", source.read_bytes()), fill)


def _busybox_layer() -> Layer:
    busybox = find_busybox()

    def fill(root: Path) -> None:
        for folder in ("bin", "etc", "proc", "sys", "dev", "root", "run", "usr/bin", "var"):
            (root / folder).mkdir(parents=True)
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        shutil.copy(busybox, root / "bin" / "busybox")
        for applet in run([str(busybox), "--list"]).split():
            if applet != "busybox":
                (root / "bin" / applet).symlink_to("busybox")
        (root / "usr" / "bin" / "env").symlink_to("/bin/busybox")
        (root / "etc" / "passwd").write_text(
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
            encoding="ascii",
        )
        (root / "etc" / "group").write_text("root:x:0:\nnogroup:x:65534:\n", encoding="ascii")

    return make_layer(_FOLDER, _key("busybox", busybox.read_bytes()), fill)


def _python_layer() -> Layer:
    """The interpreter that runs this, under the path that it has here."""
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()

    def fill(root: Path) -> None:
        _copy(interpreter, root)
        target = root / str(library).lstrip("/")
        shutil.copytree(library, target, ignore=_unused, symlinks=True)
        for path in _libraries_of([interpreter, *target.glob("lib-dynload/*.so")]):
            _copy(path, root)
        (root / "usr" / "local" / "bin").mkdir(parents=True, exist_ok=True)
        for name in ("python3", "python"):
            (root / "usr" / "local" / "bin" / name).symlink_to(interpreter)
        allot = root / "usr" / "local" / "bin" / "allot"
        allot.write_text('#!/bin/sh\nexec python3 -m allotment "$@"\n', encoding="ascii")
        allot.chmod(0o755)
        _precompile(root)

    stamp = f"{sys.version} {interpreter} {library} {interpreter.stat().st_mtime_ns}"
    return make_layer(_FOLDER, _key("python", stamp.encode()), fill)


def _dependencies_layer() -> Layer:
    """What the project needs at run time, with its extra `kubernetes`, from this environment."""
    # Not from the installed metadata, which an editable install leaves as they were.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["kubernetes"]]
    packages = _closure(wanted)

    def fill(root: Path) -> None:
        target = root / _DEPENDENCIES.lstrip("/")
        for package in packages:
            for file in package.files or ():
                # Leading dots: scripts outside of site-packages.
                if file.parts[0] != ".." and "__pycache__" not in file.parts:
                    destination = target / file
                    destination.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(str(file.locate()), destination)
        for path in _libraries_of(target.rglob("*.so*")):
            # Those that a package brings along are found beside what uses them.
            if not path.is_relative_to(target):
                _copy(path, root)
        _precompile(root)

    stamp = " ".join(f"{package.name}=={package.version}" for package in packages)
    return make_layer(_FOLDER, _key("dependencies", f"{sys.version} {stamp}".encode()), fill)


def _source_layer() -> Layer:
    package = ROOT / "src" / "allotment"
    native = package / "_native" / platform.machine() / "liballotment-shim.so"
    if not native.exists():
        raise TestbedError(f"{native} is missing\n\nhint: make native")
    files = {
        path.relative_to(package): path
        for path in sorted(package.rglob("*"))
        if path.is_file() and path.suffix != ".part" and not _is_cached(path.relative_to(package))
    }
    # As in a wheel: hatch_build.py.
    for path in sorted((ROOT / "deploy" / "manifests").iterdir()):
        files[Path("_manifests", path.name)] = path
    content = hashlib.sha256()
    for name, path in files.items():
        content.update(f"{name} {path.stat().st_size}\n".encode())
        content.update(path.read_bytes())

    def fill(root: Path) -> None:
        target = root / _SOURCE.lstrip("/") / "allotment"
        for name, path in files.items():
            destination = target / name
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, destination)
        # Images with glibc have all of glibc: the shim is loaded into every program of a container,
        # and the next one may be built for an older glibc, whose parts were several libraries.
        for path in _libraries_of(native.parent.rglob("*.so*")):
            _copy(path, root)
            if path.name.startswith("libc."):
                for part in ("libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"):
                    if (path.parent / part).exists():
                        _copy(path.parent / part, root)
        _precompile(root)

    return make_layer(_FOLDER, _key("source", content.digest()), fill)


# ---- their parts ---------------------------------------------------------------------------------


def _key(kind: str, content: bytes) -> str:
    recipe = Path(__file__).read_bytes()  # how it is put together counts, too
    return f"{kind}-{hashlib.sha256(recipe + content).hexdigest()[:24]}"


def _unused(folder: str, names: list[str]) -> list[str]:
    del folder
    return [name for name in names if _UNUSED.fullmatch(name)]


def _copy(path: Path, root: Path) -> None:
    """Puts a file of this machine under `root` at the same path, links followed."""
    _copy_to(path, root / str(path).lstrip("/"))


def _copy_to(path: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def _libraries_of(binaries: Iterable[Path]) -> list[Path]:
    """The shared libraries that these load, the dynamic loader among them."""
    names = [str(path) for path in binaries]
    done = subprocess.run(["ldd", *names], capture_output=True, text=True, check=False)
    return sorted({Path(found) for found in re.findall(r"(?:=> |\t)(/\S+) \(0x", done.stdout)})


def _precompile(root: Path) -> None:
    """Compiles all Python below. Trusted unchecked, since a layer changes the files' times."""
    command = [sys.executable, "-m", "compileall", "-q", "-s", str(root), "-p", "/"]
    mode = ["--invalidation-mode", "unchecked-hash", str(root)]
    # The standard library's own test data holds files that do not compile; they go unused.
    subprocess.run([*command, *mode], capture_output=True, check=False)


def _is_cached(path: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def _closure(requirements: Iterable[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions that these need, in turn; each once, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        key = requirement.name.lower().replace("_", "-")
        if key in found:
            continue
        found[key] = importlib.metadata.distribution(requirement.name)
        for each in ("", *requirement.extras):
            waiting += [(needed, each) for needed in found[key].requires or ()]
    return [found[key] for key in sorted(found)]
