# SPDX-License-Identifier: Apache-2.0
"""`allot burn`: a GPU workload that reports its result, for real and simulated GPUs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import click

from allotment.burn.reports import BurnPlan
from allotment.cli.options import MEMORY, output_option
from allotment.model.quantities import parse_bytes, parse_duration_ns

if TYPE_CHECKING:
    from allotment.burn.reports import BurnReport
    from allotment.model.quantities import MemoryAmount

EXIT_CUDA_ERROR: Final = 1
EXIT_OUT_OF_MEMORY: Final = 9

_APIS = ("plain", "async", "pool", "vmm", "managed", "array")

_EPILOGUE = """\b
Examples:
  allot burn --memory 3Gi --kernel 2ms --seconds 10
  allot run --simulated a100-80gb --memory 4Gi -- allot burn --memory 5Gi
  allot burn --memory 512Mi --api vmm --processes 4 -o json
  allot burn --memory 25% --kernel 0 --seconds 60        (only hold memory)
  allot burn --kernel 1ms --rate 20 --seconds 10         (a service: latency)

\b
Exit codes:
  0  done
  1  the driver returned an error other than CUDA_ERROR_OUT_OF_MEMORY
  2  a bad option or value
  5  no driver or no GPU
  9  the driver refused memory (CUDA_ERROR_OUT_OF_MEMORY)
  128 + the signal's number, if a signal ended it early (with a report)

\b
With -o json, one document:
"""


def _epilogue() -> str:
    from allotment.burn.reports import DOCUMENT

    return _EPILOGUE + "".join(f"  {line}\n" for line in DOCUMENT.splitlines())


class _BurnCommand(click.Command):
    """Writes the description of the JSON document only for --help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.epilog = _epilogue()
        super().format_epilog(ctx, formatter)


@click.command(
    cls=_BurnCommand, name="burn", short_help="Run a GPU workload and report the result."
)
@click.option("--memory", type=MEMORY, help="Memory per process: 3Gi, 25%.")
@click.option("--chunk", metavar="SIZE", default="64Mi", help="Size of one allocation.")
@click.option(
    "--api",
    type=click.Choice(_APIS),
    default="plain",
    help="Allocation API of the driver.",
)
@click.option("--touch", is_flag=True, help="Write to all memory (simulated: uses host memory).")
@click.option(
    "--kernel",
    metavar="TIME",
    default="2ms",
    help="Duration of a kernel that fills the GPU; 0 runs none and only holds the memory.",
)
@click.option(
    "--graph", metavar="N", type=click.IntRange(1, 100_000), help="Launch graphs of N kernels."
)
@click.option(
    "--streams",
    metavar="N",
    type=click.IntRange(1, 128),
    default=1,
    help="Number of streams, each with one launch outstanding.",
)
@click.option(
    "--processes",
    metavar="N",
    type=click.IntRange(1, 512),
    default=1,
    help="Number of processes, each with all of the above.",
)
@click.option(
    "--seconds",
    metavar="S",
    type=click.FloatRange(min=0),
    default=5.0,
    help="How long to run kernels or hold the memory.",
)
@click.option(
    "--launches",
    metavar="N",
    type=click.IntRange(min=1),
    help="End after N launches per process, regardless of --seconds.",
)
@click.option(
    "--rate",
    metavar="R",
    type=click.FloatRange(min=0, min_open=True),
    help="Launch R times a second, like requests to a service.",
)
@click.option(
    "--device",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    help="CUDA device number.",
)
@output_option("text", "json")
@click.pass_context
def command(
    ctx: click.Context,
    *,
    memory: MemoryAmount | None,
    chunk: str,
    api: str,
    touch: bool,
    kernel: str,
    graph: int | None,
    streams: int,
    processes: int,
    seconds: float,
    launches: int | None,
    rate: float | None,
    device: int,
    output: str,
) -> None:
    """Allocate memory, run kernels for a while, and report the driver's answers.

    Uses only the CUDA driver and needs no toolkit. Allocates in chunks until SIZE is reached or the
    driver refuses; after a refusal it runs no kernels. Several processes start their kernels when
    all have their memory. A refused process holds its memory until the end, so the sum is memory
    held at the same time. Ctrl-C ends it early and prints the report so far.
    """
    from allotment.burn.processes import burn

    plan = BurnPlan(
        memory_bytes=memory.size_bytes or 0 if memory is not None else 0,
        memory_fraction=float(memory.part or 0) if memory is not None else 0.0,
        chunk_bytes=parse_bytes(chunk),
        api=api,
        touch=touch,
        kernel_ns=parse_duration_ns(kernel),
        graph_nodes=graph or 0,
        streams=streams,
        processes=processes,
        seconds=seconds,
        launches=launches or 0,
        rate=rate or 0.0,
        device=device,
    )
    report = burn(plan)
    if output == "json":
        click.echo(json.dumps(report.to_document(), indent=2))
    else:
        from allotment.burn.reports import report_lines

        for line in report_lines(report):
            click.echo(line)
    ctx.exit(_exit_code(report))


def _exit_code(report: BurnReport) -> int:
    if report.errors:
        return EXIT_OUT_OF_MEMORY if report.was_refused else EXIT_CUDA_ERROR
    return 0 if report.ended_by is None else 128 + report.ended_by
