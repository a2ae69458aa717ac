# SPDX-License-Identifier: Apache-2.0
"""The pods of an installation, and what they serve, through the API server's proxy.

Read in the namespace of the installation alone: elsewhere anyone may give a pod their labels.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from allotment.kube.clients import Api
from allotment.kube.live import listed
from allotment.kube.objects import Metadata, Narrow

SYSTEM: Final = "allotment-system"
"""The namespace of deploy/manifests."""
AGENT: Final = "agent"
SCHEDULER: Final = "scheduler"
_NAME: Final = "app.kubernetes.io/name"
_COMPONENT: Final = "app.kubernetes.io/component"
_PORTS: Final = {AGENT: 9446, SCHEDULER: 9448}
"""Of metrics, as in deploy/manifests: for a pod that names none."""


class _Port(Narrow):
    name: str = ""
    container_port: int = 0


class _Container(Narrow):
    name: str = ""
    image: str = ""
    ports: list[_Port] | None = None


class _Spec(Narrow):
    node_name: str = ""
    containers: list[_Container] | None = None


class _Waiting(Narrow):
    reason: str = ""
    message: str = ""


class _State(Narrow):
    waiting: _Waiting | None = None


class _ContainerStatus(Narrow):
    name: str = ""
    restart_count: int = 0
    state: _State | None = None


class _Condition(Narrow):
    type: str = ""
    status: str = ""
    message: str = ""


class _Status(Narrow):
    phase: str = ""
    conditions: list[_Condition] | None = None
    container_statuses: list[_ContainerStatus] | None = None


class _Dated(Metadata):
    creation_timestamp: str = ""


class _Pod(Narrow):
    metadata: _Dated
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


class ComponentPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod of an installation."""

    component: str
    """`agent`, `scheduler`, `kube-scheduler`; or any other."""
    namespace: str
    name: str
    node: str = ""
    containers: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    """Of the containers, in this order."""
    metrics_port: int = 0
    """0: it serves none."""
    is_ready: bool = False
    restarts: int = 0
    problem: str = ""
    """Why it is not ready, by its containers."""
    created: str = ""
    """RFC 3339 in UTC."""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


async def read_components(
    api: Api, *, namespace: str = SYSTEM, component: str = ""
) -> tuple[ComponentPod, ...]:
    """Return the pods of an installation, or of one component of it. Raises `KubeError`.

    Pods that are being deleted are left out. Sorted by component, node and age.
    """
    labels = f"{_NAME}=allotment"
    if component:
        labels += f",{_COMPONENT}={component}"
    path = f"/api/v1/namespaces/{namespace}/pods"
    found = await listed(
        api,
        path,
        _Pod,
        asked=f"list pods in namespace {namespace}",
        params={"labelSelector": labels},
    )
    pods = (_read(item) for item in found if item.metadata.deletion_timestamp is None)
    return tuple(sorted(pods, key=lambda pod: (pod.component, pod.node, pod.created, pod.name)))


def _read(item: _Pod) -> ComponentPod:
    component = (item.metadata.labels or {}).get(_COMPONENT, "")
    containers = item.spec.containers or ()
    named = (
        port.container_port
        for container in containers
        for port in container.ports or ()
        if port.name == "metrics"
    )
    conditions = {each.type: each for each in item.status.conditions or ()}
    ready = conditions.get("Ready")
    is_ready = ready is not None and ready.status == "True"
    states = item.status.container_statuses or ()
    return ComponentPod(
        component=component,
        namespace=item.metadata.namespace,
        name=item.metadata.name,
        node=item.spec.node_name,
        containers=tuple(each.name for each in containers),
        images=tuple(each.image for each in containers),
        metrics_port=next(named, _PORTS.get(component, 0)),
        is_ready=is_ready,
        restarts=sum(each.restart_count for each in states),
        problem="" if is_ready else _problem(item, states),
        created=item.metadata.creation_timestamp,
    )


def _problem(item: _Pod, states: Sequence[_ContainerStatus]) -> str:
    for each in states:
        waiting = each.state.waiting if each.state else None
        if waiting is not None and waiting.reason:
            return f"container {each.name}: {waiting.reason}"
    for condition in item.status.conditions or ():
        if condition.status == "False" and condition.message:
            return condition.message
    return f"phase {item.status.phase or 'unknown'}"


async def read_metrics(api: Api, pod: ComponentPod) -> str:
    """Return a pod's metrics, through the API server's proxy. Raises `KubeError`.

    The proxy needs the right to get `pods/proxy`.
    """
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}:{pod.metrics_port}/proxy/metrics"
    body = await api.get(path, asked=f"get the metrics of pod {pod}")
    return body.decode(errors="replace")


async def read_log(api: Api, pod: ComponentPod, container: str, *, lines: int, most: int) -> str:
    """Return the last lines of a container's log, at most so many bytes. Raises `KubeError`."""
    path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}/log"
    params = {"container": container, "tailLines": str(lines), "limitBytes": str(most)}
    body = await api.get(path, asked=f"get pods/log of pod {pod}", params=params)
    return body.decode(errors="replace")
