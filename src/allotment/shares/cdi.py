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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allotment.model.errors import StateError
from allotment.model.shares import Share, ShareId
from allotment.modes.turns import link_names
from allotment.shares.folders import explained

__all__ = [
    "CDI_VERSION",
    "DEFAULT_FOLDER",
    "KIND",
    "CdiContent",
    "Edits",
    "list_specs",
    "make_spec",
    "remove_spec",
    "spec_name",
    "write_spec",
]

CDI_VERSION = "0.5.0"
KIND = "allotment.dev/share"
DEFAULT_FOLDER = Path("/var/run/cdi")
"""For specs that come and go; the runtimes' other folder, /etc/cdi, is for those that stay."""

_PREFIX = "allotment.dev-share-"
_INSIDE = "/run/allotment"
# What any glibc looks through without configuration: Debian's kind, and Red Hat's kind.
_LIBRARY_FOLDERS_INSIDE = ("/usr/lib", "/usr/lib64")

Edits = dict[str, list[Any]]
"""CDI's containerEdits: env, deviceNodes, mounts, hooks."""


@dataclass(frozen=True, slots=True)
class CdiContent:
    """What a share's container gets, as paths on this machine."""

    directory: Path
    """The share's."""
    shim: Path
    preload: Path
    """A file that names the shim as seen inside."""
    machine: Path | None = None
    libraries: Path | None = None
    """The folder with the simulated libraries."""
    driver: Mapping[str, Sequence[Any]] | None = None
    """Edits for real GPUs."""


def spec_name(share: ShareId) -> str:
    """Return the name of a share's spec file."""
    return f"{_PREFIX}{share}.json"


def preload_line(shim: Path) -> str:
    """Return where a container finds the shim: the content of its ld.so.preload."""
    return f"{_INSIDE}/shim/{shim.parent.name}/{shim.name}\n"


def make_spec(share: Share, content: CdiContent) -> dict[str, Any]:
    """Return the spec of one share: a device with the share's name."""
    shim_inside = f"{_INSIDE}/shim/{content.shim.parent.name}"
    mounts = [
        _mount(content.directory / "policy", f"{_INSIDE}/share/policy"),
        _mount(content.directory / "usage", f"{_INSIDE}/share/usage", writable=True),
        *_turns(content.directory, len(share.devices)),
        _mount(content.shim.parent, shim_inside),
        _mount(content.preload, "/etc/ld.so.preload"),
    ]
    if content.machine and content.libraries:
        mounts.append(_mount(content.machine, f"{_INSIDE}/simulated/machine", writable=True))
        mounts += [
            _mount(library, f"{folder}/{library.name}")
            for library in sorted(content.libraries.iterdir())
            for folder in _LIBRARY_FOLDERS_INSIDE
        ]
    edits: Edits = {"mounts": mounts}
    for key, values in (content.driver or {}).items():
        edits.setdefault(key, []).extend(values)
    return {
        "cdiVersion": CDI_VERSION,
        "kind": KIND,
        "devices": [{"name": share.name, "containerEdits": edits}],
    }


def _turns(directory: Path, devices: int) -> Iterator[dict[str, Any]]:
    """Mount what the shares of each device take turns by."""
    for index in range(devices):
        contract, leases = link_names(index)
        yield _mount(directory / contract, f"{_INSIDE}/share/{contract}")
        yield _mount(directory / leases, f"{_INSIDE}/share/{leases}", writable=True)


def _mount(source: Path, target: str, *, writable: bool = False) -> dict[str, Any]:
    # `exec`: /run is often mounted noexec, and a bind mount would inherit that.
    options = ["rw" if writable else "ro", "nosuid", "nodev", "exec", "bind"]
    return {"hostPath": str(source), "containerPath": target, "options": options}


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
    except OSError as error:
        raise explained(error, path, "remove the CDI spec") from error


def list_specs(shares: Iterable[Share]) -> list[tuple[Share, Path, bool]]:
    """Return the shares that are CDI devices, with their spec file and whether it is there."""
    return [
        (share, Path(share.cdi_spec), Path(share.cdi_spec).exists())
        for share in shares
        if share.cdi_spec
    ]
