# SPDX-License-Identifier: Apache-2.0
"""`allot cost` and `allot advise` beside a real Prometheus with 14 days of a small cluster."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleet_twin import gpu as fleet_gpu
from fleet_twin import share as fleet_share
from prometheus_server import program, running

from allotment.cost.prices import Prices
from allotment.model.structs import replace
from allotment.web.archive import Archive, ChartLine

Allot = Any  # tests/conftest.py: CommandLine
GI = 1 << 30
STEP_S = 300
DAY_S = 86400
DAYS = 14
A100 = "NVIDIA A100-SXM4-80GB"
COUNTERS = {"gpu_seconds", "held_seconds", "memory_refusals"}


@dataclass(frozen=True)
class Story:
    """A share: its gauges, and what its counters gain in a second."""

    pod: str
    gpu: str
    gauges: Mapping[str, float]
    rates: Mapping[str, float] = field(default_factory=dict)
    namespace: str = "ml"
    seconds: int = (DAYS + 1) * DAY_S
    """It began so long ago."""

    def labels(self) -> str:
        share = f"{self.pod}-{self.gpu}"
        return (
            f'node="n1",namespace="{self.namespace}",pod="{self.pod}",container="main",'
            f'share="{share}",gpu="{self.gpu}",mode="soft",class="normal"'
        )


def soft(
    limit: float, used: float, peak: float, guarantee: float, ceiling: float = 1.0
) -> dict[str, float]:
    return {
        "memory_limit_bytes": limit * GI,
        "memory_used_bytes": used * GI,
        "memory_peak_bytes": peak * GI,
        "compute_guaranteed_ratio": guarantee,
        "compute_ceiling_ratio": ceiling,
    }


WEB = soft(20, 6, 7.2, 0.25)
STORIES = (
    Story("web-6d4b75cb6d-x2x7k", "GPU-a", WEB, {"gpu_seconds": 0.1, "memory_refusals": 0}),
    Story("web-6d4b75cb6d-9k4tz", "GPU-b", WEB, {"gpu_seconds": 0.1, "memory_refusals": 0}),
    Story(
        "train-0",
        "GPU-a",
        soft(10, 9, 10, 0.3, 0.3),
        {"gpu_seconds": 0.3, "held_seconds": 0.5, "memory_refusals": 12 / DAYS / DAY_S},
    ),
    Story("notebook", "GPU-b", soft(16, 0, 0, 0), {"gpu_seconds": 0}, "lab"),
    Story("fresh", "GPU-b", soft(8, 1, 1, 0), {"gpu_seconds": 0}, "lab", seconds=7200),
)


def written(stories: tuple[Story, ...], end: int) -> Iterator[str]:
    """The same as OpenMetrics, metric by metric."""
    times = range(end - (DAYS + 1) * DAY_S, end + 1, STEP_S)
    info = f'model="{A100}",index="0",pci_bus_id="",mode="soft"'
    of_gpus = {
        "info": (info, 1.0),
        "memory_total_bytes": ("", 81.0 * GI),
        "memory_reserved_bytes": ("", 1.0 * GI),
        "price_per_hour": ('currency="EUR"', 2.5),
    }
    for name, (more, number) in of_gpus.items():
        yield f"# TYPE allotment_gpu_{name} gauge\n"
        for gpu in ("GPU-a", "GPU-b"):
            labels = ",".join(filter(None, ('node="n1"', f'gpu="{gpu}"', more)))
            yield from (f"allotment_gpu_{name}{{{labels}}} {number} {at}\n" for at in times)
    names = {name for story in stories for name in (*story.gauges, *story.rates)}
    for name in sorted(names):
        kind, suffix = ("counter", "_total") if name in COUNTERS else ("gauge", "")
        yield f"# TYPE allotment_share_{name} {kind}\n"
        for story in stories:
            head = f"allotment_share_{name}{suffix}{{{story.labels()}}}"
            for at in times:
                age = at - (end - story.seconds)
                if age >= 0 and name in story.gauges:
                    yield f"{head} {story.gauges[name]} {at}\n"
                elif age >= 0 and name in story.rates:
                    yield f"{head} {story.rates[name] * age} {at}\n"
    yield "# EOF\n"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has watched the stories for 15 days."""
    tool = program("promtool")
    folder = tmp_path_factory.mktemp("prometheus")
    end = int(time.time()) // STEP_S * STEP_S
    (folder / "past").write_text("".join(written(STORIES, end)), "utf-8")
    blocks = [tool, "tsdb", "create-blocks-from", "openmetrics", "--quiet"]
    blocks += ["--max-block-duration=504h", str(folder / "past"), str(folder / "data")]
    subprocess.run(blocks, check=True, capture_output=True)
    (folder / "prometheus.yaml").write_text("global: {}\n", "utf-8")
    with running(folder, "--storage.tsdb.retention.time=60d") as server:
        yield server.url


def test_a_cost_adds_up_to_what_is_paid(allot: Allot, prometheus: str) -> None:
    done = allot("cost", "--prometheus", prometheus, "-o", "json")
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    hours, money = bill["total"]["gpu_hours"], bill["total"]["money"]
    assert (bill["currency"], bill["models"]) == ("EUR", [{"model": A100, "gpus": 2}])
    assert hours["paid"] == pytest.approx(2 * 24 * DAYS)
    assert money["paid"] == pytest.approx(2 * 24 * DAYS * 2.5)
    parts = ("unallocated", "unused", "held", "busy")
    assert money["paid"] == pytest.approx(sum(money[part] for part in parts))
    of = {each["namespace"]: each["gpu_hours"] for each in bill["namespaces"]}
    whole = 24 * DAYS
    # Two replicas of 25 % that compute for 10 %, and train with 30 % of the time.
    assert of["ml"]["busy"] == pytest.approx(0.5 * whole, rel=0.01)
    assert of["ml"]["unused"] == pytest.approx(0.3 * whole, rel=0.01)
    # A notebook with a fifth of a GPU that it does not use, and a share of two hours.
    assert of["lab"]["paid"] == pytest.approx(0.2 * whole + 2 * 0.1, rel=0.01)
    assert of["lab"]["held"] == pytest.approx(2 / 80, rel=0.1)
    words = ("-n", "ml", "--price", "a100=10", "-o", "json")
    (of_ml,) = json.loads(allot("cost", "--prometheus", prometheus, *words).stdout)["namespaces"]
    assert of_ml["money"]["paid"] == pytest.approx(0.8 * whole * 10)


def test_the_charts_of_the_page_have_days_of_it(prometheus: str) -> None:
    share = replace(fleet_share(1, "GPU-a"), namespace="ml", pod="train-0", container="main")
    gpu = replace(fleet_gpu("n1", 0, (share,)), uuid="GPU-a")
    lines = [ChartLine("train", gpu, share)]

    async def values(figure: str, seconds: int) -> list[float]:
        archive = Archive(prometheus, Prices(), clock=lambda: time.time() - STEP_S)
        (found,) = (await archive.lines(lines, figure, seconds)).values
        return [value for value in found if value is not None]

    for seconds in (6 * 3600, 7 * DAY_S):
        memory = asyncio.run(values("memory", seconds))
        assert len(memory) > 200
        assert set(memory) == {9.0 * GI}
    times = asyncio.run(values("time", 7 * DAY_S))
    assert times[-1] == pytest.approx(0.3, rel=0.01)


def test_the_advice_follows_from_the_peaks(allot: Allot, prometheus: str) -> None:
    done = allot("advise", "--prometheus", prometheus, "-o", "json")
    assert done.returncode == 0, done.stderr
    found = {each["workload"]: each for each in json.loads(done.stdout)["workloads"]}
    assert list(found) == ["train", "notebook", "web", "fresh"]
    web, train = found["web"], found["train"]
    # 7.2Gi and a fifth are 8.64Gi: 8.75Gi in steps of 256Mi; a tenth of the time and a fifth: 15 %.
    assert (web["verdict"], web["devices"]) == ("less", 2)
    assert (web["memory_limit_bytes"], web["memory_peak_bytes"]) == (20 * GI, int(7.2 * GI))
    assert (web["advised_memory_bytes"], web["advised_guarantee_percent"]) == (8.75 * GI, 15)
    assert web["freed_bytes"] == 2 * 11.25 * GI
    assert web["saved_a_month"] == pytest.approx(2 * (0.25 - 0.15) * 2.5 * 730)
    assert web["watched_seconds"] == DAYS * DAY_S
    # Refused memory, and held back at its ceiling.
    assert (train["verdict"], train["refusals"]) == ("more", 12)
    assert (train["advised_memory_bytes"], train["advised_ceiling_percent"]) == (12.5 * GI, 40)
    assert (found["notebook"]["verdict"], found["notebook"]["freed_bytes"]) == ("remove", 16 * GI)
    assert (found["fresh"]["verdict"], found["fresh"]["advised_memory_bytes"]) == ("wait", None)
    table = allot("advise", "--prometheus", prometheus, "--namespace", "ml").stdout
    assert "ml/web/main" in table
    assert "lab/" not in table


def test_a_model_that_is_not_there_is_named(allot: Allot, prometheus: str) -> None:
    done = allot("cost", "--prometheus", prometheus, "--price", "h100=4")
    assert done.returncode == 2
    assert f"the models are: {A100} (2)" in done.stderr


@pytest.mark.usefixtures("native_dir")
def test_without_prometheus_the_ledgers_of_this_machine_count(allot: Allot, tmp_path: Path) -> None:
    where = ("--simulated", "a100-80gb")
    words = ("--name", "web", "--memory", "25%", "--compute", "50", "--cdi-dir", tmp_path)
    made = allot("cdi", "create", *where, *words)
    assert made.returncode == 0, made.stderr
    done = allot("cost", *where, "--price", "a100=2", "--currency", "EUR", "-o", "json")
    assert done.returncode == 0, done.stderr
    bill = json.loads(done.stdout)
    assert (bill["begin"], bill["total"]["money"]["paid"]) == (None, 2)
    assert bill["unallocated"]["money"]["unallocated"] == 1
    assert [each["money"]["unused"] for each in bill["namespaces"]] == [1]
    assert "without --prometheus there is no past" in done.stderr
    waits = allot("advise", *where)
    assert "watched for too short a time" in waits.stdout
    (found,) = json.loads(allot("advise", *where, "--least", "0", "-o", "json").stdout)["workloads"]
    assert (found["workload"], found["verdict"]) == ("web", "remove")
    assert "--days needs --prometheus" in allot("advise", "--days", "3").stderr
