# SPDX-License-Identifier: Apache-2.0
"""The metrics of use: bounds, formats, and the names of other exporters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_open
from prometheus_client.parser import text_string_to_metric_families as parsed
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from allotment.metrics.aliases import ALIASES
from allotment.metrics.use import (
    GPU_FIGURES,
    INFO_LABELS,
    SHARE_FIGURES,
    SHARE_LABELS,
    WAITS,
    GpuFigure,
    GpuUse,
    ShareFigure,
    ShareUse,
    Use,
    UseMetrics,
    bounded,
    families,
    write,
)
from allotment.metrics.users import (
    HOLDER_LABELS,
    OUTSIDE_FIGURES,
    OUTSIDE_LABELS,
    PROCESS_FIGURES,
    PROCESS_LABELS,
    GpuHolder,
    GpuProcess,
    OutsideUse,
    UserFigure,
)
from allotment.model.structs import replace

GI = 1 << 30
GPUS = ("GPU-a", "GPU-b")
AMOUNTS = st.none() | st.integers(0, 1 << 63)
RATIOS = st.none() | st.floats(0, 50)


def gpu(number: int = 0, **more: Any) -> GpuUse:  # noqa: ANN401 - its fields
    made = GpuUse(
        uuid=GPUS[number],
        index=number,
        model="NVIDIA A100-SXM4-80GB",
        pci_bus_id=f"00000000:0{number}:00.0",
        memory_total=80 * GI,
        memory_reserved=GI,
        memory_used=9 * GI,
        memory_allocated=40 * GI,
        guaranteed=0.5,
        shares=2,
        answers=True,
        utilization=0.25,
        temperature_c=40,
        power_mw=90_500,
        energy_mj=7_000,
        sm_clock_mhz=1410,
        slices={"1g.10gb": 2},
    )
    return replace(made, **more)


def share(number: int = 0, **more: Any) -> ShareUse:  # noqa: ANN401 - its fields
    made = ShareUse(
        namespace="ml",
        pod=f"train-{number}",
        container="main",
        share=f"{number:012x}",
        gpu=GPUS[0],
        device=GPUS[0],
        mode="soft",
        kind="normal",
        memory_used=4 * GI,
        memory_limit=20 * GI,
        memory_peak=5 * GI,
        memory_context=GI,
        refusals=3,
        guarantee=0.25,
        ceiling=1.0,
        utilization=0.125,
        gpu_ns=1_500_000_000,
        held_ns=2_000_000_000,
        waits=(1, 2, 0, 4),
        first_wait_ns=100_000,
        wait_ns=3_000_000,
        is_enforced=True,
    )
    return replace(made, **more)


def use(
    gpus: Iterable[GpuUse] = (),
    shares: Iterable[ShareUse] = (),
    **more: Any,  # noqa: ANN401 - its fields
) -> Use:
    made = Use(node="n1", gpus=tuple(gpus), shares=tuple(shares), are_shares_read=True)
    return replace(made, **more)


def page(one: Use, *aliases: str, is_open: bool = False) -> str:
    metrics = UseMetrics(lambda: one, lambda: [ALIASES[name] for name in aliases])
    return metrics.text(is_open).decode()


def samples(one: Use, *aliases: str) -> list[Sample]:
    families = parsed(page(one, *aliases))
    return [sample for family in families for sample in family.samples]


def value(found: Iterable[Sample], name: str, **labels: str) -> float:
    (sample,) = (
        each for each in found if each.name == name and labels.items() <= each.labels.items()
    )
    return float(sample.value)


@st.composite
def uses(draw: st.DrawFn) -> Use:
    gpus = [
        gpu(number, memory_used=draw(AMOUNTS), utilization=draw(st.none() | st.floats(0, 1)))
        for number in range(2)
    ]
    shares = [
        share(
            number,
            gpu=draw(st.sampled_from((*GPUS, "GPU-gone"))),
            memory_used=draw(AMOUNTS),
            utilization=draw(RATIOS),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    outside = [
        OutsideUse(
            gpu=draw(st.sampled_from((*GPUS, "GPU-gone"))),
            pod=f"other-{number}",
            namespace="ml",
            memory_used=draw(AMOUNTS),
            utilization=draw(RATIOS),
            processes=1,
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    users: list[ShareUse | OutsideUse] = [*shares, *shares, *outside]
    processes = [
        GpuProcess(
            pid=number,
            gpu=whose.gpu,
            device="" if getattr(whose, "device", whose.gpu) == whose.gpu else GPUS[0],
            namespace=whose.namespace,
            pod=whose.pod,
            container=whose.container,
            share=whose.share if isinstance(whose, ShareUse) else "",
            memory_used=draw(AMOUNTS),
            utilization=draw(RATIOS),
        )
        for number, whose in enumerate(users)
    ]
    return use(gpus, shares, outside=tuple(outside), processes=tuple(processes))


@given(uses())
def test_the_shares_of_a_gpu_have_at_most_what_it_has(one: Use) -> None:
    found = bounded(one)
    assert [each.uuid for each in found.gpus] == [each.uuid for each in one.gpus]
    assert Counter(each.share for each in found.shares) == Counter(
        each.share for each in one.shares
    )
    assert Counter(each.pid for each in found.processes or ()) == Counter(
        each.pid for each in one.processes or ()
    )
    for each in found.gpus:
        apart = [one for one in found.outside if one.gpu == each.uuid]
        of_gpu: list[ShareUse | OutsideUse] = [*apart]
        of_gpu += [one for one in found.shares if one.gpu == each.uuid]
        used = sum(user.memory_used or 0 for user in of_gpu)
        busy = sum(user.utilization or 0 for user in of_gpu)
        assert used <= each.memory_total
        assert busy <= 1
        if each.memory_used is not None:
            assert used <= each.memory_used
        if each.utilization is not None:
            assert busy <= each.utilization <= 1
    users: list[ShareUse | OutsideUse] = [*found.shares, *found.outside]
    for user in users:
        own = getattr(user, "share", "")
        some = [
            each
            for each in found.processes or ()
            if (each.share, each.pod, each.gpu) == (own, user.pod, user.gpu)
        ]
        assert sum(each.memory_used or 0 for each in some) <= (user.memory_used or 0)
        assert sum(each.utilization or 0 for each in some) <= (user.utilization or 0) + 1e-9


def test_a_forged_ledger_takes_nothing_from_the_drivers_figures_of_others() -> None:
    other = OutsideUse(gpu=GPUS[0], pod="alone", namespace="ml", memory_used=30 * GI, processes=1)
    forged = use([gpu(memory_outside=0)], [share(memory_used=79 * GI)], outside=(other,))
    found = bounded(forged)
    assert found.outside == (other,)
    assert found.shares[0].memory_used == 50 * GI
    assert (found.gpus[0].memory_used, found.gpus[0].memory_outside) == (80 * GI, 30 * GI)


def test_use_within_the_gpu_stays_as_it_is() -> None:
    one = use([gpu()], [share(0), share(1)])
    assert bounded(one) == one


def test_both_formats_can_be_read_and_no_series_is_there_twice() -> None:
    again = share(2, pod="train-1", memory_used=GI)  # the one before it is ending
    claims = [
        share(number, claim="big", request=f"r{number}", container="", pod="solo")
        for number in (3, 4)
    ]
    one = use(
        [gpu(0), gpu(1, answers=False, memory_used=None)], [share(0), share(1), again, *claims]
    )
    for text, read in (
        (page(one, *ALIASES), parsed),
        (page(one, *ALIASES, is_open=True), parsed_open),
    ):
        found = [each for family in read(text) for each in family.samples]
        series = Counter((each.name, tuple(sorted(each.labels.items()))) for each in found)
        assert [key for key, count in series.items() if count > 1] == []
        for each in found:
            if each.name.startswith("allotment_share_"):
                assert each.labels.keys() <= {*SHARE_LABELS, "le"}
    assert value(found, "allotment_share_gpu_seconds_total", pod="train-0") == 1.5
    assert value(found, "hami_vgpu_memory_used_bytes", pod="train-1") == GI
    assert value(found, "allotment_gpu_answers", gpu="GPU-b") == 0
    assert value(found, "allotment_gpu_clock_hertz", gpu="GPU-a", clock="sm") == 1.41e9
    assert "allotment_gpu_memory_used_bytes" not in {
        each.name for each in found if each.labels.get("gpu") == "GPU-b"
    }


def test_the_text_is_the_librarys() -> None:
    odd = share(1, pod='a"b\\c\nd', share="1", gpu_ns=1, memory_used=1 << 60)
    one = use([gpu(0), gpu(1)], [share(0), odd])

    class Page(Collector):
        def collect(self) -> Iterator[Metric]:
            return families(one, ALIASES.values())

    for is_open, encode in ((False, generate_latest), (True, openmetrics)):
        text = write(families(one, ALIASES.values()), is_open=is_open)
        assert text == encode(Page()).decode()


def test_the_text_of_a_reading_is_made_once() -> None:
    """Any pod may scrape without a pause: that must not keep the agent from its work."""
    made: list[Use] = []
    current = use([gpu()])

    def alias(one: Use) -> Iterator[Metric]:
        made.append(one)
        yield from ()

    metrics = UseMetrics(lambda: current, lambda: [alias])
    texts = [metrics.text(is_open) for is_open in (False, True, False, True)]
    assert len(made) == 2
    assert texts[:2] == texts[2:]
    current = use([gpu(memory_used=GI)])
    assert metrics.text(False) != texts[0]
    assert len(made) == 3


def test_waits_are_a_histogram_in_seconds() -> None:
    found = samples(use([gpu()], [share()]))
    name = f"allotment_share_{WAITS}"
    buckets = {each.labels["le"]: each.value for each in found if each.name == f"{name}_bucket"}
    assert buckets == {"0.0001": 1, "0.0002": 3, "0.0004": 3, "+Inf": 7}
    assert value(found, f"{name}_count") == 7
    assert value(found, f"{name}_sum") == 0.003


def test_what_is_not_measured_has_no_series() -> None:
    found = samples(use([gpu()], [share(gpu_ns=None, waits=(), memory_used=None)]))
    names = {each.name for each in found}
    assert not names & {
        "allotment_share_gpu_seconds_total",
        "allotment_share_memory_used_bytes",
        f"allotment_share_{WAITS}_count",
    }


def test_a_gpu_has_its_price_with_the_currency() -> None:
    found = samples(use([gpu(price=2.5, currency="EUR"), gpu(1)]))
    name = "allotment_gpu_price_per_hour"
    assert [each.labels["gpu"] for each in found if each.name == name] == [GPUS[0]]
    assert value(found, name, currency="EUR") == 2.5
    (bare,) = (each for each in samples(use([gpu(price=2.5)])) if each.name == name)
    assert set(bare.labels) == {"node", "gpu"}


def test_a_claim_has_its_name_in_place_of_a_pods() -> None:
    claimed = share(pod="", container="", claim="big-gpu", request="gpu")
    (sample,) = (
        each
        for each in samples(use([gpu()], [claimed]))
        if each.name == "allotment_share_memory_used_bytes"
    )
    assert sample.labels == {
        "node": "n1", "namespace": "ml", "claim": "big-gpu", "request": "gpu",
        "share": "000000000000", "gpu": "GPU-a", "mode": "soft",
        "class": "normal",
    }  # fmt: skip


def test_a_mig_device_has_its_uuid_beside_its_gpus() -> None:
    found = samples(use([gpu()], [share(device="MIG-1", mode="mig")]))
    assert value(found, "allotment_share_memory_used_bytes", gpu="GPU-a", device="MIG-1") == 4 * GI


# Of Grafana's dashboard 12239, "NVIDIA DCGM Exporter Dashboard". PIPE_TENSOR_ACTIVE is left out.
DASHBOARD_12239 = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_FB_USED",
)


def test_dcgms_dashboard_finds_each_gpu_once() -> None:
    found = samples(use([gpu(0), gpu(1)], [share(0), share(1)]), "dcgm")
    for name in DASHBOARD_12239:
        series = [each for each in found if each.name == name]
        assert [each.labels["gpu"] for each in series] == ["0", "1"], name
        assert all("pod" not in each.labels for each in series)
    assert value(found, "DCGM_FI_DEV_FB_USED", gpu="0") == 9 * 1024
    assert value(found, "DCGM_FI_DEV_FB_FREE", gpu="0") == 70 * 1024
    assert value(found, "DCGM_FI_DEV_POWER_USAGE", gpu="0") == 90.5
    assert value(found, "DCGM_FI_DEV_GPU_UTIL", UUID="GPU-a", device="nvidia0") == 25
    assert value(found, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", gpu="0") == 7000


def test_dcgms_series_name_the_pod_of_a_whole_gpu() -> None:
    found = samples(use([gpu()], [share(mode="exclusive")]), "dcgm")
    labels = {"namespace": "ml", "pod": "train-0", "container": "main"}
    assert value(found, "DCGM_FI_DEV_GPU_TEMP", **labels) == 40


def test_dcgms_series_name_the_pod_that_another_plugin_gave_the_gpu() -> None:
    alone = GpuHolder(
        gpu=GPUS[0], namespace="ml", pod="old", container="main", resource="nvidia.com/gpu"
    )
    labels = {"namespace": "ml", "pod": "old", "container": "main"}
    found = samples(use([gpu()], holders=(alone,)), "dcgm")
    assert value(found, "DCGM_FI_DEV_GPU_TEMP", **labels) == 40
    sharers = tuple(replace(alone, pod=f"p{number}", replica=str(number)) for number in range(2))
    for holders in (sharers, sharers[:1]):
        (sample,) = (
            each
            for each in samples(use([gpu()], holders=holders), "dcgm")
            if each.name == "DCGM_FI_DEV_GPU_TEMP"
        )
        assert "pod" not in sample.labels


def test_processes_have_series_where_asked_for() -> None:
    process = GpuProcess(pid=7, gpu=GPUS[0], share="000000000000", namespace="ml", pod="train-0",
                         container="main", memory_used=GI, gpu_ns=2_000_000_000)  # fmt: skip
    names = {each.name for each in samples(use([gpu()], [share()]))}
    assert not any("process_" in name for name in names)
    found = samples(use([gpu()], [share()], processes=(process,), processes_left_out=3))
    assert value(found, "allotment_process_memory_used_bytes", pid="7", pod="train-0") == GI
    assert value(found, "allotment_process_gpu_seconds_total", pid="7", gpu=GPUS[0]) == 2
    assert value(found, "allotment_use_processes_left_out") == 3


def test_hamis_names_have_its_labels_and_units() -> None:
    two = [share(0), share(1, pod="train-0", container="side")]
    found = samples(use([gpu()], two), "hami")
    of_gpu = {"node": "n1", "device_index": "0", "device_uuid": "GPU-a", "zone": "vGPU"}
    assert value(found, "hami_host_gpu_utilization_ratio", **of_gpu) == 25
    assert value(found, "hami_gpu_core_allocated_ratio", **of_gpu) == 50
    assert value(found, "hami_gpu_memory_limit_bytes", **of_gpu) == 79 * GI
    assert value(found, "hami_node_gpu_memory_allocated_ratio", **of_gpu) == 40 / 79
    pod = {"namespace": "ml", "pod": "train-0", "device_uuid": "GPU-a"}
    side = {**pod, "container": "side", "vdevice_index": "0"}
    assert value(found, "hami_vgpu_memory_used_bytes", **side) == 4 * GI
    assert value(found, "hami_vgpu_memory_buffer_bytes", **side) == 3 * GI
    assert value(found, "hami_container_device_utilization_ratio", **side) == 12.5
    assert value(found, "hami_vgpu_core_allocated_ratio", **pod, container_index="1") == 25


def test_without_the_setting_there_are_no_other_names() -> None:
    names = {each.name for each in samples(use([gpu()], [share()]))}
    assert all(name.startswith("allotment_") for name in names)


def rows(text: str, prefix: str) -> Iterator[tuple[str, list[str]]]:
    for name, labels in re.findall(rf"^\| `{prefix}(\w+)` \|([^|]*)\|", text, re.MULTILINE):
        yield name, re.findall(r"`(\w+)`", labels)


def written(figure: ShareFigure | GpuFigure | UserFigure) -> str:
    return figure.name + ("_total" if figure.kind == "counter" else "")


def test_the_reference_has_every_metric_of_use(root: Path) -> None:
    text = (root / "docs" / "reference" / "metrics.md").read_text("utf-8")
    shares: dict[str, list[str]] = {written(each): [] for each in SHARE_FIGURES}
    assert dict(rows(text, "allotment_share_")) == {**shares, WAITS: []}
    gpus = {written(each): [each.label] if each.label else [] for each in GPU_FIGURES}
    facts = list(INFO_LABELS[2:])
    pods = list(HOLDER_LABELS)
    assert dict(rows(text, "allotment_gpu_")) == {"info": facts, "pod_info": pods, **gpus}
    outside = {written(each): list(OUTSIDE_LABELS) for each in OUTSIDE_FIGURES}
    assert dict(rows(text, "allotment_outside_")) == outside
    processes = {written(each): list(PROCESS_LABELS) for each in PROCESS_FIGURES}
    assert dict(rows(text, "allotment_process_")) == processes
    for label in SHARE_LABELS:
        assert re.search(rf"^\| `{label}` \|", text, re.MULTILINE), label


@pytest.mark.parametrize("alias", ALIASES)
def test_the_reference_has_every_alias(root: Path, alias: str) -> None:
    text = (root / "docs" / "reference" / "metrics.md").read_text("utf-8")
    full = gpu(
        memory_temperature_c=1, memory_clock_mhz=1, pcie_replays=1, memory_utilization=0.5,
        ecc_corrected=0, ecc_uncorrected=0, is_repair_failed=False,
    )  # fmt: skip
    names = {family.name for family in ALIASES[alias](use([full], [share()]))}
    listed = set(re.findall(rf"`({'DCGM_FI' if alias == 'dcgm' else 'hami'}_\w+)`", text))
    assert listed == names
