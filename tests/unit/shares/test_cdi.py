# SPDX-License-Identifier: Apache-2.0
"""CDI specs: by the specification, with all that a container needs, and gone in time."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpus import mig_slice

from allotment.model.devices import Device
from allotment.model.errors import NoDevicesError, StateError
from allotment.model.shares import Share
from allotment.shares import cdi, lifecycle
from allotment.shares.cdi import _libraries, driver_edits
from allotment.shares.folders import StateFolder

Make = Callable[..., tuple[Share, Path]]
_HOOKS = {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}


def check(spec: dict[str, Any]) -> None:
    """The rules of CDI 0.5.0 for a spec, as its reference implementation checks them."""
    assert set(spec) <= {"cdiVersion", "kind", "devices", "containerEdits"}
    assert spec["cdiVersion"] in {"0.3.0", "0.4.0", "0.5.0"}
    vendor, _, kind = spec["kind"].partition("/")
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?", vendor)
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", kind)
    assert spec["devices"]
    for device in spec["devices"]:
        assert set(device) == {"name", "containerEdits"}
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", device["name"])
        edits = device["containerEdits"]
        assert edits
        assert set(edits) <= {"env", "deviceNodes", "mounts", "hooks"}
        for variable in edits.get("env", ()):
            assert re.match(r"[^=]+=", variable)
        for node in edits.get("deviceNodes", ()):
            assert node["path"]
            assert set(node.get("permissions", "")) <= set("rwm")
        for mount in edits.get("mounts", ()):
            assert set(mount) <= {"hostPath", "containerPath", "options", "type"}
            assert mount["hostPath"].startswith("/")
            assert mount["containerPath"].startswith("/")
            assert all(isinstance(option, str) for option in mount.get("options", ()))
        for hook in edits.get("hooks", ()):
            assert hook["hookName"] in _HOOKS
            assert hook["path"]


@pytest.fixture
def content(tmp_path: Path) -> Callable[[Path], cdi.CdiContent]:
    libraries = tmp_path / "lib" / "abc"
    libraries.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", "nvidia-smi"):
        (libraries / name).write_bytes(b"")

    def make(directory: Path) -> cdi.CdiContent:
        shim = tmp_path / "shim" / "0a1b" / "liballotment-shim.so"
        return cdi.CdiContent(
            directory, shim, directory / "ld.so.preload", tmp_path / "machine", libraries
        )

    return make


def test_every_device_has_its_turns(make: Make, content: Callable[[Path], cdi.CdiContent]) -> None:
    share, directory = make(name="pair", runner=None, count=2)
    (device,) = cdi.make_spec(share, content(directory))["devices"]
    mounts = {each["containerPath"]: each for each in device["containerEdits"]["mounts"]}
    for index in range(2):
        for name, access in (("contract", "ro"), ("seats", "ro"), ("seat", "rw")):
            mount = mounts[f"/run/allotment/share/{share.id}/{name}-{index}"]
            assert access in mount["options"]
            assert Path(mount["hostPath"]).is_dir() == (name == "seats")


def test_a_spec_by_the_rules(make: Make, content: Callable[[Path], cdi.CdiContent]) -> None:
    share, directory = make(name="note.book-1", runner=None)
    spec = cdi.make_spec(share, content(directory))
    check(spec)
    assert spec["kind"] == "allotment.dev/share"
    mounts = spec["devices"][0]["containerEdits"]["mounts"]
    targets = {mount["containerPath"]: mount for mount in mounts}
    inside = f"/run/allotment/share/{share.id}"
    assert targets[f"{inside}/policy"]["hostPath"] == str(directory / "policy")
    assert "ro" in targets[f"{inside}/policy"]["options"]
    assert "rw" in targets[f"{inside}/usage"]["options"]
    assert "ro" in targets["/etc/ld.so.preload"]["options"]
    assert "/run/allotment/simulated/machine" in targets
    assert "/usr/lib/libcuda.so.1" in targets
    assert [target for target in targets if "nvidia-smi" in target] == ["/usr/bin/nvidia-smi"]
    assert "ro" in targets["/usr/bin/nvidia-smi"]["options"]
    # While a program runs from a file, the kernel lets nobody write it.
    assert all({"ro", "noexec"} & {*mount["options"]} for mount in mounts)
    assert len(targets) == len(mounts)


def test_a_spec_with_an_id_for_a_name(
    make: Make, content: Callable[[Path], cdi.CdiContent]
) -> None:
    share, directory = make(runner=None)
    check(cdi.make_spec(share, content(directory)))


def test_the_spec_goes_with_its_share(folder: StateFolder, make: Make, tmp_path: Path) -> None:
    share, _ = make(runner=None, cdi_folder=tmp_path / "cdi")
    path = Path(share.cdi_spec or "")
    cdi.write_spec(path, {"kind": cdi.KIND})
    assert json.loads(path.read_text()) == {"kind": cdi.KIND}
    assert path.suffix == ".json"
    assert [present for _, _, present in cdi.list_specs([share])] == [True]
    lifecycle.destroy(folder, lifecycle.find(folder, share.id), force=False)
    assert list((tmp_path / "cdi").iterdir()) == []


def test_a_record_cannot_have_other_files_removed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("")
    cdi.remove_spec(tmp_path / "precious")
    assert (tmp_path / "precious").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="CDI spec") as caught:
        cdi.write_spec(tmp_path / "file" / "x.json", {})
    assert "--cdi-dir" in (caught.value.hint or "")


# ---- real GPUs -----------------------------------------------------------------------------------


@pytest.fixture
def machine_root(tmp_path: Path) -> Path:
    """The files of a machine with a driver, as far as containers need them."""
    root = tmp_path / "root"
    (root / "dev").mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia3", "nvidia1"):
        (root / "dev" / name).write_text("")
    information = root / "proc/driver/nvidia/gpus/0000:00:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t Tesla T4\nDevice Minor: \t 3\n")
    return root


def test_nodes_are_found_by_the_drivers_own_table(
    devices: tuple[Device, ...], machine_root: Path
) -> None:
    edits = driver_edits(devices, root=machine_root, folders=())
    nodes = [node["path"] for node in edits["deviceNodes"]]
    assert nodes == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia1"]


def test_a_gpu_without_a_node_is_refused(devices: tuple[Device, ...], machine_root: Path) -> None:
    (machine_root / "dev" / "nvidia3").unlink()
    with pytest.raises(NoDevicesError, match="/dev/nvidia3"):
        driver_edits(devices, root=machine_root, folders=())


@pytest.mark.parametrize("names", [("GPU-00000000", "GPU-10000000"), ("0", "1")])
def test_the_toolkits_spec_is_taken_over(
    devices: tuple[Device, ...], machine_root: Path, names: tuple[str, str]
) -> None:
    folder = machine_root / "cdi"
    folder.mkdir()
    (folder / "nvidia-broken.yaml").write_text("{")
    (folder / "nvidia.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n"
        "containerEdits:\n  env: [NVIDIA_VISIBLE_DEVICES=void]\n"
        "  deviceNodes: [{path: /dev/nvidiactl}]\n"
        "devices:\n"
        f"- {{name: '{names[0]}', containerEdits: {{deviceNodes: [{{path: /dev/nvidia0}}]}}}}\n"
        f"- {{name: '{names[1]}', containerEdits: {{deviceNodes: [{{path: /dev/nvidia7}}]}}}}\n"
    )
    edits = driver_edits(devices[1:], root=machine_root, folders=[folder])
    assert [node["path"] for node in edits["deviceNodes"]] == ["/dev/nvidiactl", "/dev/nvidia7"]
    assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=void"]


@pytest.fixture
def mig_slices(devices: tuple[Device, ...], machine_root: Path) -> tuple[Device, ...]:
    """Two slices of the first GPU, with the files by which the driver tells their nodes."""
    top = machine_root / "proc/driver/nvidia/capabilities/gpu3/mig"
    for instance, minor in ((7, 66), (8, 75)):
        (top / f"gi{instance}/ci0").mkdir(parents=True)
        for path, number in (("access", minor), ("ci0/access", minor + 1)):
            text = f"DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
            (top / f"gi{instance}" / path).write_text(text)
    return tuple(mig_slice(devices[0], number) for number in range(2))


def test_a_slice_has_its_gpus_node_and_those_of_its_instances(
    mig_slices: tuple[Device, ...], machine_root: Path
) -> None:
    (machine_root / "proc/devices").write_text("Character devices:\n511 nvidia-caps\n")
    edits = driver_edits(mig_slices, root=machine_root, folders=())
    assert edits["deviceNodes"] == [
        *({"path": f"/dev/{name}"} for name in ("nvidiactl", "nvidia-uvm", "nvidia3")),
        *(
            {
                "path": f"/dev/nvidia-caps/nvidia-cap{minor}",
                "type": "c",
                "major": 511,
                "minor": minor,
            }
            for minor in (66, 67, 75, 76)
        ),
    ]


def test_a_slice_that_went_is_refused(mig_slices: tuple[Device, ...], machine_root: Path) -> None:
    (machine_root / "proc/driver/nvidia/capabilities/gpu3/mig/gi8/access").unlink()
    with pytest.raises(NoDevicesError, match=r"MIG device 0:1 .* no device node"):
        driver_edits(mig_slices, root=machine_root, folders=())


@pytest.mark.parametrize(("name", "is_taken"), [("0", False), ("0:0", False), ("MIG-00", True)])
def test_of_the_toolkits_spec_a_slice_takes_what_has_its_uuid(
    mig_slices: tuple[Device, ...], machine_root: Path, name: str, *, is_taken: bool
) -> None:
    folder = machine_root / "cdi"
    folder.mkdir()
    (folder / "nvidia.yaml").write_text(
        "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
        f"- {{name: '{name}', containerEdits: {{deviceNodes: [{{path: /dev/other}}]}}}}\n"
    )
    edits = driver_edits(mig_slices[:1], root=machine_root, folders=[folder])
    paths = [node["path"] for node in edits["deviceNodes"]]
    assert (paths == ["/dev/other"]) == is_taken
    assert ("/dev/nvidia-caps/nvidia-cap66" in paths) != is_taken


def test_libraries_are_named_as_the_machine_has_them(tmp_path: Path) -> None:
    folder = tmp_path / "usr/lib/x86_64-linux-gnu"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.580.95.05").write_text("")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    (folder / "libnvidia-ml.so.1").symlink_to("/usr/lib/nvidia/libnvidia-ml.so.580")
    listing = "".join(
        f"\t{name} (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/{name}\n"
        for name in ("libcuda.so.1", "libnvidia-ml.so.1", "libz.so.1")
    )
    assert list(_libraries(listing, tmp_path)) == [
        ("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"),
        ("libnvidia-ml.so.1", "/usr/lib/nvidia/libnvidia-ml.so.580"),
    ]
