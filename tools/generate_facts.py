# SPDX-License-Identifier: Apache-2.0
"""Writes the figures that the code defines into the documents (`make docs`).

A page marks a figure as `<!-- fact: NAME -->768<!-- /fact -->`; the comments are invisible to a
reader. A test compares the pages with the code.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from allotment.agent.dra.devices import DEFAULT_COMPUTE
from allotment.devices.models import MODELS
from allotment.ledger import layout, lease_layout
from allotment.model.devices import MPS_CLIENTS

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- fact: (?P<name>[a-z.-]+) -->(?P<value>.*?)<!-- /fact -->")


def owned_entry_points() -> int:
    """How many functions of the driver and of NVML the shim exports."""
    entries = (ROOT / "native" / "shim" / "entries.h").read_text("utf-8")
    return len(set(re.findall(r"\bX\((\w+)\) *\\?$", entries, re.MULTILINE)))


def dependencies() -> int:
    """How many packages `allot` needs on one machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return len(project["dependencies"])


FACTS: Mapping[str, Callable[[], object]] = {
    "claims.compute": lambda: DEFAULT_COMPUTE,
    "dependencies": dependencies,
    # One seat is that of programs without a share.
    "device.shares": lambda: lease_layout.SEAT_UNBOOKED,
    "ledger.devices": lambda: layout.MAX_DEVICES,
    "leases.places": lambda: lease_layout.OWN_PLACES,
    "ledger.slots": lambda: layout.MAX_SLOTS,
    "mps.shares": lambda: MPS_CLIENTS,
    "shim.entry-points": owned_entry_points,
    "simulated.models": lambda: len(MODELS),
}


def documents() -> Iterator[Path]:
    """The Markdown files that may mark facts."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def render(text: str) -> str:
    """The text with each marked figure as the code has it."""

    def replaced(mark: re.Match[str]) -> str:
        return f"<!-- fact: {mark['name']} -->{FACTS[mark['name']]()}<!-- /fact -->"

    return MARK.sub(replaced, text)


if __name__ == "__main__":
    for path in documents():
        text = path.read_text("utf-8")
        if (rendered := render(text)) != text:
            path.write_text(rendered, "utf-8")
