# SPDX-License-Identifier: Apache-2.0
"""docs/concepts/health.md says of each XID what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from allotment.agent.health.xids import CATALOGUE, LINKED, catalogue_action, parse_action

ROW = re.compile(r"^\| `([a-z-]+)` \| ([^|]+) \| ([0-9][0-9, -]*) \|", re.MULTILINE)


def numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(", "):
        first, _, last = part.strip().partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def test_the_table_of_xids_is_the_codes(root: Path) -> None:
    text = (root / "docs" / "concepts" / "health.md").read_text()
    told = {xid: parse_action(name) for name, _, xids in ROW.findall(text) for xid in numbers(xids)}
    assert told == {xid: catalogue_action(xid) for xid in CATALOGUE}


def test_the_page_names_the_xids_that_the_driver_is_asked_about(root: Path) -> None:
    text = (root / "docs" / "concepts" / "health.md").read_text()
    (listed,) = re.findall(r"after an XID that\s+changes it. These are ([0-9, and]+)\.", text)
    assert {int(xid) for xid in re.findall(r"\d+", listed)} == LINKED


def test_the_table_names_nvidias_actions(root: Path) -> None:
    text = (root / "docs" / "concepts" / "health.md").read_text()
    told = {name: set(names.split(", ")) for name, names, _ in ROW.findall(text)}
    for xid, (bucket, _) in CATALOGUE.items():
        assert (bucket or "none") in told[catalogue_action(xid)], xid
