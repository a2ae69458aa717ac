# SPDX-License-Identifier: Apache-2.0
"""The bench runs, and the results that are no matter of speed are as they must be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import report
from bench.__main__ import conclude
from bench.compute.scene import SECOND, Part, Recording
from bench.gpu.mps_shares import Killed, judge_kills
from bench.harness import tables
from bench.harness.machine import Processors
from bench.harness.quantiles import quantile, summarize
from bench.harness.registry import BENCHES, Bench, select
from bench.harness.results import Provenance, Record, Result, read_records, record, write_records
from bench.harness.runner import Run
from rounds import undisturbed


def bench(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "--quick", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


def lines_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def results_of(root: Path, *words: str) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in lines_of(bench(root, "-o", "json", *words))}


def by_topic(root: Path, *words: str) -> dict[str, dict[str, Any]]:
    return {each["topic"]: each for each in lines_of(bench(root, "-o", "json", *words))}


# ---- a program in a share


@pytest.mark.usefixtures("native_dir")
def test_a_limit_is_exact(root: Path) -> None:
    (result,) = results_of(root, "fill").values()
    assert 0 <= result["value"] < result["target"]


@pytest.mark.usefixtures("native_dir")
def test_no_byte_is_over_the_limit(root: Path) -> None:
    results = results_of(root, "storm")
    assert [each["value"] for each in results.values()] == [0, 0]
    assert results["bytes over the limit, ever"]["n"] > 0


@pytest.mark.usefixtures("native_dir")
def test_a_call_that_is_not_wrapped_is_the_drivers_own(root: Path) -> None:
    result = results_of(root, "query")["a call that is not wrapped"]
    assert result["value"] == 0
    assert result["method"].startswith("dlsym and cuGetProcAddress give the driver's own address")


# ---- the command line and what is stored


@pytest.mark.usefixtures("native_dir")
def test_a_stored_line_stands_alone(root: Path, tmp_path: Path) -> None:
    done = bench(root, "size", "--results", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "a share's folder, space it takes" in done.stdout
    (path,) = tmp_path.glob("*/size.jsonl")
    first = read_records(path)[0]
    assert path.parent.name == f"{first.date[:10]}-{first.commit}"
    assert first.question == "How much disk space does a share take?"
    assert first.command == f"python -m bench --quick size --results {tmp_path}"
    assert {"machine", "system", "Python", "driver", "processors"} <= first.machine.keys()


def test_an_unknown_bench_is_refused(root: Path) -> None:
    done = bench(root, "nonsense")
    assert done.returncode == 2
    assert "no bench or room nonsense" in done.stderr


def test_results_that_cannot_be_stored_end_the_run_before_it_measures(
    root: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    done = bench(root, "size", "--results", str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: cannot create {tmp_path / 'file'}" in done.stderr


def test_an_unknown_pattern_is_refused(root: Path) -> None:
    done = bench(root, "ceilings", "--patterns", "nonsense")
    assert done.returncode == 1
    assert "--patterns: no nonsense (hint: choose from stream" in done.stderr


def test_the_list_shows_every_bench(root: Path) -> None:
    listed = bench(root, "--list").stdout
    assert all(each.name in listed and each.question in listed for each in BENCHES)


def test_names_and_rooms_are_told_apart() -> None:
    names = [each.name for each in BENCHES]
    assert len(set(names)) == len(names)
    assert not {each.room for each in BENCHES} & set(names)
    assert [each.name for each in select(["launch", "allocate"])] == ["allocate", "launch"]
    assert {each.room for each in select(["mig"])} == {"mig"}
    assert select([])


@pytest.mark.parametrize("each", BENCHES, ids=lambda each: each.name)
def test_the_function_of_a_bench_exists(root: Path, each: Bench) -> None:
    module, _, name = each.function.partition(":")
    source = (root / "bench" / f"{module.replace('.', '/')}.py").read_text()
    assert f"\ndef {name}(" in source


@pytest.mark.parametrize(
    ("changes", "is_strict", "status"),
    [
        ({"value": 1.0}, True, 0),
        ({"value": 3.0}, False, 0),
        ({"value": 3.0}, True, 1),
        ({"value": 3.0, "is_required": True}, False, 1),
    ],
    ids=["met", "missed", "missed, strict", "wrong"],
)
def test_the_exit_status(changes: dict[str, Any], *, is_strict: bool, status: int) -> None:
    done = Run(records=[stored("abc", **changes)])
    assert conclude(done, None, is_strict=is_strict) == status


def test_a_run_that_measured_nothing_fails() -> None:
    done = Run(skipped={"rate": "needs root"})
    assert conclude(done, None, is_strict=False) == 1


# ---- shares of time


@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_a_ceiling_is_measured_by_the_simulators_own_account(root: Path) -> None:
    options = ("--caps", "30", "--kernels", "200us", "--patterns", "stream")

    def figures() -> tuple[float, float, float]:
        found = by_topic(root, "ceilings", *options)
        return (
            found["ceilings"]["value"],
            float(found["ceilings"]["base"]["seen"].removesuffix(" %")),
            abs(found["the ledger's figure"]["value"]),
        )

    # Half a second of a busy computer proves no two points, but a ceiling that is none shows.
    apart, without, beside = undisturbed(
        figures, lambda each: each[0] < 15 and each[1] > 60 and each[2] < 5
    )
    assert apart < 15
    assert without > 60
    assert beside < 5


@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_a_split_is_beside_plain_time_slicing(root: Path) -> None:
    def ratios() -> tuple[float, float]:
        found = by_topic(root, "splits", "--kernels", "200us", "--splits", "20/80")["splits"]
        small, large = (float(word) for word in found["seen"].removesuffix(" %").split())
        one, other = (float(word) for word in found["base"]["seen"].removesuffix(" %").split())
        return large / small, one / other

    split, plain = undisturbed(
        ratios, lambda each: each[0] > 2 and each[1] == pytest.approx(1, rel=0.3)
    )
    assert split > 2
    assert plain == pytest.approx(1, rel=0.3)


@pytest.mark.usefixtures("native_dir")
def test_launches_are_timed_and_their_system_calls_counted(root: Path) -> None:
    found = by_topic(root, "limited-launch")
    assert found["launches"]["n"] > 0
    calls = found["system calls"]
    assert 0 <= calls["value"] <= 100
    assert calls["n"] > 0


# ---- the benches for a real GPU


def on_gpu(root: Path, *words: str) -> list[dict[str, Any]]:
    """The results of the bench for real GPUs, on a simulated one."""
    command = [sys.executable, str(root / "bench" / "gpu" / "run.py"), "--simulated", "--quick"]
    done = subprocess.run(
        [*command, "-o", "json", *words], capture_output=True, text=True, check=False
    )
    return lines_of(done)


def test_without_a_gpu_the_gpu_bench_reports_what_to_do(root: Path) -> None:
    command = [sys.executable, str(root / "bench" / "gpu" / "run.py"), "gpu-turns", "--no-store"]
    done = subprocess.run(
        [*command, "--python", "/bin/false"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    # Where there is a GPU, it is PyTorch that is missing.
    assert "--simulated is a dry run" in done.stderr or "has no PyTorch" in done.stderr


@pytest.mark.thorough
@pytest.mark.usefixtures("native_dir")
def test_the_gpu_benchs_turns_run_without_a_gpu(root: Path) -> None:
    found = on_gpu(root, "gpu-turns")
    assert {each["topic"] for each in found} == {"ceilings", "splits", "throughput"}


@pytest.mark.thorough
@pytest.mark.measured
@pytest.mark.usefixtures("native_dir")
def test_the_gpu_benchs_mps_leaves_the_settings_as_they_are(root: Path) -> None:
    ratio = undisturbed(lambda: side_by_side(root), lambda ratio: ratio > 1.2)
    assert ratio > 1.2


def side_by_side(root: Path) -> float:
    """How much faster MPS makes two programs, by a run of the bench that is right otherwise."""
    found = on_gpu(root, "gpu-mps", "gpu-mig")
    checks = {each["name"]: each for each in found if each["topic"] == "checks"}
    tried = [each for each in checks.values() if each["value"] is not None]
    assert len(tried) == 8
    assert all(each["met"] for each in tried)
    mode = checks["a daemon runs without any change of the GPU's settings"]["seen"]
    assert mode == "compute mode DEFAULT meanwhile"
    (not_tried,) = [each for each in checks.values() if each["value"] is None]
    assert "--change-settings" in not_tried["seen"]
    topics = {each["topic"]: each for each in found}
    assert topics["kills"]["n"] == 1
    return float(topics["side by side"]["value"])


@pytest.mark.parametrize(
    ("killed", "status_after", "verdicts"),
    [
        ({}, 0, [True, True, True]),
        ({"named": frozenset(["mps-0", "other"])}, 0, [False, True, True]),
        ({"named": frozenset(["mps-0"])}, 0, [False, True, True]),
        ({"statuses": (1, 0)}, 0, [True, False, True]),
        ({}, 8, [True, True, False]),
    ],
    ids=["right", "others named", "one named", "one ran on", "none after that"],
)
def test_the_gpu_bench_fails_where_the_end_of_a_daemon_is_not_seen(
    killed: dict[str, Any], status_after: int, verdicts: list[bool]
) -> None:
    right: dict[str, Any] = {
        "back_s": 0.5,
        "named": frozenset(["mps-0", "mps-1"]),
        "statuses": (1, 1),
    }
    rounds = [Killed(**right), Killed(**{**right, **killed})]
    results = list(judge_kills(rounds, status_after))
    assert [each.is_met for each in results] == verdicts
    assert all(each.is_required for each in results)


@pytest.mark.usefixtures("native_dir")
def test_the_gpu_bench_cuts_a_slice_where_it_may_and_puts_mig_back(root: Path) -> None:
    found = on_gpu(root, "gpu-mig", "--change-settings")
    assert [each["met"] for each in found] == [True, True, None]
    assert [each["topic"] for each in found] == ["checks", "checks", "slices"]


# ---- recordings


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


# ---- results


def result(**changes: Any) -> Result:  # noqa: ANN401 - fields of several types
    values: dict[str, Any] = {"name": "n", "unit": "x", "value": 1.0, "target": 2.0, "method": "m"}
    return Result(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"value": 1.0}, "met"),
        ({"value": 3.0}, "MISSED"),
        ({"value": 1.0, "at_least": True}, "MISSED"),
        ({"value": 3.0, "at_least": True}, "met"),
        ({"value": 3.0, "is_required": True}, "WRONG"),
    ],
    ids=["below", "above", "too little", "enough", "wrong"],
)
def test_a_target_is_met_from_its_own_side(changes: dict[str, Any], verdict: str) -> None:
    assert any(f"| {verdict} |" in line for line in tables.markdown([result(**changes)], base=""))


def test_a_column_that_is_empty_everywhere_is_left_out() -> None:
    head, rows = tables.table([result(target=None)], base="bare driver")
    assert (list(head), rows) == (["what", "figure"], [["n", "1 x"]])


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([4, 1, 3, 2], part) for part in (0.0, 0.5, 0.51, 0.99)] == [1, 2, 3, 4]
    summary = summarize([4.0, 1.0, 3.0, 2.0])
    assert (summary.p50, summary.p99, summary.min, summary.max, summary.n) == (2, 4, 1, 4, 4)


def test_what_others_did_meanwhile_is_reported() -> None:
    before = Processors(everybody=10.0, own=1.0, total=100.0)
    after = Processors(everybody=40.0, own=11.0, total=200.0)
    assert after.use_since(before).startswith("10% used by the bench")
    assert after.use_since(before).endswith("20% by others")


# ---- the page


def stored(commit: str, *, date: str = "2026-01-02T00:00:00+00:00", **changes: Any) -> Record:  # noqa: ANN401
    return record(
        result(**changes),
        bench="size",
        room="overhead",
        question="How large?",
        base="bare driver",
        provenance=Provenance(commit=commit, date=date, command="c", machine={"machine": "m"}),
    )


PAGE = """Before.
<!-- bench: overhead -->
what stood here
<!-- /bench -->
<!-- bench: mps -->
of another room
<!-- /bench -->
| it is | <!-- figure: size: the newer -->?<!-- /figure --> | large |
"""


def test_a_page_has_the_newest_results_of_each_bench(tmp_path: Path) -> None:
    old = stored("abc", date="2026-01-01T00:00:00+00:00", name="the older")
    new = stored("abd", name="the newer", summary=summarize([1.0]), base=summarize([2.0]))
    for folder, each in (("z", old), ("a", new)):
        write_records(tmp_path / folder, [each])
    page = report.fill(PAGE, report.newest(tmp_path))
    assert "the older" not in page
    assert "what stood here" not in page
    assert "of another room" in page
    assert "| the newer | 2 / 2 x | 1 / 1 x | 1 x | 0.50 | ≤ 2 x | met |" in page
    assert "measured: 2026-01-02T00:00:00+00:00, commit abd; machine: m" in page
    assert "| it is | <!-- figure: size: the newer -->1 x<!-- /figure --> | large |" in page
    assert report.fill(page, report.newest(tmp_path)) == page


def test_a_page_that_asks_for_an_unknown_figure_is_refused() -> None:
    with pytest.raises(report.NoSuchFigureError, match="'the newer' of size"):
        report.fill(PAGE, [[stored("abc", name="another")]])


def test_the_pages_have_the_stored_results(root: Path) -> None:
    benches = report.newest(root / "bench" / "results")
    for page in report.PAGES:
        assert report.fill(page.read_text(), benches) == page.read_text()


def test_what_is_stored_is_read_back(tmp_path: Path) -> None:
    each = stored("abc", summary=summarize([1.0]), base=summarize([2.0]), beside="b", seen="s")
    write_records(tmp_path, [each])
    assert read_records(tmp_path / "size.jsonl") == [each]


@pytest.mark.parametrize(
    ("commit", "problem"),
    [
        ("HEAD", None),
        ("0123456789ab", "0123456789ab: the repository has no such commit"),
        ("HEAD-dirty", "HEAD-dirty: measured in a modified working tree"),
    ],
    ids=["there", "not there", "modified"],
)
def test_a_commit_that_is_named_exists(commit: str, problem: str | None) -> None:
    found = list(report.problems([[stored(commit)]], exists=lambda name: name == "HEAD"))
    assert found == ([] if problem is None else [problem])


def test_stored_results_can_be_published(root: Path) -> None:
    found = report.newest(root / "bench" / "results")
    assert list(report.problems(found)) == []
