# SPDX-License-Identifier: Apache-2.0
"""The documents of `-o json` and `-o yaml`. Stable: fields are added, never changed.

Sizes in bytes, times in UTC (RFC 3339), durations in seconds; unknown values are null.
docs/reference/json.md describes every field.
"""

from typing import TYPE_CHECKING, Any

import click

from allotment.model.formats import utc

if TYPE_CHECKING:
    from allotment.model.pods import Owner
    from allotment.shares.compute_view import ComputeView
    from allotment.shares.status import ShareStatus, ShareView

Document = dict[str, Any]


def print_document(document: object, kind: str) -> None:
    if kind == "yaml":
        import yaml

        click.echo(yaml.safe_dump(document, sort_keys=False, width=100), nl=False)
        return
    import json

    click.echo(json.dumps(document, indent=2))


def shares_document(overview: "ShareStatus") -> Document:
    """Return the document of `allot ps -o json`."""
    return {
        "shares": [share_document(view) for view in overview.shares],
        "outside": [
            {
                "pid": user.pid,
                "command": user.command,
                "uuid": user.uuid,
                "memory_used_bytes": user.used,
            }
            for user in overview.outside
        ],
    }


def share_document(view: "ShareView") -> Document:
    share = view.share
    uuids = [device.uuid for device in view.devices]
    cut = {device.uuid: device for device in share.devices if device.gpu} if share else {}
    return {
        "id": view.id,
        "name": view.name,
        "state": str(view.state),
        "enforced": view.is_enforced,
        "remark": view.remark or view.excess or view.without_turns or None,
        "mode": share.mode if share else None,
        "injection": str(share.injection) if share else None,
        "simulated": share.spec if share else None,
        "created": utc(share.created) if share else None,
        "suspended": utc(share.suspension.since) if share and share.suspension else None,
        "runner_pid": share.runner.pid if share and share.runner else None,
        "command": list(share.command) if share else [],
        "owner": owner_document(share.owner) if share and share.owner else None,
        "problem": str(view.problem) if view.problem else None,
        "losses": [
            {
                "uuid": loss.uuid,
                "time": utc(loss.time),
                "reason": loss.reason,
                "recovered_seconds": loss.recovered_s,
            }
            for loss in view.losses
        ],
        "devices": [
            {
                "uuid": device.uuid,
                "name": device.name,
                "gpu": cut[device.uuid].gpu if device.uuid in cut else None,
                "mig_profile": cut[device.uuid].profile if device.uuid in cut else None,
                "memory_limit_bytes": device.limit,
                "memory_used_bytes": device.used,
                "memory_driver_bytes": device.driver_used,
                "memory_peak_bytes": device.peak,
                "refusals": device.refusals,
                "oversubscribed": device.is_oversubscribed,
                "memory_host_bytes": device.host_bytes,
                "memory_moved_bytes": device.moved_bytes,
                "compute": compute_document(device.compute) if device.compute else None,
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
                "gpu_seconds": seconds(process.gpu_ns),
                "held_seconds": seconds(process.held_ns),
                "throttled": process.throttled,
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


def owner_document(owner: "Owner") -> Document:
    return {
        "namespace": owner.namespace,
        "pod": owner.pod,
        "container": owner.container,
        "kind": str(owner.kind),
        "uid": owner.uid,
        "resource": owner.resource,
        "claim": owner.is_claim,
    }


def compute_document(compute: "ComputeView") -> Document:
    """Describe the compute that a share is promised on a device, and its use."""
    from allotment.ledger.layout import WAIT_FIRST_NS

    promised, use, account = compute.promised, compute.use, compute.account
    rates, last = compute.rates, len(use.lease_waits) - 1
    return {
        "governed": promised.is_governed,
        "guarantee_percent": promised.guarantee / 100,
        "ceiling_percent": promised.ceiling / 100,
        "weight": promised.weight,
        "class": str(promised.kind),
        "state": compute.state,
        "measured": compute.is_measured,
        "gpu_percent": round(rates.gpu * 100, 2) if rates else None,
        "driver_gpu_percent": compute.driver_percent,
        "gpu_seconds": seconds(use.gpu_ns),
        "copy_seconds": seconds(use.copy_ns),
        "held_seconds": seconds(use.held_ns),
        "throttled": use.throttled,
        "borrowed_seconds": seconds(account.borrowed_ns),
        "lent_seconds": seconds(account.lent_ns),
        "leases": account.leases,
        "evictions": account.evictions,
        "lease_wait_seconds": seconds(use.lease_wait_ns),
        "lease_waits": [
            {
                "under_seconds": seconds(WAIT_FIRST_NS << index) if index < last else None,
                "count": count,
            }
            for index, count in enumerate(use.lease_waits)
        ],
    }


def seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
