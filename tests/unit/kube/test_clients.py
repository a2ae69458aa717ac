# SPDX-License-Identifier: Apache-2.0
"""Ways to the API server, and what is said where there is none."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
import yaml
from api_server_twin import Server, answered, refused

from allotment.kube.clients import PatchKind, connect
from allotment.kube.errors import (
    ConflictError,
    DeniedError,
    GoneError,
    KubeError,
    ObjectMissingError,
    UnreachableError,
    explain_failure,
    explain_refusal,
)


def kubeconfig(path: Path, *, server: str = "https://10.0.0.1:6443", **user: object) -> Path:
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "clusters": [{"name": "c", "cluster": {"server": server}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "users": [{"name": "u", "user": user}],
            }
        )
    )
    return path


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_kubeconfig_says_where_and_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kubeconfig(tmp_path / "config", token="t")  # noqa: S106 - of no server
    assert connect(path).server == "https://10.0.0.1:6443"
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert connect(service_account=tmp_path).server == "https://10.0.0.1:6443"


def test_a_pod_knows_by_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    (tmp_path / "ca.crt").write_bytes(Path(authority).read_bytes())
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("allotment-system")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    api = connect(service_account=tmp_path)
    assert api.server == "https://[fd00::1]:443"
    assert api.namespace == "allotment-system"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "not found"),
        ("", "cannot be used"),
        ("[1, 2", "not a kubeconfig"),
        ("clusters: []", "cannot be used"),
        ("clusters: []\ncontexts: []", "current"),
        ("current-context: x\nclusters: []\ncontexts: []", "'x' not found"),
        ("- a", "cannot be used"),
    ],
)
def test_what_is_no_kubeconfig_is_refused_with_its_path(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / "config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KubeError) as caught:
        connect(path)
    assert str(path) in caught.value.message
    assert says in caught.value.message
    assert caught.value.hint


def test_credentials_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    path = kubeconfig(
        tmp_path / "config", **{"client-certificate": str(junk), "client-key": str(junk)}
    )
    with pytest.raises(KubeError) as caught:
        connect(path)
    assert str(path) in (caught.value.hint or "")


def test_with_no_way_at_all_it_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(KubeError) as caught:
        connect(service_account=tmp_path)
    assert "--kubeconfig" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("code", "kind", "is_passing"),
    [
        (401, DeniedError, False),
        (403, DeniedError, False),
        (404, ObjectMissingError, False),
        (409, ConflictError, False),
        (410, GoneError, False),
        (422, KubeError, False),
        (429, KubeError, True),
        (500, KubeError, True),
        (503, KubeError, True),
    ],
)
def test_a_refusal_is_of_its_kind_and_says_what_the_server_said(
    server: Server, code: int, kind: type[KubeError], *, is_passing: bool
) -> None:
    server.lists.append(refused(code, "so it is", retryAfterSeconds=3))

    async def ask() -> None:
        await server.client().get("/api/v1/pods", asked="list pods")

    with pytest.raises(KubeError) as caught:
        asyncio.run(ask())
    assert type(caught.value) is kind
    assert caught.value.message == "the API server refused to list pods: so it is"
    assert caught.value.is_passing is is_passing
    assert caught.value.retry_after_s == 3
    assert (caught.value.hint is not None) == (code in {401, 403})


def test_a_refusal_that_is_no_status_has_its_number() -> None:
    error = explain_refusal(b"<html>", asked="list pods", status=502, retry_after="7")
    assert error.message.endswith("HTTP status 502")
    assert error.retry_after_s == 7


def _caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionRefusedError("Connection refused"), "cannot be reached: Connection refused"),
        (aiohttp.SocketTimeoutError("read"), "did not answer in time"),
        (TimeoutError(), "did not answer in time"),
        (aiohttp.ServerDisconnectedError("gone"), "closed the connection: gone"),
        (ConnectionResetError(), "closed the connection: ConnectionResetError"),
        (
            _caused(ConnectionRefusedError("tls"), ssl.SSLCertVerificationError("self-signed")),
            "is not trusted",
        ),
    ],
    ids=["refused", "slow", "timeout", "protocol", "reset", "certificate"],
)
def test_no_answer_says_who_and_why(error: aiohttp.ClientError | OSError, says: str) -> None:
    explained = explain_failure(error, asked="list pods", server="https://10.0.0.1:6443")
    assert isinstance(explained, UnreachableError)
    assert says in explained.message
    assert "10.0.0.1:6443" in explained.message
    assert explained.is_passing


def test_a_patch_says_how_it_is_meant(server: Server) -> None:
    server.writes.append(answered({}))

    async def ask() -> None:
        await server.client().patch("/x", {"a": None}, asked="patch", kind=PatchKind.MERGE)

    asyncio.run(ask())
    (request,) = server.requests
    assert request.content_type == "application/merge-patch+json"
    assert request.body == b'{"a":null}'


def test_a_deletion_is_of_one_object_and_not_of_its_namesake(server: Server) -> None:
    server.writes.append(answered({}))
    asyncio.run(server.client().delete("/x", uid="1", asked="delete"))
    (request,) = server.requests
    assert (request.method, request.body) == ("DELETE", b'{"preconditions":{"uid":"1"}}')


def test_a_watch_that_says_nothing_for_too_long_is_dead(tmp_path: Path) -> None:
    async def main() -> None:
        hanging = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n")
            await hanging.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        config = kubeconfig(tmp_path / "config", server=f"http://{host}:{port}")
        opened: list[None] = []
        async with connect(config) as api:
            lines = api.lines(
                "/x", asked="watch", params={}, idle_s=1.0, on_open=lambda: opened.append(None)
            )
            assert await anext(lines) == b"{}"
            assert opened
            with pytest.raises(UnreachableError, match="did not answer in time"):
                await anext(lines)
        hanging.set()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize("text", ["plain text", "- a", "7"])
def test_what_is_no_kubeconfig_is_called_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(KubeError, match="it is not a kubeconfig"):
        connect(path)
