# SPDX-License-Identifier: Apache-2.0
"""docs/reference/dialects.md and the code say the same."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from allotment.dialects.foreign import deepomatic, hami, nvidia, volcano
from allotment.dialects.foreign.hami import HamiDialect
from allotment.dialects.foreign.settings import SETTINGS, foreign_dialects


def section(root: Path, title: str) -> str:
    text = (root / "docs" / "reference" / "dialects.md").read_text()
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def first_cells(table: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        (
            "HAMi",
            (*HamiDialect().resources, *hami.ANNOTATIONS, *hami.VARIABLES, *hami.RESULTS),
        ),
        (
            "Volcano",
            (
                *volcano.RESOURCES,
                *volcano.ANNOTATIONS,
                *volcano.VARIABLES,
                *volcano.RESULTS,
            ),
        ),
        ("Volcano's GPU sharing", (*volcano.GPUSHARE_RESOURCES, *volcano.GPUSHARE_RESULTS)),
        ("NVIDIA", nvidia.KEYS),
        ("Deepomatic", (deepomatic.SHARED_GPU,)),
    ],
)
def test_every_key_is_there_and_no_other(root: Path, title: str, keys: Iterable[str]) -> None:
    assert sorted(first_cells(section(root, title))) == sorted(keys)


def test_every_setting_is_there_and_no_other(root: Path) -> None:
    known = {
        f"{name}.{each.encode_name}"
        for name, kind in SETTINGS.items()
        for each in msgspec.structs.fields(kind)
    }
    assert set(first_cells(section(root, "Settings"))) == known


def test_every_dialect_has_its_name_there(root: Path) -> None:
    text = (root / "docs" / "reference" / "dialects.md").read_text()
    lacking = [each.name for each in foreign_dialects() if f"`{each.name}`" not in text]
    assert not lacking
