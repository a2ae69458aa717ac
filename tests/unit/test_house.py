# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: sizes that a reader can hold, and names that say one thing."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

MOST_FILES = 300
MOST_LINES = 600


@pytest.fixture(scope="module")
def sources(root: Path) -> Mapping[Path, str]:
    """The text of each module, without those that a compiler writes."""
    found = sorted((root / "src" / "allotment").rglob("*.py"))
    return {path: path.read_text("utf-8") for path in found if not path.stem.endswith("_pb2")}


def public_classes(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def imports_within(sources: Mapping[Path, str], root: Path) -> dict[str, set[str]]:
    """Which of our modules each module imports, at its start or later."""
    names = {
        ".".join(path.relative_to(root / "src").with_suffix("").parts).removesuffix(
            ".__init__"
        ): text
        for path, text in sources.items()
    }
    edges: dict[str, set[str]] = {}
    for name, text in names.items():
        edges[name] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                targets = {f"{node.module}.{each.name}" for each in node.names}
                edges[name] |= {each if each in names else node.module for each in targets}
        edges[name] &= names.keys() - {name}
    return edges


def test_a_public_class_name_stands_in_one_file(sources: Mapping[Path, str]) -> None:
    places = defaultdict(set)
    for path, text in sources.items():
        for name in public_classes(text):
            places[name].add(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_file_is_longer_than_a_reader_can_hold(sources: Mapping[Path, str]) -> None:
    lengths = {str(path): len(text.splitlines()) for path, text in sources.items()}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_the_house_has_so_many_files_at_most(sources: Mapping[Path, str]) -> None:
    assert len(sources) <= MOST_FILES


def test_no_module_imports_itself_by_way_of_others(sources: Mapping[Path, str], root: Path) -> None:
    edges = imports_within(sources, root)
    while leaves := {name for name, imported in edges.items() if not imported & edges.keys()}:
        edges = {name: imported for name, imported in edges.items() if name not in leaves}
    assert edges == {}
