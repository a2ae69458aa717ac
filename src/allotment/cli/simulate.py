# SPDX-License-Identifier: Apache-2.0
"""`allot simulate`: replays pods with the scheduler's policies."""

from __future__ import annotations

import math
import os
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.options import installed, output_option, read_of_cluster
from allotment.cli.replay_tables import print_results
from allotment.cli.scheduler_options import preferred_modes
from allotment.model.modes import SOFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allotment.simulate.csv_files import Trace
    from allotment.simulate.scenes import Scene
    from allotment.simulate.tasks import Results, Task

_POLICY: Final = "fragmentation"
_SEEDS: Final = "42"
_TUNE: Final = 1.3
_MOST_SEEDS: Final = 1000
_INTERRUPTED: Final = 130
_OF_GENERATE: Final = ("scale", "constrained")
_OF_CLUSTER: Final = ("kubeconfig", "replay", "modes")
_OF_TRACE: Final = ("tune", "departures", "gpu_memory", "mix")
_MOST_SEED: Final = 2**32


class SeedsType(click.ParamType[Any]):
    """Seeds on the command line: `42`, `42-51`, `1,5,7-9`."""

    name = "seeds"

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> list[int]:
        if isinstance(value, list):
            return value
        seeds: dict[int, None] = {}
        for part in str(value).split(","):
            first, dash, last = (side.strip() for side in part.partition("-"))
            if not _is_seed(first) or (dash and not _is_seed(last)):
                self.fail(f"{part.strip()!r} is not a seed: write 42, 42-51 or 1,5,7-9", param, ctx)
            begin, end = int(first), int(last or first)
            if end < begin:
                self.fail(f"{part.strip()!r} ends before it begins", param, ctx)
            if end - begin + len(seeds) >= _MOST_SEEDS:
                self.fail(f"more than {_MOST_SEEDS} seeds", param, ctx)
            seeds |= dict.fromkeys(range(begin, end + 1))
        return list(seeds)


class NumberType(click.FloatRange):
    """A number in a range; unlike `click.FloatRange`, it refuses `nan`."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def _is_seed(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST_SEED  # noqa: PLR2004


@click.command(short_help="Replay a trace or a live cluster with scheduling policies.")
@click.option(
    "--nodes",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="CSV file of the trace's nodes: sn,cpu_milli,memory_mib,gpu,model.",
)
@click.option(
    "--pods",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="CSV file of its pods: name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,"
    "deletion_time,scheduled_time. Columns after gpu_milli are optional.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Generate a trace instead, like that of a real cluster of 1,213 nodes and 6,212 GPUs. With"
    " --nodes and --pods it is written to these files and not replayed.",
)
@click.option(
    "--scale",
    metavar="X",
    type=NumberType(0.001, 100),
    default=1.0,
    help="With --generate: factor for the number of nodes and pods.",
)
@click.option(
    "--constrained",
    metavar="PERCENT",
    type=NumberType(0, 100),
    default=10.0,
    help="With --generate: percent of the GPU pods that accept only certain models.",
)
@click.option(
    "--from-cluster",
    is_flag=True,
    help="Read the nodes and pods of a live cluster; the cluster is not changed.",
)
@click.option(
    "--kubeconfig",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --from-cluster: kubeconfig for the API server.  [default: $KUBECONFIG, or the pod's"
    " service account, or ~/.kube/config]",
)
@click.option(
    "--replay",
    type=click.Choice(["all", "pending"]),
    default="all",
    help="With --from-cluster: place all its GPU pods again, or only the pending ones.",
)
@click.option(
    "--modes",
    metavar="M[,M...]",
    default=SOFT,
    help="With --from-cluster: the scheduler's --modes, for pods that name none.",
)
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default=_POLICY,
    help="Policies to compare, or `all`.",
)
@click.option(
    "--seeds",
    metavar="N[-N][,...]",
    type=SeedsType(),
    default=_SEEDS,
    help="Seeds; each policy is replayed once per seed. 42-51 are ten seeds.",
)
@click.option(
    "--tune",
    metavar="RATIO",
    type=NumberType(0, 100),
    help="Requests of the drawn pods in total, relative to all GPUs; 0: each pod of the trace"
    f" arrives once.  [default: {_TUNE}; with --departures 0]",
)
@click.option(
    "--departures",
    is_flag=True,
    help="Pods arrive in the order of their times, wait if they do not fit, and leave after their"
    " run time in the trace.",
)
@click.option(
    "--gpu-memory",
    is_flag=True,
    help="Also place by GPU memory: column gpu_memory_mib of both files (per GPU), generated where"
    " it is missing. Without this, a pod's part of the memory equals its part of the time.",
)
@click.option(
    "--mix",
    type=click.Choice(["published", "learnt", "known"]),
    default="published",
    help="Whether policies learn the frequencies of pods during the replay (learnt) or receive them"
    " before it (known). published: fgd receives them, all others learn.",
)
@click.option(
    "--dra",
    is_flag=True,
    help="Also replay the pods as resource claims, placed by kube-scheduler alone: row `claims`.",
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=1,
    help="Number of parallel replays, each in its own process. For exact decision times use 1.",
)
@output_option("table", "json")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    nodes: Path | None,
    pods: Path | None,
    generate: bool,
    scale: float,
    constrained: float,
    from_cluster: bool,
    kubeconfig: Path | None,
    replay: str,
    modes: str,
    policies: str,
    seeds: list[int],
    tune: float | None,
    departures: bool,
    gpu_memory: bool,
    mix: str,
    dra: bool,
    jobs: int,
    output: str,
) -> None:
    """Replay pods with the scheduler's policies, and report how full the cluster gets.

    Draws pods from the trace at random, with repetition, until their requests reach --tune times
    the GPUs. They arrive in random order and never leave; a pod that does not fit is dropped.
    ALLOCATED is the part of all GPUs that is allocated when 95, 100 and 130 % are requested.
    FRAGMENTED is the part that is free at 100 % but unusable for the arriving pods, as a mean over
    their mix. DECISION is the time to place one pod: p50 and p99.

    With --departures pods arrive and leave at the times of the trace. With --tune too, drawn pods
    arrive at random moments in the trace's order, at a rate that keeps the requests at --tune times
    the GPUs. All figures are means over the second half of the time, after the cluster has filled.
    STILL counts the pods of WAITED that still waited when the last pod arrived. WAIT is their
    waiting time: p50 and p99.

    With --from-cluster the GPU pods of a live cluster are placed again, as its scheduler would. The
    table shows promised TIME and MEMORY of its GPUs and the IDLE ones, before and after. Selectors,
    taints and other checks of kube-scheduler are ignored.

    With --dra the pods are also placed as resource claims of the node agent's driver, by
    kube-scheduler alone. It takes the first devices of a pool that fit, and chooses the node by its
    default scores of CPU and memory. Below the table is how much more or less each policy places,
    allocates and leaves unusable. Tags, NUMA, NVLink and the modes of GPUs are ignored.

    The columns are those of the traces `openb` (Alibaba's clusterdata, cluster-trace-gpu-v2023).
    The same options give the same result each time. Ctrl-C ends it with the results so far.

    \b
    Examples:
      allot simulate --generate
      allot simulate --generate --scale 0.1 --nodes nodes.csv --pods pods.csv
      allot simulate --nodes nodes.csv --pods pods.csv --policy fgd --seeds 42-51
      allot simulate --nodes nodes.csv --pods pods.csv --departures --tune 1.1
      allot simulate --from-cluster --replay pending --policy fgd,binpack
      allot simulate --from-cluster --dra
    """  # noqa: D301 - click's mark
    # One thread adds up numbers in one order, so results do not depend on the machine. Set before
    # numpy is imported; the processes of --jobs inherit it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _check_options(ctx, nodes=nodes, pods=pods, generate=generate, from_cluster=from_cluster)
    with installed("allot simulate", extra="simulate"):
        from allotment.simulate.outcomes import CLAIMS
        from allotment.simulate.scenes import TraceScene, check_policies
    if dra:
        with installed("allot simulate --dra", extra="kubernetes"):
            import allotment.simulate.claim_placers  # noqa: F401 - before any replay starts
    names = _policies(policies)
    settings: dict[str, Any] = {"policies": names, "seeds": seeds, "dra": dra}
    scene: Scene
    if from_cluster:
        check_policies(names)
        preferred = preferred_modes(modes)
        scene = _live_scene(kubeconfig, replay, preferred)
        settings |= {"from_cluster": True, "replay": replay, "modes": list(preferred)}
    else:
        trace = _trace(nodes, pods, generate=generate, seed=seeds[0], scale=scale, part=constrained)
        if generate and nodes is not None and pods is not None:
            _write(trace, nodes, pods)
            return
        check_policies(names)
        if tune is None and not departures:
            tune = _TUNE
        scene = TraceScene(
            trace=_with_memory(trace, counts=gpu_memory),
            tune=tune or None,
            has_departures=departures,
            is_mix_known={"known": True, "learnt": False}.get(mix),
        )
        settings |= {
            "nodes": str(nodes) if nodes else None,
            "pods": str(pods) if pods else None,
            "generated": {"seed": seeds[0], "scale": scale, "constrained_percent": constrained}
            if generate
            else None,
            "tune": tune or None,
            "departures": departures,
            "gpu_memory": gpu_memory,
            "mix": mix,
        }
    rows = [*names, CLAIMS] if dra else names
    results = _run(scene, [(name, seed) for name in rows for seed in seeds], jobs)
    print_results(results, settings, output)
    if results.was_interrupted:
        ctx.exit(_INTERRUPTED)


def _check_options(
    ctx: click.Context, *, nodes: Path | None, pods: Path | None, generate: bool, from_cluster: bool
) -> None:
    if (nodes is None) != (pods is None):
        given, missing = ("--nodes", "--pods") if pods is None else ("--pods", "--nodes")
        raise click.UsageError(f"{given} needs {missing}", ctx)
    if nodes is None and not generate and not from_cluster:
        raise click.UsageError("give --nodes and --pods, or --generate, or --from-cluster", ctx)
    if from_cluster and (generate or nodes is not None):
        raise click.UsageError("--from-cluster excludes a trace (--nodes, --pods, --generate)", ctx)
    owners = {"--generate": _OF_GENERATE, "--from-cluster": _OF_CLUSTER, "a trace": _OF_TRACE}
    chosen = {"--generate": generate, "--from-cluster": from_cluster, "a trace": not from_cluster}
    for owner, names in owners.items():
        for name in names:
            source = ctx.get_parameter_source(name)
            if not chosen[owner] and source is click.core.ParameterSource.COMMANDLINE:
                option = name.replace("_", "-")
                raise click.UsageError(f"--{option} needs {owner}", ctx)


def _live_scene(kubeconfig: Path | None, replay: str, modes: Sequence[str]) -> Scene:
    """Read the cluster, and report the objects that could not be read."""
    with installed("allot simulate", extra="kubernetes"):
        from allotment.kube.live import read_cluster
        from allotment.simulate.scenes import LiveScene, Replayed

    cluster = read_of_cluster(
        kubeconfig,
        None,
        partial(read_cluster, modes=modes),
        rights="list nodes and pods in the whole cluster",
        check="list pods -A",
    )
    for problem in cluster.problems:
        click.echo(f"left out: {problem}", err=True)
    scene = LiveScene(cluster=cluster, replayed=Replayed(replay))
    if not scene.movable:
        condition = (
            "waits for a part of a GPU"
            if scene.replayed is Replayed.PENDING
            else "has a part of a GPU from Allotment's scheduler or waits for one"
        )
        click.echo(f"note: nothing to place: no pod of the cluster {condition}", err=True)
    return scene


def _policies(text: str) -> list[str]:
    from allotment.placement.policies import POLICIES

    if text.strip() == "all":
        return sorted(POLICIES)
    # Without repetitions, in the given order.
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _trace(
    nodes: Path | None, pods: Path | None, *, generate: bool, seed: int, scale: float, part: float
) -> Trace:
    if generate or nodes is None or pods is None:
        from allotment.simulate.workloads import generate as make_up

        return make_up(seed=seed, scale=scale, constrained=part / 100)
    from allotment.simulate.csv_files import Trace, read_nodes, read_pods

    return Trace(read_nodes(nodes), read_pods(pods))


def _with_memory(trace: Trace, *, counts: bool) -> Trace:
    from allotment.simulate.placers import with_gpu_memory, without_gpu_memory

    return with_gpu_memory(trace) if counts else without_gpu_memory(trace)


def _write(trace: Trace, nodes: Path, pods: Path) -> None:
    """Write a trace; refuse to overwrite a file."""
    from allotment.model.errors import UsageError
    from allotment.simulate.csv_files import nodes_text, pods_text

    existing = [path for path in (nodes, pods) if path.exists()]
    if existing:
        raise UsageError(f"{existing[0]} exists already", hint="name new files, or remove it")
    for path, text in ((nodes, nodes_text(trace.nodes)), (pods, pods_text(trace.pods))):
        try:
            path.write_text(text)
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", hint="name a file in a writable folder"
            ) from error
    click.echo(f"{nodes}: {len(trace.nodes)} nodes; {pods}: {len(trace.pods)} pods", err=True)


def _run(scene: Scene, pairs: Sequence[tuple[str, int]], jobs: int) -> Results:
    from allotment.simulate.tasks import Task, run_tasks

    tasks = [Task(policy, seed) for policy, seed in pairs]
    with _progress(tasks) as report:
        return run_tasks(scene, tasks, jobs=jobs, progress=report)


@contextmanager
def _progress(tasks: Sequence[Task]) -> Iterator[Callable[[float], None]]:
    if not sys.stderr.isatty() or os.environ.get("TERM", "") in {"", "dumb", "unknown"}:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        plural = "s" if len(tasks) > 1 else ""
        shown = bar.add_task(f"{len(tasks)} replay{plural}", total=1.0)
        yield lambda part: bar.update(shown, completed=part)
