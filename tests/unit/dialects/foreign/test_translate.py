# SPDX-License-Identifier: Apache-2.0
"""Which dialect a pod is in: one, and no two."""

from collections.abc import Sequence

import pytest

from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.deepomatic import DeepomaticDialect, DeepomaticSettings
from allotment.dialects.foreign.hami import HamiDialect, HamiSettings
from allotment.dialects.foreign.nvidia import NvidiaForeign, NvidiaSettings
from allotment.dialects.foreign.translate import applied, translate, wanted_of, written
from allotment.dialects.foreign.volcano import (
    VolcanoDialect,
    VolcanoGpuShareDialect,
    VolcanoSettings,
)
from allotment.model.compute import Compute
from allotment.model.errors import UsageError
from allotment.model.pods import ForeignContainer, ForeignPod
from allotment.model.structs import replace

DIALECTS: Sequence[ForeignDialect] = (
    HamiDialect(),
    VolcanoDialect(),
    VolcanoGpuShareDialect(),
    DeepomaticDialect(DeepomaticSettings(containers_per_gpu=4)),
    NvidiaForeign(),
)
GPU = "nvidia.com/gpu"


def pod(*limits: dict[str, str], **annotations: str) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        annotations={f"allotment.dev/{key}": text for key, text in annotations.items()},
        containers=tuple(
            ForeignContainer(name=f"c{place}", limits=its) for place, its in enumerate(limits)
        ),
    )


@pytest.mark.parametrize(
    ("subject", "dialect", "containers"),
    [
        (pod({GPU: "1", "nvidia.com/gpumem": "10"}, {GPU: "1"}, {}), "hami", ["c0", "c1"]),
        (pod({}, {"volcano.sh/vgpu-number": "1"}), "volcano", ["c1"]),
        (pod({"volcano.sh/gpu-memory": "10"}), "volcano-gpushare", ["c0"]),
        (pod({"deepomatic.com/shared-gpu": "1"}), "deepomatic", ["c0"]),
        (pod({GPU: "1"}, {"volcano.sh/vgpu-number": "1"}), "volcano", ["c1"]),
    ],
)
def test_the_dialect_is_known_by_what_is_written(
    subject: ForeignPod, dialect: str, containers: list[str]
) -> None:
    found = translate(subject, DIALECTS)
    assert found is not None
    assert found.dialect == dialect
    assert [each.container for each in found.containers] == containers


@pytest.mark.parametrize(
    "subject",
    [
        pod({}),
        pod({"cpu": "1"}),
        pod({GPU: "1"}),
        pod({"nvidia.com/gpu.shared": "2"}),
        pod({"nvidia.com/mig-1g.5gb": "1", GPU: "1"}),
        pod({"allotment.dev/gpu": "1"}, {GPU: "1"}),
        pod({"volcano.sh/vgpu-number": "0"}),
        pod({"volcano.sh/vgpu-number": "1"}, dialect="volcano"),
    ],
)
def test_nothing_to_translate(subject: ForeignPod) -> None:
    assert translate(subject, DIALECTS) is None


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (
            pod({"nvidia.com/gpumem": "10"}, {"volcano.sh/vgpu-number": "1"}),
            "in two ways: HAMi's nvidia.com/gpumem and Volcano's volcano.sh/vgpu-number",
        ),
        (
            pod({"volcano.sh/vgpu-number": "1", "volcano.sh/gpu-memory": "1"}),
            "Volcano's volcano.sh/vgpu-number and Volcano's (GPU sharing) volcano.sh/gpu-memory",
        ),
        (
            pod({"allotment.dev/gpu": "1"}, {"nvidia.com/gpumem": "10"}),
            "Allotment's allotment.dev/gpu and HAMi's nvidia.com/gpumem",
        ),
        (
            pod({GPU: "1", "volcano.sh/vgpu-number": "1"}),
            "in two ways: Volcano's volcano.sh/vgpu-number and NVIDIA's nvidia.com/gpu",
        ),
        (
            pod({GPU: "1", "allotment.dev/gpu": "1"}),
            "container 'c0': it asks for GPUs in two ways: Allotment's allotment.dev/gpu and",
        ),
    ],
)
def test_two_dialects_are_refused_with_both_names(subject: ForeignPod, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        translate(subject, DIALECTS)
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint
    assert refused.value.hint.startswith("keep the keys of ")


def test_each_dialect_has_its_own_name() -> None:
    assert len({each.name for each in DIALECTS}) == len(DIALECTS)


# ---- NVIDIA's ------------------------------------------------------------------------------------


def test_whole_gpus_are_translated_where_the_settings_say_so() -> None:
    dialect = NvidiaForeign(NvidiaSettings(whole="share"))
    found = translate(pod({GPU: "2"}, {"nvidia.com/gpu.shared": "1"}), (dialect,))
    assert found is not None
    (one,) = found.containers
    assert one.request.count == 2
    assert one.request.memory.part == 1
    assert one.request.compute == Compute(10_000, 10_000, is_governed=True)
    assert one.removes == (GPU,)


def test_replicas_are_translated_where_the_settings_say_so() -> None:
    dialect = NvidiaForeign(NvidiaSettings(replicas=4))
    subject = pod({"nvidia.com/gpu.shared": "1"}, {GPU: "1"})
    found = translate(subject, (dialect,))
    assert found is not None
    written(subject, found)
    (one,) = found.containers
    assert one.request.compute == Compute(2500, 10_000, is_governed=True)
    assert one.request.memory.of(100) == 25


def test_mig_is_left_unless_no_node_has_it() -> None:
    subject = pod({"nvidia.com/mig-1g.5gb": "1"})
    offers = NvidiaForeign(NvidiaSettings(offered=frozenset({"nvidia.com/mig-1g.5gb"})))
    assert translate(subject, (offers,)) is None
    lacks = NvidiaForeign(NvidiaSettings(offered=frozenset({"nvidia.com/mig-3g.20gb"})))
    with pytest.raises(UsageError, match=r"container 'c0': .* no node of this cluster") as refused:
        translate(subject, (lacks,))
    assert "nvidia.com/mig-3g.20gb" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("resource", "profile"),
    [
        ("1g.5gb", "1g.5gb"),
        ("1g.5gb.me", "1g.5gb+me"),
        ("1g.24gb.me.all", "1g.24gb+me.all"),
        ("2g.48gb.gfx", "2g.48gb+gfx"),
        ("1g.24gb-me", "1g.24gb-me"),
    ],
)
def test_mig_is_translated_to_slices_where_the_settings_say_so(resource: str, profile: str) -> None:
    dialect = NvidiaForeign(NvidiaSettings(mig="slices", offered=frozenset()))
    subject = pod({f"nvidia.com/mig-{resource}": "2"}, {GPU: "1"})
    found = translate(subject, (dialect,))
    assert found is not None
    (one,) = found.containers
    assert one.removes == (f"nvidia.com/mig-{resource}",)
    changes = written(subject, found)
    # A profile says how much memory it is.
    assert changes.limits == {"c0": {f"nvidia.com/mig-{resource}": None, "allotment.dev/gpu": "2"}}
    (wanted,) = wanted_of(applied(subject, changes))
    assert wanted.request == one.request
    its = wanted.request
    assert (its.mode, its.other_modes, its.mig_profile, its.count) == ("mig", (), profile, 2)


def test_a_container_has_slices_of_one_profile() -> None:
    dialect = NvidiaForeign(NvidiaSettings(mig="slices"))
    with pytest.raises(UsageError, match="means a part of a GPU here") as refused:
        translate(pod({"nvidia.com/mig-1g.5gb": "1", "nvidia.com/mig-2g.10gb": "1"}), (dialect,))
    assert refused.value.hint


def test_a_container_has_its_gpus_by_one_resource() -> None:
    dialect = NvidiaForeign(NvidiaSettings(whole="share"))
    with pytest.raises(UsageError, match="means a part of a GPU here"):
        translate(pod({GPU: "1", "nvidia.com/mig-1g.5gb": "1"}), (dialect,))


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "100000"])
def test_a_count_that_is_none_is_refused(text: str) -> None:
    dialect = NvidiaForeign(NvidiaSettings(whole="share"))
    with pytest.raises(UsageError, match=r"container 'c0': nvidia.com/gpu"):
        translate(pod({GPU: text}), (dialect,))


# ---- Deepomatic's --------------------------------------------------------------------------------


def test_a_slot_is_a_part_of_a_gpu() -> None:
    dialect = DeepomaticDialect(DeepomaticSettings(containers_per_gpu=4))
    subject = pod({"deepomatic.com/shared-gpu": "1"}, {"deepomatic.com/shared-gpu": "3"})
    found = translate(subject, (dialect,))
    assert found is not None
    written(subject, found)
    one, three = (each.request for each in found.containers)
    assert (one.memory.of(400), one.compute.guarantee, one.compute.ceiling) == (100, 2500, 10_000)
    assert (three.memory.of(400), three.compute.guarantee, three.count) == (300, 7500, 1)
    with pytest.raises(UsageError, match="is 5, and a GPU has 4 of them"):
        translate(pod({"deepomatic.com/shared-gpu": "5"}), (dialect,))


def test_a_slot_without_a_size_is_left_to_the_kubelet() -> None:
    dialect = DeepomaticDialect()
    assert translate(pod({"deepomatic.com/shared-gpu": "1"}), (dialect,)) is None
    beside = pod({"deepomatic.com/shared-gpu": "1"}, {"volcano.sh/vgpu-number": "1"})
    found = translate(beside, (VolcanoDialect(), dialect))
    assert found is not None
    assert [(found.dialect, each.container) for each in found.containers] == [("volcano", "c1")]
    both = pod({"deepomatic.com/shared-gpu": "1", "volcano.sh/vgpu-number": "1"})
    with pytest.raises(UsageError, match="in two ways"):
        translate(both, (VolcanoDialect(), dialect))


def test_limits_and_requests_that_differ_are_refused() -> None:
    name = "deepomatic.com/shared-gpu"
    asking = ForeignContainer(name="c0", limits={name: "1"}, requests={name: "2"})
    with pytest.raises(UsageError, match="is '1' in limits and '2' in requests"):
        translate(replace(pod(), containers=(asking,)), DIALECTS)


@pytest.mark.parametrize(
    ("dialect", "resource"),
    [
        (NvidiaForeign(NvidiaSettings(gpu="example.com/gpu", whole="share")), "example.com/gpu"),
        (NvidiaForeign(NvidiaSettings(shared="example.com/s", replicas=2)), "example.com/s"),
        (
            DeepomaticDialect(DeepomaticSettings(resource="example.com/d", containers_per_gpu=2)),
            "example.com/d",
        ),
        (VolcanoDialect(VolcanoSettings(resource_memory_name="example.com/m")), "example.com/m"),
        (HamiDialect(HamiSettings(resource_core_name="example.com/c")), "example.com/c"),
    ],
)
def test_names_may_be_others(dialect: ForeignDialect, resource: str) -> None:
    found = translate(pod({resource: "1"}), (dialect,))
    assert found is not None
    assert found.containers[0].removes == (resource,)
