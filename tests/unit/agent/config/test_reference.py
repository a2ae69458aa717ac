# SPDX-License-Identifier: Apache-2.0
"""docs/reference/config.md names every key, flag, variable and default, and no other."""

import re
from pathlib import Path

import pytest
import yaml

from allotment.agent.config.options import NVIDIA_OPTIONS, Option
from allotment.agent.config.overlay import load
from allotment.agent.config.parsing import VERSION, choices_at, keys
from allotment.agent.config.schema import AllotmentConfig

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs" / "reference" / "config.md").read_text()
#: The page says at its end how the scheduler is told what to do: another document.
REFERENCE = PAGE[: PAGE.index("\n## The scheduler's settings\n")]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in REFERENCE.splitlines()
    if line.startswith("|")
]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


OPTION_ROWS = {words(row[1])[0].removeprefix("--"): row for row in ROWS if row[1][:3] == "`--"}


def test_every_option_is_there_and_no_other() -> None:
    assert list(OPTION_ROWS) == [each.flag for each in NVIDIA_OPTIONS]


@pytest.mark.parametrize("option", NVIDIA_OPTIONS, ids=lambda each: each.flag)
def test_an_option_is_told_as_it_is(option: Option) -> None:
    key, flags, variables, default, meaning = OPTION_ROWS[option.flag]
    assert words(key) == ([option.key] if option.key else [])
    assert words(flags) == [f"--{each}" for each in (option.flag, *option.aliases)]
    assert words(variables) == list(option.env)
    assert words(default) == ([option.default] if option.default else [])
    assert meaning.startswith("no effect") == bool(option.no_effect)
    assert ("deviceListStrategy" in meaning or "likewise" in meaning or "cdi-ann" in meaning) == (
        option.wants_strategy or option.flag in {"device-list-strategy", "cdi-disable-hooks"}
    )
    assert all(f"`{choice}`" in meaning for choice in option.choices)


def test_every_key_of_the_file_is_there_and_no_other() -> None:
    leaves = {
        f"{path}.{name}"[2:]
        for path, names in keys().items()
        for name in names
        if f"{path}.{name}" not in keys()
    }
    told = {words(row[0])[0] for row in ROWS if words(row[0]) and "." in words(row[0])[0]}
    told = {each for each in told if each.partition(".")[0] in keys()["$"]}
    parents = {each.rpartition(".")[0].removesuffix("[]") for each in leaves}
    assert leaves - {"version"} <= told
    assert told - leaves <= parents
    assert f"version: {VERSION}" in REFERENCE


def test_choices_are_there() -> None:
    devices, health = "$.allotment.devices[]", "$.allotment.health"
    for place in (f"{devices}.mode", f"{devices}.timeSlice", f"{health}.evict"):
        (row,) = (row for row in ROWS if row[0] == f"`{place[2:]}`")
        assert choices_at(place)
        assert set(choices_at(place)) <= set(words(" ".join(row)))


def test_defaults_of_ours_are_there() -> None:
    default = AllotmentConfig()
    told = {words(row[0])[0]: row[1] for row in ROWS if words(row[0])}
    assert told["allotment.sharesPerDevice"] == f"`{default.shares_per_device}`"
    assert told["allotment.honourResources"] == f"`{default.honour_resources}`".lower()
    assert told["allotment.health.autoRecover"] == f"`{default.health.auto_recover}`".lower()
    assert told["allotment.health.evict"] == f"`{default.health.evict}`"
    assert told["allotment.health.evictAfter"] == f"`{default.health.evict_after_s:g}s`"


EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", REFERENCE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_are_right(text: str) -> None:
    assert yaml.safe_load(text)
    assert load(text, source="example").notes == ()
