# SPDX-License-Identifier: Apache-2.0
"""Binding a pod to a node, together with what is written on it: one request.

`pods/binding` merges the annotations of the Binding into the pod's in the same write as its node,
and only if the pod is still the one with this uid and resource version (kubernetes
pkg/registry/core/pod/storage, `setPodNodeAndMetadata`). So nobody sees a bound pod without its
placement, and a binding that comes late cannot bind a pod that has changed since.
"""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Final, Protocol

import aiohttp
import msgspec
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.core.exceptions import ConfigError

from allotment.kube.cluster_feed import ClusterPod, to_cluster_pod
from allotment.kube.errors import (
    KubeError,
    ObjectMissingError,
    explain_failure,
    explain_refusal,
)
from allotment.kube.objects import PodObject
from allotment.model.pods import PodUid

__all__ = ["MOST_WRITES", "Binding", "Bindings", "Exchange", "LightApi"]

MOST_WRITES: Final = 160
"""Bindings that may be asked for at once: no more than there are connections for, so that none
waits for one unseen."""

_CONNECT_S: Final = 5.0
_WHOLE_S: Final = 15.0
"""Without an answer for so long, the outcome of a binding is not known."""
_MOST_READS: Final = 64
"""Likewise of reads, so that many of them take no connection from a binding."""
_MOST_CONNECTIONS: Final = 256
_TOKEN_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A pod, its node, and what is to stand on it."""

    uid: PodUid
    namespace: str
    name: str
    node: str
    version: str = ""
    """The resource version that it must have; empty: any, of a pod that is given nothing."""
    annotations: Mapping[str, str] = field(default_factory=dict)


class Exchange(Protocol):
    """A request and its answer."""

    async def get(self, path: str, *, asked: str) -> bytes:
        """Read an object. Raises `KubeError`."""

    async def create(self, path: str, item: object, *, asked: str) -> bytes:
        """Make an object. Raises `KubeError`."""


_pod = msgspec.json.Decoder(PodObject)


class Bindings:
    """Binds pods, and reads one by itself."""

    def __init__(
        self, api: Exchange, *, complete: Callable[[ClusterPod], ClusterPod] = lambda pod: pod
    ) -> None:
        """Take a connection: an `Api`, or `LightApi`, which costs less.

        `complete` adds to a pod that was read what others than the API server know of it.
        """
        self._api = api
        self._complete = complete

    async def bind(self, binding: Binding) -> None:
        """Bind. Raises `KubeError`; where it `is_passing`, the pod may have been bound or not."""
        metadata: dict[str, object] = {
            "name": binding.name,
            "namespace": binding.namespace,
            "uid": binding.uid,
            "annotations": binding.annotations,
        }
        if binding.version:
            metadata["resourceVersion"] = binding.version
        item = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": binding.node},
        }
        path = f"/api/v1/namespaces/{binding.namespace}/pods/{binding.name}/binding"
        await self._api.create(path, item, asked=f"bind pod {binding.namespace}/{binding.name}")

    async def read(self, *, uid: PodUid, namespace: str, name: str) -> ClusterPod | None:
        """Read a pod as it is now; None: there is none of this uid. Raises `KubeError`."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            body = await self._api.get(path, asked=f"get pod {namespace}/{name}")
        except ObjectMissingError:
            return None
        try:
            item = _pod.decode(body)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise KubeError(f"pod {namespace}/{name} is not understood: {error}") from error
        return self._complete(to_cluster_pod(item)) if item.metadata.uid == uid else None


class LightApi:
    """Requests at a fraction of what `Api` takes for one: for hundreds of them in a second.

    An `Exchange`; closed by `aclose`. By the same credentials, where they are a token, a token's
    file or a certificate.
    """

    def __init__(self, config: SingleConfig) -> None:
        """Take the way to the API server. Raises `KubeError` where it cannot be used."""
        user = config.user
        if user is None:
            raise KubeError(f"there are no credentials for {config.cluster.server}")
        self.server = config.cluster.server
        self._token_file = Path(user.token_file) if user.token_file else None
        self._token = user.token or ""
        self._token_read_at = float("-inf")
        try:
            context = client_adapter.verify_cluster(
                config.cluster,
                user,
                config.abs_file,
                trust_env=False,
            )
        except (OSError, ssl.SSLError, ValueError, ConfigError) as error:
            raise KubeError(
                f"the credentials for the API server at {self.server} cannot be used: {error}"
            ) from error
        self._session = aiohttp.ClientSession(
            self.server,
            connector=aiohttp.TCPConnector(ssl=context, limit=_MOST_CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=_WHOLE_S, sock_connect=_CONNECT_S),
            trust_env=False,
        )
        self._reads = asyncio.Semaphore(_MOST_READS)

    @staticmethod
    def suits(config: SingleConfig) -> bool:
        """Tell whether credentials are of a kind that this knows."""
        user = config.user
        return user is not None and not (
            user.exec or user.auth_provider or user.username or user.password
        )

    async def get(self, path: str, *, asked: str) -> bytes:
        """Read an object. Raises `KubeError`."""
        async with self._reads:
            return await self._request("GET", path, None, asked)

    async def create(self, path: str, item: object, *, asked: str) -> bytes:
        """Make an object. Raises `KubeError`."""
        return await self._request("POST", path, msgspec.json.encode(item), asked)

    async def aclose(self) -> None:
        """End all connections."""
        await self._session.close()

    async def _request(self, method: str, path: str, body: bytes | None, asked: str) -> bytes:
        headers = self._headers()
        try:
            async with self._session.request(method, path, data=body, headers=headers) as answer:
                content = await answer.read()
                status, retry_after = answer.status, answer.headers.get("Retry-After")
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
            what = error if isinstance(error, OSError) else OSError(str(error))
            raise explain_failure(what, asked=asked, server=self.server) from error
        if status == HTTPStatus.UNAUTHORIZED:
            self._token_read_at = float("-inf")  # it may have been renewed
        if status >= HTTPStatus.BAD_REQUEST:
            raise explain_refusal(content, asked=asked, status=status, retry_after=retry_after)
        return content

    def _headers(self) -> dict[str, str]:
        """The kubelet renews a pod's token about every hour."""
        now = time.monotonic()
        if self._token_file is not None and now - self._token_read_at > _TOKEN_S:
            try:
                self._token = self._token_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise KubeError(
                    f"there are no credentials: {error}",
                    hint="the service account's token has to be mounted",
                ) from error
            self._token_read_at = now
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers
