# SPDX-License-Identifier: Apache-2.0
"""The one place that talks HTTP to the API server.

lightkube brings what every client has to have and nobody should write twice: kubeconfig files,
service accounts, TLS, tokens that are read again when they have been rotated. Its typed requests
are not used: they decode whole objects, know no bookmarks, and tell a refusal inside a watch apart
from a lost connection only by luck. What is here instead is bytes in and bytes out, every wait
bounded, and every failure a `KubeError` that says what to do.
"""

import asyncio
import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import msgspec
import yaml
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, KubeConfig, SingleConfig
from lightkube.core.exceptions import ConfigError

from allotment.kube.errors import KubeError, explain_failure, explain_refusal

__all__ = ["Api", "PatchKind", "configuration", "connect"]

_CONNECT_S = 5.0
_ANSWER_S = 15.0
_WHOLE_S = 30.0  # for one request and its answer, whatever happens on the way
_MAX_LINE = 32 << 20  # etcd's largest object is 1.5 MiB; far more than that is no API server


class PatchKind(StrEnum):
    """How a patch is meant."""

    MERGE = "application/merge-patch+json"
    """Keys replace keys; null removes one; lists are replaced as a whole."""
    STRATEGIC = "application/strategic-merge-patch+json"
    """Likewise, but lists of named things (conditions) are merged by name."""


class Api:
    """A connection to one API server. Requests may be made at the same time. Closed by `aclose`."""

    def __init__(
        self, http: httpx2.AsyncClient, *, server: str, namespace: str = "default"
    ) -> None:
        """Take a client whose base URL, credentials and trust are set up."""
        self._http = http
        self.server = server
        self.namespace = namespace
        """The service account's own, or the kubeconfig's."""
        self.is_away = False
        """It cannot be reached, and that has been told: one who follows it says so for all."""

    async def get(self, path: str, *, asked: str, params: Mapping[str, str] | None = None) -> bytes:
        """Read an object or a list. `asked` says what for, in an error: `list pods`.

        Raises `KubeError`.
        """
        return await self._request("GET", path, asked=asked, params=params)

    async def patch(
        self, path: str, change: object, *, asked: str, kind: PatchKind = PatchKind.MERGE
    ) -> bytes:
        """Change an object and return it as it is then; raise `KubeError`."""
        return await self._request("PATCH", path, asked=asked, body=change, content_type=kind)

    async def create(self, path: str, item: object, *, asked: str) -> bytes:
        """Make an object and return it; raise `KubeError`."""
        return await self._request(
            "POST", path, asked=asked, body=item, content_type="application/json"
        )

    async def lines(
        self,
        path: str,
        *,
        asked: str,
        params: Mapping[str, str],
        idle_s: float,
        on_open: Callable[[], None],
    ) -> AsyncGenerator[bytes, None]:
        """Yield what the server tells, line by line, until it ends the answer.

        `on_open` is called when it has agreed to tell, which may be long before there is something.

        Raises `KubeError`, also when nothing came for `idle_s` seconds. Not `aiter_lines`: that
        splits at characters that may stand inside a JSON string (U+0085, U+2028).
        """
        timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S, read=idle_s)
        rest = bytearray()
        try:
            async with self._http.stream("GET", path, params=params, timeout=timeout) as response:
                if response.is_error:
                    raise _refusal(response, await response.aread(), asked)
                on_open()
                async for chunk in response.aiter_bytes():
                    rest += chunk
                    if b"\n" not in chunk:
                        if len(rest) > _MAX_LINE:
                            raise KubeError(f"cannot {asked}: the answer has no end of line")
                        continue
                    *whole, tail = bytes(rest).split(b"\n")
                    rest = bytearray(tail)
                    for line in whole:
                        if line:
                            yield line
        except (httpx2.HTTPError, OSError) as error:
            raise explain_failure(error, asked=asked, server=self.server) from error
        except ConfigError as error:
            raise _credentials(error, asked) from error

    async def aclose(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        await self.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        *,
        asked: str,
        params: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str | None = None,
    ) -> bytes:
        headers = {"Content-Type": content_type} if content_type else None
        content = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(_WHOLE_S):
                response = await self._http.request(
                    method, path, params=params, content=content, headers=headers
                )
        except (httpx2.HTTPError, OSError) as error:  # TimeoutError is one
            raise explain_failure(error, asked=asked, server=self.server) from error
        except ConfigError as error:
            raise _credentials(error, asked) from error
        if response.is_error:
            raise _refusal(response, response.content, asked)
        return response.content


def _refusal(response: httpx2.Response, body: bytes, asked: str) -> KubeError:
    return explain_refusal(
        body,
        asked=asked,
        status=response.status_code,
        retry_after=response.headers.get("Retry-After"),
    )


def _credentials(error: ConfigError, asked: str) -> KubeError:
    return KubeError(
        f"cannot {asked}: there are no credentials: {error}",
        hint="the service account's token has to be mounted (automountServiceAccountToken)",
    )


def connect(
    kubeconfig: Path | None = None,
    *,
    context: str | None = None,
    service_account: Path = Path(SERVICE_ACCOUNT),
) -> Api:
    """Make a connection: by a kubeconfig, else as the pod that this is, else by `KUBECONFIG`.

    `context`: of the kubeconfig; None: its current one. Nothing is sent yet. Raises `KubeError`
    when none of them is there or can be used.
    """
    config = configuration(kubeconfig, service_account, context=context)
    timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
    # The environment's proxies are for the internet; the API server is not there.
    params = client_adapter.ConnectionParams(timeout=timeout, trust_env=False)
    server = config.cluster.server
    try:
        http = client_adapter.AsyncClient(config, params)
    except (OSError, ssl.SSLError, ValueError, ConfigError, httpx2.InvalidURL) as error:
        raise KubeError(
            f"the credentials for the API server at {server} cannot be used: {error}",
            hint=f"look at the certificates and keys that {_source(config)} names",
        ) from error
    return Api(http, server=server, namespace=config.namespace)


def configuration(
    kubeconfig: Path | None,
    service_account: Path = Path(SERVICE_ACCOUNT),
    *,
    context: str | None = None,
) -> SingleConfig:
    """Find the way to the API server, as `connect` does. Raises `KubeError`."""
    in_cluster = (service_account / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ
    path = kubeconfig
    try:
        if path is None and in_cluster:
            return _chosen(KubeConfig.from_service_account(service_account), context)
        if path is None and "KUBECONFIG" in os.environ:
            path = Path(os.environ["KUBECONFIG"])
        if path is None:
            raise KubeError(
                "no way to the API server is known: this is no pod with a service account, and no"
                " kubeconfig was named",
                hint="give --kubeconfig PATH, or set KUBECONFIG",
            )
        return _chosen(KubeConfig.from_file(path), context)
    except (ConfigError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        # lightkube takes the file apart as it comes: all of these say that it is not one.
        what = _what_is_wrong(error)
        raise KubeError(
            f"{path or service_account}: not a usable way to the API server: {what}",
            hint="`kubectl --kubeconfig PATH cluster-info` tells whether kubectl can use it",
        ) from error
    except yaml.YAMLError as error:
        raise KubeError(f"{path}: not a kubeconfig: {error}", hint="it is no YAML") from error


def _what_is_wrong(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error}"
    # Text or a list where a mapping belongs; the interpreter's words would help nobody.
    is_other = isinstance(error, AttributeError | TypeError)
    return "it is no kubeconfig" if is_other else str(error)


def _chosen(config: KubeConfig, context: str | None = None) -> SingleConfig:
    """Take a context; None: the current one."""
    if context is not None and context not in config.contexts:
        known = ", ".join(sorted(config.contexts)) or "none"
        raise KubeError(
            f"the kubeconfig has no context {json.dumps(context)}", hint=f"it has: {known}"
        )
    single = config.get(context)
    if single is None:
        raise ConfigError("it has no current-context")
    if single.user is None:
        raise ConfigError(f"its context {json.dumps(single.context_name)} has no user")
    return single


def _source(config: SingleConfig) -> str:
    return str(config.fname) if config.fname else "the service account"
