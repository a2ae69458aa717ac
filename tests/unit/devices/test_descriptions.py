# SPDX-License-Identifier: Apache-2.0
"""Both ways to describe a simulated machine, and everything that is no description."""

from __future__ import annotations

import contextlib
import textwrap
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from allotment.devices.descriptions import (
    MAX_GPUS,
    MachineDescription,
    parse_short,
    parse_yaml,
)
from allotment.devices.models import MODELS
from allotment.model.errors import UsageError

GIB = 1 << 30
UUID = "GPU-00000000-1111-2222-3333-444444444444"


def models_of(machine: MachineDescription) -> list[str]:
    return [gpu.model.key for gpu in machine.gpus]


def yaml(text: str) -> MachineDescription:
    return parse_yaml(textwrap.dedent(text), source="machine.yaml")


# ---- the short form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("t4", ["t4"]),
        ("a100-80gb:2,t4", ["a100-80gb", "a100-80gb", "t4"]),
        (" a100-80gb : 2 , t4 ", ["a100-80gb", "a100-80gb", "t4"]),
        ("A100-80GB", ["a100-80gb"]),
        ("h100", ["h100-80gb"]),
        ("rtx4090:16", ["rtx4090"] * 16),
    ],
)
def test_the_short_form_lists_models(text: str, models: list[str]) -> None:
    assert models_of(parse_short(text)) == models


def test_the_short_form_takes_the_keys_of_the_yaml_form() -> None:
    (first, second) = parse_short("a100-80gb[memory=40Gi,numa=1]:1,t4[ecc=off]").gpus
    assert (first.memory_bytes, first.numa_node) == (40 * GIB, 1)
    assert second.ecc is False


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (",", "not a GPU model"),
        ("t4,,a10", "not a GPU model"),
        ("t4:0", "0 is not between 1 and 16"),
        ("t4:17", "17 is not between 1 and 16"),
        ("t4:10,a10:10", "at most 16"),
        ("t4:two", "'two' is not a whole number"),
        ("t4:", "not a whole number"),
        ("t4:-1", "'-1' is not a whole number"),
        ("t4:1.5", "'1.5' is not a whole number"),
        ("a100", "did you mean a100-40gb or a100-80gb?"),
        ("a100-80", "did you mean a100-80gb"),
        ("h10", "did you mean h100-80gb"),
        ("quadro", "unknown model 'quadro'"),
        ("t4[mem=8Gi]", "unknown key 'mem' (did you mean memory?)"),
        ("t4[memory]", "'memory' has no value"),
        ("t4[memory=8Gb]", "8Gb"),
        ("t4[memory=1Mi]", "needs more than"),
        ("t4[memory=100Ti]", "at most 4Ti"),
        ("t4[", "not a GPU model"),
        ("p100[ecc=maybe]", "neither true nor false"),
    ],
)
def test_what_is_no_short_form_says_why(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_short(text)
    assert says in caught.value.message
    assert "\n" not in caught.value.message


# ---- the YAML form -------------------------------------------------------------------------------


def test_yaml_describes_a_machine() -> None:
    machine = yaml(f"""
        driver: 570.124.06
        cuda: 12.8
        timeslice: 5ms
        kernel: 100us
        gpus:
          - model: a100-80gb
            count: 2
            memory: 40Gi
            numa: 1
          - t4
          - {{model: a10, uuid: {UUID}, ecc: false}}
    """)
    assert models_of(machine) == ["a100-80gb", "a100-80gb", "t4", "a10"]
    assert (machine.driver_version, machine.cuda_version) == ("570.124.06", 12080)
    assert (machine.timeslice_us, machine.kernel_us) == (5000, 100)
    assert [gpu.numa_node for gpu in machine.gpus] == [1, 1, None, None]
    assert machine.gpus[0].memory_bytes == 40 * GIB
    assert machine.gpus[3].uuid == UUID
    assert machine.gpus[3].ecc is False


def test_yaml_and_the_short_form_mean_the_same() -> None:
    assert yaml("gpus: [{model: a100-80gb, count: 2}, t4]") == parse_short("a100-80gb:2,t4")


@pytest.mark.parametrize(
    ("keys", "driver", "cuda"),
    [
        ("", "580.95.05", 13000),
        ("cuda: 11.8", "520.61.05", 11080),
        ("cuda: 12.4", "550.54.15", 12040),
        ("cuda: 12.7", "560.35.05", 12060 + 10),
        ("cuda: '13.5'", "590.44.01", 13050),
        ("driver: 550.90.07", "550.90.07", 12040),
        ("driver: 470.10", "470.10", 11080),
        ("driver: 999.1", "999.1", 13010),
    ],
)
def test_driver_and_cuda_follow_from_each_other(keys: str, driver: str, cuda: int) -> None:
    machine = yaml(f"gpus: [t4]\n{keys}\n".replace("\n        ", "\n"))
    assert (machine.driver_version, machine.cuda_version) == (driver, cuda)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a mapping with `gpus`"),
        ("- t4", "a mapping with `gpus`"),
        ("gpus: [", "is not YAML"),
        ("gpus: t4", "a list of at least one GPU"),
        ("gpus: []", "a list of at least one GPU"),
        ("gpus: [[t4]]", "gpus[0]: list is not a GPU"),
        ("gpus: [5]", "gpus[0]: unknown model"),
        ("gpus: [{count: 2}]", "gpus[0]: the model is missing"),
        (
            "gpus: [t4, {model: a10, cuont: 2}]",
            "gpus[1]: unknown key 'cuont' (did you mean count?)",
        ),
        ("gpus: [{model: [t4]}]", "gpus[0].model: list is not a value"),
        ("gpus: [{model: t4, count: true}]", "gpus[0].count: 'true' is not a whole"),
        (
            "gpus: [{model: t4, count: 0x" + "f" * 9000 + "}]",
            "gpus[0].count: '0xffff",
        ),
        ("gpus: [{model: t4, uuid: GPU-1}]", "gpus[0].uuid: 'GPU-1' is not a GPU's UUID"),
        (f"gpus: [{{model: t4, uuid: {UUID}, count: 2}}]", "one UUID cannot name 2 GPUs"),
        (f"gpus: [{{model: t4, uuid: {UUID}}}, {{model: t4, uuid: {UUID}}}]", "two GPUs have the"),
        ("gpus: [{model: t4, numa: 64}]", "gpus[0].numa: 64 is not between 0 and 63"),
        ("driverr: 580.1\ngpus: [t4]", "unknown key 'driverr' (did you mean driver?)"),
        ("driver: latest\ngpus: [t4]", "driver: 'latest' is not a driver version"),
        ("cuda: 10.2\ngpus: [t4]", "cuda: '10.2' is not a CUDA version from 11.8 to 13.x"),
        ("cuda: 14.0\ngpus: [t4]", "cuda: '14.0' is not a CUDA version"),
        ("timeslice: 2\ngpus: [t4]", "timeslice: '2' is not an amount: the unit is missing"),
        ("timeslice: 0ms\ngpus: [t4]", "timeslice: '0ms' is not between 1us and 60s"),
        ("2020-99-99: 1\ngpus: [t4]", "unknown key '2020-99-99'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_what_is_no_machine_says_where_and_why(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_yaml(text, source="machine.yaml")
    assert caught.value.message.startswith("machine.yaml")
    assert says in caught.value.message
    assert len(caught.value.message) < 400


def test_a_bomb_of_aliases_is_refused_and_not_unfolded() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]" for p, n in pairwise("abcdefghi")]
    with pytest.raises(UsageError):
        parse_yaml("\n".join([*lines, "gpus: [{model: *i}]"]), source="bomb")


def test_a_long_file_is_refused_unread() -> None:
    with pytest.raises(UsageError, match="too many"):
        parse_yaml("#" * (1 << 21), source="long")


# ---- anything at all -----------------------------------------------------------------------------

WORDS = st.sampled_from([*MODELS, ":", ",", "[", "]", "=", "memory", "16", "0", "-", " ", "4Gi"])


@given(st.one_of(st.text(), st.lists(WORDS).map("".join)))
@example("t4[" * 50)
@example("\0")
def test_any_text_is_a_machine_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert 1 <= len(parse_short(text).gpus) <= MAX_GPUS


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
KEYS = st.sampled_from(
    ["gpus", "driver", "cuda", "timeslice", "kernel", "model", "count", "memory", "uuid", "numa"]
)
TREES = st.recursive(
    st.one_of(SCALARS, st.sampled_from([*MODELS])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYS, SCALARS), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.one_of(TREES, st.fixed_dictionaries({"gpus": st.lists(TREES, max_size=3)})))
def test_any_tree_is_a_machine_or_a_usage_error(tree: object) -> None:
    import yaml as library

    with contextlib.suppress(UsageError):
        machine = parse_yaml(library.safe_dump(tree), source="tree")
        assert 1 <= len(machine.gpus) <= MAX_GPUS


@given(st.text())
@example("[" * 2000)
@example("gpus: !!python/object:os.system [t4]")
@example("a: 1_0:60:0x")
@example("? !!timestamp 2001-99-12")
def test_any_yaml_is_a_machine_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_yaml(text, source="text")
