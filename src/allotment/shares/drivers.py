# SPDX-License-Identifier: Apache-2.0
"""What a container needs of a real NVIDIA driver, as CDI edits.

NVIDIA's container toolkit writes a CDI spec of its own (`nvidia-ctk cdi generate`). Where there is
one that knows the GPUs by UUID or number, its edits are taken over. Else they are put together
here: the device nodes, and the driver's libraries that the loader of this machine knows.
"""

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from allotment.devices.mig_slices import CapabilityNode, capability_nodes
from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError
from allotment.shares.cdi import Edits

__all__ = ["driver_edits"]

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
_LIBRARY_FOLDERS_INSIDE = ("/usr/lib", "/usr/lib64")
_READ_ONLY = ["ro", "nosuid", "nodev", "bind"]


def driver_edits(
    devices: Sequence[Device], *, root: Path = Path("/"), folders: Sequence[Path] = _CDI_FOLDERS
) -> Edits:
    """Return the edits that make these real devices usable in a container.

    `root` and `folders` are where the machine's files are. Raises `NoDevicesError` when a device
    has no node.
    """
    taken = _toolkit_edits(devices, folders)
    if taken is not None:
        return taken
    nodes = [node for node in _CONTROL_NODES if (root / node[1:]).exists()]
    minors = [_minor(device, root) for device in devices]
    nodes += dict.fromkeys(f"/dev/nvidia{minor}" for minor in minors)  # slices share their GPU's
    missing = [node for node in nodes if not (root / node[1:]).exists()]
    if missing:
        raise NoDevicesError(
            f"{missing[0]} is not there",
            hint="load the driver's modules (`nvidia-smi` does), or write NVIDIA's own CDI spec:"
            " nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )
    mounts = [
        {"hostPath": path, "containerPath": f"{folder}/{name}", "options": _READ_ONLY}
        for name, path in _libraries(_loader_cache(root), root)
        for folder in _LIBRARY_FOLDERS_INSIDE
    ]
    smi = root / "usr/bin/nvidia-smi"
    if smi.exists():
        mounts.append(
            {
                "hostPath": "/usr/bin/nvidia-smi",
                "containerPath": "/usr/bin/nvidia-smi",
                "options": _READ_ONLY,
            }
        )
    capabilities = {
        node: _numbered(node)
        for device, minor in zip(devices, minors, strict=True)
        for node in capability_nodes(device, minor, root=root)
    }
    return {
        "deviceNodes": [*({"path": node} for node in nodes), *capabilities.values()],
        "mounts": mounts,
    }


def _numbered(node: CapabilityNode) -> dict[str, object]:
    """Describe a node by its numbers: the machine makes the file only when somebody asks for it."""
    if node.major is None:
        return {"path": node.path}
    return {"path": node.path, "type": "c", "major": node.major, "minor": node.minor}


def _minor(device: Device, root: Path) -> int:
    """Return N of /dev/nvidiaN, from the driver's own table (/proc/driver/nvidia/gpus)."""
    bus = device.pci_bus_id.lower()
    bus = (
        bus[-12:] if len(bus) > len("0000:00:00.0") else bus
    )  # NVML writes the domain with 8 digits
    path = root / "proc/driver/nvidia/gpus" / bus / "information"
    try:
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Device Minor":
                return int(value)
    except (OSError, ValueError):
        pass  # drivers before the table was there number the nodes as NVML does
    return device.index


def _loader_cache(root: Path) -> str:
    cache = [] if root == Path("/") else ["-C", str(root / "etc/ld.so.cache")]
    done = subprocess.run(
        ["/sbin/ldconfig", "-p", *cache], capture_output=True, text=True, check=False, timeout=10
    )
    return done.stdout


def _libraries(listing: str, root: Path) -> Iterator[tuple[str, str]]:
    """Return name and file of the driver's 64-bit libraries in a listing of `ldconfig -p`.

    Files are named as the machine's own root has them, whatever it is called here.
    """
    whole = root.resolve()
    for line in listing.splitlines():
        found = _DRIVER_LIBRARIES.match(line)
        if found and "64" in found["flags"]:
            real = (whole / found["path"].lstrip("/")).resolve()
            # A link that is absolute leads out of another root, to the name that is meant.
            inside = real.relative_to(whole) if real.is_relative_to(whole) else real
            yield found["name"], f"/{inside}" if not inside.is_absolute() else str(inside)


def _toolkit_edits(devices: Sequence[Device], folders: Iterable[Path]) -> Edits | None:
    """Return the edits of NVIDIA's own spec for these devices, or None if it lacks any of them."""
    for spec in _nvidia_specs(folders):
        known = {str(each.get("name")): each.get("containerEdits", {}) for each in spec["devices"]}
        parts = [_known(known, device) for device in devices]
        if parts and all(part is not None for part in parts):
            return _merged([spec.get("containerEdits", {}), *(part for part in parts if part)])
    return None


def _known(known: Mapping[str, Mapping[str, Any]], device: Device) -> Mapping[str, Any] | None:
    """Return a device's edits. A slice's number may be another slice's since the spec was made."""
    if device.slice_of is not None:
        return known.get(device.uuid)
    return known.get(device.uuid, known.get(str(device.index)))


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
        return None  # not ours; the next one may do


def _merged(parts: Iterable[Mapping[str, Any]]) -> Edits:
    """Join edits; what several devices name is kept once."""
    edits: Edits = {}
    for part in parts:
        for key in ("env", "deviceNodes", "mounts", "hooks"):
            for value in part.get(key, ()):
                if value not in edits.setdefault(key, []):
                    edits[key].append(value)
    return {key: values for key, values in edits.items() if values}
