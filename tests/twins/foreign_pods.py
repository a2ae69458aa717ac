# SPDX-License-Identifier: Apache-2.0
"""What the tests of foreign dialects have in common: nodes to look at, and any text at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hypothesis import strategies as st

from allotment.dialects.foreign.adoption import adopted_usage, node_view
from allotment.dialects.foreign.base import ForeignDialect
from allotment.dialects.foreign.settings import DialectSettings, read_sections, settings_of
from allotment.dialects.foreign.translate import applied, wanted_of, written
from allotment.model.clusters import (
    NodeDevice,
    NodeInventory,
    PlacedContainer,
    PlacedDevice,
    PodBooking,
)
from allotment.model.compute import WHOLE
from allotment.model.errors import UsageError
from allotment.model.pods import ForeignPod, PodUid

Result = TypeVar("Result")

GI = 1 << 30
MI = 1 << 20
UUIDS = ("GPU-a", "GPU-b", "GPU-c")
INVENTORY = NodeInventory(
    name="node-1",
    devices=tuple(
        NodeDevice(uuid=uuid, model="Tesla T4", memory_bytes=15 * GI, index=index)
        for uuid, index in zip(UUIDS, (0, 1, 7), strict=True)
    ),
)
NODE = node_view(INVENTORY)

texts = st.one_of(
    st.text(max_size=30),
    st.integers(min_value=-5, max_value=2**70).map(str),
    st.decimals(allow_nan=True, allow_infinity=True).map(str),
    st.sampled_from(
        [
            "0",
            "1",
            "2",
            "4",
            "8",
            "30",
            "100",
            "200",
            "0.5",
            ".5",
            "1.0",
            "2.0",
            "4Gi",
            "1e3",
            "2k",
            "true",
            "false",
            "0,1",
            "GPU-a",
            "GPU-a,GPU-b",
            "1073741824",
            "time-slicing",
        ]
    ),
)
"""What people write, and what nobody would."""


def load_settings(text: str) -> DialectSettings:
    return settings_of(read_sections(text))


def booking(**parts: list[PlacedDevice]) -> PodBooking:
    """What containers were given, by their names."""
    return PodBooking(
        uid=PodUid("u"),
        node="node-1",
        containers=tuple(
            PlacedContainer(name=name, devices=tuple(devices)) for name, devices in parts.items()
        ),
    )


def given_to(found: PodBooking | None) -> dict[str, tuple[PlacedDevice, ...]]:
    """The same, read back."""
    assert found is not None
    return {each.name: each.devices for each in found.containers}


def outcome(act: Callable[[], Result]) -> Result | UsageError:
    """What it returns, or why it was refused; any other error is a test's failure."""
    try:
        return act()
    except UsageError as error:
        return error


def check_translation(dialect: ForeignDialect, subject: ForeignPod) -> None:
    """Any pod is refused by name, or translated so that it reads natively as it was meant."""
    if not dialect.recognises(subject):
        return
    found = outcome(lambda: dialect.translate(subject))
    if isinstance(found, UsageError):
        assert str(subject) in found.message
        assert found.hint
        return
    assert found.dialect == dialect.name
    assert found.containers
    requests = [each.request for each in found.containers]
    assert all(0 < each.compute.ceiling <= WHOLE and each.count > 0 for each in requests)
    changes = outcome(lambda: written(subject, found))
    if isinstance(changes, UsageError):  # an amount beyond all nodes
        assert str(subject) in changes.message
        return
    wanted = [each.request for each in wanted_of(applied(subject, changes))]
    assert [(each.count, each.compute, each.constraints, each.preferences) for each in wanted] == [
        (each.count, each.compute, each.constraints, each.preferences) for each in requests
    ]
    assert [(each.memory.size_bytes, each.memory.part) for each in wanted] == [
        (each.memory.size_bytes, each.memory.part) for each in requests
    ]


def taken(
    dialect: ForeignDialect, subject: ForeignPod, node: NodeInventory = INVENTORY
) -> PodBooking | None:
    """What a dialect's system has given a pod that runs."""
    return adopted_usage(subject, node, (dialect,), uid=PodUid(""))


def check_take_over(dialect: ForeignDialect, subject: ForeignPod) -> None:
    """Whatever stands on a running pod is read as devices of the node, or refused by name."""
    found = outcome(lambda: taken(dialect, subject))
    if isinstance(found, UsageError):
        assert str(subject) in found.message
    elif found is not None:
        devices = [part for each in found.containers for part in each.devices]
        assert devices
        assert all(part.uuid in NODE.memory_bytes and part.memory > 0 for part in devices)
        assert all(0 <= part.guarantee <= WHOLE for part in devices)


def documented(root: Path, title: str) -> list[str]:
    """What docs/reference/dialects.md has in the first cells of a system's tables, in order."""
    text = (root / "docs" / "reference" / "dialects.md").read_text()
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return sorted(re.findall(r"^\| `([^`]+)`", found[1], re.MULTILINE))
