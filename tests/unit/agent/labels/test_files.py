# SPDX-License-Identifier: Apache-2.0
"""`allotment.agent.labels.publisher`: the feature file, and the machine type file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allotment.agent.labels.publisher import (
    read_machine_type,
    remove_feature_file,
    write_feature_file,
    written,
)
from allotment.model.errors import StateError

LABELS = {"nvidia.com/gpu.count": "2", "nvidia.com/cuda.driver.rev": ""}


def test_one_label_a_line_and_a_missing_revision_is_empty() -> None:
    assert written(LABELS) == "nvidia.com/cuda.driver.rev=\nnvidia.com/gpu.count=2\n"


def test_the_file_appears_whole_for_everyone_to_read(tmp_path: Path) -> None:
    path = tmp_path / "gfd"
    assert write_feature_file(str(path), LABELS)
    assert path.read_text() == written(LABELS)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["gfd"], "a draft was left"


def test_a_file_that_says_it_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "gfd"
    write_feature_file(str(path), LABELS)
    before = path.stat().st_ino
    assert not write_feature_file(str(path), LABELS)
    assert path.stat().st_ino == before
    assert write_feature_file(str(path), {**LABELS, "nvidia.com/gpu.count": "3"})
    assert path.stat().st_ino != before


def test_a_folder_that_is_not_there_is_told_with_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "features.d" / "gfd"
    with pytest.raises(StateError, match="No such file or directory") as raised:
        write_feature_file(str(path), LABELS)
    assert raised.value.hint is not None
    assert "GFD_OUTPUT_FILE" in raised.value.hint


def test_no_path_means_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write_feature_file("", LABELS)
    assert capsys.readouterr().out == written(LABELS)


def test_removing_what_is_not_there_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "gfd"
    path.touch()
    for _ in range(2):
        remove_feature_file(str(path))
        assert not path.exists()
    remove_feature_file("")


def test_the_machine_type_is_a_files_text(tmp_path: Path) -> None:
    path = tmp_path / "product_name"
    path.write_bytes(b"PowerEdge R7525\n")
    assert read_machine_type(str(path)) == "PowerEdge R7525"
    path.write_bytes(b"\xff\xfe Board\n")
    assert read_machine_type(str(path)).endswith("Board")
    assert read_machine_type("") == "unknown"
    assert read_machine_type(os.fspath(tmp_path / "none")) == "unknown"
    assert read_machine_type(os.fspath(tmp_path)) == "unknown"
