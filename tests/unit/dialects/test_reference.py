# SPDX-License-Identifier: Apache-2.0
"""docs/reference/annotations.md and the code say the same."""

import re
from pathlib import Path

from allotment.agent import device_modes, evictions, maintenance
from allotment.agent.allocation import share_events
from allotment.agent.mig import conflicts, slices
from allotment.agent.plugin import front_keeping
from allotment.dialects.own.allotment import RESOURCES
from allotment.dialects.own.annotations import KEYS
from allotment.dialects.own.placement import PLACEMENT


def section(root: Path, title: str) -> str:
    text = (root / "docs" / "reference" / "annotations.md").read_text()
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def first_cells(table: str) -> set[str]:
    return set(re.findall(r"^\| `([^`]+)`", table, re.MULTILINE))


def test_every_annotation_is_there_and_no_other(root: Path) -> None:
    assert first_cells(section(root, "Annotations")) == KEYS
    assert f"### `{PLACEMENT}`" in section(root, "Annotations")


def test_every_resource_is_there(root: Path) -> None:
    assert first_cells(section(root, "Resources")) == {*RESOURCES, "nvidia.com/gpu"}


def test_every_event_is_there(root: Path) -> None:
    reasons = {
        share_events.READY,
        share_events.SMALL,
        share_events.UNGUARDED,
        share_events.REFUSED,
        share_events.TAKEN_OVER,
        share_events.MISSING,
        share_events.RESIZED,
        share_events.RESIZE_REFUSED,
        share_events.STATE,
    }
    reasons |= {evictions.EVICTED, evictions.KEPT, front_keeping.WITHHELD}
    reasons |= {slices.LOST, slices.STAYS, slices.UNKNOWN, slices.DAMAGED}
    reasons |= {maintenance.EXCEEDED, conflicts.SWITCHED_OFF, conflicts.PAUSED}
    reasons |= {device_modes.DRAINING, device_modes.DRAINED, device_modes.INVALID}
    assert first_cells(section(root, "Events")) == reasons
