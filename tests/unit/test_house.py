# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: sizes that a reader can hold, and names that say one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
from tests.conftest import FIRST_FILES, OWN_CLUSTERS, file_order

from allotment.model.modes import MODES

MOST_FILES = 385
MOST_LINES = 600
# Where a mode is parsed or shown. All other code asks for a trait (`model/modes.py`).
MODE_COMPARISONS = {
    "cli/explain.py": "the column MODE, if not all have the default mode",
    "cli/run.py": "--mode of `allot run` is one of these",
    "cli/scheduler_options.py": "--modes of `allot scheduler` is one of these",
    "shares/mode_policy.py": "the modes of `allot devices set-mode`, and of its file",
    "agent/config/schema.py": "`mode` of a rule: as parts of a GPU, or by NVIDIA's resources",
    "dialects/own/allotment.py": "a profile without the annotation `mode` means mode mig",
    "dialects/own/resource_claims.py": "the modes of a claim for a part of a GPU",
    "dialects/own/placement.py": "the annotation omits the default mode",
    "kube/inventories.py": "a node's annotation may name modes of later versions: left out",
    "dialects/foreign/translate.py": "the annotation omits the default mode, and one that a"
    " profile implies",
}


@pytest.fixture(scope="module")
def sources(root: Path) -> Mapping[Path, str]:
    """The text of each module, without those that a compiler writes."""
    found = sorted((root / "src" / "allotment").rglob("*.py"))
    return {path: path.read_text("utf-8") for path in found if not path.stem.endswith("_pb2")}


def public_classes(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def aliases(text: str) -> Iterator[str]:
    """What a module names like a class: types and type variables."""
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
        for target in targets:
            if isinstance(target, ast.Name) and re.match(r"[A-Z]\w*[a-z]", target.id):
                yield target.id


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
    for path, text in sources.items():
        for name in places.keys() & set(aliases(text)):
            places[name].add(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_file_is_longer_than_a_reader_can_hold(sources: Mapping[Path, str], root: Path) -> None:
    folders = ("bench", "examples", "native", "tests", "tools")
    others = [path for folder in folders for path in (root / folder).rglob("*.[pch]*")]
    written = [
        path
        for path in others
        if path.suffix in {".py", ".c", ".h"}
        and path.relative_to(root).parts[:2] != ("native", "build")
        and not path.stem.endswith("_pb2")
    ]
    assert len(written) > 500
    lengths = {
        path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines())
        for path in (*sources, *written)
    }
    long = {path for path, lines in lengths.items() if lines > MOST_LINES}
    assert long == set()


def test_the_tests_that_have_a_place_in_the_order_are_there(root: Path) -> None:
    named = (*FIRST_FILES, *OWN_CLUSTERS)
    assert [name for name in named if not (root / name).is_file()] == []


def test_clusters_of_their_own_are_for_the_workers_that_have_none() -> None:
    (shared, *_), (own, next_own, *_) = FIRST_FILES, OWN_CLUSTERS
    unit, short = "tests/unit/test_a.py", "tests/cluster/test_short.py"
    clusters = [shared, short, next_own, own]
    waiting = [unit, next_own, short, own, shared]
    assert file_order(waiting, is_cluster_worker=True) == [*clusters, unit]
    assert file_order(waiting, is_cluster_worker=False) == [unit, *reversed(clusters)]


def test_the_house_has_so_many_files_at_most(sources: Mapping[Path, str]) -> None:
    assert len(sources) <= MOST_FILES


def test_no_module_imports_itself_by_way_of_others(sources: Mapping[Path, str], root: Path) -> None:
    edges = imports_within(sources, root)
    while leaves := {name for name, imported in edges.items() if not imported & edges.keys()}:
        edges = {name: imported for name, imported in edges.items() if name not in leaves}
    assert edges == {}


def is_mode(node: ast.AST | None, names: AbstractSet[str]) -> bool:
    """Whether it is a mode, or has modes; `names`: constants that are or have such."""
    match node:
        case ast.Constant():
            return node.value in MODES
        case ast.Name():
            return node.id in names
        case ast.Set(elts=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            return any(is_mode(part, names) for part in parts)
        case ast.Call(func=ast.Name("frozenset" | "set" | "tuple"), args=[part]):
            return is_mode(part, names)
        case ast.Starred(value=part):
            return is_mode(part, names)
    return False


def mode_constants(tree: ast.Module, known: AbstractSet[str] = frozenset()) -> set[str]:
    """A module's constants that are modes or have some: its own, and those that it imports.

    `known`: such constants of other modules than the modes' own, as `MODULE.NAME`.
    """
    names = {
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name.isupper()
        if node.module in {"allotment.model.modes", "allotment.modes"}
        or f"{node.module}.{each.name}" in known
    }
    for node in tree.body:
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and not isinstance(node.value, ast.Constant)  # another system's word
            and is_mode(node.value, names)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {each.id for each in targets if isinstance(each, ast.Name)}
    return names


def compares_modes(tree: ast.Module, known: AbstractSet[str] = frozenset()) -> bool:
    """Whether a module compares with a mode's name, as a constant or a literal."""
    names = mode_constants(tree, known)
    operands = [
        operand
        for node in ast.walk(tree)
        for operand in (
            (node.left, *node.comparators)
            if isinstance(node, ast.Compare)
            else (node.left, node.right)
            if isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.Sub | ast.BitAnd | ast.BitOr | ast.BitXor)
            else (node.value,)
            if isinstance(node, ast.MatchValue)
            else ()
        )
    ]
    return any(is_mode(operand, names) for operand in operands)


@pytest.mark.parametrize(
    "text",
    [
        "{imports} MIG\nmode == MIG",
        "{imports} MPS as MPS_MODE\nmode in (MPS_MODE, '')",
        "{imports} SOFT\nmodes - {{SOFT}}",
        "{imports} PART_MODES\nmode not in PART_MODES",
        "match mode:\n    case 'timeslice': pass",
        "mode != 'exclusive'",
        "{imports} MODES\nWORDS: Final = (*MODES, 'other')\nmode in WORDS",
        "{imports} SOFT\nSHARED = frozenset((SOFT, 'mps'))\nmodes - SHARED",
        "from allotment.dialects.own.other import LISTED\nmode not in LISTED",
    ],
)
def test_a_comparison_with_a_mode_is_seen(text: str) -> None:
    tree = ast.parse(text.format(imports="from allotment.model.modes import"))
    assert compares_modes(tree, {"allotment.dialects.own.other.LISTED"})
    assert not compares_modes(ast.parse("from allotment.model.modes import MIG\nmode = MIG"))


def test_modes_are_compared_where_they_are_parsed_or_shown(
    sources: Mapping[Path, str], root: Path
) -> None:
    trees = {
        path.relative_to(root / "src" / "allotment").as_posix(): ast.parse(text)
        for path, text in sources.items()
    }
    known: set[str] = set()
    more = {""}
    while more - known:
        known |= more
        more = {
            f"allotment.{path.removesuffix('.py').replace('/', '.')}.{name}"
            for path, tree in trees.items()
            for name in mode_constants(tree, known)
        }
    comparing = {
        path
        for path, tree in trees.items()
        if not path.startswith("modes/") and path != "model/modes.py"
        if compares_modes(tree, known)
    }
    assert comparing == set(MODE_COMPARISONS)


def unprepared(text: str) -> Iterator[int]:
    """The lines of functions that read a document into a type that may not be prepared."""
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            call = ast.unparse(node.func)
            kinds = [each.value for each in node.keywords if each.arg == "type"]
            if call == "msgspec.convert":
                kinds += node.args[1:]
            elif call != "msgspec.json.decode":
                continue
            yield from (each.lineno for each in kinds if "prepared(" not in ast.unparse(each))


def test_documents_are_read_into_prepared_types(sources: Mapping[Path, str], root: Path) -> None:
    lines = {str(path.relative_to(root)): [*unprepared(text)] for path, text in sources.items()}
    assert {path: found for path, found in lines.items() if found} == {}


def test_an_unprepared_type_is_seen() -> None:
    calls = ["msgspec.json.decode(x, type=A)", "msgspec.convert(x, B)", "msgspec.json.decode(x)"]
    assert [*unprepared("\n    ".join(["def f(x):", *calls]))] == [2, 3]


def test_a_test_kills_at_each_failpoint(sources: Mapping[Path, str], root: Path) -> None:
    call = re.compile(r'\b(?:failpoint|_step)\("([a-z.]+)"\)')
    points = {
        point
        for path, text in sources.items()
        for point in call.findall(text)
        if path.name != "failpoints.py"
    }
    assert len(points) > 30
    tests = "".join(path.read_text("utf-8") for path in (root / "tests").rglob("*.py"))
    assert {point for point in points if f'"{point}' not in tests} == set()
