# SPDX-License-Identifier: Apache-2.0
"""The documents hold together: links lead somewhere, and what is generated is up to date."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import generate_cli_reference

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Every Markdown file of the project."""
    top = [path for path in ROOT.glob("*.md") if not path.name.startswith(".")]
    rooms = ("deploy", "docs", "native", "bench", "examples", "tests")
    return sorted([*top, *(path for room in rooms for path in (ROOT / room).rglob("*.md"))])


def anchors(document: Path) -> set[str]:
    """The names that links may give to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


def broken(document: Path) -> list[str]:
    """The relative links of a document that lead nowhere."""
    found = []
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    assert broken(document) == []


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# A heading\n[a](page.md#a-heading) [b](page.md#no) [c](no.md) [d](#no)")
    assert broken(document) == ["page.md#no", "no.md", "#no"]


def test_cli_reference_is_up_to_date(root: Path) -> None:
    written = (root / "docs" / "reference" / "cli.md").read_text()
    assert written == generate_cli_reference.render(), "run `make docs`"


@pytest.mark.parametrize("target", ["demo", "test", "lint", "types", "native", "bench", "docs"])
def test_make_has_the_target_and_says_what_it_does(root: Path, target: str) -> None:
    told = subprocess.run(
        ["make", "help"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"^  make {target} +\w", told, re.MULTILINE)
