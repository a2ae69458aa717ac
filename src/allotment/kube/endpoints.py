# SPDX-License-Identifier: Apache-2.0
"""Where a Service without a selector leads: its EndpointSlice, which is ours to write.

One object with one address, replaced as a whole: whoever writes his own takes the other's out by
the same write. A label on pods that a selector looks for would need the right to change pods, and
would stay on the pod of a node that is gone.
"""

from dataclasses import dataclass

import msgspec

from allotment.kube.clients import Api
from allotment.kube.errors import KubeError, ObjectMissingError
from allotment.kube.listing import decoded
from allotment.kube.objects import Metadata

__all__ = ["Endpoint", "ServiceEndpoint"]


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of the object."""


class _Conditions(_Narrow):
    ready: bool | None = None


class _EndpointObject(_Narrow):
    addresses: list[str] = msgspec.field(default_factory=list)
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(_Narrow):
    name: str | None = None
    port: int | None = None


class _Slice(_Narrow):
    metadata: Metadata
    endpoints: list[_EndpointObject] | None = None
    ports: list[_Port] | None = None


_DECODER = msgspec.json.Decoder(_Slice)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where somebody listens."""

    address: str
    """An IP address."""
    port: int
    name: str
    """Of the Service's port."""


class ServiceEndpoint:
    """The one endpoint of a Service without a selector."""

    def __init__(self, api: Api, *, namespace: str, service: str, is_ipv6: bool = False) -> None:
        """Ask nothing yet. The slices of the two families are named by them: a slice has one."""
        self.name = f"{service}-ipv6" if is_ipv6 else f"{service}-ipv4"
        self._api = api
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices/{self.name}"
        self.title = f"{namespace}/{self.name}"

    async def read(self) -> tuple[str, Endpoint | None]:
        """Return the object's version, and where it leads; None: nowhere, or to more than one.

        Raises `KubeError`.
        """
        asked = f"get endpoint slice {self.title}"
        try:
            body = await self._api.get(self._path, asked=asked)
        except ObjectMissingError as error:
            raise KubeError(
                f"there is no endpoint slice {self.title}: kube-scheduler finds no leader by it",
                hint="kubectl apply -f deploy/manifests/scheduler.yaml",
                status=error.status,
            ) from error
        item = decoded(_DECODER, body, asked=asked)
        return item.metadata.resource_version, _endpoint(item)

    async def write(self, endpoint: Endpoint, *, version: str) -> None:
        """Lead there, and nowhere else.

        Raises `ConflictError`: somebody else wrote since that version. `KubeError`.
        """
        change = {
            "metadata": {"resourceVersion": version},
            "endpoints": [{"addresses": [endpoint.address], "conditions": {"ready": True}}],
            "ports": [{"name": endpoint.name, "port": endpoint.port, "protocol": "TCP"}],
        }
        await self._api.patch(self._path, change, asked=f"patch endpoint slice {self.title}")


def _endpoint(item: _Slice) -> Endpoint | None:
    try:
        (one,) = item.endpoints or []
        (port,) = item.ports or []
        (address,) = one.addresses
    except ValueError:
        return None
    if not one.conditions.ready or not port.port:
        return None
    return Endpoint(address, port.port, port.name or "")
