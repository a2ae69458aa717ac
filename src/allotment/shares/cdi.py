# SPDX-License-Identifier: Apache-2.0
"""A share as a CDI device: `docker run --device allotment.dev/share=NAME`, and Podman likewise.

Each share has a spec file in a folder that container runtimes read. It mounts the ledger at
/run/allotment/share/ID, the shim through a read-only /etc/ld.so.preload, and the simulated machine
or the real GPU's nodes, with their libraries. So a container may have several shares: all paths are
the share's own, or the same for all. Source: Container Device Interface specification, 0.5.0
(device names may begin with a digit, device nodes may have a host path).
"""

import json
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from allotment.devices.mig_slices import CapabilityNode, capability_nodes
from allotment.devices.watching import driver_facts
from allotment.files import atomic_write
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError, StateError
from allotment.model.shares import Share, ShareId
from allotment.modes import traits_of
from allotment.modes.turns import link_names
from allotment.shares.failpoints import failpoint
from allotment.shares.folders import explained

CDI_VERSION = "0.5.0"
KIND = "allotment.dev/share"
DEFAULT_FOLDER = Path("/var/run/cdi")
"""For temporary specs; the runtimes' other folder, /etc/cdi, is for permanent ones."""

_PREFIX = "allotment.dev-share-"
_MONITOR_PREFIX = "allotment.dev-monitor-"
_OLD_S = 600.0  # a draft exists for a millisecond
_INSIDE = "/run/allotment"
# The default library folders of any glibc: Debian's and Red Hat's.
_LIBRARY_FOLDERS_INSIDE = ("/usr/lib", "/usr/lib64")

Edits = dict[str, list[Any]]
"""CDI's containerEdits: env, deviceNodes, mounts, hooks."""


class HostMount(msgspec.Struct, frozen=True):
    """A bind mount into a container."""

    host_path: str
    container_path: str
    is_read_only: bool = True


class CdiContent(msgspec.Struct, frozen=True):
    """The files for a share's container, as paths on this machine."""

    directory: Path
    """The share's directory."""
    shim: Path | None = None
    """None: the mode needs no shim."""
    preload: Path | None = None
    """A file with the shim's path inside the container."""
    machine: Path | None = None
    libraries: Path | None = None
    """The folder with the simulated libraries."""
    driver: Mapping[str, Sequence[Any]] | None = None
    """Edits for real GPUs."""
    marker: Path | None = None
    """A file that identifies the share's processes, in modes without a ledger."""
    visible: Path | None = None
    """A file that lists the container's simulated GPUs, which have no device nodes."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    """More environment variables."""
    folders: tuple[HostMount, ...] = ()
    """More mounts."""


def spec_name(share: ShareId) -> str:
    return f"{_PREFIX}{share}.json"


def monitor_spec_name(monitor: ShareId) -> str:
    return f"{_MONITOR_PREFIX}{monitor}.json"


def preload_line(shim: Path) -> str:
    """The content of a container's ld.so.preload: the shim's path inside."""
    return f"{_INSIDE}/shim/{shim.parent.name}/{shim.name}\n"


def make_spec(share: Share, content: CdiContent) -> dict[str, Any]:
    """The spec of one share: a device with the name of the share, or the id of an owned one."""
    seats = len(share.devices) if traits_of(share.mode).takes_turns else 0
    return document_of(KIND, share.device_name, edits_of(content, devices=seats))


def document_of(kind: str, name: str, edits: Edits) -> dict[str, Any]:
    """Return a spec with one device."""
    return {
        "cdiVersion": CDI_VERSION,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": edits}],
    }


def edits_of(content: CdiContent, *, devices: int) -> Edits:
    """Return the edits of a container; `devices` as for `mounts_of`."""
    edits: Edits = {
        "mounts": [
            _mount(
                mount.host_path,
                mount.container_path,
                _LOADABLE if mount.is_read_only else _WRITABLE,
            )
            for mount in mounts_of(content, devices=devices)
        ]
    }
    if content.environment:
        edits["env"] = [f"{name}={value}" for name, value in content.environment.items()]
    for key, values in (content.driver or {}).items():
        edits.setdefault(key, []).extend(values)
    return edits


def mounts_of(content: CdiContent, *, devices: int) -> tuple[HostMount, ...]:
    """The mounts of a share's container, without the driver's. The files need not exist yet.

    `devices`: the number of devices on which the share takes turns.
    """
    return (*_of_share(content, devices), *_of_simulation(content), *content.folders)


def _of_share(content: CdiContent, devices: int) -> Iterator[HostMount]:
    directory, inside = content.directory, f"{_INSIDE}/share/{content.directory.name}"
    if content.marker:
        yield HostMount(str(content.marker), f"{inside}/id")
    if not (content.shim and content.preload):
        return
    yield HostMount(str(directory / "policy"), f"{inside}/policy")
    yield HostMount(str(directory / "usage"), f"{inside}/usage", is_read_only=False)
    for index in range(devices):
        names = link_names(index)
        yield HostMount(str(directory / names.contract), f"{inside}/{names.contract}")
        yield HostMount(str(directory / names.seats), f"{inside}/{names.seats}")
        yield HostMount(str(directory / names.own), f"{inside}/{names.own}", is_read_only=False)
    shim = content.shim.parent
    yield HostMount(str(shim), f"{_INSIDE}/shim/{shim.name}")
    yield HostMount(str(content.preload), "/etc/ld.so.preload")


def _of_simulation(content: CdiContent) -> Iterator[HostMount]:
    if not (content.machine and content.libraries):
        return
    inside = f"{_INSIDE}/simulated"
    yield HostMount(str(content.machine), f"{inside}/machine", is_read_only=False)
    if content.visible:
        yield HostMount(str(content.visible), f"{inside}/devices/{content.directory.name}")
    for file in sorted(content.libraries.iterdir()):
        is_library = ".so" in file.suffixes
        for folder in _LIBRARY_FOLDERS_INSIDE if is_library else ("/usr/bin",):
            yield HostMount(str(file), f"{folder}/{file.name}")


def _mount(host_path: str, container_path: str, options: list[str]) -> dict[str, Any]:
    return {"hostPath": host_path, "containerPath": container_path, "options": options}


def publish(path: Path, content: bytes) -> None:
    """Write a spec for the container runtimes, unless it exists. Raises `StateError`.

    A name's content never changes: a runtime may still use an earlier one (containerd 2.3 did in 1
    to 2 of 90 starts). A file with other content is removed, and the error makes the caller retry
    later, when the runtime has noticed.
    """
    try:
        current = path.read_bytes()
    except FileNotFoundError:
        current = None
    except OSError as error:
        raise _unpublished(error, path) from error
    if current == content:
        return
    if current is not None:
        remove_spec(path)
        raise StateError(
            f"{path} was the CDI spec of another share of that name: it is removed",
            hint="it is tried again; if it returns, find the program that writes it",
        )
    draft = _draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.chmod(0o644)
            failpoint("publish.drafted")
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unpublished(error, path) from error
    failpoint("publish.shown")


def _draft_of(path: Path) -> Path:
    """The name of an incomplete spec; runtimes ignore this suffix."""
    return path.with_name(f".{path.name}.new")


def _unpublished(error: OSError, path: Path) -> StateError:
    return StateError(
        explained(error, path, "write the CDI spec").message,
        hint=f"let the node agent write into {path.parent} (a hostPath mount, not read-only), or"
        " name another folder that the container runtime reads",
    )


def write_spec(path: Path, spec: Mapping[str, Any]) -> None:
    """Write a spec in one step, because the runtimes watch the folder. Raises `StateError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(spec, indent=2) + "\n", mode=0o644)
    except OSError as error:
        failure = explained(error, path, "write the CDI spec")
        hint = "name a folder that you may write and the container runtime reads, with --cdi-dir"
        raise StateError(failure.message, hint=hint) from error


def remove_spec(path: Path) -> None:
    """Remove the spec file of a share or a monitor, if it exists. Raises `StateError`."""
    if not path.name.startswith((_PREFIX, _MONITOR_PREFIX)):
        return  # a changed record must not make us remove other files
    try:
        path.unlink(missing_ok=True)
        _draft_of(path).unlink(missing_ok=True)
    except NotADirectoryError:
        return  # it does not exist
    except OSError as error:
        # A read-only folder refuses to remove even missing files.
        if path.exists() or _draft_of(path).exists():
            raise explained(error, path, "remove the CDI spec") from error


def sweep(folder: Path, shares: Path) -> None:
    """Remove specs whose shares below `shares` do not exist, and left-over drafts.

    The caller holds the lock of that state folder, so that no other process writes its specs.
    """
    with suppress(OSError):
        for path in sorted(folder.glob(f"*{_PREFIX}*")):
            with suppress(OSError):
                if _is_left_over(path, shares):
                    path.unlink()


def _is_left_over(path: Path, shares: Path) -> bool:
    is_draft = path.name.startswith(".")
    name = path.name.removeprefix(".").removesuffix(".new") if is_draft else path.name
    share = name.removeprefix(_PREFIX).removesuffix(".json")
    whole = path.with_name(spec_name(ShareId(share)))
    if path != (_draft_of(whole) if is_draft else whole):
        return False  # not one of our names
    if (shares / share).exists():
        return is_draft
    # The folder also has the specs of other state folders.
    if f'"{shares}/{share}/'.encode() in path.read_bytes():
        return True
    return is_draft and time.time() - path.stat().st_mtime > _OLD_S


def list_specs(shares: Iterable[Share]) -> list[tuple[Share, Path, bool]]:
    """The shares that are CDI devices, each with its spec file and whether that exists."""
    return [
        (share, Path(share.cdi_spec), Path(share.cdi_spec).exists())
        for share in shares
        if share.cdi_spec
    ]


_CDI_FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
_NVIDIA_KIND = "nvidia.com/gpu"
_CONTROL_NODES = (
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidia-modeset",
)
_DRIVER_LIBRARIES = re.compile(
    r"^\s*(?P<name>lib(?:cuda|cudadebugger|nvidia-(?:ml|cfg|ptxjitcompiler|nvvm|nvvm70|gpucomp"
    r"|opencl|allocator|pkcs11|pkcs11-openssl3))\.so\.\S+) \((?P<flags>[^)]*)\) => (?P<path>\S+)$"
)
_READ_ONLY = ["ro", "nosuid", "nodev", "bind"]
# /run is often mounted noexec, which a bind mount would inherit.
_LOADABLE = ["ro", "nosuid", "nodev", "exec", "bind"]
# The kernel lets no process write a file that runs as a program: not the agent, either.
_WRITABLE = ["rw", "nosuid", "nodev", "noexec", "bind"]


def driver_edits(
    devices: Sequence[Device], *, root: Path = Path("/"), folders: Sequence[Path] = _CDI_FOLDERS
) -> Edits:
    """The edits for real devices in a container: NVIDIA's own, or from the machine's files.

    Raises `NoDevicesError` for a device without a node.
    """
    if (edits := _toolkit_edits(devices, folders)) is not None:
        return edits
    nodes = [node for node in _CONTROL_NODES if (root / node[1:]).exists()]
    minors = [_minor(device, root) for device in devices]
    nodes += dict.fromkeys(f"/dev/nvidia{minor}" for minor in minors)  # slices share their GPU's
    missing = [node for node in nodes if not (root / node[1:]).exists()]
    if missing:
        raise NoDevicesError(
            f"{missing[0]} does not exist",
            hint="load the driver's modules (`nvidia-smi` does), or write NVIDIA's own CDI spec:"
            " nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    mounts = [
        _mount(path, f"{folder}/{name}", _READ_ONLY)
        for name, path in _libraries(_loader_cache(root), root)
        for folder in _LIBRARY_FOLDERS_INSIDE
    ]
    smi = "usr/bin/nvidia-smi"
    if (root / smi).exists():
        mounts.append(_mount(f"/{smi}", f"/{smi}", _READ_ONLY))
    capabilities = {
        node: _numbered(node)
        for device, minor in zip(devices, minors, strict=True)
        for node in capability_nodes(device, minor, root=root)
    }
    return {
        "deviceNodes": [*({"path": node} for node in nodes), *capabilities.values()],
        "mounts": mounts,
    }


EXTRAS: Mapping[str, tuple[str, ...]] = {
    "gdrcopy": ("dev/gdrdrv",),
    "gds": ("dev/nvidia-fs*",),
    "mofed": ("dev/infiniband/uverbs*", "dev/infiniband/rdma_cm"),
}
"""Device nodes of GDRCopy, GPUDirect Storage and MOFED, in the order of NVIDIA's plugin."""
_STORAGE_MOUNTS = ("/run/udev", "/etc/cufile.json")


def extra_edits(kind: str, *, root: Path = Path("/")) -> Edits:
    """The edits for one of `EXTRAS`; empty if this machine has no device of it.

    Source: nvidia-container-toolkit, internal/discover (gdrcopy.go, gds.go, mofed.go).
    """
    nodes = [
        f"/{path.relative_to(root)}"
        for pattern in EXTRAS[kind]
        for path in sorted(root.glob(pattern))
        if path.is_char_device()
    ]
    if not nodes:
        return {}
    edits: Edits = {"deviceNodes": [{"path": node} for node in nodes]}
    mounts = [path for path in _STORAGE_MOUNTS if kind == "gds" and (root / path[1:]).exists()]
    if mounts:
        edits["mounts"] = [_mount(path, path, _READ_ONLY) for path in mounts]
    return edits


def _numbered(node: CapabilityNode) -> dict[str, object]:
    """A node by its numbers, because its file may not exist before its first use."""
    if node.major is None:
        return {"path": node.path}
    return {"path": node.path, "type": "c", "major": node.major, "minor": node.minor}


def _minor(device: Device, root: Path) -> int:
    """N of /dev/nvidiaN, by the driver's table (/proc/driver/nvidia/gpus)."""
    # NVML writes the domain with 8 digits, the table with 4.
    bus = device.pci_bus_id.lower()[-len("0000:00:00.0") :]
    try:
        return int(driver_facts(root, bus)["Device Minor"])
    except (KeyError, ValueError):
        return device.index  # drivers without the table number the nodes as NVML does


def _loader_cache(root: Path) -> str:
    cache = [] if root == Path("/") else ["-C", str(root / "etc/ld.so.cache")]
    done = subprocess.run(
        ["/sbin/ldconfig", "-p", *cache], capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout


def _libraries(listing: str, root: Path) -> Iterator[tuple[str, str]]:
    """Name and path of the driver's 64-bit libraries in a listing of `ldconfig -p`.

    Paths are those in the machine's own root, wherever it is mounted here.
    """
    whole = root.resolve()
    for line in listing.splitlines():
        match = _DRIVER_LIBRARIES.match(line)
        if match and "64" in match["flags"]:
            real = (whole / match["path"].lstrip("/")).resolve()
            # An absolute link leads out of a mounted root, to the right path inside.
            inside = real.relative_to(whole) if real.is_relative_to(whole) else real
            yield match["name"], str(Path("/") / inside)


def has_toolkit_spec(devices: Sequence[Device], folders: Sequence[Path] = _CDI_FOLDERS) -> bool:
    """Tell whether NVIDIA's own spec has these devices."""
    return _toolkit_edits(devices, folders) is not None


def _toolkit_edits(devices: Sequence[Device], folders: Iterable[Path]) -> Edits | None:
    """The edits of NVIDIA's own spec for these devices; None: a device is missing there."""
    for spec in _nvidia_specs(folders):
        edits = {str(each.get("name")): each.get("containerEdits", {}) for each in spec["devices"]}
        parts = [_edits_of(device, edits) for device in devices]
        if parts and all(part is not None for part in parts):
            return _merged([spec.get("containerEdits", {}), *(part for part in parts if part)])
    return None


def _edits_of(device: Device, edits: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    if device.slice_of is not None:
        return edits.get(device.uuid)  # a slice's number may belong to another slice by now
    return edits.get(device.uuid, edits.get(str(device.index)))


def _nvidia_specs(folders: Iterable[Path]) -> Iterator[Mapping[str, Any]]:
    for folder in folders:
        for path in sorted(folder.glob("*")) if folder.is_dir() else ():
            if path.suffix not in {".json", ".yaml"} or not path.name.startswith("nvidia"):
                continue
            spec = _load(path)
            if isinstance(spec, dict) and spec.get("kind") == _NVIDIA_KIND and spec.get("devices"):
                yield spec


def _load(path: Path) -> object:
    import yaml

    try:
        text = path.read_text("utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError):
        return None  # not ours; the next one may be usable


def _merged(parts: Iterable[Mapping[str, Any]]) -> Edits:
    """Join edits without duplicates."""
    edits: Edits = {}
    for part in parts:
        for key in ("env", "deviceNodes", "mounts", "hooks"):
            for value in part.get(key, ()):
                if value not in edits.setdefault(key, []):
                    edits[key].append(value)
    return {key: values for key, values in edits.items() if values}
