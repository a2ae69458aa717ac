# SPDX-License-Identifier: Apache-2.0
"""`allot simulate`: what a policy would make of a cluster."""

from __future__ import annotations

import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment.cli.kubeconfigs import usual_kubeconfig
from allotment.cli.options import installed, output_option
from allotment.cli.replay_tables import print_results
from allotment.cli.scheduler_options import preferred_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from allotment.simulate.running import Results, Task
    from allotment.simulate.scenes import Scene
    from allotment.simulate.traces import Trace

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
        """Parse a text; what is parsed already passes through."""
        if isinstance(value, list):
            return value
        seeds: dict[int, None] = {}
        for part in str(value).split(","):
            first, dash, last = (each.strip() for each in part.partition("-"))
            if not _is_seed(first) or (dash and not _is_seed(last)):
                self.fail(f"{part.strip()!r} is no seed: write 42, 42-51 or 1,5,7-9", param, ctx)
            begin, end = int(first), int(last or first)
            if end < begin:
                self.fail(f"{part.strip()!r} ends before it begins", param, ctx)
            if end - begin + len(seeds) >= _MOST_SEEDS:
                self.fail(f"these are more than {_MOST_SEEDS} seeds", param, ctx)
            seeds |= dict.fromkeys(range(begin, end + 1))
        return list(seeds)


class NumberType(click.FloatRange):
    """A number of a range. Of `nan` click says that it is in all ranges."""

    def convert(
        self,
        value: Any,  # noqa: ANN401 - click's signature
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Parse a text."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


def _is_seed(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MOST_SEED  # noqa: PLR2004


@click.command(short_help="Replay a trace or a live cluster: what would a policy make of it?")
@click.option(
    "--nodes",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The trace's nodes, a CSV file: sn,cpu_milli,memory_mib,gpu,model.",
)
@click.option(
    "--pods",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Its pods: name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,"
    "deletion_time,scheduled_time; all after gpu_milli may be missing.",
)
@click.option(
    "--generate",
    is_flag=True,
    help="Make up a trace instead, like that of a real cluster of 1,213 nodes and 6,212 GPUs. With"
    " --nodes and --pods it is written there, and not replayed.",
)
@click.option(
    "--scale",
    metavar="X",
    type=NumberType(0.001, 100),
    default=1.0,
    show_default=True,
    help="Of --generate: so many times the nodes and pods.",
)
@click.option(
    "--constrained",
    metavar="PERCENT",
    type=NumberType(0, 100),
    default=10.0,
    show_default=True,
    help="Of --generate: how many of the pods with GPUs take certain models alone.",
)
@click.option(
    "--from-cluster",
    is_flag=True,
    help="Take the nodes and pods of a live cluster; nothing of it is changed.",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Of --from-cluster: how to reach the API server.  [default: $KUBECONFIG, or as the pod"
    " that this is, or ~/.kube/config]",
)
@click.option(
    "--replay",
    type=click.Choice(["all", "pending"]),
    default="all",
    show_default=True,
    help="Of --from-cluster: place all its pods with GPUs anew, or those alone that wait.",
)
@click.option(
    "--modes",
    metavar="M[,M...]",
    default="soft",
    show_default=True,
    help="Of --from-cluster: the scheduler's --modes, for pods that name none.",
)
@click.option(
    "--policy",
    "policies",
    metavar="P[,P...]",
    default=_POLICY,
    show_default=True,
    help="Policies to replay with; `all`: each that there is.",
)
@click.option(
    "--seeds",
    metavar="N[-N][,...]",
    type=SeedsType(),
    default=_SEEDS,
    show_default=True,
    help="A replay of each policy for each seed: 42-51 are ten.",
)
@click.option(
    "--tune",
    metavar="RATIO",
    type=NumberType(0, 100),
    help="How much the pods that are drawn ask for in all, over all GPUs; 0: each pod of the trace"
    f" comes once.  [default: {_TUNE}; with --departures 0]",
)
@click.option(
    "--departures",
    is_flag=True,
    help="Pods come in the order of their times, wait where there is no room, and leave when they"
    " have run for as long as they did.",
)
@click.option(
    "--gpu-memory",
    is_flag=True,
    help="GPU memory counts as well: column gpu_memory_mib of both files (of each GPU), made up"
    " where it is missing. Else each pod takes the part of the memory that it takes of the time.",
)
@click.option(
    "--mix",
    type=click.Choice(["published", "learnt", "known"]),
    default="published",
    show_default=True,
    help="Whether policies learn from the pods that come which come how often, or know it"
    " beforehand; published: fgd knows it, all others learn.",
)
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Replays at once, each in a process of its own. Times of decisions are best taken with 1.",
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
    jobs: int,
    output: str,
) -> None:
    """Replay pods through the scheduler's policies, and say how full the cluster gets.

    Pods are drawn from the trace with the seed, with repetition, until they ask for --tune times
    what there is, and come in random order; none leaves, and one that fits nowhere is gone.
    ALLOCATED is what of all GPUs is given when 95, 100 and 130 % of them have been asked for,
    FRAGMENTED what of them is free at 100 % and cannot be used by the pods that come, as a mean
    over their mix. DECISION is how long it takes to choose for one pod: p50 and p99.

    With --departures pods leave, and times are the trace's; with --tune pods are drawn and come at
    random moments in the trace's order, so many that they ask for that much at a time. All figures
    are means over the second half of the time: in the first the cluster fills up. STILL is how many
    still WAITED when the last pod came, WAIT for how long: p50 and p99.

    With --from-cluster the pods of a live cluster that ask for GPUs are placed anew, as its
    scheduler would: what of its GPUs' TIME and MEMORY is promised, and how many are IDLE, as it
    runs and then. Selectors, taints and what else kube-scheduler checks are not looked at.

    The columns are those of the traces `openb` (Alibaba's clusterdata, cluster-trace-gpu-v2023).
    The same options give the same result each time. Ctrl-C ends it with what is done until then.

    \b
    Examples:
      allot simulate --generate
      allot simulate --generate --scale 0.1 --nodes nodes.csv --pods pods.csv
      allot simulate --nodes nodes.csv --pods pods.csv --policy fragmentation,fgd --seeds 42-51
      allot simulate --nodes nodes.csv --pods pods.csv --departures --tune 1.1 -o json
      allot simulate --from-cluster --replay pending --policy fragmentation,binpack
    """  # noqa: D301 - click's mark
    # One thread adds up numbers in one order: results do not depend on the machine. Set before
    # numpy is there; the processes of --jobs have it too.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _check_options(ctx, nodes=nodes, pods=pods, generate=generate, from_cluster=from_cluster)
    with installed("allot simulate", extra="simulate"):
        from allotment.simulate.scenes import TraceScene, check_policies
    names = _policies(policies)
    settings: dict[str, Any] = {"policies": names, "seeds": seeds}
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
    results = _run(scene, [(name, seed) for name in names for seed in seeds], jobs)
    print_results(results, settings, output)
    if results.was_interrupted:
        ctx.exit(_INTERRUPTED)


def _check_options(
    ctx: click.Context, *, nodes: Path | None, pods: Path | None, generate: bool, from_cluster: bool
) -> None:
    if (nodes is None) != (pods is None):
        there, missing = ("--nodes", "--pods") if pods is None else ("--pods", "--nodes")
        raise click.UsageError(f"{there} is given without {missing}", ctx)
    if nodes is None and not generate and not from_cluster:
        raise click.UsageError("give --nodes and --pods, or --generate, or --from-cluster", ctx)
    if from_cluster and (generate or nodes is not None):
        raise click.UsageError("--from-cluster is given with a trace: it is one or the other", ctx)
    owners = {"--generate": _OF_GENERATE, "--from-cluster": _OF_CLUSTER, "a trace": _OF_TRACE}
    chosen = {"--generate": generate, "--from-cluster": from_cluster, "a trace": not from_cluster}
    for owner, names in owners.items():
        for name in names:
            source = ctx.get_parameter_source(name)
            if not chosen[owner] and source is click.core.ParameterSource.COMMANDLINE:
                option = name.replace("_", "-")
                raise click.UsageError(f"--{option} is of {owner}, which is not given", ctx)


def _live_scene(kubeconfig: Path | None, replay: str, modes: Sequence[str]) -> Scene:
    """Read the cluster, and say what of it could not be read."""
    import asyncio

    with installed("allot simulate", extra="kubernetes"):
        from allotment.kube.clients import connect
        from allotment.kube.live import LiveCluster, read_cluster
        from allotment.simulate.live_scenes import LiveScene, Replayed

    async def read() -> LiveCluster:
        async with connect(kubeconfig or usual_kubeconfig()) as api:
            return await read_cluster(api, modes=modes)

    cluster = asyncio.run(read())
    for problem in cluster.problems:
        click.echo(f"left out: {problem}", err=True)
    scene = LiveScene(cluster=cluster, replayed=Replayed(replay))
    if not scene.movable:
        which = (
            "waits for a part of a GPU"
            if scene.replayed is Replayed.PENDING
            else "has a part of a GPU from Allotment's scheduler, or waits for one"
        )
        click.echo(f"note: there is nothing to place: no pod of the cluster {which}", err=True)
    return scene


def _policies(text: str) -> list[str]:
    from allotment.placement.policies import POLICIES

    if text.strip() == "all":
        return sorted(POLICIES)
    # Each once, in the order given.
    return list(dict.fromkeys(part.strip() for part in text.split(",")))


def _trace(
    nodes: Path | None, pods: Path | None, *, generate: bool, seed: int, scale: float, part: float
) -> Trace:
    if generate or nodes is None or pods is None:
        from allotment.simulate.generating import generate as make_up

        return make_up(seed=seed, scale=scale, constrained=part / 100)
    from allotment.simulate.csv_files import read_nodes, read_pods
    from allotment.simulate.traces import Trace

    return Trace(read_nodes(nodes), read_pods(pods))


def _with_memory(trace: Trace, *, counts: bool) -> Trace:
    from allotment.simulate.needs import with_gpu_memory, without_gpu_memory

    return with_gpu_memory(trace) if counts else without_gpu_memory(trace)


def _write(trace: Trace, nodes: Path, pods: Path) -> None:
    """Write a trace, and over nothing that is there."""
    from allotment.model.errors import UsageError
    from allotment.simulate.csv_files import nodes_text, pods_text

    there = [path for path in (nodes, pods) if path.exists()]
    if there:
        raise UsageError(
            f"{there[0]} is there already", hint="name files that are not, or remove it"
        )
    for path, text in ((nodes, nodes_text(trace.nodes)), (pods, pods_text(trace.pods))):
        try:
            path.write_text(text)
        except OSError as error:
            raise UsageError(
                f"cannot write {path}: {error.strerror}", hint="name a file in a folder of yours"
            ) from error
    click.echo(f"{nodes}: {len(trace.nodes)} nodes; {pods}: {len(trace.pods)} pods", err=True)


def _run(scene: Scene, pairs: Sequence[tuple[str, int]], jobs: int) -> Results:
    from allotment.simulate.running import Task, run_tasks

    tasks = [Task(policy, seed) for policy, seed in pairs]
    with _progress(tasks) as tell:
        return run_tasks(scene, tasks, jobs=jobs, progress=tell)


@contextmanager
def _progress(tasks: Sequence[Task]) -> Iterator[Callable[[float], None]]:
    """Show how much is done, where somebody looks on."""
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
