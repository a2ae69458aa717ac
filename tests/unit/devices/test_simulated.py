# SPDX-License-Identifier: Apache-2.0
"""Machine files: made once, whole, by whoever comes first."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from allotment.devices import layout
from allotment.devices.packing import read_machine
from allotment.devices.simulated import SimulatedMachine, machine_path, parse_spec
from allotment.model.errors import StateError, UsageError


def test_a_machine_is_made_and_read(tmp_path: Path) -> None:
    path = machine_path(tmp_path, "a100-80gb:2,t4")
    assert path.parent.parent == tmp_path / "simulated"
    assert path.stat().st_size == layout.MACHINE_FILE_BYTES
    assert path.stat().st_blocks * 512 < 8 << 20, "the file is sparse"
    assert path.stat().st_blocks * 512 >= layout.MACHINE_RINGS_AT, "what is mapped has its space"
    assert [device.name for device in SimulatedMachine(path).devices()] == [
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A100-SXM4-80GB",
        "Tesla T4",
    ]


def test_every_user_may_run_on_it(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = machine_path(tmp_path, "t4")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666


def test_a_machine_of_the_same_description_is_used_again(tmp_path: Path) -> None:
    path = machine_path(tmp_path, "t4:2")
    with path.open("r+b") as file:
        file.seek(layout.MACHINE_FILE_BYTES - 8)
        file.write(b"in use!!")
    assert machine_path(tmp_path, "t4,t4") == path
    assert path.read_bytes()[-8:] == b"in use!!"
    assert machine_path(tmp_path, "t4:3") != path


def test_makers_at_once_get_one_machine(tmp_path: Path) -> None:
    paths: list[Path] = []
    inodes: list[int] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        path = machine_path(tmp_path, "t4")
        inodes.append(path.stat().st_ino)
        paths.append(path)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert len(set(inodes)) == 1
    assert [entry.name for entry in paths[0].parent.iterdir()] == ["machine"]


def test_a_yaml_file_is_a_spec(tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("cuda: 12.4\ngpus: [{model: l4, count: 3}]\n")
    facts = read_machine(machine_path(tmp_path, str(file)))
    assert len(facts.devices) == 3
    assert facts.cuda_version == 12040


@pytest.mark.parametrize(("cuda", "clients"), [("12.4", 48), ("13.0", 48), ("13.1", 60)])
def test_the_driver_says_how_many_clients_mps_takes(
    tmp_path: Path, cuda: str, clients: int
) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text(f"cuda: '{cuda}'\ngpus: [t4]\n")
    (device,) = SimulatedMachine(machine_path(tmp_path, str(file))).devices()
    assert device.mps_clients == clients


@pytest.mark.parametrize("name", ["missing.yaml", "./missing", "/dev/null/x.yml"])
def test_a_file_that_cannot_be_read_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot read the simulated machine"):
        parse_spec(name)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="not text"):
        parse_spec(str(file))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: os.truncate(path, 4096), id="cut"),
        pytest.param(lambda path: os.truncate(path, layout.MACHINE_SIZE), id="only described"),
        pytest.param(lambda path: path.write_bytes(b"x" * 20000), id="foreign"),
    ],
)
def test_a_damaged_machine_is_named_with_the_way_out(damage: object, tmp_path: Path) -> None:
    path = machine_path(tmp_path, "t4")
    assert callable(damage)
    damage(path)
    with pytest.raises(StateError) as caught:
        read_machine(path)
    assert str(path) in caught.value.message
    assert "rm -r" in (caught.value.hint or "")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "simulated").write_text("a file where the folder should be")
    with pytest.raises(StateError, match="cannot create the simulated machine"):
        machine_path(tmp_path, "t4")


def test_a_missing_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot read"):
        read_machine(tmp_path / "nothing")


def test_importing_the_room_loads_neither_nvml_nor_yaml() -> None:
    code = (
        "import sys, allotment.devices.simulated, allotment.devices.nvml, allotment.devices.faults;"
        "print([name for name in ('yaml', 'pynvml', 'difflib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[]"
