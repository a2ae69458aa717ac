# SPDX-License-Identifier: Apache-2.0
"""`allot cdi`: shares as CDI devices, for Docker and Podman."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.options import (
    MEMORY,
    complete_share,
    compute_options,
    output_option,
    oversubscribe_options,
    requested_compute,
    simulated_option,
    state_option,
)

if TYPE_CHECKING:
    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount


@click.group(short_help="Make shares for containers: Docker, Podman.")
def command() -> None:
    """Make shares for containers, as devices of the Container Device Interface.

    \b
    Example:
      allot cdi create --memory 8Gi --name notebook
      docker run --device allotment.dev/share=notebook ...
      podman run --device allotment.dev/share=notebook ...
      allot cdi rm notebook
    """  # noqa: D301 - click's mark


@command.command(short_help="Make a share and its CDI device.")
@click.option(
    "--memory",
    metavar="SIZE",
    type=MEMORY,
    required=True,
    help="Memory on each GPU: 4Gi, 500M, or a part of the GPU like 25%.",
)
@compute_options
@oversubscribe_options
@click.option(
    "--count",
    metavar="N",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="How many GPUs, each a different one.",
)
@click.option(
    "--gpu",
    "gpus",
    metavar="UUID|MODEL",
    multiple=True,
    help="Only this GPU or model; several times: any of them.",
)
@click.option("--name", metavar="NAME", help="Name of the share and the device; default: its id.")
@simulated_option
@click.option(
    "--cdi-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("/var/run/cdi"),
    show_default=True,
    help="Folder of CDI specs that the container runtime reads.",
)
@state_option
def create(
    *,
    memory: "MemoryAmount",
    compute: "Compute | None",
    kind: str | None,
    weight: int | None,
    oversubscribe: bool,
    host_memory: int | None,
    count: int,
    gpus: tuple[str, ...],
    name: str | None,
    simulated: str | None,
    cdi_dir: Path,
    state: Path | None,
) -> None:
    """Make a share that stays until it is removed, and print its CDI device.

    All containers that get the device share its limits.

    \b
    Examples:
      allot cdi create --memory 8Gi --name notebook
      allot cdi create --memory 8Gi --compute 30:80 --name notebook
      allot cdi create --memory 25% --simulated a100-80gb --cdi-dir /etc/cdi
    """  # noqa: D301 - click's mark
    from allotment.model.requests import Request
    from allotment.shares.cdi import KIND
    from allotment.shares.containers import ContainerOrder, create_for_containers
    from allotment.shares.folders import StateFolder

    request = Request(
        memory=memory,
        count=count,
        selectors=gpus,
        compute=requested_compute(compute, kind, weight),
        may_oversubscribe=oversubscribe,
    )
    order = ContainerOrder(request, cdi_dir, name=name, spec=simulated, host_budget=host_memory)
    share = create_for_containers(StateFolder.at(state), order)
    click.echo(f"{KIND}={share.device_name}")


@command.command("list", short_help="Show the shares that are CDI devices.")
@output_option("table", "json", "yaml")
@state_option
def list_(*, output: str, state: Path | None) -> None:
    """Show the shares that are CDI devices, with their spec files.

    \b
    Example:
      allot cdi list -o json
    """  # noqa: D301 - click's mark
    from allotment.model.formats import format_bytes
    from allotment.shares.cdi import KIND, list_specs
    from allotment.shares.folders import StateFolder
    from allotment.shares.views import current

    shares = [each.share for each in current(StateFolder.at(state)) if each.share]
    specs = list_specs(shares)
    if output != "table":
        from allotment.cli.documents import print_document

        document = {
            "devices": [
                {
                    "device": f"{KIND}={share.device_name}",
                    "share": share.id,
                    "spec": str(path),
                    "present": present,
                }
                for share, path, present in specs
            ]
        }
        print_document(document, output)
        return
    from allotment.cli.tables import Column, print_table

    print_table(
        (
            Column("DEVICE"),
            Column("MEMORY", is_number=True),
            Column("GPUS", is_number=True),
            Column("SPEC"),
        ),
        [
            (
                f"{KIND}={share.device_name}",
                format_bytes(share.devices[0].memory_bytes),
                str(len(share.devices)),
                str(path) if present else f"{path} (missing)",
            )
            for share, path, present in specs
        ],
    )


@command.command(short_help="Remove shares and their CDI devices.")
@click.argument(
    "shares", metavar="SHARE...", nargs=-1, required=True, shell_complete=complete_share
)
@click.option("--force", is_flag=True, help="Also when containers use it.")
@state_option
def rm(*, shares: tuple[str, ...], force: bool, state: Path | None) -> None:
    """Remove shares by name, id or device, and their CDI specs.

    \b
    Example:
      allot cdi rm notebook
    """  # noqa: D301 - click's mark
    from allotment.shares.cdi import KIND
    from allotment.shares.folders import StateFolder
    from allotment.shares.lives import destroy, find
    from allotment.shares.sessions import refuse_inside

    refuse_inside(f"allot cdi rm {' '.join(shares)}")
    folder = StateFolder.at(state)
    names = [name.removeprefix(f"{KIND}=") for name in shares]
    for found in [find(folder, name) for name in names]:
        destroy(folder, found, force=force)
        click.echo(found.name)
