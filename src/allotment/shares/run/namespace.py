# SPDX-License-Identifier: Apache-2.0
"""A private mount namespace where every program loads the shim, whatever its environment.

Runs in the child of `allot run`, between fork and exec; needs CAP_SYS_ADMIN. The child sees
/run/allotment as its own small read-only file system: its share's ledger, the shim, and its
simulated machine. /etc/ld.so.preload names the shim. /etc/ld.so.cache has the simulated libraries
first. The machine's mounts reach the namespace (a slave), not the reverse.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from allotment.files import open_regular

RUN_FOLDER = "/run/allotment"
MPS_INSIDE = "/run/allotment/mps"
PRELOAD_FILE = "/etc/ld.so.preload"
CACHE_FILE = "/etc/ld.so.cache"
_SHIM_INSIDE = "/run/allotment/shim"
_LIBRARIES_INSIDE = "/run/allotment/simulated/lib"

# <sched.h> and <sys/mount.h>
_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_SLAVE = 32, 4096, 16384, 1 << 19
_CAP_SYS_ADMIN = 21


class NamespacePlan(msgspec.Struct, frozen=True):
    """The mounts: paths on the machine, before anything is covered."""

    share: Path
    shim: Path
    devices: int
    """Number of devices with files for turns."""
    machine: Path | None = None
    libraries: Path | None = None
    """The folder with the simulated libraries."""
    mps: Path | None = None
    """The pipe directory of the share's MPS daemon, if it has one."""
    cache: Path | None = None
    """The stored loader cache for `libraries`; created if it does not exist."""


def can_unshare() -> bool:
    """Whether this process has the capability; the kernel may still refuse."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - start-up time
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


def inside_folder(libraries: Path | None) -> str:
    """Where a namespace has the folder with the simulated libraries; empty without one."""
    return f"{_LIBRARIES_INSIDE}/{libraries.name}" if libraries else ""


def enter_driver_root(
    root: Path, libraries: Path, covers: Iterable[str], adds: Iterable[str]
) -> None:
    """Enter a namespace where parts of a folder are the machine's; raise `OSError`.

    Below `covers`, the folder replaces the machine's files; below `adds`, it adds to them. The
    loader finds `libraries` without a variable: programs start others with an empty environment.
    """
    os.makedirs(f"{RUN_FOLDER}/simulated", exist_ok=True)  # noqa: PTH103
    cache = f"{root}/.ld.so.cache"
    _make_cache(cache, str(libraries))
    _libc_call("unshare", _CLONE_NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)
    if os.path.exists(CACHE_FILE):  # noqa: PTH110
        _mount(cache, CACHE_FILE, None, _MS_BIND)
    for part in covers:
        if os.path.exists(f"/{part}"):  # noqa: PTH110
            _mount(f"{root}/{part}", f"/{part}", None, _MS_BIND | _MS_REC)
    for part in adds:
        _add(f"/{part}", f"{root}/{part}")
    if not os.path.exists("/proc/modules"):  # noqa: PTH110
        _add_modules(f"{root}/proc")


def _add(target: str, source: str) -> None:
    """Cover a folder with its own content and that of `source`."""
    draft = f"{source}/.whole"
    os.makedirs(draft, exist_ok=True)  # noqa: PTH103
    _mount("allotment", draft, "tmpfs", _MS_NOSUID, b"mode=755,size=1m")
    names = {name: f"{target}/{name}" for name in os.listdir(target)}  # noqa: PTH208
    names |= {name: f"{source}/{name}" for name in os.listdir(source) if name != ".whole"}  # noqa: PTH208
    for name, path in names.items():
        inside = f"{draft}/{name}"
        if os.path.islink(path):  # noqa: PTH114
            os.symlink(os.readlink(path), inside)  # noqa: PTH115, PTH211
            continue
        _touch(inside, folder=os.path.isdir(path))  # noqa: PTH112
        _mount(path, inside, None, _MS_BIND | _MS_REC)
    _mount(draft, target, None, _MS_BIND | _MS_REC)


def _add_modules(source: str) -> None:
    """Cover /proc of a kernel without modules, where no file can be added.

    Processes that begin later are missing there, but for each caller's own entry.
    """
    draft = f"{source}/.whole"
    os.makedirs(draft, exist_ok=True)  # noqa: PTH103
    _mount("allotment", draft, "tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=1m")
    os.mkdir(f"{draft}/.kernel")  # noqa: PTH102
    _mount("/proc", f"{draft}/.kernel", None, _MS_BIND | _MS_REC)
    for name in os.listdir("/proc"):  # noqa: PTH208
        os.symlink(f".kernel/{name}", f"{draft}/{name}")  # noqa: PTH211
    os.symlink(f"{source}/modules", f"{draft}/modules")  # noqa: PTH211
    _mount(draft, "/proc", None, _MS_BIND | _MS_REC)


def enter(plan: NamespacePlan) -> None:
    """Enter a namespace as planned; raise `OSError` naming the failed step.

    Opens the machine's files before they are covered, and mounts them through descriptors.
    """
    umask = os.umask(0o022)  # users inside read what is made here
    _make_mount_points()
    try:
        working_folder = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:  # removed: stay there
        working_folder = ""
    _libc_call("unshare", _CLONE_NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)
    seats = [f"seat-{index}" for index in range(plan.devices)]
    others = [f"{name}-{index}" for name in ("contract", "seats") for index in range(plan.devices)]
    # Opened in the new namespace: the kernel does not bind files of another one.
    sources = {
        "share/policy": _open(plan.share / "policy"),
        "share/usage": _open(plan.share / "usage"),
        **{f"share/{name}": _open(plan.share / name) for name in (*others, *seats)},
        f"shim/{plan.shim.parent.name}": _open(plan.shim.parent),
    }
    if plan.machine and plan.libraries:
        sources["simulated/machine"] = _open(plan.machine)
        sources[f"simulated/lib/{plan.libraries.name}"] = _open(plan.libraries)
    if plan.mps:
        sources[MPS_INSIDE.removeprefix(f"{RUN_FOLDER}/")] = _open(plan.mps)
    writable = {"share/usage", "mps", "simulated/machine", *(f"share/{name}" for name in seats)}
    cache_folder = _open(plan.cache.parent) if plan.cache else -1
    _mount("allotment", RUN_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755,size=4m")
    for inside, descriptor in sources.items():
        target = f"{RUN_FOLDER}/{inside}"
        _touch(target, folder=_is_folder(descriptor))
        _bind(f"/proc/self/fd/{descriptor}", target, read_only=inside not in writable)
        os.close(descriptor)
    _write_preload(f"{_SHIM_INSIDE}/{plan.shim.parent.name}/{plan.shim.name}")
    if plan.cache and plan.libraries:
        _write_cache(
            f"/proc/self/fd/{cache_folder}/{plan.cache.name}",
            inside_folder(plan.libraries),
        )
        os.close(cache_folder)
    _mount("none", RUN_FOLDER, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.umask(umask)
    if working_folder:
        # Again by its name, to see the new mounts. Folders in the state folder are covered.
        try:
            os.chdir(working_folder)
        except FileNotFoundError:
            os.chdir(RUN_FOLDER)


def _make_mount_points() -> None:
    """Create the machine's mount points, empty, if they do not exist."""
    os.makedirs(RUN_FOLDER, mode=0o755, exist_ok=True)  # noqa: PTH103 - plain paths throughout
    if not os.path.exists(PRELOAD_FILE):  # noqa: PTH110
        os.close(os.open(PRELOAD_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _write_preload(shim: str) -> None:
    """Mount a file that names the shim, after the machine's own entries, over the machine's."""
    with open(PRELOAD_FILE, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        before = file.read()
    if before and not before.endswith("\n"):
        before += "\n"
    source = f"{RUN_FOLDER}/ld.so.preload"
    with open(source, "w", encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
        file.write(f"{before}{shim}\n")
    _bind(source, PRELOAD_FILE, read_only=True)


def _write_cache(kept: str, libraries: str) -> None:
    """Mount a loader cache with the simulated libraries first over the machine's.

    It is stored in the state folder, named by its sources. The configuration is the machine's with
    one folder before it; no link of the machine changes (-X).
    """
    source = f"{RUN_FOLDER}/ld.so.cache"
    content = _kept_cache(kept)
    if content is None:
        _make_cache(source, libraries)
        _keep(source, kept)
    else:
        with open(source, "wb") as copy:  # noqa: PTH123
            copy.write(content)
    os.chmod(source, 0o644)  # noqa: PTH101
    if not os.path.exists(CACHE_FILE):  # noqa: PTH110
        os.close(os.open(CACHE_FILE, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    _bind(source, CACHE_FILE, read_only=True)


def _kept_cache(kept: str) -> bytes | None:
    """Read the stored cache; None: there is none, or another user has made it meanwhile."""
    try:
        descriptor = open_regular(kept, os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read() if os.fstat(descriptor).st_uid in {0, os.geteuid()} else None


def _make_cache(path: str, libraries: str) -> None:
    import subprocess

    configuration = f"{RUN_FOLDER}/ld.so.conf"
    with open(configuration, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(f"{libraries}\ninclude /etc/ld.so.conf\n")
    program = "/sbin/ldconfig" if os.path.exists("/sbin/ldconfig") else "ldconfig"  # noqa: PTH110
    # The new configuration's trusted folders are ldconfig's own, as for the machine's cache.
    done = subprocess.run(
        [program, "-X", "-C", path, "-f", configuration],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    os.unlink(configuration)  # noqa: PTH108
    if done.returncode != 0:
        raise OSError(0, f"ldconfig: {done.stderr.decode(errors='replace').strip()[:200]}", path)


def _keep(source: str, kept: str) -> None:
    draft = f"{kept}.{os.urandom(6).hex()}"
    try:
        with open(source, "rb") as file, open(draft, "xb") as copy:  # noqa: PTH123
            copy.write(file.read())
        os.rename(draft, kept)  # noqa: PTH104
    except OSError:  # stored only to save time
        with suppress(OSError):
            os.unlink(draft)  # noqa: PTH108


def _open(path: Path) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _is_folder(descriptor: int) -> bool:
    import stat

    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


def _touch(path: str, *, folder: bool) -> None:
    os.makedirs(path if folder else os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind-mount; libraries without `noexec`, which /run often has: they could not be loaded.

    With it what programs write: the kernel lets no process write a file that runs as a program.
    """
    _mount(source, target, None, _MS_BIND)
    flags = _MS_REMOUNT | _MS_BIND | _MS_NOSUID | _MS_NODEV
    flags |= _MS_RDONLY if read_only else _MS_NOEXEC
    _mount("none", target, None, flags)


def _mount(
    source: str, target: str, kind: str | None, flags: int, data: bytes | None = None
) -> None:
    _libc_call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        flags,
        data,
        what=target,
    )


def _libc_call(name: str, *arguments: object, what: str = "") -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if getattr(libc, name)(*converted) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}", what or None)
