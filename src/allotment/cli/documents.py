# SPDX-License-Identifier: Apache-2.0
"""The documents that `-o json` and `-o yaml` print. Stable: fields are added, never changed.

Memory is in bytes, times are UTC (RFC 3339), what is not known is null. docs/reference/json.md has
every field.
"""

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from allotment.shares.views import Overview, ShareView

__all__ = ["Document", "print_document", "share_document", "shares_document", "utc"]

Document = dict[str, Any]


def print_document(document: object, kind: str) -> None:
    """Print a document as `json` or `yaml`."""
    if kind == "yaml":
        import yaml

        click.echo(yaml.safe_dump(document, sort_keys=False, width=100), nl=False)
        return
    import json

    click.echo(json.dumps(document, indent=2))


def utc(seconds: float) -> str:
    """Write a time (seconds after the epoch) as RFC 3339, in UTC."""
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def shares_document(overview: "Overview") -> Document:
    """Describe all shares: what `allot ps -o json` prints."""
    return {
        "shares": [share_document(each) for each in overview.shares],
        "outside": [
            {
                "pid": each.pid,
                "command": each.command,
                "uuid": each.uuid,
                "memory_used_bytes": each.used,
            }
            for each in overview.outside
        ],
    }


def share_document(view: "ShareView") -> Document:
    """Describe one share."""
    share = view.share
    uuids = [device.uuid for device in view.devices]
    return {
        "id": view.id,
        "name": view.name,
        "state": str(view.state),
        "enforced": view.is_enforced,
        "mode": share.mode if share else None,
        "injection": str(share.injection) if share else None,
        "simulated": share.spec if share else None,
        "created": utc(share.created) if share else None,
        "runner_pid": share.runner.pid if share and share.runner else None,
        "command": list(share.command) if share else [],
        "problem": str(view.problem) if view.problem else None,
        "devices": [
            {
                "uuid": device.uuid,
                "name": device.name,
                "memory_limit_bytes": device.limit,
                "memory_used_bytes": device.used,
                "memory_peak_bytes": device.peak,
                "refusals": device.refusals,
            }
            for device in view.devices
        ],
        "processes": [
            {
                "pid": process.pid,
                "pid_inside": process.pid_inside,
                "command": process.command,
                "enforced": process.is_enforced,
                "refusals": process.refusals,
                "devices": [
                    {
                        "uuid": uuid,
                        "memory_used_bytes": used,
                        "memory_peak_bytes": peak,
                        "context_bytes": context,
                    }
                    for uuid, used, peak, context in zip(
                        uuids, process.used, process.peak, process.context, strict=False
                    )
                ],
            }
            for process in view.processes
        ],
    }
