# SPDX-License-Identifier: Apache-2.0
"""Traces as CSV files. Every error names its line."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from io import StringIO
from pathlib import Path

import msgspec

from allotment.model.errors import UsageError

MILLI = 1000
"""Thousandths in a whole GPU."""


class TraceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose GPUs are all of one model."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str = ""
    gpu_memory_mib: int | None = None
    """Of each GPU; None: not in the trace."""


class TraceShape(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a pod without its host memory: pods of one shape count as one kind."""

    cpu_milli: int
    gpus: int
    gpu_milli: int
    """Of each GPU."""
    models: tuple[str, ...] = ()
    """Allowed models; empty: any."""
    gpu_memory_mib: int | None = None
    """Of each GPU; None: not in the trace."""

    @property
    def size_milli(self) -> int:
        return self.gpus * self.gpu_milli


class TracePod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod, with its arrival and run time if the trace has them."""

    name: str
    shape: TraceShape
    memory_mib: int
    """Host memory."""
    created_s: float | None = None
    duration_s: float | None = None
    line: int = 0
    """Line in its file."""


class Trace(msgspec.Struct, frozen=True):
    """Nodes and pods of a cluster."""

    nodes: Sequence[TraceNode]
    pods: Sequence[TracePod]


def capacity_milli(nodes: Sequence[TraceNode]) -> int:
    return MILLI * sum(node.gpus for node in nodes)


NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model", "gpu_memory_mib")
POD_COLUMNS = (
    "name",
    "cpu_milli",
    "memory_mib",
    "num_gpu",
    "gpu_milli",
    "gpu_spec",
    "qos",
    "pod_phase",
    "creation_time",
    "deletion_time",
    "scheduled_time",
    "gpu_memory_mib",
)
_NODE_NEEDS = ("sn", "cpu_milli", "memory_mib", "gpu")
_POD_NEEDS = ("name", "cpu_milli", "num_gpu", "gpu_milli")

_MOST_GPUS = 64
_MOST_CPU = 10**9
_MOST_MIB = 10**12
_MOST_SECONDS = 1e12
_MOST_DIGITS = 20
_MOST_SHOWN = 40
_MODELS = "|"


class _Row(msgspec.Struct, frozen=True):
    """A line of a file."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def refuse(self, problem: str, *, hint: str) -> UsageError:
        return UsageError(f"{self.path}, line {self.line}: {problem}", hint=hint)

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def name(self, column: str) -> str:
        text = self.text(column)
        if not text:
            raise self.refuse(f"{column} is empty", hint="each line needs a unique name")
        return text

    def whole(self, column: str, *, most: int) -> int:
        """Return a whole number from 0 to `most`; 0 if the file lacks the column."""
        if column not in self.cells:
            return 0
        text = self.text(column)
        number = (
            int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else -1
        )
        if not 0 <= number <= most:
            problem = f"{column} is {_shown(text)}"
            raise self.refuse(problem, hint=f"write a whole number from 0 to {most}")
        return number

    def whole_or_none(self, column: str, *, most: int) -> int | None:
        return self.whole(column, most=most) if self.text(column) else None

    def seconds(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not abs(number) <= _MOST_SECONDS:
            problem = f"{column} is {_shown(text)}"
            raise self.refuse(problem, hint="write seconds, like 1558381; or nothing")
        return number


def read_nodes(path: Path) -> list[TraceNode]:
    """Read nodes; raise `UsageError` for an invalid file."""
    nodes = [_node(row) for row in _rows(path, NODE_COLUMNS, _NODE_NEEDS, what="nodes")]
    if not nodes:
        raise _empty(path, "nodes", NODE_COLUMNS)
    return nodes


def read_pods(path: Path) -> list[TracePod]:
    """Read pods; raise `UsageError` for an invalid file. Some columns are optional."""
    pods = [_pod(row) for row in _rows(path, POD_COLUMNS, _POD_NEEDS, what="pods")]
    if not pods:
        raise _empty(path, "pods", POD_COLUMNS)
    return pods


def nodes_text(nodes: Iterable[TraceNode]) -> str:
    rows = (
        (node.name, node.cpu_milli, node.memory_mib, node.gpus, node.model, node.gpu_memory_mib)
        for node in nodes
    )
    return _text(NODE_COLUMNS, rows)


def pods_text(pods: Iterable[TracePod]) -> str:
    """Format pods as CSV; each one is scheduled when it is created."""
    return _text(POD_COLUMNS, (_pod_cells(pod) for pod in pods))


def _pod_cells(pod: TracePod) -> tuple[object, ...]:
    shape = pod.shape
    created, ended = pod.created_s, None
    if created is not None and pod.duration_s is not None:
        ended = created + pod.duration_s
    return (
        pod.name,
        shape.cpu_milli,
        pod.memory_mib,
        shape.gpus,
        shape.gpu_milli,
        _MODELS.join(shape.models),
        "LS" if shape.gpus else "BE",
        "Running",
        _plain(created),
        _plain(ended),
        _plain(created),
        shape.gpu_memory_mib,
    )


def _plain(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return str(int(seconds)) if seconds == int(seconds) else repr(seconds)


def _node(row: _Row) -> TraceNode:
    return TraceNode(
        name=row.name("sn"),
        cpu_milli=row.whole("cpu_milli", most=_MOST_CPU),
        memory_mib=row.whole("memory_mib", most=_MOST_MIB),
        gpus=row.whole("gpu", most=_MOST_GPUS),
        model=row.text("model"),
        gpu_memory_mib=row.whole_or_none("gpu_memory_mib", most=_MOST_MIB),
    )


def _pod(row: _Row) -> TracePod:
    gpus = row.whole("num_gpu", most=_MOST_GPUS)
    milli = row.whole("gpu_milli", most=MILLI)
    if gpus and not milli:
        problem = f"the pod requests {gpus} GPUs with gpu_milli 0"
        raise row.refuse(problem, hint=f"gpu_milli is the part of each GPU; {MILLI} is a whole GPU")
    if milli and not gpus:
        problem = f"the pod requests gpu_milli {milli} of 0 GPUs"
        raise row.refuse(problem, hint="set num_gpu to 1, or gpu_milli to 0")
    memory = row.whole_or_none("gpu_memory_mib", most=_MOST_MIB)
    created = row.seconds("creation_time")
    return TracePod(
        name=row.name("name"),
        shape=TraceShape(
            cpu_milli=row.whole("cpu_milli", most=_MOST_CPU),
            gpus=gpus,
            gpu_milli=milli,
            models=_models(row),
            gpu_memory_mib=memory if gpus else None,
        ),
        memory_mib=row.whole("memory_mib", most=_MOST_MIB),
        created_s=created,
        duration_s=_duration(row, created),
        line=row.line,
    )


def _models(row: _Row) -> tuple[str, ...]:
    """Return the models in sorted order, so that their order in the file does not matter."""
    parts = {part.strip() for part in row.text("gpu_spec").split(_MODELS)}
    return tuple(sorted(parts - {""}))


def _duration(row: _Row, created: float | None) -> float | None:
    """Return the run time from scheduling, else from creation, to deletion."""
    ended = row.seconds("deletion_time")
    scheduled = row.seconds("scheduled_time")
    begun = created if scheduled is None else scheduled
    if begun is None or ended is None:
        return None
    if ended < begun:
        problem = f"the pod ended ({_plain(ended)}) before it started ({_plain(begun)})"
        raise row.refuse(
            problem, hint="deletion_time must be after creation_time and scheduled_time"
        )
    return ended - begun


def _rows(path: Path, columns: Sequence[str], needs: Sequence[str], *, what: str) -> Iterator[_Row]:
    reader = csv.reader(StringIO(_read(path), newline=""), strict=True)
    header: list[str] | None = None
    lines_by_name: dict[str, int] = {}
    try:
        for cells in reader:
            if not cells:
                continue
            if header is None:
                header = _header(path, cells, columns, needs, what=what)
                continue
            row = _Row(
                path, reader.line_num, dict(zip(header, map(str.strip, cells), strict=False))
            )
            if len(cells) != len(header):
                problem = f"{len(cells)} cells in {len(header)} columns"
                raise row.refuse(problem, hint=f"the columns are {', '.join(header)}")
            name = row.text(needs[0])
            if name in lines_by_name:
                problem = f"{needs[0]} {_shown(name)} repeats line {lines_by_name[name]}"
                raise row.refuse(problem, hint="each line needs a unique name")
            lines_by_name[name] = reader.line_num
            yield row
    except csv.Error as error:
        problem = f"{path}, line {reader.line_num}: invalid CSV: {error}"
        raise UsageError(problem, hint="separate cells by commas") from error


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(
            f"{path}, line {line}: bytes are not UTF-8 text",
            hint="the file must be CSV in UTF-8 (is it compressed?)",
        ) from error
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", hint="name an existing CSV file"
        ) from error


def _header(
    path: Path, cells: Sequence[str], columns: Sequence[str], needs: Sequence[str], *, what: str
) -> list[str]:
    header = [cell.strip() for cell in cells]
    for column in needs:
        if column in header:
            continue
        similar = get_close_matches(column, header, n=1)
        suggestion = f" (is it {_shown(similar[0])}?)" if similar else ""
        raise UsageError(
            f"{path}, line 1: missing column {column}{suggestion}",
            hint=f"a file of {what} starts with: {','.join(columns)}",
        )
    repeated = {column for column in header if column in columns and header.count(column) > 1}
    if repeated:
        problem = f"{path}, line 1: column {min(repeated)} appears twice"
        raise UsageError(problem, hint="remove one of them")
    return header


def _empty(path: Path, what: str, columns: Sequence[str]) -> UsageError:
    hint = f"a file of {what} starts with: {','.join(columns)}"
    return UsageError(f"{path} has no {what}", hint=hint)


def _text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    target = StringIO(newline="")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    return target.getvalue()


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")
