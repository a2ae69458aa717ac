# SPDX-License-Identifier: Apache-2.0
"""The files of a driver for a simulated machine: what NVIDIA's programs look for beside NVML.

A folder like a machine's root: libraries with their version, `nvidia-smi`, `/proc/driver/nvidia`,
`/sys/bus/pci`, device nodes. Nothing of it computes; the nodes exist to be found and passed on.
"""

import ctypes
import os
import platform
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from allotment.devices.loading import nvml_of
from allotment.devices.packing import read_machine
from allotment.devices.simulated import DEFAULT_PATH, capabilities_path
from allotment.model.errors import PrerequisiteError, StateError

_GPU_MAJOR: Final = 195
_UVM_MAJOR: Final = 511
_CAPS_MAJOR: Final = 510
_CONTROL_MINOR: Final = 255
_MODESET_MINOR: Final = 254
_GPU_CAPS: Final = 15 * 9
"""Capability numbers of one GPU: 15 GPU instances, each with itself and 8 compute instances."""
_FIRST_CAP: Final = 3
_MODULES: Final = ("nvidia_uvm", "nvidia_modeset", "nvidia")

COVERS: Final = ("proc/driver", "proc/modules", "proc/devices", "sys/bus/pci")
"""Parts of the folder that replace the machine's own."""
ADDS: Final = ("dev", "sys/devices", "run/allotment/simulated")
"""Parts that are added to the machine's own."""


class _Gpu(msgspec.Struct, frozen=True):
    """What the kernel and the driver publish of a GPU."""

    address: str
    minor: int
    device_id: int
    subsystem_id: int
    pci_class: int
    numa_node: int
    facts: dict[str, str]


def make_driver_root(root: Path, machine: Path, programs: Path) -> None:
    """Make the folder, or bring it up to date. `programs` has the libraries and programs.

    Raises `PrerequisiteError` for a user that cannot make device nodes, `StateError` for a folder
    that has other files.
    """
    if os.geteuid() != 0:
        raise PrerequisiteError(
            "only root can make the device nodes of a driver's folder", hint="use sudo"
        )
    mark = root / ".allotment-driver-root"
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()) and not mark.exists():
            raise StateError(
                f"{root} has other files, and would become a driver's folder",
                hint="name a new folder with --driver-root",
            )
        if os.statvfs(root).f_flag & os.ST_NOEXEC:
            raise StateError(
                f"no program can load libraries from {root}: it is mounted noexec",
                hint="name a folder elsewhere, as /var/lib/gpu",
            )
        mark.touch()
        facts = read_machine(machine)
        gpus = list(_gpus(machine))
        _put_programs(root, programs, facts.driver_version)
        _put_driver_facts(root / "proc", gpus, machine, facts.driver_version)
        _put_pci(root / "sys", gpus)
        _put_nodes(root / "dev", gpus, machine)
        # Where the libraries look without a variable.
        default = root / DEFAULT_PATH.relative_to("/")
        _link(default, str(machine.absolute()))
        _link(default.with_name("capabilities"), str(capabilities_path(machine).absolute()))
    except OSError as error:
        raise StateError(
            f"cannot make the driver's folder {root}: {error.strerror} ({error.filename})",
            hint="choose a folder where device nodes can be made, as /var/lib/gpu",
        ) from error


def library_folder(root: Path) -> Path:
    return root / "usr/lib64"


def _gpus(machine: Path) -> Iterator[_Gpu]:
    devices = read_machine(machine).devices
    with nvml_of(machine) as nvml:
        for device in devices:
            handle = nvml.nvmlDeviceGetHandleByIndex(device.index)
            pci = nvml.nvmlDeviceGetPciInfo_v3(handle)
            kind = nvml.nvmlPciInfoExt_v1_t()
            kind.version = nvml.nvmlPciInfoExt_v1
            nvml.nvmlDeviceGetPciInfoExt(handle, ctypes.byref(kind))
            minor = nvml.nvmlDeviceGetMinorNumber(handle)
            address = device.pci_bus_id[4:].lower()
            yield _Gpu(
                address=address,
                minor=minor,
                device_id=pci.pciDeviceId,
                subsystem_id=pci.pciSubSystemId,
                pci_class=kind.baseClass << 16 | kind.subClass << 8,
                numa_node=-1 if device.numa_node is None else device.numa_node,
                facts={
                    "Model": device.name,
                    "IRQ": str(nvml.nvmlDeviceGetIrqNum(handle)),
                    "GPU UUID": device.uuid,
                    "Video BIOS": nvml.nvmlDeviceGetVbiosVersion(handle),
                    "Bus Type": "PCIe",
                    "DMA Size": "47 bits",
                    "DMA Mask": "0x7fffffffffff",
                    "Bus Location": address,
                    "Device Minor": str(minor),
                    "GPU Excluded": "No",
                },
            )


def _put_programs(root: Path, programs: Path, version: str) -> None:
    libraries, tools = library_folder(root), root / "usr/bin"
    libraries.mkdir(parents=True, exist_ok=True)
    tools.mkdir(parents=True, exist_ok=True)
    for source in programs.iterdir():
        stem, is_library, _ = source.name.partition(".so.")
        if not is_library:
            _copy(source, tools / source.name)
            continue
        _copy(source, libraries / f"{stem}.so.{version}")
        _link(libraries / f"{stem}.so.1", f"{stem}.so.{version}")
        _link(libraries / f"{stem}.so", f"{stem}.so.1")
    _link(tools / "nvidia-cuda-mps-server", "nvidia-cuda-mps-control")


def _put_driver_facts(proc: Path, gpus: list[_Gpu], machine: Path, version: str) -> None:
    driver = proc / "driver/nvidia"
    _write(
        driver / "version",
        f"NVRM version: NVIDIA UNIX {platform.machine()} Kernel Module  {version}"
        "  (simulated by Allotment)\n",
    )
    _write(driver / "params", "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n")
    for gpu in gpus:
        lines = [f"{name + ':':<17} {value}\n" for name, value in gpu.facts.items()]
        _write(driver / "gpus" / gpu.address / "information", "".join(lines))
    _link(driver / "capabilities", str(capabilities_path(machine).absolute()))
    _write(proc / "driver/nvidia-caps/mig-minors", "".join(_mig_minors(gpus)))
    lines = [f"{name} 1 0 - Live 0x0000000000000000\n" for name in _MODULES]
    _write(proc / "modules", _own("/proc/modules") + "".join(lines))
    majors = f"{_GPU_MAJOR:3} nvidia\n{_CAPS_MAJOR} nvidia-caps\n{_UVM_MAJOR} nvidia-uvm\n"
    head, _, rest = _own("/proc/devices").partition("\nBlock devices:")
    _write(proc / "devices", f"{head.rstrip()}\n{majors}\nBlock devices:{rest}")


def _mig_minors(gpus: list[_Gpu]) -> Iterator[str]:
    yield "config 1\nmonitor 2\n"
    for gpu in gpus:
        for instance in range(15):
            minor = _FIRST_CAP + gpu.minor * _GPU_CAPS + instance * 9
            yield f"gpu{gpu.minor}/gi{instance}/access {minor}\n"
            for compute in range(8):
                yield f"gpu{gpu.minor}/gi{instance}/ci{compute}/access {minor + 1 + compute}\n"


def _put_pci(sys: Path, gpus: list[_Gpu]) -> None:
    """Write the PCI bus as the kernel shows it, with these devices alone."""
    bus = sys / "bus/pci"
    (bus / "drivers/nvidia").mkdir(parents=True, exist_ok=True)
    (bus / "devices").mkdir(exist_ok=True)
    for gpu in gpus:
        # The root of its PCI tree is part of a device's path.
        folder = sys / "devices/pci0000:00" / gpu.address
        vendor, device = gpu.device_id & 0xFFFF, gpu.device_id >> 16
        values = {
            "vendor": f"0x{vendor:04x}",
            "device": f"0x{device:04x}",
            "subsystem_vendor": f"0x{gpu.subsystem_id & 0xFFFF:04x}",
            "subsystem_device": f"0x{gpu.subsystem_id >> 16:04x}",
            "class": f"0x{gpu.pci_class:06x}",
            "numa_node": str(gpu.numa_node),
            "resource": "\n".join(
                ["0x0000000000000000 0x0000000000000000 0x0000000000000000"] * 13
            ),
        }
        for name, value in values.items():
            _write(folder / name, f"{value}\n")
        config = struct.pack("<HHHHB", vendor, device, 0x0406, 0x0010, 0xA1)
        config += gpu.pci_class.to_bytes(3, "little") + bytes(32)
        config += struct.pack("<I", gpu.subsystem_id)
        (folder / "config").write_bytes(config.ljust(256, b"\0"))
        _link(folder / "driver", "../../../bus/pci/drivers/nvidia")
        _link(bus / "devices" / gpu.address, f"../../../devices/pci0000:00/{gpu.address}")


def _put_nodes(folder: Path, gpus: list[_Gpu], machine: Path) -> None:
    nodes = {
        "nvidiactl": (_GPU_MAJOR, _CONTROL_MINOR),
        "nvidia-modeset": (_GPU_MAJOR, _MODESET_MINOR),
        "nvidia-uvm": (_UVM_MAJOR, 0),
        "nvidia-uvm-tools": (_UVM_MAJOR, 1),
        **{f"nvidia{gpu.minor}": (_GPU_MAJOR, gpu.minor) for gpu in gpus},
        **{
            f"nvidia-caps/nvidia-cap{minor}": (_CAPS_MAJOR, minor)
            for minor in sorted(_capability_minors(machine))
        },
    }
    (folder / "nvidia-caps").mkdir(parents=True, exist_ok=True)
    for name, (major, minor) in nodes.items():
        with suppress(FileExistsError):
            os.mknod(folder / name, stat.S_IFCHR, os.makedev(major, minor))
            (folder / name).chmod(0o666)


def _capability_minors(machine: Path) -> Iterator[int]:
    for path in capabilities_path(machine).rglob("*"):
        if path.is_file():
            first = path.read_text("ascii").splitlines()[0]
            yield int(first.removeprefix("DeviceFileMinor:"))


def _own(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def _copy(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)  # it may be in use
    shutil.copyfile(source, target)
    target.chmod(0o755)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
