# SPDX-License-Identifier: Apache-2.0
"""The status of ResourceClaims: what their devices are, for people to read."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from allotment.dialects.own.resource_claims import AllocatedDevice, ResourceClaim
from allotment.kube.clients import Api, read_and_write
from allotment.kube.errors import ConflictError
from allotment.kube.resource_claims import API, find_claim, reported_devices
from allotment.model.structs import replace


class PreparedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """What the status of a claim says about one of its devices that is prepared."""

    device: AllocatedDevice
    data: Mapping[str, Any]
    """Under 10 KiB of JSON."""
    since: float
    """Seconds after the epoch."""


async def write_prepared(
    api: Api, claim: ResourceClaim, devices: Sequence[PreparedDevice], *, driver: str
) -> None:
    """Write `status.devices` of a driver's devices: ready, with data. Raises `KubeError`.

    By a merge patch on the version read. The API server compares opaque parameters byte by byte
    (1.36): server-side apply sorts their keys, and it refuses that as a changed allocation. So it
    refuses any status of a claim whose JSON was posted with spaces. Needs the verb
    `associated-node:patch` for resourceclaims/driver.
    """
    own = [_prepared(each, driver) for each in devices]
    try:
        await _report(api, claim, own, driver=driver)
    except ConflictError:  # the claim has changed since it was read, as when a pod reserves it
        await read_and_write(lambda: _report_again(api, claim, own, driver=driver))


async def _report_again(
    api: Api, claim: ResourceClaim, own: Sequence[Mapping[str, Any]], *, driver: str
) -> None:
    found = await find_claim(api, namespace=claim.namespace, name=claim.name, uid=claim.uid)
    if found is not None:
        version, reported = found.metadata.resource_version, reported_devices(found)
        present = replace(claim, version=version, reported=reported)
        await _report(api, present, own, driver=driver)


async def _report(
    api: Api, claim: ResourceClaim, own: Sequence[Mapping[str, Any]], *, driver: str
) -> None:
    devices = [*(each for each in claim.reported if each.get("driver") != driver), *own]
    if devices == [*claim.reported]:
        return
    await api.patch(
        f"{API}/namespaces/{claim.namespace}/resourceclaims/{claim.name}/status",
        {"metadata": {"resourceVersion": claim.version}, "status": {"devices": devices}},
        asked=f"write the status of ResourceClaim {claim}",
    )


def _prepared(prepared: PreparedDevice, driver: str) -> dict[str, Any]:
    device = prepared.device
    since = datetime.fromtimestamp(int(prepared.since), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Prepared",
        "message": "",
        "lastTransitionTime": since,
    }
    return {
        "driver": driver,
        "pool": device.pool,
        "device": device.device,
        **({"shareID": device.share_id} if device.share_id else {}),
        "conditions": [ready],
        "data": prepared.data,
    }
