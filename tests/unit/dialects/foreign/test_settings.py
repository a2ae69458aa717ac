# SPDX-License-Identifier: Apache-2.0
"""All foreign dialects together: their settings, and any text against all of them."""

import json
import re

import pytest
from examples import examples
from foreign_pods import load_settings, taken
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.dialects.foreign import deepomatic, hami, volcano
from allotment.dialects.foreign.adoption import node_view
from allotment.dialects.foreign.aliyun import AliyunSettings
from allotment.dialects.foreign.base import DIALECT
from allotment.dialects.foreign.hami import HamiSettings
from allotment.dialects.foreign.nvidia import NvidiaSettings
from allotment.dialects.foreign.settings import (
    NAMES,
    DialectSettings,
    foreign_dialects,
)
from allotment.dialects.foreign.translate import (
    applied,
    is_native,
    native_pod,
    translate,
    wanted_of,
    written,
)
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.errors import UsageError
from allotment.model.pods import ContainerKind, ForeignContainer, ForeignPod, PodUid
from allotment.model.requests import Request
from allotment.model.structs import replace

DIALECTS = foreign_dialects()
CUTTING = foreign_dialects(load_settings("nvidia: {mig: slices}"))
INVENTORY = NodeInventory(
    name="node-1",
    devices=(
        NodeDevice(uuid="GPU-1", model="Tesla T4", memory_bytes=16 << 30),
        NodeDevice(uuid="GPU-2", model="Tesla T4", memory_bytes=16 << 30, index=1),
    ),
)
NODE = node_view(INVENTORY)


def test_every_dialect_has_a_name_of_its_own() -> None:
    assert tuple(each.name for each in DIALECTS) == NAMES
    assert len(set(NAMES)) == len(NAMES)
    assert len({each.title for each in DIALECTS}) == len(NAMES)
    assert all(each.title.endswith(("'s", ")")) for each in DIALECTS)


def test_settings_by_section() -> None:
    found = load_settings(
        "disabled: [kai, nvidia]\n"
        "hami: {memoryFactor: 10, overwriteEnv: true}\n"
        "aliyun: {memoryUnit: MiB}\n"
    )
    assert found.sections == {
        "hami": HamiSettings(memory_factor=10),
        "aliyun": AliyunSettings(memory_unit="MiB"),
    }
    names = [each.name for each in foreign_dialects(found)]
    assert names == [each for each in NAMES if each not in {"kai", "nvidia"}]


def test_settings_reach_their_dialect() -> None:
    subject = pod({"nvidia.com/gpu": "1"})
    assert translate(subject, DIALECTS) is None
    found = foreign_dialects(load_settings("nvidia: {whole: share}"))
    translation = translate(subject, found)
    assert translation is not None
    assert translation.containers[0].request.memory.part == 1
    assert load_settings("") == DialectSettings()
    assert load_settings(json.dumps({"nvidia": {"replicas": 4}})).sections == {
        "nvidia": NvidiaSettings(replicas=4)
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hamy: {}", "'hamy' has none (did you mean 'hami'?)"),
        ("kubeshare: {}", "'kubeshare' has none"),
        ("hami: []", "hami is not a section"),
        ("hami: {memoryfactor: 1}", "(did you mean 'memoryFactor'?)"),
        ("volcano: {gpuMemoryFactor: 0}", "section volcano: "),
        ("tencent: {coreUnit: 1}", "tencent has 'coreUnit', which is unknown"),
        ("disabled: kai", "disabled is not a list"),
        ("disabled: [kay]", "disabled has 'kay' (did you mean 'kai'?)"),
        ("[1]", "not a mapping of sections"),
        ("{", "are not valid YAML"),
        ("1: {}", "'1' has none"),
    ],
)
def test_settings_that_cannot_be_meant(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        load_settings(text)
    assert said in refused.value.message
    assert refused.value.hint


# ---- any text ------------------------------------------------------------------------------------

RESOURCES = sorted(
    {
        *hami.HamiDialect().resources,
        *volcano.RESOURCES,
        *volcano.GPUSHARE_RESOURCES,
        deepomatic.SHARED_GPU,
        "nvidia.com/gpu.shared",
        "nvidia.com/mig-1g.5gb",
        "nvidia.com/mig-1g.24gb.me.all",
        "allotment.dev/gpu",
        "allotment.dev/gpu-memory",
        "cpu",
    }
)
ANNOTATIONS = sorted(
    {
        *hami.ANNOTATIONS,
        *hami.RESULTS,
        *volcano.ANNOTATIONS,
        *volcano.RESULTS,
        *volcano.GPUSHARE_RESULTS,
        "allotment.dev/compute",
        "allotment.dev/memory",
        "allotment.dev/mode",
        "allotment.dev/mig-profile",
        "example.com/x",
    }
)
QUANTITIES = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "50",
        "100",
        "101",
        "-1",
        "1.5",
        "500m",
        "4Gi",
        "1e9",
        "1e99",
        "",
        "x",
        "9" * 70,
    ]
) | st.text(max_size=6)
TEXTS = st.sampled_from(
    [
        "true",
        "binpack,spread",
        "A100,",
        "nvidia",
        "GPU-1,GPU-2",
        "slot=1,core=1,memory=3",
        "slot=99999999999,core=1,memory=3",
        "hami-core",
        "mig",
        "mps,mig,hami-core",
        "mig,soft",
        "strongest",
        "1g.10gb",
        "c0=1g.10gb+me",
        "mutex",
        "GPU-1,NVIDIA,1000,30:;",
        "GPU-1,NVIDIA,1000,30:GPU-1[0-1],NVIDIA,5,5:",
        "0,1",
        "node-1",
        ",;=:%",
        "\u0661\u0662",  # digits, but not ASCII's
    ]
) | st.text(max_size=20)
KEY = re.compile(r"(?:[a-z0-9.-]+/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LIMITS = st.dictionaries(st.sampled_from(RESOURCES), QUANTITIES, max_size=4)
CONTAINERS = st.lists(
    st.builds(
        ForeignContainer,
        name=st.just("c"),
        kind=st.sampled_from(ContainerKind),
        limits=LIMITS,
        requests=st.just({}) | LIMITS,
        environment=st.dictionaries(st.sampled_from(hami.VARIABLES), TEXTS, max_size=2),
        is_privileged=st.booleans(),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(replace(each, name=f"c{place}") for place, each in enumerate(found)))
PODS = st.builds(
    ForeignPod,
    namespace=st.just("team"),
    name=st.just("train-0"),
    annotations=st.dictionaries(st.sampled_from(ANNOTATIONS), TEXTS, max_size=4),
    containers=CONTAINERS,
    scheduler=st.sampled_from(["", "hami-scheduler", "volcano"]),
    node=st.sampled_from(["", "node-1"]),
)


def mig_of(request: Request) -> tuple[object, ...]:
    """What a request says of modes and slices."""
    return request.mode, request.other_modes, request.mig_profile, request.count


def pod(*limits: dict[str, str]) -> ForeignPod:
    containers = tuple(
        ForeignContainer(name=f"c{place}", limits=each) for place, each in enumerate(limits)
    )
    return ForeignPod(namespace="team", name="train-0", containers=containers)


@settings(max_examples=examples(2))
@given(PODS, st.booleans())
def test_any_pod_is_translated_or_refused_with_where_and_the_next_step(
    subject: ForeignPod,
    is_cut: bool,  # noqa: FBT001 - drawn
) -> None:
    dialects = CUTTING if is_cut else DIALECTS
    refused: UsageError | None = None
    try:
        translation = translate(subject, dialects)
        if translation is not None:
            after = applied(subject, written(subject, translation))
            assert is_native(after)
            assert after.annotations[DIALECT] == translation.dialect
            assert len(wanted_of(after)) == len(translation.containers)
            assert translate(after, dialects) is None
            assert [mig_of(each.request) for each in wanted_of(after)] == [
                mig_of(each.request) for each in translation.containers
            ] or {"allotment.dev/mode", "allotment.dev/mig-profile"} & set(subject.annotations)
            # What goes is gone, and nothing else is.
            for before, now in zip(subject.containers, after.containers, strict=True):
                gone = {key for key in before.limits if key not in now.limits}
                its = next((t for t in translation.containers if t.container == before.name), None)
                assert gone == (set(its.removes) & set(before.limits) if its else set())
        else:
            native_pod(subject)
    except UsageError as error:
        refused = error
    assert refused is None or refused.hint
    assert refused is None or "team/train-0" in refused.message
    assert refused is None or len(refused.message) < 1000


@settings(max_examples=examples(2))
@given(PODS)
def test_any_record_is_taken_over_or_refused_with_where(subject: ForeignPod) -> None:
    for dialect in DIALECTS:
        refused: UsageError | None = None
        found: PodBooking | None = None
        try:
            found = taken(dialect, subject, INVENTORY)
        except UsageError as error:
            refused = error
        assert refused is None or (refused.hint and "team/train-0" in refused.message)
        for container in found.containers if found else ():
            uuids = [each.uuid for each in container.devices]
            assert len(set(uuids)) == len(uuids)
            assert all(each.memory >= 0 for each in container.devices)
            assert subject.containers[container.place].name == container.name


@given(PODS, st.floats(0, 2**33))
def test_results_are_annotations_whatever_the_pod_says(subject: ForeignPod, now: float) -> None:
    booking = PodBooking(
        uid=PodUid("uid"),
        node="node-1",
        containers=tuple(
            PlacedContainer(
                name=each.name,
                devices=(PlacedDevice("GPU-1", 1 << 30, 2550),),
                kind=each.kind,
                place=place,
            )
            for place, each in enumerate(subject.containers)
        ),
    )
    for dialect in DIALECTS:
        record = dialect.result_annotations(subject, booking, NODE, now=now)
        assert all(KEY.fullmatch(key) for key in record)
        assert all(isinstance(text, str) for text in record.values())


@given(st.text(max_size=60))
def test_any_settings_are_read_or_refused(text: str) -> None:
    try:
        load_settings(text)
    except UsageError as error:
        assert error.hint  # noqa: PT017 - one of two ways


@pytest.mark.parametrize(
    ("section", "field", "wrong", "allowed"),
    [
        ("aliyun", "memoryUnit", "GB", "GiB or MiB"),
        ("aliyun", "placement", "binpak", '"" or binpack or spread'),
        ("nvidia", "whole", "shared", "left or share"),
    ],
)
def test_a_wrong_word_is_answered_with_the_allowed_ones(
    section: str, field: str, wrong: str, allowed: str
) -> None:
    with pytest.raises(UsageError, match=f"section {section}: .*'{wrong}'.* of {field}") as caught:
        load_settings(f"{section}: {{{field}: {wrong}}}")
    assert caught.value.hint == f"write {field}: {allowed}"
