# SPDX-License-Identifier: Apache-2.0
"""Kubeconfigs of every kind, against a server that says what it was sent."""

from __future__ import annotations

import asyncio
import base64
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from aiohttp import web

from allotment.kube.clients import connect
from allotment.kube.errors import DeniedError, KubeError, UnreachableError

Json = dict[str, Any]
PLUGIN = """\
import json, os, pathlib
count = pathlib.Path("{count}")
count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = os.environ["WHO"] + count.read_text()
status = {{"token": token, "expirationTimestamp": "{ends}"}}
print(json.dumps({{"apiVersion": info["apiVersion"], "kind": info["kind"], "status": status}}))
"""


class Asked:
    """What the server was sent, and what it lets pass."""

    def __init__(self) -> None:
        self.authorizations: list[str | None] = []
        self.subjects: list[str] = []
        self.is_welcome: Callable[[str | None], bool] = lambda _: True

    async def answer(self, request: web.Request) -> web.Response:
        sent = request.headers.get("Authorization")
        self.authorizations.append(sent)
        connection = request.get_extra_info("ssl_object")
        if connection is not None:
            subject = dict(pair for (pair,) in (connection.getpeercert() or {}).get("subject", ()))
            self.subjects.append(subject.get("organizationName", ""))
        if self.is_welcome(sent):
            return web.json_response({"path": request.path_qs})
        return web.json_response({"kind": "Status", "code": 401, "message": "who?"}, status=401)


@asynccontextmanager
async def serving(asked: Asked, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{path:.*}", asked.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{'https' if context else 'http'}://{host}:{port}"
    finally:
        await runner.cleanup()


def write_kubeconfig(folder: Path, server: str, user: Json, **cluster: object) -> Path:
    path = folder / "config"
    config = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def sent(folder: Path, user: Json, *, times: int = 1, asked: Asked | None = None) -> list[Any]:
    """What a user's requests have as `Authorization`, one after another."""
    asked = asked or Asked()

    async def ask() -> None:
        async with serving(asked) as server, connect(write_kubeconfig(folder, server, user)) as api:
            for _ in range(times):
                await api.get("/api", asked="read")

    asyncio.run(ask())
    return asked.authorizations


def plugin(folder: Path, *, version: str = "v1", ends: str = "2999-01-01T00:00:00Z") -> Json:
    script = folder / "plugin.py"
    script.write_text(PLUGIN.format(count=folder / "count", ends=ends))
    return {
        "exec": {
            "apiVersion": f"client.authentication.k8s.io/{version}",
            "command": sys.executable,
            "args": [str(script)],
            "env": [{"name": "WHO", "value": "me"}],
            "installHint": "install it",
        }
    }


@pytest.mark.parametrize(
    ("user", "header"),
    [
        ({"token": "t"}, "Bearer t"),
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, None),
    ],
    ids=["token", "password", "none"],
)
def test_a_user_is_sent_as_the_kubeconfig_has_it(
    tmp_path: Path, user: Json, header: str | None
) -> None:
    assert sent(tmp_path, user) == [header]


def test_a_tokens_file_goes_before_a_token_and_is_beside_the_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    assert sent(tmp_path, {"tokenFile": "token", "token": "t"}) == ["Bearer from-file"]


def test_a_token_that_was_renewed_is_sent_after_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    asked = Asked()

    async def ask() -> None:
        async with serving(asked) as server:
            config = write_kubeconfig(tmp_path, server, {"tokenFile": str(path)})
            async with connect(config) as api:
                await api.get("/api", asked="read")
                path.write_text("new")
                asked.is_welcome = "Bearer new".__eq__
                await api.get("/api", asked="read")
                asked.is_welcome = lambda _: False
                with pytest.raises(DeniedError, match="who"):
                    await api.get("/api", asked="read")

    asyncio.run(ask())
    # With nothing newer in the file, a refusal is final.
    assert asked.authorizations == [f"Bearer {each}" for each in ("old", "old", "new", "new")]


def test_a_token_that_went_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(KubeError, match="no credentials") as caught:
        sent(tmp_path, {"tokenFile": "nowhere"})
    assert caught.value.is_passing


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_plugin_is_asked_once_while_its_token_lasts(tmp_path: Path, version: str) -> None:
    assert sent(tmp_path, plugin(tmp_path, version=version), times=3) == ["Bearer me1"] * 3


def test_a_plugin_is_asked_again_when_its_token_ends(tmp_path: Path) -> None:
    user = plugin(tmp_path, ends="2020-01-01T00:00:00Z")
    assert sent(tmp_path, user, times=2) == ["Bearer me1", "Bearer me2"]


def test_a_plugin_is_asked_again_when_its_token_is_refused(tmp_path: Path) -> None:
    asked = Asked()
    asked.is_welcome = "Bearer me2".__eq__
    assert sent(tmp_path, plugin(tmp_path), asked=asked) == ["Bearer me1", "Bearer me2"]


@pytest.mark.parametrize(
    ("command", "args", "says"),
    [
        ("./none-such", [], "No such file"),
        (sys.executable, ["-c", "raise SystemExit('locked out')"], "exit status 1: locked out"),
        (sys.executable, ["-c", "print('hello')"], "no ExecCredential"),
        (sys.executable, ["-c", "print('{\"status\": {}}')"], "no token"),
    ],
    ids=["missing", "fails", "prints", "without token"],
)
def test_a_plugin_that_fails_says_why(
    tmp_path: Path, command: str, args: list[str], says: str
) -> None:
    user = plugin(tmp_path)
    user["exec"] |= {"command": command, "args": args}
    with pytest.raises(KubeError, match=says) as caught:
        sent(tmp_path, user)
    assert caught.value.hint == "install it"


@pytest.mark.parametrize(
    ("user", "says"),
    [
        ({"exec": {"apiVersion": "x/v9", "command": "y"}}, "x/v9"),
        ({"auth-provider": {"name": "gcp"}}, "auth-provider"),
        ({"client-certificate-data": "!"}, "cannot be used"),
    ],
    ids=["version", "provider", "base64"],
)
def test_credentials_that_are_not_known_are_refused_at_once(
    tmp_path: Path, user: Json, says: str
) -> None:
    with pytest.raises(KubeError, match=says):
        connect(write_kubeconfig(tmp_path, "https://10.0.0.1", user))


@pytest.mark.parametrize("is_inline", [True, False], ids=["inline", "files"])
def test_a_certificate_says_who_asks_and_an_authority_who_answers(
    tmp_path: Path, *, is_inline: bool
) -> None:
    authority = trustme.CA()
    mine = authority.issue_cert(common_name="me", organization_name="system:masters")
    pems = {
        "certificate-authority": authority.cert_pem.bytes(),
        "client-certificate": b"".join(each.bytes() for each in mine.cert_chain_pems),
        "client-key": mine.private_key_pem.bytes(),
    }
    said: dict[str, Any] = {}
    for name, pem in pems.items():
        if is_inline:
            said[f"{name}-data"] = base64.b64encode(pem).decode()
        else:
            (tmp_path / name).write_bytes(pem)
            said[name] = name
    cluster = {name: text for name, text in said.items() if name.startswith("certificate")}
    user = {name: text for name, text in said.items() if name.startswith("client")}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("api.example").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    asked = Asked()

    async def ask() -> None:
        async with serving(asked, context) as server:
            named = write_kubeconfig(
                tmp_path, server, user, **cluster, **{"tls-server-name": "api.example"}
            )
            async with connect(named) as api:
                await api.get("/api", asked="read")
            # Neither the machine's own authorities nor another name will do.
            for kept in ({}, cluster):
                async with connect(write_kubeconfig(tmp_path, server, user, **kept)) as api:
                    with pytest.raises(UnreachableError, match="is not trusted"):
                        await api.get("/api", asked="read")
            insecure = write_kubeconfig(
                tmp_path, server, user, **{"insecure-skip-tls-verify": True}
            )
            async with connect(insecure) as api:
                await api.get("/api", asked="read")

    asyncio.run(ask())
    assert asked.subjects == ["system:masters"] * 2


def test_a_server_below_a_path_keeps_it_and_parameters_are_quoted(tmp_path: Path) -> None:
    async def ask() -> bytes:
        async with serving(Asked()) as server:
            config = write_kubeconfig(tmp_path, f"{server}/k8s/clusters/c1/", {})
            async with connect(config) as api:
                return await api.get("/api", asked="read", params={"continue": "a+b/c=="})

    assert asyncio.run(ask()) == b'{"path": "/k8s/clusters/c1/api?continue=a%2Bb/c%3D%3D"}'


def test_who_is_not_there_cannot_be_reached(tmp_path: Path) -> None:
    async def ask(server: str) -> None:
        async with connect(write_kubeconfig(tmp_path, server, {})) as api:
            await api.get("/api", asked="read")

    with pytest.raises(UnreachableError, match=r"cannot be reached: Connection refused$"):
        asyncio.run(ask("http://127.0.0.1:1"))
