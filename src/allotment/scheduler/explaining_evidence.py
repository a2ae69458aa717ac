# SPDX-License-Identifier: Apache-2.0
"""What `allot explain` reads of the API server: a pod, and all that is to be known about it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

import msgspec

from allotment.dialects.foreign import ForeignPod
from allotment.dialects.kubeshare_sharepods import GROUP
from allotment.dialects.systems import DialectSettings, foreign_dialects
from allotment.kube.clients import Api
from allotment.kube.errors import DeniedError, KubeError, ObjectMissingError
from allotment.kube.live import LiveCluster, read_cluster
from allotment.kube.objects import ObjectList, PodObject, PodStatus
from allotment.kube.quotas import NamespaceQuota, QuotaObject, quota_of
from allotment.kube.sharepods import MANIFEST
from allotment.scheduler.admission_pods import read_pod

__all__ = ["AskedPod", "Condition", "Evidence", "read_evidence"]

_NEAR: Final = 3


class Condition(msgspec.Struct, kw_only=True, rename="camel"):
    """One of a pod's `status.conditions`."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class _Status(PodStatus):
    """With what schedulers have written."""

    conditions: list[Condition] | None = None


class AskedPod(PodObject):
    """The pod that is asked about."""

    status: _Status = msgspec.field(default_factory=_Status)


class _PodStatus(msgspec.Struct):
    """A SharePod's copy of its pod's, or why there is no pod."""

    phase: str = ""
    message: str = ""


class _SharePodStatus(msgspec.Struct):
    pod_status: _PodStatus = msgspec.field(default_factory=_PodStatus, name="PodStatus")


class _SharePod(msgspec.Struct):
    status: _SharePodStatus = msgspec.field(default_factory=_SharePodStatus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was read of the API server."""

    item: AskedPod
    foreign: ForeignPod
    """The same pod, as dialects read it."""
    cluster: LiveCluster
    quotas: tuple[NamespaceQuota, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be looked at."""
    settings: DialectSettings = field(default=DialectSettings())
    """By which dialects are read, and quotas counted."""


_pod: Final = msgspec.json.Decoder(AskedPod)
_sharepod: Final = msgspec.json.Decoder(_SharePod)
_pods: Final = msgspec.json.Decoder(ObjectList[PodObject])
_quotas: Final = msgspec.json.Decoder(ObjectList[QuotaObject])


async def read_evidence(
    api: Api,
    namespace: str,
    name: str,
    *,
    settings: DialectSettings | None = None,
    systems: Collection[str] = (),
) -> Evidence:
    """Read the pod, all nodes and pods, and the quotas of its namespace.

    `settings` are the scheduler's of the dialects; None: all as usual. `systems` are those whose
    running pods it counts.

    Raises `KubeError`; `ObjectMissingError` for a pod that is not there, with names near to it.
    """
    path = f"/api/v1/namespaces/{namespace}/pods/{name}"
    try:
        body = await api.get(path, asked=f"read pod {namespace}/{name}")
    except ObjectMissingError as error:
        raise ObjectMissingError(
            f"there is no pod {namespace}/{name}",
            hint=await _near(api, namespace, name),
            status=error.status,
        ) from error
    try:
        item = _pod.decode(body)
    except msgspec.MsgspecError as error:
        raise KubeError(f"cannot read pod {namespace}/{name}: {error}") from error
    foreign = read_pod(body, namespace=namespace).pod
    its = settings or DialectSettings()
    cluster = await read_cluster(api, dialects=foreign_dialects(its), systems=systems)
    problems = list(cluster.problems)
    quotas: tuple[NamespaceQuota, ...] = ()
    try:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        page = _quotas.decode(await api.get(path, asked="list resourcequotas"))
        quotas = tuple(quota_of(each) for each in page.items or ())
    except DeniedError as error:
        problems.append(f"quotas: {error.message}")
    return Evidence(
        item=item,
        foreign=foreign,
        cluster=cluster,
        quotas=quotas,
        problems=tuple(problems),
        settings=its,
    )


async def _near(api: Api, namespace: str, name: str) -> str:
    """Say which pod may have been meant, or what of its name there is in place of a pod."""
    told = await _of_sharepod(api, namespace, name)
    if told:
        return told
    try:
        body = await api.get(f"/api/v1/namespaces/{namespace}/pods", asked="list pods")
        names = [each.metadata.name for each in _pods.decode(body).items or ()]
        close = [each for each in names if name in each][:_NEAR]
        close = close or get_close_matches(name, names, n=_NEAR)
        if close:
            return f"did you mean {' or '.join(f'{namespace}/{each}' for each in close)}?"
        params = {"fieldSelector": f"metadata.name={name}"}
        body = await api.get("/api/v1/pods", asked="list pods", params=params)
        found = [each.metadata.namespace for each in _pods.decode(body).items or ()]
    except (KubeError, msgspec.MsgspecError):
        return f"`kubectl get pods --namespace {namespace}` lists those there are"
    if found:
        return f"did you mean {' or '.join(f'{each}/{name}' for each in found[:_NEAR])}?"
    if not names:
        return f"namespace {namespace} has no pod at all; `kubectl get pods -A` lists all"
    return f"`kubectl get pods --namespace {namespace}` lists those there are"


async def _of_sharepod(api: Api, namespace: str, name: str) -> str:
    """Say why a SharePod of this name has no pod; empty: there is none, or it cannot be read."""
    path = f"/apis/{GROUP}/v1/namespaces/{namespace}/sharepods/{name}"
    try:
        found = _sharepod.decode(await api.get(path, asked=f"get sharepod {namespace}/{name}"))
    except (KubeError, msgspec.MsgspecError):
        return ""
    told = found.status.pod_status
    if told.phase in {"Succeeded", "Failed"}:
        return f"SharePod {namespace}/{name} had one, which has ended ({told.phase})"
    if told.message:
        return f"SharePod {namespace}/{name} has none: {told.message}"
    return (
        f"SharePod {namespace}/{name} has none: is there an `allot scheduler` that leads, and is"
        f" {MANIFEST} applied?"
    )
