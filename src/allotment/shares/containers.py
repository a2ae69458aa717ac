# SPDX-License-Identifier: Apache-2.0
"""What `allot cdi create` does: a share that waits for containers, and its CDI device."""

from dataclasses import dataclass
from pathlib import Path

from allotment.model.requests import Request
from allotment.model.shares import Injection, Share
from allotment.shares import lives
from allotment.shares.cdi import CdiContent, make_spec, preload_line, write_spec
from allotment.shares.copies import shim_copy, simulated_copy
from allotment.shares.folders import StateFolder, explained
from allotment.shares.sessions import local_inventory, refuse_nesting

__all__ = ["ContainerOrder", "create_for_containers"]


@dataclass(frozen=True, slots=True)
class ContainerOrder:
    """A share for containers, and the folder that gets its CDI spec."""

    request: Request
    cdi_folder: Path
    name: str | None = None
    spec: str | None = None
    host_budget: int | None = None
    """As `lives.Order` has it."""


def create_for_containers(folder: StateFolder, order: ContainerOrder) -> Share:
    """Make a share that stays until it is removed, and its CDI spec.

    Raises `AllotError`; then neither is left behind.
    """
    refuse_nesting()
    machine, inventory = local_inventory(folder, order.spec)
    folder.prepare()
    shim = shim_copy(folder)
    libraries = simulated_copy(folder) if machine else None
    share, directory = lives.create(
        folder,
        lives.Order(
            request=order.request,
            injection=Injection.CDI,
            name=order.name,
            machine=machine,
            spec=order.spec,
            problems=inventory.problems,
            cdi_folder=order.cdi_folder.absolute(),
            host_budget=order.host_budget,
        ),
        inventory.devices,
    )
    try:
        driver = None
        if machine is None:
            from allotment.shares.drivers import driver_edits

            chosen = {device.uuid for device in share.devices}
            driver = driver_edits([device for device in inventory.devices if device.uuid in chosen])
        content = CdiContent(
            directory, shim, _preload_file(directory, shim), machine, libraries, driver
        )
        write_spec(Path(share.cdi_spec or ""), make_spec(share, content))
    except BaseException:
        lives.destroy(folder, lives.find(folder, share.id), force=True)
        raise
    return share


def _preload_file(directory: Path, shim: Path) -> Path:
    path = directory / "ld.so.preload"
    try:
        path.write_text(preload_line(shim), "utf-8")
        path.chmod(0o644)
    except OSError as error:
        raise explained(error, path, "write") from error
    return path
