# SPDX-License-Identifier: Apache-2.0
"""The documents hold together: links lead somewhere, and what is generated is up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import generate_cli_reference
import generate_facts
import generate_man_pages
import site_links
from allotment.cli.groups import COMMANDS

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


def test_man_pages_are_up_to_date(root: Path) -> None:
    written = {path.name: path.read_text() for path in (root / "man").iterdir()}
    assert written == generate_man_pages.render(), "run `make docs`"
    assert len(written) == len(COMMANDS) + 1


@pytest.mark.parametrize(
    ("text", "troff"),
    [
        ("--memory of `a b`", r"\-\-memory of \fBa b\fP"),
        ("a\\b", r"a\eb"),
        (".begins\n'so", "\\&.begins\n\\&'so"),
    ],
)
def test_text_of_a_man_page_is_no_request_of_troff(text: str, troff: str) -> None:
    assert generate_man_pages.escaped(text) == troff


def test_facts_are_up_to_date() -> None:
    marked = set()
    for document in generate_facts.documents():
        text = document.read_text()
        assert text == generate_facts.render(text), f"{document}: run `make docs`"
        # A comment there would end the paragraph.
        assert not re.search(r"^ *<!-- fact", text, re.MULTILINE), document
        marked |= {mark["name"] for mark in generate_facts.MARK.finditer(text)}
    assert marked == set(generate_facts.FACTS), "a fact that no page marks"


def test_a_fact_that_differs_is_renewed() -> None:
    assert generate_facts.render("a <!-- fact: ledger.slots -->1<!-- /fact --> b") == (
        "a <!-- fact: ledger.slots -->768<!-- /fact --> b"
    )


def test_the_count_of_entry_points_is_that_of_the_exports(root: Path) -> None:
    exports = (root / "tests" / "unit" / "shim_exports.txt").read_text().split()
    owned = [name for name in exports if name.startswith(("cu", "nvml"))]
    assert generate_facts.owned_entry_points() == len(owned)


UNSEEN = ("none", "not tested")
# A test, one of its cases, or a case of a C program.
NAMED_TEST = r'def test_\w*{0}|"[\w-]*{0}\w*"|^static void \w*{0}\w*\(void\)'


def named_tests(cell: str, before: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files that a cell of SECURITY.md names, and what it names that is not there.

    A test is of the file before its name. `before` are the files that "the same" stands for.
    """
    files, missing = list(before) if cell.startswith("the same") else [], []
    for name in re.findall(r"`([^`]+)`", cell):
        if re.fullmatch(r"\w+", name):
            wanted = re.compile(NAMED_TEST.format(name.removeprefix("test_")), re.MULTILINE)
            is_there = bool(files and wanted.search(files[-1].read_text()))
        else:
            folders = (ROOT, ROOT / "tests/cluster", *(file.parent for file in files[-1:]))
            found = [folder / name for folder in folders if (folder / name).exists()]
            files += found[:1]
            is_there = bool(found)
        missing += [name] * (not is_there)
    if not files and not cell.startswith(UNSEEN):
        missing.append(cell)
    return files, missing


def test_security_names_a_test_for_each_attack() -> None:
    missing, seen, heading, files = [], 0, [""], list[Path]()
    for line in (ROOT / "SECURITY.md").read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| "):
            heading = heading if line.startswith("|---") else [""]
        elif heading == [""]:
            heading = row
        elif heading[-1] in {"seen by", "test"}:
            assert len(row) == len(heading), row
            files, unknown = named_tests(row[-1], files)
            missing += unknown
            seen += bool(files)
    assert missing == []
    assert seen > 30


def test_a_test_that_is_not_there_would_be_found() -> None:
    other = [ROOT / "tests/unit/test_words.py"]
    assert named_tests("`test_no.py`, `tests/unit`", []) == ([ROOT / "tests/unit"], ["test_no.py"])
    assert named_tests("the same (`an_offence_is_found`)", other) == (other, [])
    assert named_tests("the same (`leads_back`)", other) == (other, ["leads_back"])
    assert named_tests("read", []) == ([], ["read"])


def unknown_commits(root: Path, text: str) -> list[str]:
    """The commits that a page of results names, that are not here and not marked so."""
    lines = [line for line in text.splitlines() if "not in this repository" not in line]
    named = re.findall(r"\bcommit:? ([0-9a-f]{7,40})\b", "\n".join(lines))
    found = [["git", "cat-file", "-e", f"{commit}^{{commit}}"] for commit in named]
    done = [subprocess.run(each, cwd=root, capture_output=True, check=False) for each in found]
    return [commit for commit, ran in zip(named, done, strict=True) if ran.returncode]


def test_commits_that_results_name_exist(root: Path) -> None:
    history = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if history.stdout.strip() != "false":
        pytest.skip("no full git history here (a shallow clone: git fetch --unshallow)")
    page = (root / "docs" / "performance-details.md").read_text()
    assert unknown_commits(root, page) == []
    assert unknown_commits(root, "- commit: 0123abc\n") == ["0123abc"]


@pytest.mark.parametrize(
    ("source", "here", "target", "site"),
    [
        ("docs/guides/mig.md", "guides/mig.md", "../concepts/modes.md#a", "../concepts/modes.md#a"),
        ("docs/guides/mig.md", "guides/mig.md", "#a", "#a"),
        ("docs/guides/mig.md", "guides/mig.md", "https://example.com", "https://example.com"),
        ("docs/guides/mig.md", "guides/mig.md", "../../SECURITY.md", "../project/security.md"),
        ("docs/guides/mig.md", "guides/mig.md", "../../native/ledger.h", None),
        ("docs/guides/mig.md", "guides/mig.md", "no.md", "no.md"),
        ("SECURITY.md", "project/security.md", "docs/concepts/modes.md", "../concepts/modes.md"),
    ],
)
def test_the_site_has_links_of_its_own(
    source: str, here: str, target: str, site: str | None
) -> None:
    pages = {"guides/mig.md", "concepts/modes.md", "project/security.md"}
    assert site_links.site_target(target, source=source, here=here, pages=pages) == site


def build_site(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Not quietly: mkdocs counts no warning then."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", site],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_site_builds_without_a_warning(root: Path, tmp_path: Path) -> None:
    done = build_site(root / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert not re.findall(r"(?:src|href)=\"?https?://[^\" >]+\.(?:js|css|woff2?)", page)


def test_a_broken_link_fails_the_site(root: Path, tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text("# A page\n\n[a](no.md) [b](#none)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {root}/mkdocs.yml\ndocs_dir: {pages}\nnav: [index.md]\n"
        f"hooks: [{root}/tools/site_links.py]\n"
    )
    done = build_site(config, tmp_path / "site")
    assert done.returncode == 1
    assert "link 'no.md'" in done.stderr
    assert "'#none'" in done.stderr


@pytest.mark.parametrize("target", ["demo", "test", "lint", "types", "native", "bench", "docs"])
def test_make_has_the_target_and_says_what_it_does(root: Path, target: str) -> None:
    told = subprocess.run(
        ["make", "help"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"^  make {target} +\w", told, re.MULTILINE)
