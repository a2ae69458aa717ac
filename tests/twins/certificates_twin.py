# SPDX-License-Identifier: Apache-2.0
"""Certificates that a test makes, where they are kept, and a TLS server that shows them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

from allotment.kube.errors import ConflictError, ObjectMissingError
from allotment.kube.webhooks import KeptSecret, Webhook
from allotment.scheduler.tls.authority import CertificateSet, Lives, next_client, next_set
from allotment.scheduler.tls.context import HandshakeFailure, ReloadingTlsContext, load_chain
from allotment.scheduler.tls.rotation import CertificateKeeper, KeepingSettings, TlsEndpoint

NAMES = ("localhost", "127.0.0.1", "webhook.allotment-system.svc")
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LIVES = Lives(authority=100 * DAY, server=30 * DAY, overlap=HOUR)


def first(now: datetime = NOW, lives: Lives = LIVES) -> CertificateSet:
    found = next_set(now, names=NAMES, kept=None, lives=lives)
    assert found is not None
    return found


def step(kept: CertificateSet, now: datetime, lives: Lives = LIVES) -> CertificateSet | None:
    return next_set(now, names=NAMES, kept=kept, lives=lives)


@contextmanager
def served(context: ssl.SSLContext) -> Iterator[int]:
    """Answer TLS connections on a port until the end of the `with`."""
    ports: queue.Queue[int] = queue.Queue()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        writers: set[asyncio.StreamWriter] = set()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            while line := await reader.readline():
                writer.write(line)

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        ports.put(int(server.sockets[0].getsockname()[1]))
        await ended.wait()
        # Begun before the end: after it, Python 3.11 waits for nobody.
        all_gone = asyncio.create_task(server.wait_closed())
        await asyncio.sleep(0)
        server.close()
        for each in tuple(writers):
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        # Of who was not let in nobody has a writer: its connection ends by itself.
        await asyncio.wait_for(all_gone, 30)

    thread = Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield ports.get(timeout=30)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(40)
        loop.close()


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _echo(port: int, bundle: bytes, name: str) -> bytes:
    context = ssl.create_default_context(cadata=bundle.decode())
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=name
    )
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.write(b"hello\n")
    assert await reader.readline() == b"hello\n"
    await closed(writer)
    return bytes(certificate)


def echo(port: int, bundle: bytes, name: str = "localhost") -> bytes:
    return asyncio.run(_echo(port, bundle, name))


@dataclass
class SecretTwin:
    """A Secret as the API server keeps it."""

    name: str = "allotment-system/allotment-webhook"
    version: int = 1
    data: dict[str, bytes] | None = None
    writes: int = 0
    failure: Exception | None = None

    async def read(self) -> KeptSecret | None:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        return None if self.data is None else KeptSecret(str(self.version), dict(self.data))

    async def write(self, data: Mapping[str, bytes], *, over: KeptSecret | None) -> None:
        await asyncio.sleep(0)
        if (over is None) != (self.data is None) or (over and over.version != str(self.version)):
            raise ConflictError("changed meanwhile")
        self.version += 1
        self.writes += 1
        self.data = dict(data)


@dataclass
class ConfigurationTwin:
    """A webhook's configuration as the API server keeps it."""

    name: str = "allotment-scheduler"
    version: int = 1
    webhooks: tuple[Webhook, ...] = (Webhook("pods.allotment.dev"),)
    is_there: bool = True
    bundles: list[bytes] = field(default_factory=list)

    async def read(self) -> tuple[str, tuple[Webhook, ...]]:
        await asyncio.sleep(0)
        if not self.is_there:
            raise ObjectMissingError("not found", status=404)
        return str(self.version), self.webhooks

    async def write(self, webhooks: tuple[Webhook, ...], *, version: str) -> None:
        await asyncio.sleep(0)
        if version != str(self.version):
            raise ConflictError("changed meanwhile")
        self.version += 1
        self.webhooks = webhooks
        self.bundles.append(webhooks[0].bundle)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


def keeper(
    secret: SecretTwin,
    configuration: ConfigurationTwin | None,
    clock: Clock,
    *,
    conditions: Mapping[str, str] | None = None,
) -> CertificateKeeper:
    kept = KeepingSettings(names=NAMES, lives=LIVES, conditions=conditions or {})
    return CertificateKeeper(secret, configuration, kept, clock=clock)


def client_step(
    kept: CertificateSet, found: Mapping[str, bytes], now: datetime = NOW
) -> dict[str, bytes] | None:
    return next_client(now, kept=kept, found=found, lives=LIVES)


def guarded(replica: CertificateKeeper, data: Mapping[str, bytes] | None) -> None:
    """Connect as somebody who has these files; raises `OSError` or `EOFError` where refused."""

    async def work(port: int) -> None:
        context = ssl.create_default_context(cadata=replica.bundle.decode())
        if data is not None:
            load_chain(context, data["tls.crt"], data["tls.key"])
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        try:
            # Of TLS 1.3, a client hears that it was refused when it reads.
            writer.write(b"hello\n")
            if await reader.readline() != b"hello\n":
                raise EOFError
        finally:
            await closed(writer)

    with served(replica.extender.context) as port:
        asyncio.run(work(port))


def reached(guard: ReloadingTlsContext, data: Mapping[str, bytes] | None, bundle: bytes) -> bool:
    """Whether somebody with these files, who trusts this bundle, is answered.

    As the API server and kube-scheduler do, and asyncio's clients do not, it says why it goes.
    """
    context = ssl.create_default_context(cadata=bundle.decode())
    if data is not None:
        load_chain(context, data["tls.crt"], data["tls.key"])
    with (
        served(guard.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        try:
            connection.sendall(b"hello\n")
            return connection.recv(10) == b"hello\n"
        except OSError:
            return False


@dataclass
class Heard:
    """Who is told of certificates, and remembers it."""

    handshakes: list[tuple[str, str]] = field(default_factory=list)
    amiss: list[tuple[str, str, str]] = field(default_factory=list)

    def handshake_failed(self, door: TlsEndpoint, failure: HandshakeFailure) -> None:
        self.handshakes.append((door.value, failure.value))

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        del text
        self.amiss.append((name, uid, reason))


@dataclass
class Kept:
    """A keeper of both sides, and where it keeps what."""

    lives: Lives = LIVES
    heard: Heard = field(default_factory=Heard)
    secret: SecretTwin = field(default_factory=SecretTwin)
    clients: SecretTwin = field(
        default_factory=lambda: SecretTwin(name="allotment-system/clients", data={})
    )

    def keeper(
        self,
        client_authority: Path | None = None,
        *,
        clock: Clock | None = None,
        leads: Callable[[], bool] = lambda: True,
    ) -> CertificateKeeper:
        return CertificateKeeper(
            self.secret,
            ConfigurationTwin(),
            KeepingSettings(names=NAMES, lives=self.lives, client_authority=client_authority),
            clients=self.clients,
            observer=self.heard,
            leads=leads,
            clock=clock or Clock(),
        )
