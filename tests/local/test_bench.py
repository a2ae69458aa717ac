# SPDX-License-Identifier: Apache-2.0
"""The bench runs, and the rows that are no matter of speed are as they must be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "bench" / "run.py"), "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows_of(root: Path, question: str) -> dict[str, dict[str, Any]]:
    done = bench(root, "-o", "json", "--only", question)
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["rows"]}


@pytest.mark.usefixtures("native_dir")
def test_a_limit_is_exact(root: Path) -> None:
    (row,) = rows_of(root, "fill").values()
    assert 0 <= row["added"] < row["limit"]


@pytest.mark.usefixtures("native_dir")
def test_no_byte_is_over_the_limit(root: Path) -> None:
    rows = rows_of(root, "storm")
    assert [row["added"] for row in rows.values()] == [0, 0]
    assert rows["bytes over the limit, ever"]["samples"] > 0


@pytest.mark.usefixtures("native_dir")
def test_a_call_that_is_not_wrapped_is_the_drivers_own(root: Path) -> None:
    row = rows_of(root, "calls")["a call that is not wrapped"]
    assert row["added"] == 0
    assert row["method"].startswith("dlsym and cuGetProcAddress give the driver's own address")


@pytest.mark.usefixtures("native_dir")
def test_the_table_goes_between_its_markers(root: Path, tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\n<!-- bench:begin -->\nSTALE\n<!-- bench:end -->\n\nMore.\n")
    done = bench(root, "--only", "size", "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "STALE" not in text
    assert text.startswith(
        "# Performance\n\n<!-- bench:begin -->\nMade by `python bench/run.py --markdown` on:"
    )
    assert text.endswith("<!-- bench:end -->\n\nMore.\n")
    assert "| a share's folder, space it takes |" in text


def test_an_unknown_question_is_refused(root: Path) -> None:
    done = bench(root, "--only", "nonsense")
    assert done.returncode == 2
    assert "no question nonsense" in done.stderr


def test_without_a_gpu_the_gpu_bench_says_what_to_do(root: Path) -> None:
    command = [sys.executable, str(root / "bench" / "gpu" / "run.py"), "--python", "/bin/false"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Where there is a GPU, it is PyTorch that is missing.
    assert done.returncode in (5, 8)
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
