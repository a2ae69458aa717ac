# SPDX-License-Identifier: Apache-2.0
"""The bench runs, and the rows that are no matter of speed are as they must be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from disturbances import Processors
from findings import Finding, Findings, render_markdown
from scenes import SECOND, Part, Recording


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


def compute(root: Path, *options: str) -> dict[str, dict[str, Any]]:
    command = [sys.executable, str(root / "bench" / "compute.py"), "--quick", "-o", "json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {each["question"]: each for each in json.loads(done.stdout)["findings"]}


@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_a_ceiling_is_measured_by_the_simulators_own_account(root: Path) -> None:
    options = ("--only", "ceilings", "--caps", "30", "--kernels", "200us", "--patterns", "stream")
    found = compute(root, *options)
    # Half a second of a busy computer proves no two points, but a ceiling that is none shows.
    assert found["ceilings"]["reached"] < 15
    assert float(found["ceilings"]["without"].removesuffix(" %")) > 60
    assert abs(found["the ledger's figure"]["reached"]) < 5


@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_a_split_is_beside_plain_time_slicing(root: Path) -> None:
    found = compute(root, "--only", "splits", "--kernels", "200us", "--splits", "20/80")
    small, large = (float(each) for each in found["splits"]["seen"].removesuffix(" %").split())
    one, other = (float(each) for each in found["splits"]["without"].removesuffix(" %").split())
    assert small * 2 < large
    assert one / other == pytest.approx(1, rel=0.3)


@pytest.mark.usefixtures("native_dir")
def test_launches_are_timed_and_their_system_calls_counted(root: Path) -> None:
    found = compute(root, "--only", "launches")
    assert found["launches"]["samples"] > 0
    calls = found["system calls"]
    assert 0 <= calls["reached"] <= 100
    assert calls["samples"] > 0


def test_the_gpu_bench_makes_its_folder_before_it_measures(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = tmp_path / "file" / "results"
    command = [sys.executable, str(root / "bench" / "gpu" / "run.py"), "--simulated", "--out"]
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: --out: {wrong} cannot be made" in done.stderr
    document = on_gpu(root, tmp_path / "new" / "results", "--only", "mig")
    assert "compute" in document


def on_gpu(root: Path, folder: Path, *options: str) -> dict[str, Any]:
    """The document of the bench for real GPUs, on a simulated one."""
    command = [sys.executable, str(root / "bench" / "gpu" / "run.py"), "--simulated", "--quick"]
    command += [*options, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads((folder / "gpu-results.json").read_text())
    assert not document["compute"]["failures"]
    return document


@pytest.mark.usefixtures("native_dir")
def test_the_gpu_benchs_turns_run_without_a_gpu(root: Path, tmp_path: Path) -> None:
    found = on_gpu(root, tmp_path, "--only", "turns")["compute"]["findings"]
    assert {each["question"] for each in found} == {"ceilings", "splits", "throughput"}


@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_the_gpu_benchs_mps_leaves_the_settings_as_they_are(root: Path, tmp_path: Path) -> None:
    document = on_gpu(root, tmp_path, "--only", "mps", "mig")
    checks = {each["name"]: each for each in document["checks"]}
    tried = [each for each in checks.values() if each["is_right"] is not None]
    assert len(tried) == 8
    assert all(each["is_right"] for each in tried)
    mode = checks["a daemon runs without any change of the GPU's settings"]["seen"]
    assert mode == "compute mode DEFAULT meanwhile"
    (not_tried,) = [each for each in checks.values() if each["is_right"] is None]
    assert "--change-settings" in not_tried["seen"]
    found = {each["question"]: each for each in document["compute"]["findings"]}
    assert found["side by side"]["reached"] > 1.2
    assert found["kills"]["samples"] == 1


@pytest.mark.parametrize(
    ("killed", "status_after", "verdicts"),
    [
        ({}, 0, [True, True, True]),
        ({"named": ["mps-0", "other"]}, 0, [False, True, True]),
        ({"named": ["mps-0"]}, 0, [False, True, True]),
        ({"statuses": [1, 0]}, 0, [True, False, True]),
        ({}, 8, [True, True, False]),
    ],
    ids=["right", "others named", "one named", "one ran on", "none after that"],
)
def test_the_gpu_bench_fails_where_the_end_of_a_daemon_is_not_seen(
    root: Path, killed: dict[str, Any], status_after: int, verdicts: list[bool]
) -> None:
    right = {"back_s": 0.5, "named": ["mps-0", "mps-1"], "statuses": [1, 1]}
    code = """if True:
        import json, sys
        from mps_shares import Killed, judge_kills
        rounds, status = json.loads(sys.argv[1])
        killed = [Killed(**{**each, "named": frozenset(each["named"])}) for each in rounds]
        print(json.dumps([each.is_right for each in judge_kills(killed, status)]))
    """
    words = json.dumps([[right, {**right, **killed}], status_after])
    environment = {**os.environ, "PYTHONPATH": f"{root / 'bench'}:{root / 'bench' / 'gpu'}"}
    done = subprocess.run(
        [sys.executable, "-c", code, words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout or "null") == verdicts, done.stderr


@pytest.mark.usefixtures("native_dir")
def test_the_gpu_bench_cuts_a_slice_where_it_may_and_puts_mig_back(
    root: Path, tmp_path: Path
) -> None:
    document = on_gpu(root, tmp_path, "--only", "mig", "--change-settings")
    assert [each["is_right"] for each in document["checks"]] == [True, True]
    assert [each["question"] for each in document["compute"]["findings"]] == ["slices"]


def test_an_unknown_pattern_is_refused(root: Path) -> None:
    command = [sys.executable, str(root / "bench" / "compute.py"), "--patterns", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no nonsense: choose from stream" in done.stderr


def recording(*busy: dict[str, int]) -> Recording:
    """One program of two processes; a sample every tenth of a second."""
    samples = [
        {"gpus": [{"time_ns": number * SECOND // 10, "busy_ns": 0, "epoch": 0, "processes": each}]}
        for number, each in enumerate(busy)
    ]
    answers = ([{"pid": 7, "begun_ns": 0, "ended_ns": SECOND}, {"pid": 8, "begun_ns": 1}],)
    return Recording(parts=(Part(command=["x"]),), answers=answers, samples=samples)


def test_a_part_is_what_all_of_its_processes_had() -> None:
    tenth = SECOND // 10
    seen = recording({}, {"7": tenth // 2}, {"7": tenth, "8": tenth // 2, "9": tenth})
    assert seen.percent(0, from_ns=0, to_ns=2 * tenth) == pytest.approx(75)
    assert seen.percent(0, from_ns=tenth, to_ns=2 * tenth) == pytest.approx(100)


def test_a_process_that_ended_keeps_what_it_had() -> None:
    tenth = SECOND // 10
    seen = recording({"7": tenth, "8": tenth}, {"7": 2 * tenth}, {"7": 2 * tenth})
    assert seen.true_ns(0) == 3 * tenth


def test_windows_slide_and_end_in_time() -> None:
    tenth = SECOND // 10
    seen = recording(*({"7": number * tenth // 4} for number in range(6)))
    windows = seen.windows(0, length_ns=2 * tenth, from_ns=tenth, to_ns=4 * tenth)
    assert windows == [(tenth, 25.0), (2 * tenth, 25.0)]


@pytest.mark.parametrize(
    ("reached", "at_least", "verdict"),
    [(1.0, False, "met"), (3.0, False, "MISSED"), (1.0, True, "MISSED"), (3.0, True, "met")],
)
def test_a_target_is_met_from_its_own_side(*, reached: float, at_least: bool, verdict: str) -> None:
    finding = Finding(
        question="q",
        name="n",
        without="w",
        seen="s",
        reached=reached,
        unit="x",
        target=2.0,
        at_least=at_least,
        samples=1,
        method="m",
    )
    page = render_markdown(Findings(facts={}, findings=[finding], failures={}), command="c")
    assert f"| {verdict} |" in page


def test_what_others_did_meanwhile_is_told() -> None:
    before = Processors(everybody=10.0, own=1.0, total=100.0)
    after = Processors(everybody=40.0, own=11.0, total=200.0)
    assert after.tell_since(before).startswith("10% used by the bench")
    assert after.tell_since(before).endswith("20% by others")
