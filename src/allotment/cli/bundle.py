# SPDX-License-Identifier: Apache-2.0
"""`allot bundle`: a tar.gz of texts with what a bug report of a cluster needs, without secrets.

Fields of objects are copied by lists of what is wanted, so nothing unknown gets in: no Secret is
read, and no variable, command, argument, volume or foreign annotation is copied. What looks like a
credential in a log or a configuration is replaced.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from allotment import __version__
from allotment.cli.options import (
    cluster_options,
    installed,
    lacking,
    read_of_cluster,
    system_namespace_option,
)
from allotment.model.formats import format_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from allotment.kube.clients import Api

    Json = Any
    Texts = dict[str, str]

_LOG_LINES: Final = 2000
_LOG_BYTES: Final = 1 << 20
_MOST_LOGS: Final = 12
"""Pods: those that are not ready first."""
_MOST_EVENTS: Final = 2000

_META: Final = {
    "name": True,
    "namespace": True,
    "uid": True,
    "creationTimestamp": True,
    "deletionTimestamp": True,
    "labels": "keys",
    "annotations": "keys",
}
_RESOURCES: Final = {"limits": True, "requests": True, "claims": True}
_CONTAINERS: Final = [{"name": True, "image": True, "restartPolicy": True, "resources": _RESOURCES}]
_STATE: Final = {
    "running": True,
    "waiting": {"reason": True, "message": True},
    # Its message is the program's own.
    "terminated": {"reason": True, "exitCode": True, "signal": True, "finishedAt": True},
}
_STATUSES: Final = [
    {"name": True, "ready": True, "restartCount": True, "state": _STATE, "lastState": _STATE}
]
_CONDITIONS: Final = [
    {"type": True, "status": True, "reason": True, "message": True, "lastTransitionTime": True}
]
_NODE: Final = {
    "metadata": _META,
    "spec": {"taints": True, "unschedulable": True},
    "status": {
        "capacity": True,
        "allocatable": True,
        "conditions": _CONDITIONS,
        "nodeInfo": True,
    },
}
_POD: Final = {
    "metadata": _META,
    "spec": {
        "nodeName": True,
        "schedulerName": True,
        "priority": True,
        "schedulingGates": True,
        "resourceClaims": True,
        "containers": _CONTAINERS,
        "initContainers": _CONTAINERS,
    },
    "status": {
        "phase": True,
        "reason": True,
        "message": True,
        "nominatedNodeName": True,
        "conditions": _CONDITIONS,
        "containerStatuses": _STATUSES,
        "initContainerStatuses": _STATUSES,
    },
}
_CLAIM: Final = {
    "metadata": _META,
    "spec": {"devices": {"requests": True, "constraints": True}},
    "status": {"allocation": {"devices": {"results": True}}, "reservedFor": True},
}
_EVENT: Final = {
    "involvedObject": {"kind": True, "namespace": True, "name": True},
    "reason": True,
    "message": True,
    "type": True,
    "count": True,
    "firstTimestamp": True,
    "lastTimestamp": True,
    "eventTime": True,
    "reportingComponent": True,
    "source": {"component": True},
}
_DAEMON_SET: Final = {
    "metadata": _META,
    "spec": {"template": {"spec": {"containers": _CONTAINERS, "nodeSelector": True}}},
    "status": True,
}
_KEYS: Final = re.compile(
    r"allotment\.dev/|nvidia\.com/|hami\.io/|volcano\.sh/|kubeshare|sharedgpu/|ALIYUN_COM_GPU"
    r"|scheduler\.framework\.gpushare|tencent\.com/|kai\.scheduler/|app\.kubernetes\.io/"
    r"|kubernetes\.io/(?:hostname|os|arch)$|topology\.kubernetes\.io/"
)
"""Keys of labels and annotations that are copied."""

_SECRETS: Final = (
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL), "PEM"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)?"), "token"),
    (re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9+/=._~-]{8,}"), "credential"),
    (
        re.compile(
            r"(?i)((?:password|passwd|secret|token|api[-_]?key|private[-_]?key|credential)s?"
            r"[\"']?\s*[:=]\s*[\"']?)[^\s\"',}]{4,}"
        ),
        "value",
    ),
)


@click.command(short_help="Collect what a bug report of a cluster needs, without secrets.")
@click.option(
    "--file",
    "-f",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The tar.gz file.  [default: allot-bundle-TIME.tar.gz in this folder]",
)
@cluster_options
@system_namespace_option
def command(
    *, path: Path | None, kubeconfig: Path | None, context: str | None, system_namespace: str
) -> None:
    """Write a tar.gz of texts for a bug report, and list what is in it.

    It has the checks of `doctor`, who has what, the use of shares, the state of nodes, claims and
    of pods with GPUs, events, and the logs of agents and schedulers. It has names of namespaces,
    nodes and pods, and images.

    It has no Secret, token, key, variable, command or argument: these are not read or not copied,
    and what looks like a credential in a log is replaced. Parts that this user may not read are
    left out and named in refused.txt. Look through it before you publish it.

    \b
    Example:
      kubectl allot bundle -f bug.tar.gz
    """  # noqa: D301 - click's mark
    with installed("allot bundle", extra="kubernetes"):
        from allotment.cli import cluster_checks  # noqa: F401 - reports what is not installed

    texts = read_of_cluster(
        kubeconfig,
        context,
        lambda api: collect(api, system_namespace),
        rights="read the cluster",
        check="list pods -A",
    )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = path or Path(f"allot-bundle-{stamp}.tar.gz")
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(packed(texts, folder=f"allot-bundle-{stamp}"))
    for name, text in sorted(texts.items()):
        click.echo(f"{format_bytes(len(text.encode())):>8}  {name}")
    click.echo(f"written to {target}: look through it before you publish it", err=True)


def packed(texts: Mapping[str, str], *, folder: str) -> bytes:
    """Return a tar.gz of these texts."""
    packed_bytes = io.BytesIO()
    with tarfile.open(fileobj=packed_bytes, mode="w:gz") as archive:
        for name, text in sorted(texts.items()):
            content = text.encode()
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))
    return packed_bytes.getvalue()


def without_secrets(text: str) -> str:
    """Replace what looks like a credential: keys and certificates in PEM, tokens, passwords."""
    for pattern, what in _SECRETS:
        replacement = f"(removed: {what})"
        groups = pattern.groups
        text = pattern.sub(rf"\g<1>{replacement}" if groups else replacement, text)
    return text


def picked(value: Json, shape: Json) -> Json:
    """Copy the fields of an object that a shape names.

    In a shape, true is the whole value, `keys` a map with known keys, and a list that of entries.
    """
    if shape is True:
        return value
    if shape == "keys":
        return {key: text for key, text in (value or {}).items() if _KEYS.match(key)}
    if isinstance(shape, list):
        return [picked(each, shape[0]) for each in value or ()]
    return {
        key: picked(value[key], part)
        for key, part in shape.items()
        if isinstance(value, dict) and value.get(key) is not None
    }


class _Collector:
    """Collects texts; a part that is refused is named, and the others go on."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.texts: Texts = {}
        self.refused: list[str] = []

    async def add(self, name: str, part: Callable[[], Awaitable[Json]]) -> Json:
        from allotment.kube.errors import KubeError

        try:
            content = await part()
        except KubeError as error:
            rule = lacking(error.message)
            self.refused.append(f"{name}: {error.message}" + (f"\n  {rule}" if rule else ""))
            return None
        self.texts[name] = content if isinstance(content, str) else _json(content)
        return content

    async def objects(self, name: str, path: str, shape: Json, **options: Any) -> list[Json]:  # noqa: ANN401
        from allotment.kube.live import listed

        keep: Callable[[Json], bool] = options.get("keep", lambda _: True)

        async def read() -> list[Json]:
            items: list[Json] = await listed(self.api, path, dict, asked=options["asked"])
            return [picked(each, shape) for each in items if keep(each)]

        return await self.add(name, read) or []


def _json(content: Json) -> str:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


async def collect(api: Api, namespace: str) -> Texts:
    """Return all parts, without what looks like a credential.

    Raises `UnreachableError` if the API server does not answer at all.
    """
    from allotment.cli import cluster_checks, cluster_top, inspect
    from allotment.kube.errors import KubeError
    from allotment.kube.installation import read_installation
    from allotment.kube.live import read_cluster
    from allotment.scheduler.cluster_use import read_cluster_use
    from allotment.scheduler.holdings import cluster_holdings

    found = _Collector(api)
    installation = await read_installation(api, namespace=namespace)
    checks = list(cluster_checks.check(installation, now=datetime.now(UTC)))
    found.texts["doctor.txt"] = "".join(
        f"{each.outcome:<8} {each.name}: {each.detail}\n" for each in checks
    )

    async def holdings() -> Json:
        read = cluster_holdings(await read_cluster(api))
        return inspect.document(read, read.nodes)

    async def use() -> Json:
        return cluster_top.document(await read_cluster_use(api, namespace=namespace))

    await found.add("holdings.json", holdings)
    await found.add("use.json", use)
    await found.objects("nodes.json", "/api/v1/nodes", _NODE, asked="list nodes")
    await found.objects(
        "pods.json",
        "/api/v1/pods",
        _POD,
        asked="list pods",
        keep=lambda pod: _is_of_interest(pod, namespace),
    )
    claims = "/apis/resource.k8s.io/v1/resourceclaims"
    await found.objects("claims.json", claims, _CLAIM, asked="list resourceclaims")
    sets = "/apis/apps/v1/daemonsets"
    await found.objects("daemonsets.json", sets, _DAEMON_SET, asked="list daemonsets")
    await found.objects(
        "events.json", "/api/v1/events", _EVENT, asked="list events", keep=_is_our_event
    )
    maps = f"/api/v1/namespaces/{namespace}/configmaps/allotment-config"
    await found.add("allotment-config.yaml", lambda: _configuration(api, maps))
    pods = () if isinstance(installation.pods, KubeError) else installation.pods
    await _logs(found, pods)
    if found.refused:
        found.texts["refused.txt"] = "".join(f"{each}\n" for each in found.refused)
    found.texts["README.txt"] = "".join(_readme(installation.version, found))
    return {name: without_secrets(text) for name, text in found.texts.items()}


def _is_of_interest(pod: Json, namespace: str) -> bool:
    """Return whether a pod is of the installation, or asks for something of a device plugin."""
    if pod["metadata"].get("namespace") == namespace:
        return True
    spec = pod.get("spec") or {}
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    limits = ((each.get("resources") or {}).get("limits") or {} for each in containers)
    return bool(spec.get("resourceClaims")) or any("/" in name for each in limits for name in each)


def _is_our_event(event: Json) -> bool:
    source = (event.get("source") or {}).get("component") or ""
    reporter = event.get("reportingComponent") or source
    is_scheduling = event.get("reason") in {"FailedScheduling", "Preempted"}
    return reporter.startswith("allotment") or is_scheduling


async def _configuration(api: Api, path: str) -> str:
    body = json.loads(await api.get(path, asked="get configmap allotment-config"))
    return "".join(f"# {key}\n{text}\n" for key, text in (body.get("data") or {}).items())


async def _logs(found: _Collector, pods: Sequence[Any]) -> None:
    from allotment.kube.components import SCHEDULER, read_log, read_metrics

    def urgency(pod: Any) -> tuple[bool, bool]:  # noqa: ANN401 - a `ComponentPod`
        return pod.is_ready, pod.component != SCHEDULER

    for pod in sorted(pods, key=urgency)[:_MOST_LOGS]:
        for container in pod.containers:
            log = partial(read_log, found.api, pod, container, lines=_LOG_LINES, most=_LOG_BYTES)
            await found.add(f"logs/{pod.name}-{container}.log", log)
        if pod.component == SCHEDULER:
            await found.add(f"metrics/{pod.name}.txt", partial(read_metrics, found.api, pod))


def _readme(version: object, found: _Collector) -> Iterator[str]:
    yield f"Made by allot {__version__} at {datetime.now(UTC).isoformat(timespec='seconds')}\n"
    yield f"Kubernetes: {version}\n"
    yield "Without Secrets, variables, commands, arguments and volumes of pods.\n\n"
    yield from (f"{name}\n" for name in sorted(found.texts))
