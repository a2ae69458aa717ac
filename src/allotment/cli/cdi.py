# SPDX-License-Identifier: Apache-2.0
"""`allot cdi`: shares as CDI devices, for Docker and Podman."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from allotment.cli.documents import print_document
from allotment.cli.options import (
    MEMORY,
    allowance_in,
    cdi_dir_option,
    complete_share,
    compute_options,
    count_option,
    output_option,
    oversubscribe_options,
    requested_compute,
    simulated_option,
    state_option,
)
from allotment.cli.tables import Column, print_table
from allotment.model.formats import format_bytes
from allotment.model.structs import replace

if TYPE_CHECKING:
    from allotment.model.compute import Compute
    from allotment.model.quantities import MemoryAmount
    from allotment.model.shares import Share
    from allotment.shares.folders import StateFolder
    from allotment.shares.placing import ShareOrder


@click.group(short_help="Create shares for containers: Docker, Podman.")
def command() -> None:
    """Create shares for containers, as devices of the Container Device Interface.

    \b
    Example:
      allot cdi create --memory 8Gi --name notebook
      docker run --device allotment.dev/share=notebook ...
      podman run --device allotment.dev/share=notebook ...
      allot cdi rm notebook
    """  # noqa: D301 - click's mark


@command.command(short_help="Create a share and its CDI device.")
@click.option(
    "--memory",
    type=MEMORY,
    required=True,
    help="Memory on each GPU: 4Gi, 500M, or a part of the GPU like 25%.",
)
@compute_options
@oversubscribe_options
@count_option
@click.option(
    "--gpu",
    "gpus",
    metavar="UUID|MODEL",
    multiple=True,
    help="Use only this GPU or model. May be repeated: any of them.",
)
@click.option("--name", metavar="NAME", help="Name of the share and the device.  [default: its id]")
@simulated_option
@cdi_dir_option
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
    """Create a share that stays until it is removed, and print its CDI device.

    All containers that get the device share its limits.

    \b
    Examples:
      allot cdi create --memory 8Gi --name notebook
      allot cdi create --memory 8Gi --compute 30:80 --name notebook
      allot cdi create --memory 25% --simulated a100-80gb --cdi-dir /etc/cdi
    """  # noqa: D301 - click's mark
    from allotment.model.compute import ComputeClass
    from allotment.model.requests import Request
    from allotment.model.shares import Injection
    from allotment.shares.cdi import KIND
    from allotment.shares.folders import StateFolder
    from allotment.shares.placing import ShareOrder

    allowance = allowance_in(state, simulated)
    request = Request(
        memory=memory,
        count=count,
        selectors=gpus,
        compute=requested_compute(compute, kind, weight)
        if allowance is None
        else allowance.filled(compute, ComputeClass(kind) if kind else None, weight),
        may_oversubscribe=oversubscribe,
    )
    order = ShareOrder(
        request,
        Injection.CDI,
        name=name,
        spec=simulated,
        cdi_folder=cdi_dir.absolute(),
        host_budget=host_memory,
        allowance=allowance,
    )
    share = _create(StateFolder.at(state), order)
    click.echo(f"{KIND}={share.device_name}")


def _create(folder: "StateFolder", order: "ShareOrder") -> "Share":
    """Create a share that stays until it is removed, and its CDI spec; neither if one fails."""
    from allotment.shares import cdi, lifecycle
    from allotment.shares.folders import explained, shim_copy, simulated_copy
    from allotment.shares.run.command import local_inventory, refuse_nesting

    refuse_nesting()
    machine, inventory = local_inventory(folder, order.spec)
    folder.prepare()
    shim = shim_copy(folder)
    libraries = simulated_copy(folder) if machine else None

    def publish(share: "Share", directory: Path) -> None:
        driver = None
        if machine is None:
            chosen = {device.uuid for device in share.devices}
            devices = [device for device in inventory.devices if device.uuid in chosen]
            driver = cdi.driver_edits(devices)
        preload = directory / "ld.so.preload"
        try:
            preload.write_text(cdi.preload_line(shim), "utf-8")
            preload.chmod(0o644)
        except OSError as error:
            raise explained(error, preload, "write") from error
        content = cdi.CdiContent(directory, shim, preload, machine, libraries, driver)
        cdi.write_spec(Path(share.cdi_spec or ""), cdi.make_spec(share, content))

    order = replace(order, machine=machine, problems=inventory.problems)
    door = lifecycle.FrontDoor(locked=folder.locked, publish=publish)
    share, _ = lifecycle.create(folder, order, inventory.devices, door=door)
    return share


@command.command("list", short_help="Show the shares that are CDI devices.")
@output_option("table", "json", "yaml")
@state_option
def list_(*, output: str, state: Path | None) -> None:
    """Show the shares that are CDI devices, with their spec files.

    \b
    Example:
      allot cdi list -o json
    """  # noqa: D301 - click's mark
    from allotment.shares.cdi import KIND, list_specs
    from allotment.shares.folders import StateFolder
    from allotment.shares.status import current

    shares = [loaded.share for loaded in current(StateFolder.at(state)) if loaded.share]
    specs = list_specs(shares)
    if output != "table":
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
@click.option("--force", is_flag=True, help="Remove it even while containers use it.")
@state_option
def rm(*, shares: tuple[str, ...], force: bool, state: Path | None) -> None:
    """Remove shares by name, id or device, and their CDI specs.

    \b
    Example:
      allot cdi rm notebook
    """  # noqa: D301 - click's mark
    from allotment.shares.cdi import KIND
    from allotment.shares.folders import StateFolder
    from allotment.shares.lifecycle import destroy, find
    from allotment.shares.run.command import refuse_inside

    refuse_inside(f"allot cdi rm {' '.join(shares)}")
    folder = StateFolder.at(state)
    names = [name.removeprefix(f"{KIND}=") for name in shares]
    for share in [find(folder, name) for name in names]:
        destroy(folder, share, force=force)
        click.echo(share.name)
