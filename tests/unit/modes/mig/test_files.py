# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's file of MIG configurations: what is read, what is refused, and with which words."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allotment.agent.config.parsing import read
from allotment.model.errors import NotFoundError, UsageError
from allotment.modes.mig.apply import entry_for
from allotment.modes.mig.files import (
    ConfigEntry,
    GpuIdentity,
    document_of,
    parse_configurations,
    select,
)

A100 = GpuIdentity(index=0, pci_id=0x20B210DE, pci_subsystem=0x147F10DE)
H100 = GpuIdentity(index=1, pci_id=0x233010DE)

FILE = """
version: v1
mig-configs:
  all-off:
    - devices: all
      mig-enabled: false
  empty:
    - {devices: all, mig-enabled: true, mig-devices: {}}
  mixed:
    - device-filter: ["0x20B210DE", "0x20B510de"]
      devices: all
      mig-enabled: true
      mig-devices: {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    - device-filter: "0x233010DE"
      devices: [1, 3]
      mig-enabled: true
      mig-devices:
        1g.10gb+me: 1
        1g.24gb-me: 0
"""


def parse(text: str) -> Mapping[str, tuple[ConfigEntry, ...]]:
    return parse_configurations(read(text, source="f.yaml"), source="f.yaml")


def test_a_file_is_read() -> None:
    found = parse(FILE)
    assert list(found) == ["all-off", "empty", "mixed"]
    first, second = found["mixed"]
    assert first.wanted == {"1g.10gb": 2, "2g.20gb": 1, "3g.40gb": 1}
    assert second.wanted == {"1g.10gb+me": 1}
    assert first.filters == ("0x20B210DE", "0x20B510de")
    assert found["empty"][0].mig_enabled
    assert found["all-off"][0].wanted == {}


def test_which_gpus_an_entry_names() -> None:
    first, second = parse(FILE)["mixed"]
    assert [first.names(A100), first.names(H100)] == [True, False]
    assert [second.names(A100), second.names(H100)] == [False, True]
    other = GpuIdentity(index=2, pci_id=0x233010DE)
    assert not second.names(other)


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("0x20B210DE", True),
        ("0X20b210de", True),
        ("548540638", True),
        ("0x20B210DE:0x147F10DE", True),
        ("0x20B210DE:0x000010DE", False),
        ("0x20B010DE", False),
    ],
)
def test_pci_ids(text: str, is_named: bool) -> None:  # noqa: FBT001
    assert A100.matches(text) is is_named


def test_the_last_entry_that_names_a_gpu_counts() -> None:
    entries = parse(
        "version: v1\nmig-configs:\n  a:\n"
        "  - {devices: all, mig-enabled: false}\n"
        "  - {devices: [1], mig-enabled: true, mig-devices: {1g.10gb: 7}}\n"
    )["a"]
    assert entry_for(entries, A100) is entries[0]
    assert entry_for(entries, H100) is entries[1]
    assert entry_for(entries[1:], A100) is None


def test_one_is_selected() -> None:
    found = parse(FILE)
    assert select(found, "all-off", source="f") == found["all-off"]
    assert select({"all-off": found["all-off"]}, None, source="f") == found["all-off"]
    with pytest.raises(UsageError, match="more than one configuration") as several:
        select(found, None, source="f")
    assert several.value.hint == "choose by -c: all-off, empty, mixed"
    with pytest.raises(NotFoundError, match="selected mig-config not present: nix"):
        select(found, "nix", source="f")


def test_parts_of_instances_are_refused_where_they_are_chosen() -> None:
    found = parse(
        "version: v1\nmig-configs:\n"
        "  whole:\n  - {devices: all, mig-enabled: true, mig-devices: {3g.20gb: 2}}\n"
        "  parts:\n  - {devices: [1], mig-enabled: false}\n"
        "  - {devices: [0], mig-enabled: true, mig-devices: {3g.20gb: 1, 1c.3g.20gb: 1}}\n"
    )
    assert select(found, "whole", source="f") == found["whole"]
    with pytest.raises(UsageError, match=r"mig-configs.parts\[1\]: mig-devices: '1c.3g.20gb'"):
        select(found, "parts", source="f")


ENTRY = (
    "version: v1\nmig-configs:\n  a:\n  - {devices: all, mig-enabled: true, mig-devices: {}}\n  - "
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no configuration"),
        ("[]", "it holds no configuration"),
        ("mig-configs: {}", "unable to parse with missing 'version' field"),
        ("version: v2", "unknown version: v2"),
        ("version: 1", "unknown version: 1"),
        ("version: v1", "missing required field: mig-configs"),
        ("version: v1\nmig-configs: {}", "at least one entry in 'mig-configs' is required"),
        ("version: v1\nmig-configs: {a: []}", "at least one entry in 'a' is required"),
        ("version: v1\nmig-config: {}\nmig-configs: {}", "unexpected field: mig-config"),
        (ENTRY + "{devices: all}", r"mig-configs.a\[1\]: missing required field: mig-enabled"),
        (ENTRY + "{mig-enabled: false}", r"mig-configs.a\[1\]: missing required field: devices"),
        (ENTRY + "{devices: all, mig-enabled: false, device: 1}", "unexpected field: device"),
        (ENTRY + "{devices: some, mig-enabled: false}", "invalid input for 'devices'"),
        (ENTRY + "{devices: 1, mig-enabled: false}", "invalid input for 'devices'"),
        (ENTRY + "{devices: [0, 0], mig-enabled: false}", "0 is repeated"),
        (ENTRY + "{devices: [-1], mig-enabled: false}", "cannot be negative"),
        (ENTRY + "{devices: [], mig-enabled: false}", "the list is empty"),
        (ENTRY + "{devices: all, mig-enabled: 'yes'}", "Expected `bool`, got `str`"),
        (
            ENTRY + "{devices: all, mig-enabled: true}",
            "missing required field 'mig-devices' when 'mig-enabled' is true",
        ),
        (
            ENTRY + "{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}}",
            "MIG devices included when 'mig-enabled' is false",
        ),
        (
            ENTRY + "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0}}",
            "all counts for all MigProfiles are 0",
        ),
        (
            ENTRY + "{devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}}",
            "invalid count for '1g.5gb': -1",
        ),
        (
            ENTRY + "{devices: all, mig-enabled: true, mig-devices: {1g5gb: 1}}",
            "invalid format for '1g5gb'",
        ),
        (
            ENTRY + "{devices: all, device-filter: A100, mig-enabled: false}",
            "invalid DeviceID format 'A100'",
        ),
        (ENTRY + "{devices: all, device-filter: 0x20B210DE, mig-enabled: false}", "device-filter"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(text)
    assert caught.value.message.startswith("f.yaml: ")


PROFILES = st.sampled_from(["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "1g.5gb+me"])
HAS = st.none() | st.dictionaries(PROFILES, st.integers(1, 7), max_size=3)
KINDS = st.sampled_from([0x20B210DE, 0x233010DE, 0x20B710DE])


@given(st.lists(st.tuples(KINDS, HAS), min_size=1, max_size=8))
def test_what_is_exported_says_of_each_gpu_what_it_has(
    machine: list[tuple[int, Mapping[str, int] | None]],
) -> None:
    gpus = [
        (GpuIdentity(index=index, pci_id=kind), has) for index, (kind, has) in enumerate(machine)
    ]
    text = yaml.safe_dump(document_of("current", gpus))
    entries = parse(text)["current"]
    for gpu, has in gpus:
        entry = entry_for(entries, gpu)
        assert entry is not None
        assert sum(each.names(gpu) for each in entries) == 1
        assert entry.mig_enabled is (has is not None)
        assert entry.wanted == (has or {})


def test_gpus_of_one_model_that_have_the_same_are_one_entry() -> None:
    same = [(GpuIdentity(index=index, pci_id=1), {"1g.5gb": 7}) for index in range(2)]
    assert document_of("x", same)["mig-configs"] == {
        "x": [{"devices": "all", "mig-enabled": True, "mig-devices": {"1g.5gb": 7}}]
    }
