# SPDX-License-Identifier: Apache-2.0
"""The kubelet's messages: made of its files, and numbered as they are on the wire."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import generate_protos
from allotment.agent.kubelet.proto import deviceplugin_pb2 as messages

UNAVAILABLE = 3


def test_what_is_generated_is_as_it_was_written_of_the_files_that_are_there() -> None:
    for root, files in generate_protos.SOURCES.items():
        assert list(root.glob(files))
        assert generate_protos.changed(root, files) == []


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("podresources.proto", ["podresources_pb2.py", "podresources_pb2.pyi"]),
        ("podresources_pb2.pyi", ["podresources_pb2.pyi"]),
    ],
)
def test_a_change_is_seen(name: str, seen: list[str], root: Path, tmp_path: Path) -> None:
    for path in (root / "src/allotment/agent/kubelet/proto").glob("podresources*.p[ry]*"):
        shutil.copy(path, tmp_path)
    assert generate_protos.changed(tmp_path, "*.proto") == []
    with (tmp_path / name).open("a", encoding="utf-8") as file:
        file.write("\n")
    assert [path.name for path in generate_protos.changed(tmp_path, "*.proto")] == seen


@pytest.mark.thorough  # the compiler has an environment of its own, which takes half a minute
@pytest.mark.timeout(180)
def test_what_is_generated_is_made_of_the_files_that_are_there(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/generate_protos.py", "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        pytest.skip(f"the compiler cannot be had here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_fields_have_the_kubelets_numbers() -> None:
    answer = messages.ContainerAllocateResponse.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in answer.items()} == {
        "envs": 1,
        "mounts": 2,
        "devices": 3,
        "annotations": 4,
        "cdi_devices": 5,
    }
    device = messages.Device.DESCRIPTOR.fields_by_name
    assert {name: field.number for name, field in device.items()} == {
        "ID": 1,
        "health": 2,
        "topology": 3,
    }
