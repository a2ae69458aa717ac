# SPDX-License-Identifier: Apache-2.0
"""A share as a CDI device: `docker run --device allotment.dev/share=NAME`, and Podman likewise.

One spec file for each share, in a folder that the container runtimes read. The container gets what
`allot run` gives a command: the ledger at /run/allotment/share, the shim through a read-only
/etc/ld.so.preload, and a simulated machine with its libraries or the real GPU's nodes and
libraries. Facts: the Container Device Interface specification, version 0.5.0 (device names may
begin with a digit, device nodes may have a host path).
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allotment.model.errors import StateError
from allotment.model.requests import SOFT
from allotment.model.shares import Share, ShareId
from allotment.modes.turns import link_names
from allotment.shares.folders import explained
from allotment.shares.steps import step

__all__ = [
    "CDI_VERSION",
    "DEFAULT_FOLDER",
    "KIND",
    "CdiContent",
    "Edits",
    "HostMount",
    "list_specs",
    "make_spec",
    "mounts_of",
    "preload_line",
    "publish",
    "remove_spec",
    "spec_name",
    "sweep",
    "write_spec",
]

CDI_VERSION = "0.5.0"
KIND = "allotment.dev/share"
DEFAULT_FOLDER = Path("/var/run/cdi")
"""For specs that come and go; the runtimes' other folder, /etc/cdi, is for those that stay."""

_PREFIX = "allotment.dev-share-"
_OLD_S = 600.0  # a draft is there for a millisecond
_INSIDE = "/run/allotment"
# What any glibc looks through without configuration: Debian's kind, and Red Hat's kind.
_LIBRARY_FOLDERS_INSIDE = ("/usr/lib", "/usr/lib64")

Edits = dict[str, list[Any]]
"""CDI's containerEdits: env, deviceNodes, mounts, hooks."""


@dataclass(frozen=True, slots=True)
class HostMount:
    """A bind mount into a container."""

    host_path: str
    container_path: str
    is_read_only: bool = True


@dataclass(frozen=True, slots=True)
class CdiContent:
    """What a share's container gets, as paths on this machine."""

    directory: Path
    """The share's."""
    shim: Path | None = None
    """None: in a mode that needs none."""
    preload: Path | None = None
    """A file that names the shim as seen inside."""
    machine: Path | None = None
    libraries: Path | None = None
    """The folder with the simulated libraries."""
    driver: Mapping[str, Sequence[Any]] | None = None
    """Edits for real GPUs."""
    marker: Path | None = None
    """A file that tells whose container it is, where there is no ledger to tell."""
    visible: Path | None = None
    """A file with the simulated GPUs that the container has: what device nodes are to real ones."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What else its programs are told."""
    folders: tuple[HostMount, ...] = ()
    """What else is mounted."""


def spec_name(share: ShareId) -> str:
    """Return the name of a share's spec file."""
    return f"{_PREFIX}{share}.json"


def preload_line(shim: Path) -> str:
    """Return where a container finds the shim: the content of its ld.so.preload."""
    return f"{_INSIDE}/shim/{shim.parent.name}/{shim.name}\n"


def make_spec(share: Share, content: CdiContent) -> dict[str, Any]:
    """Return the spec of one share: a device with the share's name, or its id if it has an owner.

    So the name of an owned share's device is never another's, whatever its container is called.
    """
    edits: Edits = {"mounts": [_mount(each) for each in mounts_of(content, devices=_seats(share))]}
    if content.environment:
        edits["env"] = [f"{name}={value}" for name, value in content.environment.items()]
    for key, values in (content.driver or {}).items():
        edits.setdefault(key, []).extend(values)
    return {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [{"name": share.device_name, "containerEdits": edits}],
    }


def _seats(share: Share) -> int:
    """Return of how many devices a share takes turns: mode soft alone has them."""
    return len(share.devices) if share.mode == SOFT else 0


def mounts_of(content: CdiContent, *, devices: int) -> tuple[HostMount, ...]:
    """Return what is mounted into the container of a share that takes turns on so many devices.

    None of the files has to be there yet. The driver's own are not among them.
    """
    return (*_of_share(content, devices), *_of_simulation(content), *content.folders)


def _of_share(content: CdiContent, devices: int) -> Iterator[HostMount]:
    directory, inside = content.directory, f"{_INSIDE}/share"
    if content.marker:
        yield HostMount(str(content.marker), f"{inside}/id")
    if not (content.shim and content.preload):
        return
    yield HostMount(str(directory / "policy"), f"{inside}/policy")
    yield HostMount(str(directory / "usage"), f"{inside}/usage", is_read_only=False)
    for index in range(devices):
        contract, leases = link_names(index)
        yield HostMount(str(directory / contract), f"{inside}/{contract}")
        yield HostMount(str(directory / leases), f"{inside}/{leases}", is_read_only=False)
    shim = content.shim.parent
    yield HostMount(str(shim), f"{_INSIDE}/shim/{shim.name}")
    yield HostMount(str(content.preload), "/etc/ld.so.preload")


def _of_simulation(content: CdiContent) -> Iterator[HostMount]:
    if not (content.machine and content.libraries):
        return
    inside = f"{_INSIDE}/simulated"
    yield HostMount(str(content.machine), f"{inside}/machine", is_read_only=False)
    if content.visible:
        yield HostMount(str(content.visible), f"{inside}/devices")
    for library in sorted(content.libraries.iterdir()):
        for folder in _LIBRARY_FOLDERS_INSIDE:
            yield HostMount(str(library), f"{folder}/{library.name}")


def _mount(mount: HostMount) -> dict[str, Any]:
    # `exec`: /run is often mounted noexec, and a bind mount would inherit that.
    access = "ro" if mount.is_read_only else "rw"
    options = [access, "nosuid", "nodev", "exec", "bind"]
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": options,
    }


def publish(path: Path, content: bytes) -> None:
    """Put a spec where the container runtimes read it, unless it is there. Raises `StateError`.

    A name has one content for ever: a runtime may still know an earlier one (containerd 2.3 did in
    1 to 2 of 90 starts). A file of that name with another content is removed, and the error lets
    the caller be asked again later, when the runtime has seen that.
    """
    try:
        there = path.read_bytes()
    except FileNotFoundError:
        there = None
    except OSError as error:
        raise _unpublished(error, path) from error
    if there == content:
        return
    if there is not None:
        remove_spec(path)
        raise StateError(
            f"{path} was the CDI spec of another share of that name: it is removed",
            hint="it is tried again; should it come back, see what else writes there",
        )
    draft = _draft_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(content)
            draft.chmod(0o644)
            step("publish.drafted")
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _unpublished(error, path) from error
    step("publish.shown")


def _draft_of(path: Path) -> Path:
    """Return the one name for a spec that is not yet whole; runtimes read none with that end."""
    return path.with_name(f".{path.name}.new")


def _unpublished(error: OSError, path: Path) -> StateError:
    return StateError(
        explained(error, path, "write the CDI spec").message,
        hint=f"let the node agent write into {path.parent} (a hostPath mount, not read-only), or"
        " name another folder that the container runtime reads",
    )


def write_spec(path: Path, spec: Mapping[str, Any]) -> None:
    """Write a spec file in one step: the runtimes watch the folder. Raises `StateError`."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps(spec, indent=2) + "\n", "utf-8")
            draft.chmod(0o644)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        failure = explained(error, path, "write the CDI spec")
        hint = "name a folder that you may write and the container runtime reads, with --cdi-dir"
        raise StateError(failure.message, hint=hint) from error


def remove_spec(path: Path) -> None:
    """Remove a share's spec file if it is there; raise `StateError` where that fails."""
    if not path.name.startswith(_PREFIX):
        return  # a record that was changed must not make us remove anything else
    try:
        path.unlink(missing_ok=True)
        _draft_of(path).unlink(missing_ok=True)
    except NotADirectoryError:
        return  # then it is not there
    except OSError as error:
        # A folder that is read-only refuses to remove even what is not there.
        if path.exists() or _draft_of(path).exists():
            raise explained(error, path, "remove the CDI spec") from error


def sweep(folder: Path, shares: Path) -> None:
    """Remove the specs whose shares were below `shares` and are not there, and cut-off drafts.

    The caller holds the lock of the state folder that `shares` is of: nobody writes a spec of it.
    """
    with suppress(OSError):
        for path in sorted(folder.glob(f"*{_PREFIX}*")):
            with suppress(OSError):
                if _is_left_over(path, shares):
                    path.unlink()


def _is_left_over(path: Path, shares: Path) -> bool:
    is_draft = path.name.startswith(".")
    name = path.name.removeprefix(".").removesuffix(".new") if is_draft else path.name
    share = name.removeprefix(_PREFIX).removesuffix(".json")
    whole = path.with_name(spec_name(ShareId(share)))
    if path != (_draft_of(whole) if is_draft else whole):
        return False  # none of our names
    if (shares / share).exists():
        return is_draft
    # Other state folders' shares have their specs here as well.
    if f'"{shares}/{share}/'.encode() in path.read_bytes():
        return True
    return is_draft and time.time() - path.stat().st_mtime > _OLD_S


def list_specs(shares: Iterable[Share]) -> list[tuple[Share, Path, bool]]:
    """Return the shares that are CDI devices, with their spec file and whether it is there."""
    return [
        (share, Path(share.cdi_spec), Path(share.cdi_spec).exists())
        for share in shares
        if share.cdi_spec
    ]
