# SPDX-License-Identifier: Apache-2.0
"""The API server's address and our credentials.

Reads a kubeconfig or a pod's service account as client-go does, without user interaction: tokens,
token files, passwords, certificates, exec plugins. Sends nothing.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

import msgspec
import yaml

from allotment.kube.errors import KubeError
from allotment.model.structs import prepared

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_TOKEN_S: Final = 60.0
"""The kubelet renews a pod's token about hourly; client-go rereads it each minute."""
_PLUGIN_S: Final = 30.0
_EXPIRY_MARGIN_S: Final = 10.0
_EXEC_VERSIONS: Final = frozenset(
    f"client.authentication.k8s.io/{version}" for version in ("v1", "v1beta1", "v1alpha1")
)


class Credentials(Protocol):
    """The `Authorization` header."""

    async def authorization(self) -> str | None:
        """Return the header's value; None if a client certificate is used instead.

        Raises `KubeError`.
        """

    def refused(self, authorization: str | None) -> None:
        """The API server answered 401 to this value."""


class ApiServer(msgspec.Struct, frozen=True, kw_only=True):
    """An API server's address and credentials."""

    url: str
    """Without a trailing slash."""
    namespace: str
    """The namespace of the service account or the kubeconfig."""
    tls: ssl.SSLContext
    credentials: Credentials
    tls_server_name: str | None = None
    """The name in its certificate, if it differs from the URL's."""


# ---- kubeconfig ----------------------------------------------------------------------------------


class _Cluster(msgspec.Struct, rename="kebab"):
    server: str = "http://localhost:8080"
    certificate_authority: str | None = None
    certificate_authority_data: str | None = None
    insecure_skip_tls_verify: bool = False
    tls_server_name: str | None = None


class _Variable(msgspec.Struct):
    name: str
    value: str


class _Exec(msgspec.Struct, rename="camel"):
    api_version: str
    command: str
    args: list[str] | None = None
    env: list[_Variable] | None = None
    install_hint: str | None = None


class _User(msgspec.Struct, rename="kebab"):
    token: str | None = None
    token_file: str | None = msgspec.field(default=None, name="tokenFile")
    username: str | None = None
    password: str | None = None
    client_certificate: str | None = None
    client_certificate_data: str | None = None
    client_key: str | None = None
    client_key_data: str | None = None
    exec: _Exec | None = None
    auth_provider: dict[str, object] | None = None


class _Context(msgspec.Struct):
    cluster: str
    user: str | None = None
    namespace: str | None = None


class _NamedCluster(msgspec.Struct):
    name: str
    cluster: _Cluster


class _NamedUser(msgspec.Struct):
    name: str
    user: _User


class _NamedContext(msgspec.Struct):
    name: str
    context: _Context


class _Kubeconfig(msgspec.Struct, rename="kebab"):
    clusters: list[_NamedCluster]
    contexts: list[_NamedContext]
    users: list[_NamedUser] | None = None
    current_context: str | None = None


def find_api_server(
    kubeconfig: Path | None,
    *,
    context: str | None = None,
    service_account: Path = SERVICE_ACCOUNT,
) -> ApiServer:
    """Find the API server by a kubeconfig, else as this pod, else by `KUBECONFIG`.

    `context`: of the kubeconfig; None: its current one. Raises `KubeError` if none of them is
    usable.
    """
    if kubeconfig is None:
        if (service_account / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _of_pod(service_account)
        if not os.environ.get("KUBECONFIG"):
            raise KubeError(
                "no credentials for the API server: no service account is mounted, and no"
                " kubeconfig was given or found",
                hint="give --kubeconfig PATH, or set KUBECONFIG",
            )
        kubeconfig = Path(os.environ["KUBECONFIG"])
    path = kubeconfig.expanduser()
    try:
        config = msgspec.convert(yaml.safe_load(path.read_bytes()), prepared(_Kubeconfig))
    except FileNotFoundError as error:
        raise _unusable(path, "not found") from error
    except (OSError, UnicodeError) as error:
        raise _unusable(path, str(error)) from error
    except yaml.YAMLError as error:
        raise KubeError(f"{path}: not a kubeconfig: {error}", hint="it is not YAML") from error
    except msgspec.ValidationError as error:
        raise _unusable(path, f"it is not a kubeconfig: {error}") from error
    return _of_context(config, path, context)


def _unusable(path: Path, why: str) -> KubeError:
    return KubeError(
        f"{path}: cannot be used for the API server: {why}",
        hint="`kubectl --kubeconfig PATH cluster-info` shows whether kubectl can use it",
    )


def _of_context(config: _Kubeconfig, path: Path, name: str | None) -> ApiServer:
    contexts = {named.name: named.context for named in config.contexts}
    if name is not None and name not in contexts:
        raise KubeError(
            f"the kubeconfig has no context {json.dumps(name)}",
            hint=f"it has: {', '.join(sorted(contexts)) or 'none'}",
        )
    name = name or config.current_context
    if not name:
        raise _unusable(path, "it has no current-context")
    context = contexts.get(name)
    if context is None:
        raise _unusable(path, f"its current-context {name!r} not found")
    cluster = next(
        (named.cluster for named in config.clusters if named.name == context.cluster), None
    )
    if cluster is None:
        raise _unusable(path, f"it has no cluster {context.cluster!r}")
    if context.user is None:
        raise _unusable(path, f"its context {json.dumps(name)} has no user")
    user = next((named.user for named in config.users or () if named.name == context.user), None)
    if user is None:
        raise _unusable(path, f"it has no user {context.user!r}")
    return _api_server(cluster, user, source=path, namespace=context.namespace or "default")


def _of_pod(folder: Path) -> ApiServer:
    try:
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    except (OSError, UnicodeError) as error:
        raise _unusable(folder, str(error)) from error
    except KeyError as error:
        raise _unusable(folder, f"the environment has no {error}") from error
    host = f"[{host}]" if ":" in host else host
    cluster = _Cluster(
        server=f"https://{host}:{port}", certificate_authority=str(folder / "ca.crt")
    )
    user = _User(token_file=str(folder / "token"))
    return _api_server(cluster, user, source=folder, namespace=namespace)


def _api_server(cluster: _Cluster, user: _User, *, source: Path, namespace: str) -> ApiServer:
    """Load certificates and credentials; `source` is the file that names them."""
    folder = source if source.is_dir() else source.parent
    if not cluster.server.startswith(("https://", "http://")):
        raise _unusable(source, f"its server {cluster.server!r} is not a URL")
    try:
        return ApiServer(
            url=cluster.server.rstrip("/"),
            namespace=namespace,
            tls=_tls(cluster, user, folder),
            credentials=_credentials(user, folder),
            tls_server_name=cluster.tls_server_name,
        )
    except (OSError, ValueError) as error:  # ssl's errors, base64's and UnicodeError among them
        raise KubeError(
            f"the credentials for the API server at {cluster.server} cannot be used: {error}",
            hint=f"check the certificates and keys in {source}",
        ) from error


# ---- TLS -----------------------------------------------------------------------------------------


def _tls(cluster: _Cluster, user: _User, folder: Path) -> ssl.SSLContext:
    authority = _pem(cluster.certificate_authority_data, cluster.certificate_authority, folder)
    # Without an authority: the system's trusted ones, as client-go does.
    context = ssl.create_default_context(cadata=authority.decode("ascii") if authority else None)
    if authority is None and cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = _pem(user.client_certificate_data, user.client_certificate, folder)
    key = _pem(user.client_key_data, user.client_key, folder)
    if certificate is not None:
        # ssl can only load a certificate and its key from a file.
        with tempfile.NamedTemporaryFile(prefix="allotment-") as file:
            file.write(certificate + b"\n" + (key or b""))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def _pem(data: str | None, path: str | None, folder: Path) -> bytes | None:
    """Return a kubeconfig's inline data, else the contents of the file that it names."""
    if data:
        return base64.b64decode(data)
    return (folder / path).read_bytes() if path else None


# ---- credentials ---------------------------------------------------------------------------------


def _credentials(user: _User, folder: Path) -> Credentials:
    """Choose as client-go does: a token file has priority over a token."""
    if user.token_file:
        return _TokenFile(folder / user.token_file)
    if user.token:
        return _Fixed(f"Bearer {user.token}")
    if user.exec is not None:
        return _Plugin(user.exec, folder)
    if user.username and user.password:
        pair = base64.b64encode(f"{user.username}:{user.password}".encode())
        return _Fixed(f"Basic {pair.decode('ascii')}")
    if user.auth_provider is not None:
        raise ValueError("auth-provider is not supported; kubectl dropped it in 1.26, use exec")
    return _Fixed(None)


class _Fixed:
    """A constant value; None: no header."""

    def __init__(self, value: str | None) -> None:
        self._value = value

    async def authorization(self) -> str | None:
        return self._value

    def refused(self, authorization: str | None) -> None: ...


class _TokenFile:
    """A token in a file that another program renews."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._value = ""
        self._read_at = float("-inf")

    async def authorization(self) -> str | None:
        now = time.monotonic()
        if now - self._read_at > _TOKEN_S:
            try:
                self._value = f"Bearer {self._path.read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeError) as error:
                raise KubeError(
                    f"no credentials for the API server: {error}",
                    hint="mount the service account's token (automountServiceAccountToken)",
                ) from error
            self._read_at = now
        return self._value

    def refused(self, authorization: str | None) -> None:
        if authorization == self._value:
            self._read_at = float("-inf")


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct):
    status: _ExecStatus


class _Plugin:
    """A program that prints a token (client.authentication.k8s.io)."""

    def __init__(self, plugin: _Exec, folder: Path) -> None:
        if plugin.api_version not in _EXEC_VERSIONS:
            raise ValueError(f"its exec plugin is of {plugin.api_version}, which is unknown")
        # As client-go: a path with a slash is relative to the kubeconfig, a name is on the PATH.
        path = plugin.command
        self._command = str(folder / path) if os.sep in path else path
        self._plugin = plugin
        self._value: str | None = None
        self._ends_at = float("-inf")
        self._lock = asyncio.Lock()

    async def authorization(self) -> str | None:
        async with self._lock:
            if self._value is None or time.time() >= self._ends_at - _EXPIRY_MARGIN_S:
                status = await self._run()
                ends = status.expiration_timestamp
                self._value = f"Bearer {status.token}"
                self._ends_at = ends.timestamp() if ends else float("inf")
            return self._value

    def refused(self, authorization: str | None) -> None:
        if authorization == self._value:
            self._value = None

    async def _run(self) -> _ExecStatus:
        try:
            process = await asyncio.create_subprocess_exec(
                self._command,
                *(self._plugin.args or ()),
                env=self._environment(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise self._failed(str(error)) from error
        try:
            async with asyncio.timeout(_PLUGIN_S):
                printed, errors = await process.communicate()
        except TimeoutError as error:
            raise self._failed(f"it did not end within {_PLUGIN_S:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            why = errors.decode(errors="replace").strip()
            raise self._failed(f"exit status {process.returncode}: {why}")
        try:
            status = msgspec.json.decode(printed, type=prepared(_ExecCredential)).status
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise self._failed(f"it printed no ExecCredential: {error}") from error
        if not status.token:
            raise self._failed("it returned no token; certificates from plugins are not supported")
        return status

    def _environment(self) -> Mapping[str, str]:
        info = {
            "apiVersion": self._plugin.api_version,
            "kind": "ExecCredential",
            "spec": {"interactive": False},
        }
        extra = {variable.name: variable.value for variable in self._plugin.env or ()}
        return {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info), **extra}

    def _failed(self, why: str) -> KubeError:
        return KubeError(
            f"the kubeconfig's exec plugin {self._command} returned no credentials: {why}",
            hint=self._plugin.install_hint or "run it by hand, as `kubectl` does",
        )
