# SPDX-License-Identifier: Apache-2.0
"""What the agent writes about a node's devices is what schedulers read, and nothing breaks them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allotment.kube.inventories import CORDONS, DEVICES, MOST_LISTS, cordoned, decode, encode
from allotment.model.clusters import NodeDevice, NodeInventory, NodeMig, TakenPart
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.mig import MigHold, MigProfile, MigSlice
from allotment.model.pods import PodUid
from allotment.model.quantities import MAX_BYTES
from allotment.model.structs import replace

Document = dict[str, Any]

amounts = st.integers(0, MAX_BYTES)
words = st.text(max_size=40)
takens = st.builds(
    TakenPart,
    memory=amounts,
    guarantee=st.integers(0, 2 * WHOLE),
    shares=st.integers(0, 100),
    mode=st.sampled_from(["", "soft", "exclusive"]),
)
uuids = st.lists(st.text(min_size=1, max_size=40), unique=True, max_size=8)


@st.composite
def lists_of_profiles(draw: st.DrawFn) -> tuple[MigProfile, ...]:
    """What one driver may report."""
    names = draw(st.lists(st.text(min_size=1, max_size=20), unique=True, max_size=4))
    numbers = draw(st.lists(st.integers(0, 99), unique=True, min_size=4, max_size=4))
    sizes = draw(st.lists(st.integers(1, 8), min_size=4, max_size=4))
    return tuple(
        MigProfile(
            name=name,
            number=number,
            slices=draw(st.integers(0, 7)),
            memory_bytes=draw(st.integers(0, 1 << 40)),
            size=size,
            starts=tuple(sorted(draw(st.sets(st.integers(0, 8 - size))))),
            most=draw(st.integers(0, 7)),
            multiprocessors=draw(st.integers(0, 200)),
            has_media=draw(st.booleans()),
        )
        for name, number, size in zip(names, numbers, sizes, strict=False)
    )


@st.composite
def cuts(draw: st.DrawFn, profiles: tuple[MigProfile, ...]) -> NodeMig:
    """What is cut from a device, its slices in their order."""
    there = draw(st.lists(st.sampled_from(profiles), max_size=3)) if profiles else []
    starts = sorted(draw(st.lists(st.integers(0, 7), unique=True, min_size=3, max_size=3)))
    return NodeMig(
        profiles=profiles,
        slices=tuple(
            MigSlice(
                profile=each.number,
                start=start,
                size=each.size,
                hold=draw(st.sampled_from(MigHold)),
            )
            for each, start in zip(there, starts, strict=False)
        ),
        is_enabled=draw(st.booleans()),
    )


@st.composite
def inventories(draw: st.DrawFn) -> NodeInventory:
    """An inventory as an agent may make it, its devices in their order."""
    names = draw(uuids)
    profiles = draw(st.lists(lists_of_profiles(), min_size=1, max_size=2))
    devices = tuple(
        NodeDevice(
            uuid=uuid,
            model=draw(words),
            memory_bytes=draw(st.integers(0, 1 << 50)),
            index=index,
            numa_node=draw(st.none() | st.integers(0, 8)),
            modes=draw(st.sampled_from([("soft",), ("soft", "exclusive"), ()])),
            max_shares=draw(st.integers(0, 128)),
            problem=draw(words),
            taken=draw(st.just(TakenPart()) | takens),
            guarantee=draw(st.just(WHOLE) | st.integers(0, WHOLE)),
            mig=draw(st.none() | st.sampled_from(profiles).flatmap(cuts)),
            mig_off=draw(words),
        )
        for index, uuid in enumerate(names)
    )
    pairs = [(one, other) for one in names for other in names if one < other]
    scored = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return NodeInventory(
        name="n1",
        devices=devices,
        cpu_milli=draw(st.integers(0, 1 << 20)),
        memory_bytes=draw(amounts),
        host_budget_bytes=draw(amounts),
        links={pair: draw(st.integers(1, 1800)) for pair in scored},
        resized=draw(st.dictionaries(words.map(PodUid), st.integers(1, 1 << 40), max_size=3)),
        claims=draw(
            st.frozensets(st.text("0123456789abcdef", min_size=12, max_size=12), max_size=3)
        ),
    )


def read(text: str) -> NodeInventory:
    return decode("n1", text)


@given(inventories())
def test_what_is_written_is_what_is_read(inventory: NodeInventory) -> None:
    text = encode(inventory)
    again = decode("n1", text, cpu_milli=inventory.cpu_milli, memory_bytes=inventory.memory_bytes)
    assert again == inventory
    assert encode(again) == text


@given(inventories(), st.randoms())
def test_the_order_in_which_devices_are_found_makes_no_difference(
    inventory: NodeInventory, random: Random
) -> None:
    shuffled = list(inventory.devices)
    random.shuffle(shuffled)
    other = NodeInventory(
        name="n1",
        devices=tuple(shuffled),
        host_budget_bytes=inventory.host_budget_bytes,
        links=dict(reversed(list(inventory.links.items()))),
        resized=dict(reversed(list(inventory.resized.items()))),
        claims=inventory.claims,
    )
    assert encode(other) == encode(inventory)


def test_it_reads_well() -> None:
    inventory = NodeInventory(
        name="n1",
        devices=(
            NodeDevice(uuid="GPU-a", model="NVIDIA H100", memory_bytes=80 << 30, numa_node=0),
            NodeDevice(
                uuid="GPU-b",
                model="NVIDIA H100",
                memory_bytes=80 << 30,
                index=1,
                problem="lost",
                taken=TakenPart(memory=4 << 30, guarantee=3000, shares=1, mode="soft"),
            ),
        ),
        host_budget_bytes=1 << 30,
        links={("GPU-a", "GPU-b"): 160},
    )
    assert encode(inventory) == (
        '{"version":1,"devices":['
        '{"uuid":"GPU-a","model":"NVIDIA H100","memory":85899345920,"numa":0},'
        '{"uuid":"GPU-b","model":"NVIDIA H100","memory":85899345920,"index":1,"problem":"lost",'
        '"taken":{"memory":4294967296,"guarantee":3000,"shares":1,"mode":"soft"}}],'
        '"host":1073741824,"links":[[0,1,160]]}'
    )


ONE_G = MigProfile(
    name="1g.10gb",
    number=19,
    slices=1,
    memory_bytes=10 << 30,
    size=1,
    starts=(0, 1, 2, 3, 4, 5, 6),
    most=7,
    multiprocessors=16,
)


def test_what_mig_makes_of_devices_reads_well() -> None:
    on = NodeMig(
        profiles=(ONE_G,),
        slices=(
            MigSlice(profile=19, start=0, size=1, hold=MigHold.FOREIGN),
            MigSlice(profile=19, start=4, size=1, hold=MigHold.IDLE),
        ),
    )
    off = NodeMig(profiles=(ONE_G,), is_enabled=False)
    devices = tuple(
        NodeDevice(uuid=f"GPU-{index}", model="m", memory_bytes=1, index=index, mig=mig)
        for index, mig in enumerate([on, off, None])
    )
    text = encode(NodeInventory(name="n1", devices=devices))
    assert text == (
        '{"version":1,"devices":[{"uuid":"GPU-0","model":"m","memory":1,'
        '"mig":{"profiles":0,"slices":[["1g.10gb",0,"foreign"],["1g.10gb",4,"idle"]]}},'
        '{"uuid":"GPU-1","model":"m","memory":1,"index":1,"mig":{"profiles":0,"on":false}},'
        '{"uuid":"GPU-2","model":"m","memory":1,"index":2}],'
        '"profiles":[[["1g.10gb",19,1,10737418240,1,[0,1,2,3,4,5,6],7,16,false]]]}'
    )
    again = read(text)
    assert again.devices == devices


def test_gpus_of_a_model_have_the_very_same_profiles_on_all_nodes() -> None:
    device = NodeDevice(
        uuid="GPU-0", model="m", memory_bytes=1, mig=NodeMig(profiles=(ONE_G,), is_enabled=False)
    )
    text = encode(NodeInventory(name="n1", devices=(device,)))
    one, other = (decode(name, text).devices[0].mig for name in ("n1", "n2"))
    assert one is not None
    assert other is not None
    assert one.profiles is other.profiles


def test_a_slice_whose_profile_the_driver_does_not_report_is_left_out() -> None:
    strange = MigSlice(profile=77, start=0, size=1, hold=MigHold.FOREIGN)
    mig = NodeMig(profiles=(ONE_G,), slices=(strange,))
    device = NodeDevice(uuid="GPU-0", model="m", memory_bytes=1, mig=mig)
    found = read(encode(NodeInventory(name="n1", devices=(device,)))).devices[0].mig
    assert found == NodeMig(profiles=(ONE_G,))


def test_what_a_newer_agent_adds_is_passed_over() -> None:
    text = (
        '{"version":1,"colour":"red","devices":[{"uuid":"a","model":"m","memory":1,"age":3,'
        '"taken":{"memory":1,"joy":2}}]}'
    )
    assert read(text).devices == (
        NodeDevice(uuid="a", model="m", memory_bytes=1, taken=TakenPart(memory=1)),
    )


def test_a_long_problem_is_shortened() -> None:
    device = NodeDevice(uuid="a", model="m", memory_bytes=1, problem="x" * 1000)
    shown = read(encode(NodeInventory(name="n1", devices=(device,)))).devices[0].problem
    assert shown == "x" * 197 + "..."


def test_as_many_devices_as_a_machine_can_have_are_told_with_their_links() -> None:
    devices = tuple(
        NodeDevice(uuid=f"GPU-{number:03}", model="m" * 256, memory_bytes=1, index=number)
        for number in range(32)
    )
    links = {
        (one.uuid, other.uuid): 10 for one in devices for other in devices if one.uuid < other.uuid
    }
    inventory = NodeInventory(name="n1", devices=devices, links=links)
    assert read(encode(inventory)) == inventory


def test_modes_that_are_not_known_are_passed_over() -> None:
    text = with_device(modes=["vgpu", "exclusive", "soft", "soft", "later"])
    assert read(text).devices[0].modes == ("exclusive", "soft")
    assert read(with_device(modes=["later"])).devices[0].modes == ()


@pytest.mark.parametrize("count", [33, 5000])
def test_more_devices_than_any_node_has_are_not_written(count: int) -> None:
    devices = tuple(NodeDevice(uuid=str(each), model="", memory_bytes=0) for each in range(count))
    with pytest.raises(ValueError, match="more than 32"):
        encode(NodeInventory(name="n1", devices=devices))


def kinds_of_gpus(count: int) -> NodeInventory:
    devices = tuple(
        NodeDevice(
            uuid=f"GPU-{each}",
            model="m",
            memory_bytes=1,
            index=each,
            mig=NodeMig(profiles=(replace(ONE_G, memory_bytes=each),)),
        )
        for each in range(count)
    )
    return NodeInventory(name="n1", devices=devices)


def test_a_node_has_few_kinds_of_gpus_that_are_cut() -> None:
    """Whoever decides works out for each kind what fits on it."""
    most = kinds_of_gpus(MOST_LISTS)
    text = encode(most)
    assert read(text) == most
    with pytest.raises(ValueError, match="more than 4"):
        encode(kinds_of_gpus(MOST_LISTS + 1))
    document = json.loads(text)
    document["profiles"].append(document["profiles"][0])
    with pytest.raises(UsageError, match="profiles"):
        read(json.dumps(document))


# ---- what others may write -----------------------------------------------------------------------

GOOD: Document = {
    "version": 1,
    "devices": [
        {"uuid": "GPU-a", "model": "m", "memory": 1},
        {"uuid": "GPU-b", "model": "m", "memory": 1},
    ],
}


def changed(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def with_device(**changes: object) -> str:
    return changed(devices=[{"uuid": "GPU-a", "model": "m", "memory": 1, **changes}])


def with_mig(profile: object, **changes: object) -> str:
    mig = {"profiles": 0, **changes}
    device = {"uuid": "GPU-a", "model": "m", "memory": 1, "mig": mig}
    return changed(devices=[device], profiles=[[GOOD_PROFILE, profile]])


GOOD_PROFILE = ["1g.10gb", 19, 1, 1, 1, [0, 1], 2, 16]
HALF = ["3g.40gb", 9, 3, 1, 4, [0, 4], 2, 60, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "truncated"),
        ("null", "Expected `object`"),
        ("[" * 100_000, "is not an inventory"),
        ('{"version": 1', "truncated"),
        ('{"devices": []}', "`version`"),
        (changed(version=2), "has version 2"),
        ('{"version": 7, "devices": "all"}', "has version 7"),
        ('{"version": "1"}', "`$.version`"),
        (changed(devices=[{"uuid": "a", "model": "m"}]), "`memory`"),
        (with_device(memory=-1), "`$.devices[0].memory`"),
        (with_device(memory=1 << 63), "memory"),
        (with_device(memory=(1 << 50) + 1), "`$.devices[0].memory`"),
        (with_device(numa=1024), "`$.devices[0].numa`"),
        (with_device(memory=1.5), "memory"),
        (with_device(memory=True), "memory"),
        (with_device(uuid=""), "`$.devices[0].uuid`"),
        (with_device(uuid="x" * 129), "`$.devices[0].uuid`"),
        (with_device(model="x" * 257), "`$.devices[0].model`"),
        (with_device(problem="x" * 1025), "`$.devices[0].problem`"),
        (with_device(guarantee=WHOLE + 1), "`$.devices[0].guarantee`"),
        (with_device(taken={"memory": -1}), "`$.devices[0].taken.memory`"),
        (with_device(modes=["x"] * 17), "`$.devices[0].modes`"),
        (changed(devices=[GOOD["devices"][0]] * 2), "'GPU-a' twice"),
        (changed(devices=[{"uuid": str(n), "model": "", "memory": 0} for n in range(33)]), "<= 32"),
        (changed(links=[[0, 2, 10]]), "devices 0 and 2, but has 2"),
        (changed(links=[[1, 1, 10]]), "devices 1 and 1"),
        (changed(links=[[0, 1]]), "`$.links[0]`"),
        (changed(links=[[0, 1, -5]]), "`$.links[0]"),
        (with_mig(HALF, profiles=1), "profile list 1 of 1"),
        (with_mig(HALF, profiles=-1), "mig.profiles`"),
        (with_mig(HALF, profiles=32), "mig.profiles`"),
        (with_mig(HALF, on="yes"), "mig.on`"),
        (
            with_mig(HALF, slices=[["2g.20gb", 0, "idle"]]),
            "'2g.20gb', which its device does not offer",
        ),
        (with_mig(HALF, slices=[["1g.10gb", 8, "idle"]]), "mig.slices[0]"),
        (with_mig(HALF, slices=[["1g.10gb", 0, "mine"]]), "mig.slices[0]"),
        (with_mig(HALF, slices=[["1g.10gb", 0]]), "mig.slices[0]"),
        (with_mig(HALF, slices=[["1g.10gb", 0, "idle"]] * 9), "mig.slices`"),
        (with_mig(GOOD_PROFILE), "a list of profiles has a name twice"),
        (with_mig(["3g.40gb", 19, *HALF[2:]]), "a list of profiles has a number twice"),
        (with_mig([*HALF[:5], [5], *HALF[6:]]), "'3g.40gb' ends after slot 7"),
        (with_mig([*HALF[:4], 0, *HALF[5:]]), "$.profiles"),
        (with_mig([*HALF[:4], 9, *HALF[5:]]), "$.profiles"),
        (with_mig([*HALF[:5], [0] * 9, *HALF[6:]]), "$.profiles"),
        (with_mig(HALF[:6]), "$.profiles"),
        (changed(profiles=[[]] * 33), "`$.profiles`"),
        (changed(profiles=[[GOOD_PROFILE] * 25]), "`$.profiles[0]`"),
        (changed(devices=[], padding="x" * (1 << 18)), "more than 131072"),
    ],
)
def test_what_is_wrong_is_told_with_the_node_and_the_place(text: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        decode("gpu-7", text)
    assert "node gpu-7" in error.value.message
    assert DEVICES in error.value.message
    assert says in error.value.message
    assert error.value.hint


@given(st.text() | st.binary().map(lambda each: each.decode("utf-8", "surrogateescape")))
def test_no_text_does_any_harm(text: str) -> None:
    try:
        read(text)
    except UsageError as error:
        assert "node n1" in error.message  # noqa: PT017 - most texts are refused, not all


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
fields = st.sampled_from(
    [
        *("version", "devices", "host", "links", "uuid", "model", "memory", "taken", "modes"),
        *("numa", "mig", "profiles", "slices", "on"),
    ]
)


@given(st.lists(json_values, min_size=8, max_size=9), st.dictionaries(fields, json_values))
def test_nothing_in_a_profile_does_any_harm(profile: list[object], mig: Document) -> None:
    try:
        assert encode(read(with_mig(profile, **mig)))
    except UsageError as error:
        assert "node n1" in error.message  # noqa: PT017 - most are refused, not all


@given(st.dictionaries(fields, json_values), st.dictionaries(fields, json_values))
def test_nothing_in_a_field_does_any_harm(top: Document, inner: Document) -> None:
    document: Document = {**GOOD, **top}
    if isinstance(document["devices"], list) and document["devices"]:
        document["devices"] = [{**GOOD["devices"][0], **inner}]
    try:
        found = read(json.dumps(document))
    except UsageError:
        return
    assert encode(found)
    for device in found.devices:
        assert 0 <= device.memory_bytes <= MAX_BYTES
        assert 0 <= device.guarantee <= WHOLE


@pytest.mark.parametrize(
    ("annotations", "uuids"),
    [
        ({}, set()),
        ({CORDONS[0]: ""}, set()),
        ({CORDONS[0]: "GPU-a, GPU-b ,,"}, {"GPU-a", "GPU-b"}),
        ({CORDONS[0]: "GPU-a", CORDONS[1]: "GPU-c"}, {"GPU-a", "GPU-c"}),
        ({"else": "GPU-a"}, set()),
    ],
)
def test_cordons_are_read_by_either_name(annotations: dict[str, str], uuids: set[str]) -> None:
    assert cordoned(annotations) == uuids
