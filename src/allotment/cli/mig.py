# SPDX-License-Identifier: Apache-2.0
"""`allot mig`: configure the MIG instances of GPUs from a file, and export them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click
import msgspec

from allotment.cli.documents import Document, print_document
from allotment.cli.options import options, output_option, simulated_option, state_option
from allotment.devices.mig import MigView
from allotment.devices.nvml import Nvml
from allotment.model.errors import AllotError, UsageError
from allotment.modes.mig.journal import Journal, SliceRecord, Stage, stands_for
from allotment.shares.folders import StateFolder

if TYPE_CHECKING:
    from allotment.cli.mig_fits import Planned
    from allotment.modes.mig.files import ConfigEntry

_F = TypeVar("_F", bound=Callable[..., Any])
_NOT_AS_ASKED = 1
_DIGITS = 4


@click.group(short_help="Cut GPUs into MIG instances from a configuration file.")
def command() -> None:
    """Cut GPUs into MIG instances from a configuration file, and export the current instances.

    The file has the format of NVIDIA's mig-parted, version v1.

    \b
    Examples:
      allot mig plan -f config.yaml -c all-balanced
      allot mig plan --fit 3g.40gb
      allot mig apply -f config.yaml -c all-balanced
      allot mig assert -f config.yaml -c all-balanced
      allot mig export
    """  # noqa: D301 - click's mark


def _file_options(*, is_required: bool) -> Callable[[_F], _F]:
    return options(
        click.option(
            "-f",
            "--config-file",
            "file",
            metavar="FILE",
            type=click.File(encoding="utf-8"),
            required=is_required,
            help="File of configurations in mig-parted's format; - reads standard input.",
        ),
        click.option(
            "-c",
            "--selected-config",
            "name",
            metavar="NAME",
            help="Name of the configuration; optional if the file has only one.",
        ),
    )


@command.command(short_help="Apply a configuration to the GPUs.")
@_file_options(is_required=True)
@click.option(
    "--reset",
    is_flag=True,
    help="Allow a reset of GPUs that need one to switch MIG (A100, A30). They are reset together"
    " with the GPUs that NVLink joins to them; none of these may be in use.",
)
@simulated_option
@state_option
def apply(
    *, file: TextIO, name: str | None, reset: bool, simulated: str | None, state: Path | None
) -> int:
    """Switch MIG on or off and create and remove instances until the GPUs match the file.

    Changes only what differs: wanted instances stay, and programs in them keep running. If an
    instance to remove is in use, nothing is changed, and the error names its users. Neither is
    anything changed if a GPU needs a reset to switch MIG and --reset is missing.

    \b
    Examples:
      allot mig apply -f config.yaml -c all-1g.10gb
      allot mig apply -f config.yaml -c all-1g.5gb --reset
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_runs import MigRun

    run = MigRun(StateFolder.at(state), simulated)
    failed = False
    for planned, outcome in run.apply(_entries(file, name), may_reset=reset):
        click.echo(f"GPU {planned.index} {planned.uuid}: {outcome.text}", err=outcome.is_error)
        failed |= outcome.is_error
    return _NOT_AS_ASKED if failed else 0


@command.command("assert", short_help="Check whether the GPUs match a configuration.")
@_file_options(is_required=True)
@simulated_option
@state_option
def assert_(*, file: TextIO, name: str | None, simulated: str | None, state: Path | None) -> int:
    """Exit with 0 if the GPUs that the configuration names match it, and with 1 if not.

    Prints the differences to standard error. The slots and the origin of instances do not matter.
    Exits with 2 for an invalid file.

    \b
    Example:
      allot mig assert -f now.yaml || allot mig apply -f now.yaml
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_runs import MigRun

    different = MigRun(StateFolder.at(state), simulated).differences(_entries(file, name))
    for index, text in different:
        click.echo(f"GPU {index}: {text}", err=True)
    if not different:
        click.echo("the configuration is applied")
    return _NOT_AS_ASKED if different else 0


@command.command(short_help="Print the current MIG instances as a configuration.")
@click.option(
    "-c",
    "--config-label",
    "name",
    metavar="NAME",
    default="current",
    help="Name of the printed configuration.",
)
@output_option("yaml", "json")
@simulated_option
@state_option
def export(*, name: str, output: str, simulated: str | None, state: Path | None) -> None:
    """Print the current MIG instances as a file that `apply`, `assert` and mig-parted read.

    \b
    Example:
      allot mig export > now.yaml
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_runs import MigRun

    print_document(MigRun(StateFolder.at(state), simulated).document(name), output)


@command.command(short_help="Show what apply would do, or how to make room for a slice.")
@_file_options(is_required=False)
@click.option(
    "--fit",
    "wanted",
    metavar="PROFILE[:N]",
    multiple=True,
    help="Instead of a file: show how to make room for N more slices of this profile. May be"
    " repeated.",
)
@output_option("table", "json", "yaml")
@simulated_option
@state_option
def plan(
    *,
    file: TextIO | None,
    name: str | None,
    wanted: tuple[str, ...],
    output: str,
    simulated: str | None,
    state: Path | None,
) -> int:
    """Show what `apply` would do to each GPU, or why it would refuse. Changes nothing.

    With --fit: shows the cheapest way to make room. It may reuse an idle MIG device, switch MIG on,
    or drain slices: their programs end and start again elsewhere. An instance in use cannot move.

    Exits with 0 if the plan is possible or already applied. Otherwise with the code of `apply`: 2
    if a GPU cannot have these instances, 7 if an instance is in use.

    \b
    Examples:
      allot mig plan -f config.yaml -c all-balanced
      allot mig plan --fit 3g.40gb --fit 1g.10gb:2
    """  # noqa: D301 - click's mark
    from allotment.cli.mig_fits import plan_document, plan_rows
    from allotment.cli.mig_runs import MigRun

    if (file is None) == (not wanted):
        raise click.UsageError("give either a file (-f) or slices (--fit)")
    run = MigRun(StateFolder.at(state), simulated)
    planned = run.advice(_counts(wanted)) if file is None else run.plans(_entries(file, name))
    if output == "table":
        from allotment.cli.tables import Column, print_table

        columns = (
            Column("#", is_number=True),
            Column("UUID"),
            Column("STEP"),
            Column("PROFILE"),
            Column("SLOT", is_number=True),
            Column("REMARK", is_note=True),  # it may have a command to copy
        )
        print_table(columns, plan_rows(planned))
    else:
        print_document(plan_document(planned), output)
    for gpu in planned:
        if gpu.error is not None and gpu.error.hint:
            click.echo(f"GPU {gpu.index} {gpu.uuid}: hint: {gpu.error.hint}", err=True)
    return _status(planned)


def _counts(wanted: tuple[str, ...]) -> dict[str, int]:
    """Parse `--fit`: the number of slices per profile."""
    counts: dict[str, int] = {}
    for text in wanted:
        name, _, number = text.partition(":")
        if number and not (number.isascii() and number.isdecimal() and len(number) < _DIGITS):
            raise UsageError(
                f"--fit {text}: {number!r} is not a count", hint="for example: --fit 1g.10gb:2"
            )
        counts[name] = counts.get(name, 0) + int(number or 1)
    return counts


def _status(planned: "list[Planned]") -> int:
    """Return the exit code of the first error, as `apply` would."""
    return next((gpu.error.exit_code for gpu in planned if gpu.error), 0)


def _entries(file: TextIO, name: str | None) -> "tuple[ConfigEntry, ...]":
    from allotment.agent.config.parsing import read
    from allotment.modes.mig.files import parse_configurations, select

    source = file.name
    try:
        text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {source}: {error}") from error
    return select(
        parse_configurations(read(text, source=source), source=source), name, source=source
    )


class MigRow(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU instance with its compute instance, if it has one."""

    uuid: str
    """UUID of the MIG device; empty without a compute instance."""
    profile: str
    start: int
    size: int
    memory_bytes: int | None
    """None: the driver lists no profile with this number."""
    gpu_instance: int
    compute_instance: int | None
    state: str
    """`ours`, `warm`, `being made`, `being removed`, or `static` (foreign, never removed)."""
    share: str | None
    """Name of the share that uses it."""
    processes: tuple[int, ...]

    @property
    def place(self) -> str:
        last = self.start + self.size - 1
        return f"slot {self.start}" if last == self.start else f"slots {self.start}-{last}"

    @property
    def user(self) -> str:
        """The share or processes that use it, else its state."""
        if self.share:
            return f"share {self.share}"
        if self.processes:
            return "processes " + ", ".join(map(str, self.processes))
        return self.state

    def to_document(self) -> Document:
        return {
            **msgspec.structs.asdict(self),
            "uuid": self.uuid or None,
            "processes": list(self.processes),
        }


def mig_rows(
    folder: StateFolder,
    machines: Collection[Path | None],
    *,
    shares: Mapping[str, str],
    of_devices: Mapping[str, str] | None = None,
) -> dict[str, tuple[MigRow, ...]]:
    """Return the slices of every GPU in MIG mode, by the GPU's UUID.

    `shares` has the names of shares by id, `of_devices` by the UUID of their device.
    """
    rows: dict[str, tuple[MigRow, ...]] = {}
    for uuid, view in mig_views(machines):
        if view.gpu.is_enabled:
            try:
                records = Journal(folder.mig / uuid).read().records
            except AllotError:
                records = ()  # owned by another user: `allot doctor` reports it
            rows[uuid] = tuple(_rows(view, records, shares, of_devices or {}))
    return rows


def mig_views(machines: Collection[Path | None]) -> Iterator[tuple[str, MigView]]:
    """Yield each GPU with MIG, by UUID; a machine that does not answer has none."""
    for machine in machines:
        try:
            with Nvml(machine=machine) as source:
                views = source.mig_views()
        except AllotError:
            continue
        yield from views.items()


def _rows(
    view: MigView,
    records: Sequence[SliceRecord],
    shares: Mapping[str, str],
    of_devices: Mapping[str, str],
) -> list[MigRow]:
    profiles = {profile.number: profile for profile in view.gpu.profiles}
    rows = []
    for instance in view.gpu.instances:
        record = next(
            (candidate for candidate in records if stands_for(candidate, (instance,))), None
        )
        profile = profiles.get(instance.profile)
        rows.append(
            MigRow(
                uuid=instance.uuid,
                profile="?" if profile is None else profile.name,
                start=instance.start,
                size=instance.size,
                memory_bytes=None if profile is None else profile.memory_bytes,
                gpu_instance=instance.gpu_instance,
                compute_instance=instance.compute_instance,
                state=_state(record),
                # The kubelet may assign a static slice: it has a share but no record here.
                share=of_devices.get(instance.uuid)
                if record is None
                else shares.get(record.holder),
                processes=view.users.get(instance.gpu_instance, ()),
            )
        )
    return rows


def _state(record: SliceRecord | None) -> str:
    if record is None:
        return "static"
    match record.stage:
        case Stage.READY:
            return "ours" if record.holder else "warm"
        case Stage.LEAVING:
            return "being removed"
        case _:
            return "being made"
