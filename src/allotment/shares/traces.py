# SPDX-License-Identifier: Apache-2.0
"""By what a share's processes are known when nothing in themselves tells: `processes.json`.

A daemon that scrubbed its environment, or changed its root folder, carries no mark of its share.
While `allot run` is there it is one of its descendants; what is written here is for afterwards.
It has a file of its own because `allot run` writes it without waiting for the folder's lock.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from allotment.model.shares import Runner
from allotment.shares.folders import explained

__all__ = ["Traces", "read_traces", "write_traces"]

_NAME = "processes.json"


@dataclass(frozen=True, slots=True)
class Traces:
    """What was seen of a share's processes."""

    namespace: int | None = None
    """The inode of the mount namespace that was made for its command."""
    members: tuple[Runner, ...] = ()


def write_traces(directory: Path, traces: Traces) -> None:
    """Write them into a share's directory in one step; raise `StateError`."""
    path = directory / _NAME
    draft = directory / f".{_NAME}-{os.getpid()}"
    document = {
        "namespace": traces.namespace,
        "members": [[each.pid, each.start_time, each.boot_id] for each in traces.members],
    }
    try:
        try:
            draft.write_text(json.dumps(document) + "\n", "utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise explained(error, path, "write down the share's processes") from error


def read_traces(directory: Path) -> Traces:
    """Return what is written down; nothing, where that cannot be read."""
    try:
        document = json.loads((directory / _NAME).read_bytes())
        namespace = document["namespace"]
        members = tuple(
            Runner(int(pid), int(start_time), str(boot_id))
            for pid, start_time, boot_id in document["members"]
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return Traces()
    return Traces(namespace if isinstance(namespace, int) else None, members)
