# SPDX-License-Identifier: Apache-2.0
"""HAMi's resources and annotations: what they come to, what is refused, and its records."""

from fractions import Fraction

import pytest
from foreign_pods import load_settings, taken
from hypothesis import given
from hypothesis import strategies as st

from allotment.dialects.foreign.adoption import node_view
from allotment.dialects.foreign.base import DIALECT, Translation
from allotment.dialects.foreign.hami import ANNOTATIONS, HamiDialect, HamiSettings
from allotment.dialects.foreign.translate import applied, wanted_of, written
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.compute import WHOLE, Compute, ComputeClass
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod, PodUid
from allotment.model.requests import DeviceWeights, ModelRule, Request
from allotment.model.structs import replace

MI = 1 << 20
NAMES = {
    "gpu": "nvidia.com/gpu",
    "mem": "nvidia.com/gpumem",
    "part": "nvidia.com/gpumem-percentage",
    "cores": "nvidia.com/gpucores",
    "priority": "nvidia.com/priority",
}
INVENTORY = NodeInventory(
    name="node-1",
    devices=tuple(
        NodeDevice(uuid=f"GPU-{number}", model="Tesla T4", memory_bytes=15 << 30)
        for number in range(1, 5)
    ),
)
NODE = node_view(INVENTORY)


def container(name: str = "train", /, **amounts: object) -> ForeignContainer:
    limits = {NAMES[key]: str(value) for key, value in amounts.items()}
    return ForeignContainer(name=name, limits=limits)


def pod(*containers: ForeignContainer, **annotations: str) -> ForeignPod:
    return ForeignPod(
        namespace="team",
        name="train-0",
        containers=containers,
        annotations={
            next(each for each in ANNOTATIONS if each.endswith(f"/{key.replace('_', '-')}")): text
            for key, text in annotations.items()
        },
    )


def translate(subject: ForeignPod, **settings: object) -> Translation:
    dialect = HamiDialect(HamiSettings(**settings))  # type: ignore[arg-type]
    assert dialect.recognises(subject)
    found = dialect.translate(subject)
    written(subject, found)
    return found


def request(subject: ForeignPod, **settings: object) -> Request:
    (found,) = translate(subject, **settings).containers
    return found.request


def test_amounts_are_of_each_gpu_and_they_go() -> None:
    (found,) = translate(pod(container(gpu=2, mem=3000, cores=30))).containers
    assert found.container == "train"
    assert found.request.count == 2
    assert found.request.memory.size_bytes == 3000 * MI
    assert found.request.compute == Compute(3000, WHOLE, is_governed=True)
    assert found.removes == ("nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores")


@pytest.mark.parametrize(
    ("amounts", "part", "compute"),
    [
        ({"gpu": 1, "part": 50}, Fraction(1, 2), Compute()),
        ({"gpu": 1, "part": 33, "cores": 0}, Fraction(33, 100), Compute()),
        ({"gpu": 1, "cores": 20}, Fraction(1), Compute(2000, WHOLE, is_governed=True)),
        ({"cores": 20, "part": 7}, Fraction(7, 100), Compute(2000, WHOLE, is_governed=True)),
        ({"gpu": 1, "mem": 0, "cores": 1}, Fraction(1), Compute(100, WHOLE, is_governed=True)),
    ],
    ids=str,
)
def test_parts_of_memory(amounts: dict[str, int], part: Fraction, compute: Compute) -> None:
    found = request(pod(container(**amounts)))
    assert found.count == 1
    assert found.memory.part == part
    assert found.compute == compute


def test_mebibytes_win_over_percent_and_that_is_told() -> None:
    found = translate(pod(container(gpu=1, mem=1000, part=50)))
    assert found.containers[0].request.memory.size_bytes == 1000 * MI
    assert "nvidia.com/gpumem-percentage" in found.passed_over[0]


def test_all_cores_are_of_a_gpu_that_nobody_is_on() -> None:
    found = translate(pod(container(gpu=1, mem=1000, cores=150)))
    its = found.containers[0].request
    assert its.compute == Compute(WHOLE, WHOLE, is_governed=True)
    assert its.constraints.is_alone
    assert "nvidia.com/gpucores is 150" in found.passed_over[0]
    assert not request(pod(container(gpu=1, mem=1000, cores=99))).constraints.is_alone


def test_high_priority_is_class_latency() -> None:
    found = request(pod(container(gpu=1, mem=1000, priority=0)))
    assert found.compute == Compute(kind=ComputeClass.LATENCY, is_governed=True)


@pytest.mark.parametrize("amounts", [{"mem": 1000}, {"mem": 1000, "cores": 30}, {}], ids=str)
def test_the_default_priority_equals_an_absent_one(amounts: dict[str, int]) -> None:
    written_out = translate(pod(container(gpu=1, **amounts, priority=1)), owns_plain_count=True)
    absent = translate(pod(container(gpu=1, **amounts)), owns_plain_count=True)
    (found,), (expected,) = written_out.containers, absent.containers
    assert found.request == expected.request
    assert found.removes == (*expected.removes, "nvidia.com/priority")
    assert written_out.passed_over == absent.passed_over == ()


def test_annotations() -> None:
    found = request(
        pod(
            container(gpu=2, mem=1000),
            use_gputype="A100, nvidia-tesla v100,",
            nouse_gputype="T4",
            use_gpuuuid="GPU-1 , GPU-2",
            nouse_gpuuuid="GPU-3",
            numa_bind="True",
            vgpu_mode="hami-core",
            node_scheduler_policy="spread",
            gpu_scheduler_policy="topology-aware, mutex,numa",
            device_scoring_weights="slot=1, core=0,memory=3",
        )
    )
    its = found.constraints
    assert its.models == (
        ModelRule("A100"),
        ModelRule("nvidia-tesla v100"),
        ModelRule("tesla v100"),
    )
    assert its.not_models == (ModelRule("T4"),)
    assert its.uuids == ("GPU-1", "GPU-2")
    assert its.not_uuids == ("GPU-3",)
    assert its.same_numa
    assert its.is_alone
    assert found.mode == "soft"
    assert found.preferences.node_policies == ("spread",)
    assert found.preferences.device_policies == ("topology", "numa")
    assert found.preferences.weights == DeviceWeights(shares=1, compute=0, memory=3)


def test_a_type_that_every_gpu_is_asks_for_nothing() -> None:
    assert request(pod(container(gpu=1), use_gputype="A100,NVIDIA")).constraints.models == ()


@pytest.mark.parametrize(
    ("settings", "amounts", "expected"),
    [
        ({"memory_factor": 10}, {"gpu": 1, "mem": 100}, 1000 * MI),
        ({"default_memory": 500}, {"gpu": 1, "cores": 5}, 500 * MI),
        ({"default_memory": 50, "memory_factor": 10}, {"gpu": 1, "cores": 5}, 500 * MI),
    ],
)
def test_units_and_defaults(
    settings: dict[str, int], amounts: dict[str, int], expected: int
) -> None:
    assert request(pod(container(**amounts)), **settings).memory.size_bytes == expected


def test_more_settings() -> None:
    asking = pod(container(mem=1000, cores=20))
    assert request(asking, default_gpu_num=2).count == 2
    assert request(asking, device_memory_scaling=1.5).may_oversubscribe
    assert not request(asking).may_oversubscribe
    assert request(pod(container(mem=1)), default_cores=15).compute.guarantee == 1500
    assert request(asking, gpu_scheduler_policy="spread").preferences.device_policies == ("spread",)
    assert request(asking, node_scheduler_policy="binpack").preferences.node_policies == (
        "binpack",
    )
    renamed = ForeignContainer(name="train", limits={"example.com/vmem": "5"})
    settings = {"resource_memory_name": "example.com/vmem"}
    assert request(pod(renamed), **settings).memory.size_bytes == 5 * MI


@pytest.mark.parametrize(
    ("settings", "environment", "ceiling"),
    [
        ({}, None, WHOLE),
        ({"gpu_core_policy": ""}, None, WHOLE),
        ({"gpu_core_policy": "default"}, None, WHOLE),
        ({"gpu_core_policy": "disable"}, None, WHOLE),
        ({"gpu_core_policy": "force"}, None, 3000),
        ({"gpu_core_policy": "force", "disable_core_limit": True}, None, WHOLE),
        ({}, "force", 3000),
        ({}, "FORCE", 3000),
        ({"gpu_core_policy": "force"}, "default", WHOLE),
        ({"gpu_core_policy": "force"}, "disable", WHOLE),
        ({"gpu_core_policy": "force"}, "", WHOLE),
    ],
    ids=str,
)
def test_cores_are_a_ceiling_where_the_policy_is_force(
    settings: dict[str, object], environment: str | None, ceiling: int
) -> None:
    variables = {} if environment is None else {"GPU_CORE_UTILIZATION_POLICY": environment}
    asking = replace(container(gpu=1, mem=1000, cores=30), environment=variables)
    found = request(pod(asking), **settings)
    assert found.compute == Compute(3000, ceiling, is_governed=True)
    without = replace(container(gpu=1, mem=1000), environment=variables)
    assert request(pod(without), **settings).compute == Compute()


def test_mode_mps_keeps_the_ceiling_which_is_all_that_it_enforces() -> None:
    asking = pod(container(gpu=1, mem=1000, cores=30), vgpu_mode="mps")
    assert request(asking).compute.ceiling == 3000
    assert request(asking, gpu_core_policy="disable").compute.ceiling == WHOLE
    other = pod(container(gpu=1, mem=1000, cores=30), vgpu_mode="mps,hami-core")
    assert request(other).compute.ceiling == 3000


@pytest.mark.parametrize("wish", [":80", ":30"])
def test_a_ceiling_by_allotments_annotation_counts(wish: str) -> None:
    subject = pod(container(gpu=1, mem=1000, cores=30))
    subject = replace(subject, annotations={"allotment.dev/compute": wish})
    changes = written(subject, HamiDialect().translate(subject))
    (found,) = wanted_of(applied(subject, changes))
    assert str(found.request.compute) == f"30{wish}"


def test_environment() -> None:
    variables = {"CUDA_DISABLE_CONTROL": "true", "GPU_CORE_UTILIZATION_POLICY": "FAST"}
    asking = replace(container(gpu=1, cores=10), environment=variables)
    found = translate(pod(asking))
    assert found.containers[0].request.compute.ceiling == WHOLE
    assert ["CUDA_DISABLE_CONTROL" in each for each in found.passed_over] == [True, False]
    assert "GPU_CORE_UTILIZATION_POLICY is 'fast'" in found.passed_over[1]


def test_a_plain_count_is_its_only_where_something_says_so() -> None:
    plain = pod(container(gpu=1))
    assert HamiDialect().recognises(plain) == ()
    assert HamiDialect().recognises(pod(container(gpu=1), use_gputype="A100")) == (
        "nvidia.com/gpu",
        "nvidia.com/use-gputype",
    )
    assert HamiDialect().recognises(replace(plain, scheduler="hami-scheduler"))
    assert HamiDialect(HamiSettings(owns_plain_count=True)).recognises(plain)
    assert HamiDialect().recognises(pod(container("web"), use_gputype="A100")) == ()
    beside = pod(container("a", gpu=1, mem=5), container("b", gpu=1), container("web"))
    assert [each.container for each in translate(beside).containers] == ["a", "b"]


@pytest.mark.parametrize(
    ("amounts", "is_whole"),
    [
        ({"gpu": 1}, True),
        ({"gpu": 1, "part": 100}, True),
        ({"gpu": 1, "part": 99}, False),
        ({"gpu": 1, "cores": 0}, False),
        ({"gpu": 1, "mem": 100}, False),
    ],
    ids=str,
)
def test_all_memory_and_no_word_on_cores_is_a_gpu_alone(
    amounts: dict[str, int],
    is_whole: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    found = request(pod(container(**amounts)), owns_plain_count=True, default_cores=3)
    assert found.constraints.is_alone == is_whole
    assert (found.compute.guarantee == WHOLE) == is_whole


@pytest.mark.parametrize(
    ("subject", "said"),
    [
        (pod(container(gpu=1, part=101)), "container 'train': nvidia.com/gpumem-percentage is 101"),
        (pod(container(gpu=1, part=0)), "nvidia.com/gpumem-percentage is 0"),
        (pod(container(gpu=1, mem="500m")), "nvidia.com/gpumem: '500m'"),
        (pod(container(gpu=1, mem="4Ei")), "more than any GPU has"),
        (pod(container(gpu=0, mem=5)), "asks for nvidia.com/gpumem of nvidia.com/gpu: 0"),
        (pod(container(gpu=10**6, mem=5)), "more GPUs than any node has"),
        (pod(container(gpu=-1, mem=5)), "nvidia.com/gpu: '-1'"),
        (pod(container(gpu=1, priority=2)), "nvidia.com/priority is 2"),
        (pod(container(priority=1)), "nvidia.com/priority but asks for no GPU"),
        (pod(container(gpu=1), vgpu_mode="mig"), "asks for mode mig, where its memory is 100%"),
        (pod(container(gpu=1, part=50), vgpu_mode="mig"), "where its memory is 50% of a GPU"),
        (pod(container(gpu=2, mem=9), vgpu_mode="mps"), "where a share has one GPU"),
        (pod(container(gpu=1), vgpu_mode="mgi"), "no allowed word"),
        (pod(container(gpu=1), nouse_gputype="nvidia"), "which matches every NVIDIA GPU"),
        (pod(container(gpu=1), node_scheduler_policy="pack"), "is 'pack'"),
        (pod(container(gpu=1), gpu_scheduler_policy="spred"), "did you mean 'spread'?"),
        (pod(container(gpu=1), device_scoring_weights="slot=1"), "hami.io/device-scoring-weights"),
        (pod(container(gpu=1), device_scoring_weights="slot=0,core=0,memory=0"), "above 0"),
        (pod(container(gpu=1), device_scoring_weights="slot=-1,core=0,memory=0"), "not a whole"),
    ],
)
def test_refused_with_where_and_the_next_step(subject: ForeignPod, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        translate(subject)
    assert refused.value.message.startswith("pod team/train-0")
    assert said in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("written_there", "modes", "annotation"),
    [
        ("mig", ("mig",), "mig"),
        ("mig,hami-core", ("mig", "soft"), "mig,soft"),
        ("hami-core,mig", ("soft", "mig"), "soft,mig"),
        ("mps", ("mps",), "mps"),
        ("hami-core", ("soft",), "soft"),
        (None, ("soft",), None),
    ],
)
def test_modes_are_those_that_the_annotation_has(
    written_there: str | None, modes: tuple[str, ...], annotation: str | None
) -> None:
    more = {} if written_there is None else {"vgpu_mode": written_there}
    subject = pod(container(gpu=1, mem=4000, cores=20), **more)
    found = translate(subject)
    its = found.containers[0].request
    assert (its.mode, *its.other_modes) == modes
    assert written(subject, found).annotations.get("allotment.dev/mode") == annotation


def test_modes_that_a_cluster_has_not_are_refused_or_left_out() -> None:
    modes = frozenset({"soft", "mig"})
    its = request(pod(container(gpu=1, mem=4000), vgpu_mode="mps,mig"), modes=modes)
    assert (its.mode, its.other_modes) == ("mig", ())
    with pytest.raises(UsageError, match="asks for GPUs in mode mps, which no node has"):
        translate(pod(container(gpu=1), vgpu_mode="mps"), modes=modes)


@pytest.mark.parametrize(
    ("written_there", "mode", "told"),
    [
        ("migg", "mig", "ignored 'migg'; read as mig"),
        ("mig, hami_core", "mig", "ignored 'hami_core'; read as mig"),
        ("mps|mig", "mps", "ignored 'mps|mig'; read as mps or mig"),
    ],
)
def test_a_word_that_is_none_is_taken_as_hami_takes_it_and_told(
    written_there: str, mode: str, told: str
) -> None:
    found = translate(pod(container(gpu=1, mem=4000), vgpu_mode=written_there))
    assert found.containers[0].request.mode == mode
    words = "nvidia.com/vgpu-mode: allowed words are hami-core, mig, mps;"
    assert found.passed_over == (f"{words} {told}",)


def test_what_a_slice_does_not_know_is_told() -> None:
    subject = pod(container(gpu=2, mem=4000, cores=20, priority=0), vgpu_mode="mig")
    found = translate(subject, device_memory_scaling=2.0)
    its = found.containers[0].request
    assert (its.mode, its.count, its.may_oversubscribe) == ("mig", 2, False)
    assert its.compute == Compute(2000, WHOLE, is_governed=True)
    assert found.passed_over == (
        "container 'train': its priority: shares do not take turns in mode mig",
    )


def test_a_priority_is_told_where_no_mode_has_turns() -> None:
    found = translate(pod(container(gpu=1, mem=4000, priority=0), vgpu_mode="mps"))
    assert found.containers[0].request.compute.kind == "normal"
    assert found.passed_over == (
        "container 'train': its priority: shares do not take turns in mode mps",
    )


def test_a_mode_that_cannot_give_it_is_told_where_another_can() -> None:
    found = translate(pod(container(gpu=1, part=50), vgpu_mode="mig,hami-core"))
    assert found.containers[0].request.mode == "soft"
    assert "nvidia.com/vgpu-mode, mode mig: its memory is 50% of a GPU" in found.passed_over[0]


# ---- result annotations --------------------------------------------------------------------------


def booking(*containers: PlacedContainer) -> PodBooking:
    return PodBooking(uid=PodUid(""), node="node-1", containers=containers)


def has(name: str, *devices: PlacedDevice, place: int = 0) -> PlacedContainer:
    return PlacedContainer(name=name, devices=devices, place=place)


def test_result_is_as_hami_writes_it() -> None:
    subject = pod(container("web"), container("a", gpu=2), container("b", gpu=1))
    given_ = booking(
        has("a", PlacedDevice("GPU-1", 1000 * MI, 3000), PlacedDevice("GPU-2", 1000 * MI, 3001)),
        has("b", PlacedDevice("GPU-1", 2000 * MI)),
    )
    assert HamiDialect().result_annotations(subject, given_, NODE, now=1_700_000_000.7) == {
        "hami.io/vgpu-node": "node-1",
        "hami.io/vgpu-time": "1700000000",
        "hami.io/bind-time": "1700000000",
        "hami.io/bind-phase": "success",
        "hami.io/vgpu-devices-allocated": (
            ";GPU-1,NVIDIA,1000,30:GPU-2,NVIDIA,1000,31:;GPU-1,NVIDIA,2000,0:;"
        ),
    }


def running(record: str, *containers: ForeignContainer, **changes: str) -> ForeignPod:
    annotations = {
        "hami.io/vgpu-node": "node-1",
        "hami.io/bind-phase": "success",
        "hami.io/vgpu-devices-allocated": record,
        **changes,
    }
    return replace(pod(*containers), node="node-1", annotations=annotations)


def test_take_over_of_what_hami_gave() -> None:
    init = replace(container("init"), kind=ContainerKind.INIT)
    main = container("train", gpu=1, mem=1000, cores=30)
    expected = booking(has("train", PlacedDevice("GPU-1", 1000 * MI, 3000), place=1))
    for record in (";GPU-1,NVIDIA,1000,30:;", "GPU-1,NVIDIA,1000,30:;"):
        assert taken(HamiDialect(), running(record, init, main), INVENTORY) == expected


def test_how_much_it_is_the_pod_s_request_says_and_not_the_record() -> None:
    asking = container(gpu=1, mem=1000, cores=30)
    expected = booking(has("train", PlacedDevice("GPU-1", 1000 * MI, 3000)))
    for record in ("GPU-1,NVIDIA,1,0:;", "GPU-1,NVIDIA,99999,100:;", "GPU-1[0-2],NVIDIA,9728,0:;"):
        assert taken(HamiDialect(), running(record, asking), INVENTORY) == expected


def test_two_mig_devices_of_one_gpu_are_twice_as_much_of_it() -> None:
    record = "GPU-1[0-2],NVIDIA,9728,0:GPU-1[2-2],NVIDIA,1,0:;"
    found = taken(HamiDialect(), running(record, container(gpu=2, mem=1000)), INVENTORY)
    assert found == booking(has("train", PlacedDevice("GPU-1", 2000 * MI)))


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ("GPU-1,NVIDIA,1000,30:GPU-2,NVIDIA,1000,30:;", "asks for 1 GPU, and its record names 2"),
        (";", "asks for 1 GPU, and its record names 0"),
        ("GPU-9,NVIDIA,1000,30:;", "'GPU-9', which is not a GPU of the node"),
    ],
)
def test_a_record_that_is_not_of_what_the_pod_asks_for_is_told(record: str, word: str) -> None:
    other = container("other", gpu=1, mem=1)
    asking = container(gpu=1, mem=1000, cores=30)
    with pytest.raises(UsageError, match=word):
        taken(HamiDialect(), running(f"GPU-1,NVIDIA,1,0:;{record}", other, asking), INVENTORY)


def test_a_pod_that_asks_for_nothing_of_hami_s_has_nothing_of_it() -> None:
    record = "GPU-1,NVIDIA,15000,100:;"
    asking = ForeignContainer(name="train", limits={"cpu": "1", "nvidia.com/gpu": "1"})
    assert taken(HamiDialect(), running(record, asking), INVENTORY) is None
    served = replace(running(record, asking), scheduler="hami-scheduler")
    assert taken(HamiDialect(), served, INVENTORY) is not None


def test_a_record_beyond_all_bounds_is_not_read() -> None:
    record = "GPU-1,NVIDIA,1,1:;" * 5000
    with pytest.raises(UsageError, match="has 90000 characters, more than 65536"):
        taken(HamiDialect(), running(record, container(gpu=1, mem=1)), INVENTORY)


@pytest.mark.parametrize(
    "changes",
    [
        {"hami.io/vgpu-node": "node-2"},
        {DIALECT: "hami"},
    ],
    ids=str,
)
def test_no_take_over_of_what_was_copied_or_is_ours(changes: dict[str, str]) -> None:
    subject = running("GPU-1,NVIDIA,1000,30:;", container(gpu=1, mem=1000), **changes)
    assert taken(HamiDialect(), subject, INVENTORY) is None
    assert taken(HamiDialect(), replace(subject, annotations={}), INVENTORY) is None


@pytest.mark.parametrize(
    "record",
    [
        "GPU-1,NVIDIA,1000,30:;;;",
        "GPU-1,NVIDIA,1000:;",
        "GPU-1,NVIDIA,1000,30",
        "GPU-1,MLU,1000,30:;",
        ",NVIDIA,1000,30:;",
        "x" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_records_that_cannot_be_read_are_refused(record: str) -> None:
    with pytest.raises(UsageError, match=r"hami\.io/vgpu-devices-allocated") as refused:
        taken(HamiDialect(), running(record, container(gpu=1, mem=1)), INVENTORY)
    assert refused.value.message.startswith("pod team/train-0: ")
    assert refused.value.hint
    assert len(refused.value.message) < 300


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(["GPU-1", "GPU-2", "GPU-3"]), max_size=3, unique=True),
            st.integers(1, 1000),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_what_is_written_is_taken_over(parts: list[tuple[list[str], int, int]]) -> None:
    asking, placed = [], []
    for place, (uuids, mebibytes, percent) in enumerate(parts):
        name = f"c{place}"
        amounts = {"gpu": len(uuids), "mem": mebibytes, "cores": percent} if uuids else {}
        asking.append(container(name, **amounts))
        had = (PlacedDevice(uuid, mebibytes * MI, percent * 100) for uuid in uuids)
        placed.append(has(name, *had, place=place))
    expected = booking(*(each for each in placed if each.devices))
    subject = pod(*asking)
    record = HamiDialect().result_annotations(subject, expected, NODE, now=0)
    running_ = replace(subject, node="node-1", annotations=record)
    assert taken(HamiDialect(), running_, INVENTORY) == (expected if expected.containers else None)


# ---- the settings file ---------------------------------------------------------------------------


def settings_of_hami(section: str) -> HamiSettings:
    settings = load_settings(f"hami: {section}").sections["hami"]
    assert isinstance(settings, HamiSettings)
    return settings


def test_settings_are_read_from_its_own_section() -> None:
    settings = settings_of_hami(
        "{resourceCountName: example.com/vgpu, memoryFactor: 2, defaultGPUNum: 3,"
        " deviceMemoryScaling: 1.8, overwriteEnv: true}"
    )
    assert settings.resource_count_name == "example.com/vgpu"
    assert (settings.memory_factor, settings.default_gpu_num) == (2, 3)
    assert settings.device_memory_scaling == 1.8


def test_its_list_of_profiles_is_read() -> None:
    settings = settings_of_hami(
        "{migProfileAllowlist: [{models: [A100-SXM4-40GB, A100-PCIE-40GB],"
        " profiles: [1g.5gb, 1g.5gb+me, 3g.20gb]}]}"
    )
    (profiles,) = settings.mig_profile_allowlist
    assert profiles.models == ("A100-SXM4-40GB", "A100-PCIE-40GB")
    assert profiles.profiles == ("1g.5gb", "1g.5gb+me", "3g.20gb")
    with pytest.raises(UsageError, match="migProfileAllowlist"):
        settings_of_hami("{migProfileAllowlist: [{models: [A100], profiles: [small]}]}")


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{defaultGpuNum: 1}", "(did you mean 'defaultGPUNum'?)"),
        ("{memoryFactor: 0}", "memoryFactor"),
        ("{resourceCountName: gpu}", "resourceCountName"),
        ("[", "not valid YAML"),
    ],
)
def test_settings_that_cannot_be_meant(section: str, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        settings_of_hami(section)
    assert problem in refused.value.message
    assert refused.value.hint
