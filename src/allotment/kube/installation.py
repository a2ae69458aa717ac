# SPDX-License-Identifier: Apache-2.0
"""What an installation of Allotment consists of in a cluster, read once for `doctor` and `status`.

Each part may be missing, because this client may not read it: then the refusal is kept.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

import msgspec

from allotment.kube.clients import Api, read
from allotment.kube.components import SYSTEM, ComponentPod, read_components
from allotment.kube.errors import KubeError, ObjectMissingError, UnreachableError
from allotment.kube.live import listed
from allotment.kube.objects import Metadata, Narrow, NodeObject
from allotment.kube.webhooks import Webhook, WebhookConfiguration

_T = TypeVar("_T")

WEBHOOK: Final = "allotment-scheduler"
"""The MutatingWebhookConfiguration of deploy/manifests/scheduler.yaml."""
LEASE: Final = "allotment-scheduler"


class _LeaseSpec(Narrow):
    holder_identity: str | None = None
    renew_time: str | None = None


class LeaseObject(Narrow):
    """A Lease: who leads, and when it was renewed (RFC 3339)."""

    metadata: Metadata
    spec: _LeaseSpec = msgspec.field(default_factory=_LeaseSpec)


class _Container(Narrow):
    image: str = ""


class _PodSpec(Narrow):
    containers: list[_Container] | None = None


class _Template(Narrow):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _DaemonSetSpec(Narrow):
    template: _Template = msgspec.field(default_factory=_Template)


class _DaemonSetStatus(Narrow):
    desired_number_scheduled: int = 0


class DaemonSetObject(Narrow):
    """A DaemonSet, as far as its images tell what it is."""

    metadata: Metadata
    spec: _DaemonSetSpec = msgspec.field(default_factory=_DaemonSetSpec)
    status: _DaemonSetStatus = msgspec.field(default_factory=_DaemonSetStatus)

    @property
    def images(self) -> tuple[str, ...]:
        return tuple(each.image for each in self.spec.template.spec.containers or ())

    def __str__(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"


class _Version(Narrow):
    git_version: str = ""


class InstalledParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts, each as read, or why it could not be read."""

    server: str
    namespace: str
    version: str | KubeError
    """Of the API server: `v1.36.3`."""
    pods: tuple[ComponentPod, ...] | KubeError
    nodes: Sequence[NodeObject] | KubeError
    daemon_sets: Sequence[DaemonSetObject] | KubeError
    webhooks: tuple[Webhook, ...] | KubeError | None
    """None: there is no such configuration."""
    lease: LeaseObject | KubeError | None


_LEASE: Final = msgspec.json.Decoder(LeaseObject)
_VERSION: Final = msgspec.json.Decoder(_Version)


async def read_installation(api: Api, *, namespace: str = SYSTEM) -> InstalledParts:
    """Raises `UnreachableError` only."""

    async def of_version() -> str:
        return (await read(api, "/version", _VERSION, asked="get the version")).git_version

    async def of_webhooks() -> tuple[Webhook, ...] | None:
        try:
            return (await WebhookConfiguration(api, name=WEBHOOK).read())[1]
        except ObjectMissingError:
            return None

    async def of_lease() -> LeaseObject | None:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{LEASE}"
        try:
            return await read(api, path, _LEASE, asked=f"get lease {namespace}/{LEASE}")
        except ObjectMissingError:
            return None

    version, pods, nodes, daemon_sets, webhooks, lease = await asyncio.gather(
        _kept(of_version()),
        _kept(read_components(api, namespace=namespace)),
        _kept(listed(api, "/api/v1/nodes", NodeObject, asked="list nodes")),
        _kept(listed(api, "/apis/apps/v1/daemonsets", DaemonSetObject, asked="list daemonsets")),
        _kept(of_webhooks()),
        _kept(of_lease()),
    )
    return InstalledParts(
        server=api.server,
        namespace=namespace,
        version=version,
        pods=pods,
        nodes=nodes,
        daemon_sets=daemon_sets,
        webhooks=webhooks,
        lease=lease,
    )


async def _kept(part: Awaitable[_T]) -> _T | KubeError:
    try:
        return await part
    except UnreachableError:
        raise
    except KubeError as error:
        return error
