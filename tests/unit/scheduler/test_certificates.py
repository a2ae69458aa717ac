# SPDX-License-Identifier: Apache-2.0
"""The authority: what is made when, and that whoever trusts the bundle trusts what is served."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError, UnreachableError
from allotment.kube.webhooks import KeptSecret, Webhook
from allotment.model.errors import PrerequisiteError, UsageError
from allotment.scheduler.certificates import (
    CertificateSet,
    Lives,
    Signed,
    next_client,
    next_set,
    read_set,
)
from allotment.scheduler.certificates_keeping import (
    CertificateKeeper,
    Door,
    KeepingSettings,
    service_names,
)
from allotment.scheduler.guards import Failure, Guard, load_chain

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


# ---- decisions -----------------------------------------------------------------------------------


def test_what_was_made_needs_nothing_for_two_thirds_of_its_life() -> None:
    kept = first()
    assert step(kept, NOW) is None
    assert step(kept, NOW + 19 * DAY) is None
    renewed = step(kept, NOW + 21 * DAY)
    assert renewed is not None
    assert renewed.server.certificate != kept.server.certificate
    assert renewed.server.key != kept.server.key
    assert renewed.authority == kept.authority
    assert renewed.bundle == kept.bundle


def test_another_name_is_another_certificate() -> None:
    kept = first()
    renewed = next_set(NOW, names=("other",), kept=kept, lives=LIVES)
    assert renewed is not None
    assert renewed.authority == kept.authority
    assert next_set(NOW, names=("other",), kept=renewed, lives=LIVES) is None


def test_a_new_authority_is_known_before_it_signs_and_the_old_one_until_it_ends() -> None:
    kept = first()
    now = NOW + 70 * DAY
    told = step(kept, now)
    assert told is not None
    assert told.successor is not None
    assert told.authority == kept.authority
    assert told.bundle.count(b"BEGIN") == 2
    assert step(told, now + HOUR / 2) is None
    signing = step(told, now + HOUR)
    assert signing is not None
    assert signing.authority == told.successor
    assert signing.successor is None
    assert signing.bundle.count(b"BEGIN") == 2
    signing.server.parsed().verify_directly_issued_by(signing.authority.parsed())
    later = step(signing, NOW + 101 * DAY)
    assert later is not None
    assert later.bundle == later.authority.certificate


def test_nothing_that_has_ended_is_gone_on_with() -> None:
    kept = first()
    anew = step(kept, NOW + 200 * DAY)
    assert anew is not None
    assert anew.authority != kept.authority
    assert anew.bundle == anew.authority.certificate


def test_a_clock_that_is_behind_or_ahead_by_half_an_hour_changes_nothing() -> None:
    kept = first()
    for wrong in (-HOUR / 2, HOUR / 2):
        assert step(kept, NOW + wrong) is None


def test_what_a_clock_far_ahead_has_made_is_made_anew() -> None:
    kept = first(NOW + 30 * DAY)
    anew = step(kept, NOW)
    assert anew is not None
    assert anew.authority.parsed().not_valid_before_utc <= NOW
    # And whoever is ahead leaves that alone.
    assert step(anew, NOW + 2 * HOUR) is None


def test_certificates_say_what_they_are_for() -> None:
    kept = first()
    assert kept.authority.parsed().not_valid_before_utc == NOW - HOUR
    assert kept.authority.parsed().not_valid_after_utc == NOW + 100 * DAY
    assert kept.server.parsed().not_valid_after_utc == NOW + 30 * DAY
    assert service_names("a", "b") == ("a.b", "a.b.svc")


def test_what_is_kept_is_read_again() -> None:
    kept = first()
    assert read_set(kept.as_data()) == kept
    both = step(kept, NOW + 70 * DAY)
    assert both is not None
    assert read_set(both.as_data()) == both


@pytest.mark.parametrize("key", ["ca.crt", "ca.key", "tls.crt", "tls.key", "bundle.crt"])
@pytest.mark.parametrize("damage", [None, b"", b"junk"], ids=["missing", "empty", "junk"])
def test_what_is_damaged_is_said(key: str, damage: bytes | None) -> None:
    data = first().as_data()
    if damage is None:
        del data[key]
    else:
        data[key] = damage
    with pytest.raises(UsageError) as caught:
        read_set(data)
    assert "cannot be read" in caught.value.message


def test_a_key_of_another_certificate_is_damage() -> None:
    data = first().as_data() | {"tls.key": first().server.key}
    with pytest.raises(UsageError) as caught:
        read_set(data)
    assert "does not belong" in caught.value.message


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0.01, 40), min_size=1, max_size=12))
def test_at_every_look_what_is_served_is_trusted_by_the_bundle_of_the_look_before(
    days: list[float],
) -> None:
    """However rarely somebody looks, as long as it is often enough for the certificate's life."""
    lives = Lives(authority=40 * DAY, server=8 * DAY, overlap=HOUR)
    now, kept = NOW, first(NOW, lives)
    for each in days:
        passed = timedelta(days=min(each, 2.5))
        now += passed
        before = kept
        while (changed := next_set(now, names=NAMES, kept=kept, lives=lives)) is not None:
            kept = changed
        server = kept.server.parsed()
        assert server.not_valid_before_utc <= now < server.not_valid_after_utc
        trusted = before.bundle if passed > HOUR else kept.bundle
        issuers = [
            one
            for one in read_authorities(trusted)
            if one.parsed().public_key() == kept.authority.parsed().public_key()
        ]
        assert issuers or kept.authority == before.successor or passed <= 2 * HOUR


def read_authorities(bundle: bytes) -> list[Signed]:
    marker = b"-----END CERTIFICATE-----\n"
    return [Signed(part + marker, b"") for part in bundle.split(marker) if part]


# ---- a real TLS server ---------------------------------------------------------------------------


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
        for each in writers:
            each.close()
            with contextlib.suppress(OSError):
                await each.wait_closed()
        # Of who was not let in nobody has a writer: its connection ends by itself.
        await asyncio.wait_for(all_gone, 10)

    thread = Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield ports.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
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


def test_a_client_that_trusts_the_bundle_connects_by_each_name_and_by_no_other() -> None:
    now = datetime.now(UTC)
    kept = first(now)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_chain(context, kept.server.certificate, kept.server.key)
    with served(context) as port:
        for name in NAMES:
            echo(port, kept.bundle, name)
        with pytest.raises(ssl.SSLCertVerificationError):
            echo(port, kept.bundle, "another.svc")
        with pytest.raises(ssl.SSLCertVerificationError):
            echo(port, first(now).bundle)


def test_no_key_is_left_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    kept = first()
    load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), kept.server.certificate, kept.server.key)
    assert not list(tmp_path.iterdir())


def test_without_a_place_to_write_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    kept = first()
    with pytest.raises(PrerequisiteError) as caught:
        load_chain(
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), kept.server.certificate, kept.server.key
        )
    assert "emptyDir" in str(caught.value.hint)


# ---- keeping -------------------------------------------------------------------------------------


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
    secret: SecretTwin, configuration: ConfigurationTwin | None, clock: Clock, **fields: str
) -> CertificateKeeper:
    kept = KeepingSettings(names=NAMES, lives=LIVES, condition=fields.get("condition", ""))
    return CertificateKeeper(secret, configuration, kept, clock=clock)


def test_the_first_replica_makes_them_and_the_second_serves_the_same() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    one, two = (keeper(secret, configuration, clock) for _ in range(2))

    async def both() -> None:
        assert not one.is_ready
        await asyncio.gather(one.prepare(), two.prepare())

    asyncio.run(both())
    assert secret.writes == 1
    assert one.is_ready
    assert two.is_ready
    assert one.bundle == two.bundle == configuration.webhooks[0].bundle
    with served(one.webhook.context) as first_port, served(two.webhook.context) as second_port:
        assert echo(first_port, one.bundle) == echo(second_port, one.bundle)


def test_a_renewal_reaches_those_who_come_and_leaves_those_who_are_there() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    replica = keeper(secret, configuration, clock)
    clock.now -= 21 * DAY  # the client's clock is the machine's
    asyncio.run(replica.prepare())
    with served(replica.webhook.context) as port:
        before = echo(port, replica.bundle)

        async def across() -> bytes:
            context = ssl.create_default_context(cadata=replica.bundle.decode())
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            clock.now += 21 * DAY
            await replica.prepare()
            writer.write(b"still here\n")
            line = await reader.readline()
            await closed(writer)
            return line

        assert asyncio.run(across()) == b"still here\n"
        assert echo(port, replica.bundle) != before
    assert secret.writes == 2
    assert len(configuration.bundles) == 1  # the authority is the same


def test_the_authority_changes_without_a_moment_of_distrust() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    replicas = [keeper(secret, configuration, clock) for _ in range(2)]
    now = datetime.now(UTC)
    # Client and server live now: the authority's life goes by in the past.
    clock.now = now - 75 * DAY
    for each in replicas:
        asyncio.run(each.prepare())
    trusted = replicas[0].bundle
    for clock.now in (now - 55 * DAY, now - 30 * DAY, now, now + HOUR, now + 2 * HOUR):
        for each in replicas:
            asyncio.run(each.prepare())
        if clock.now >= now:
            for each in replicas:
                with served(each.webhook.context) as port:
                    echo(port, trusted)  # what the API server had a moment ago
        trusted = configuration.webhooks[0].bundle
    assert read_set(dict(secret.data or {})).authority.parsed().not_valid_before_utc > now - 2 * DAY
    assert trusted.count(b"BEGIN") == 2


def test_the_match_condition_is_written_with_the_bundle_and_only_when_it_differs() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    other = {"not-mine": "true"}
    configuration.webhooks = (replace(configuration.webhooks[0], conditions=other),)
    replica = keeper(secret, configuration, clock, condition="1 == 1")
    for _ in range(3):
        asyncio.run(replica.prepare())
    assert configuration.webhooks[0].conditions == {**other, "asks-for-gpus": "1 == 1"}
    assert configuration.version == 2
    # kubectl apply of the manifest brings its own back.
    configuration.webhooks = (replace(configuration.webhooks[0], bundle=b""),)
    asyncio.run(replica.prepare())
    assert configuration.webhooks[0].bundle == replica.bundle


def test_a_damaged_secret_is_left_while_there_is_something_to_serve() -> None:
    """kube-scheduler reads whom to trust at its start alone: a new authority locks it out."""
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    replica = keeper(secret, configuration, clock)
    asyncio.run(replica.prepare())
    good, bundle = dict(secret.data or {}), replica.bundle
    secret.data = {"tls.crt": b"junk"}
    secret.version += 1
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot be read") as told:
            asyncio.run(replica.prepare())
        assert "put back" in str(told.value.hint)
    assert secret.data == {"tls.crt": b"junk"}
    assert replica.is_ready
    secret.data = good
    asyncio.run(replica.prepare())
    assert replica.bundle == bundle == configuration.webhooks[0].bundle


def test_a_secret_that_stays_damaged_is_told_and_made_anew_when_nothing_is_left_to_serve() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    replica = keeper(secret, configuration, clock)
    asyncio.run(replica.prepare())
    secret.data = {"tls.crt": b"junk"}

    async def told() -> None:
        running = asyncio.create_task(replica.run())
        async with asyncio.timeout(20):
            while replica.problem is None:  # noqa: ASYNC110 - a twin has no event
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(told())
    assert "cannot be read" in str(replica.problem)
    clock.now += LIVES.server + DAY
    asyncio.run(replica.prepare())
    assert replica.is_ready
    assert configuration.webhooks[0].bundle == replica.bundle
    assert read_set(dict(secret.data)).bundle == replica.bundle


def test_what_is_missing_is_said_and_tried_again() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(is_there=False), Clock()
    replica = keeper(secret, configuration, clock)
    with pytest.raises(KubeError) as caught:
        asyncio.run(replica.prepare())
    assert "kubectl apply" in str(caught.value.hint)
    assert not replica.is_ready

    async def until_ready() -> None:
        secret.failure = UnreachableError("cannot get secret")
        running = asyncio.create_task(replica.run())
        await asyncio.sleep(0.05)
        assert isinstance(replica.problem, UnreachableError)
        secret.failure, configuration.is_there = None, True
        async with asyncio.timeout(20):
            while not replica.is_ready:  # noqa: ASYNC110 - a twin has no event
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(until_ready())


def test_a_configuration_that_somebody_else_keeps_is_left_to_them() -> None:
    secret, clock = SecretTwin(), Clock()
    replica = keeper(secret, None, clock)
    asyncio.run(replica.prepare())
    assert replica.is_ready


def test_an_api_server_that_is_away_for_a_moment_takes_no_replica_out() -> None:
    secret, clock = SecretTwin(), Clock()
    replica = keeper(secret, ConfigurationTwin(), clock)

    async def work() -> None:
        await replica.prepare()
        secret.failure = UnreachableError("cannot get secret")
        running = asyncio.create_task(replica.run())
        await asyncio.sleep(0.05)
        assert isinstance(replica.problem, UnreachableError)
        at = [replica.is_ready]
        # A certificate that has ended is trusted by nobody.
        clock.now += 31 * DAY
        at.append(replica.is_ready)
        assert at == [True, False]
        running.cancel()

    asyncio.run(work())


def test_whatever_stands_in_the_secret_the_keeper_goes_on() -> None:
    secret, configuration, clock = SecretTwin(), ConfigurationTwin(), Clock()
    replica = keeper(secret, configuration, clock)

    async def work() -> None:
        secret.failure = RuntimeError("a defect")
        running = asyncio.create_task(replica.run())
        await asyncio.sleep(0.05)
        assert isinstance(replica.problem, RuntimeError)
        secret.failure = None
        async with asyncio.timeout(20):
            while not replica.is_ready:  # noqa: ASYNC110 - a twin has no event
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(work())


def other_certificate(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> Signed:
    """One that somebody made with other tools: of himself, without a word of what it is for."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mine")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + 30 * DAY)
        .sign(key, hashes.SHA256())
    )
    return Signed(
        made.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    )


@pytest.mark.parametrize("names", [("tls.crt", "tls.key"), ("ca.crt", "ca.key")])
@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP256R1()), rsa.generate_private_key(65537, 2048)],
    ids=["plain", "rsa"],
)
def test_certificates_of_others_are_made_anew(
    names: tuple[str, str], key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey
) -> None:
    other = other_certificate(key)
    found = first().as_data() | {names[0]: other.certificate, names[1]: other.key}
    with pytest.raises(UsageError, match="cannot be read"):
        read_set(found)
    secret, configuration, clock = SecretTwin(data=found), ConfigurationTwin(), Clock()
    replica = keeper(secret, configuration, clock)
    asyncio.run(replica.prepare())
    assert replica.is_ready


# ---- kube-scheduler's ----------------------------------------------------------------------------


def client_step(
    kept: CertificateSet, found: Mapping[str, bytes], now: datetime = NOW
) -> dict[str, bytes] | None:
    return next_client(now, kept=kept, found=found, lives=LIVES)


def test_kube_scheduler_s_certificate_is_renewed_like_the_server_s() -> None:
    kept = first()
    made = client_step(kept, {})
    assert made is not None
    assert set(made) == {"tls.crt", "tls.key", "ca.crt"}
    assert kept.authority.key not in made.values()
    assert client_step(kept, made) is None
    assert client_step(kept, made, NOW + 19 * DAY) is None
    renewed = client_step(kept, made, NOW + 21 * DAY)
    assert renewed is not None
    assert renewed["tls.crt"] != made["tls.crt"]
    # Another bundle is written beside the same certificate, another authority signs anew.
    both = step(kept, NOW + 70 * DAY)
    assert both is not None
    recent = client_step(kept, {}, NOW + 70 * DAY)
    told = client_step(both, recent or {}, NOW + 70 * DAY)
    assert told == {**(recent or {}), "ca.crt": both.bundle}
    other = client_step(first(), made)
    assert other is not None
    assert other["tls.crt"] != made["tls.crt"]


@pytest.mark.parametrize("key", ["tls.crt", "tls.key"])
@pytest.mark.parametrize("damage", [None, b"", b"junk"], ids=["missing", "empty", "junk"])
def test_what_is_damaged_of_kube_scheduler_s_is_made_anew(key: str, damage: bytes | None) -> None:
    kept = first()
    found = client_step(kept, {}) or {}
    if damage is None:
        del found[key]
    else:
        found[key] = damage
    made = client_step(kept, found)
    assert made is not None
    assert client_step(kept, made) is None


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


def test_the_extender_is_reached_by_who_has_the_certificate_and_by_nobody_else() -> None:
    secret, clients, clock = SecretTwin(), SecretTwin(data={}), Clock()
    kept = KeepingSettings(names=NAMES, lives=LIVES)
    # Whom the API server is to trust cannot be said here: no reason to leave kube-scheduler out.
    replica = CertificateKeeper(
        secret, ConfigurationTwin(is_there=False), kept, clients=clients, clock=clock
    )
    with pytest.raises(KubeError):
        asyncio.run(replica.prepare())
    assert replica.extender.serves
    assert not replica.is_ready
    replica.bundle = read_set(dict(secret.data or {})).bundle
    guarded(replica, clients.data)
    another = next_client(clock(), kept=first(clock()), found={}, lives=LIVES)
    for data in (None, dict(secret.data or {}), another):
        with pytest.raises((OSError, EOFError)):
            guarded(replica, data)


def test_an_authority_that_was_removed_is_not_trusted_any_more() -> None:
    """Whoever empties the Secret does so because the authority's key is somebody else's, too."""
    secret, clients = SecretTwin(), SecretTwin(data={})
    kept = KeepingSettings(names=NAMES, lives=LIVES)
    replica = CertificateKeeper(secret, ConfigurationTwin(), kept, clients=clients, clock=Clock())
    asyncio.run(replica.prepare())
    stolen = dict(clients.data or {})
    guarded(replica, stolen)
    secret.data = {}
    asyncio.run(replica.prepare())
    guarded(replica, clients.data)
    with pytest.raises((OSError, EOFError)):
        guarded(replica, stolen)


def test_who_was_let_in_once_shows_its_certificate_again() -> None:
    """A session that is gone on with is asked for no certificate: none is given out."""
    clients = SecretTwin(data={})
    kept = KeepingSettings(names=NAMES, lives=LIVES)
    replica = CertificateKeeper(
        SecretTwin(), ConfigurationTwin(), kept, clients=clients, clock=Clock()
    )
    asyncio.run(replica.prepare())
    data = clients.data or {}
    context = ssl.create_default_context(cadata=replica.bundle.decode())
    load_chain(context, data["tls.crt"], data["tls.key"])
    with (
        served(replica.extender.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"hello\n")
        assert connection.recv(10) == b"hello\n"
        assert connection.version() == "TLSv1.3"
        session = connection.session
        assert session is None or not session.has_ticket
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        served(replica.extender.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        pytest.raises(OSError),  # noqa: PT011 - of TLS, or of the connection
    ):
        context.wrap_socket(raw, server_hostname="localhost")


def test_without_a_place_for_kube_scheduler_s_certificate_pods_are_reviewed() -> None:
    clients = SecretTwin(failure=UnreachableError("cannot get secret"))
    replica = CertificateKeeper(
        SecretTwin(),
        ConfigurationTwin(),
        KeepingSettings(names=NAMES, lives=LIVES),
        clients=clients,
        clock=Clock(),
    )
    with pytest.raises(UnreachableError):
        asyncio.run(replica.prepare())
    assert replica.is_ready


def reached(guard: Guard, data: Mapping[str, bytes] | None, bundle: bytes) -> bool:
    """Whether somebody with these files, who trusts this bundle, is answered.

    As the API server and kube-scheduler do, and asyncio's clients do not, it says why it goes.
    """
    context = ssl.create_default_context(cadata=bundle.decode())
    if data is not None:
        load_chain(context, data["tls.crt"], data["tls.key"])
    with (
        served(guard.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        try:
            connection.sendall(b"hello\n")
            return connection.recv(10) == b"hello\n"
        except OSError:
            return False


# ---- who is told ---------------------------------------------------------------------------------


@dataclass
class Heard:
    """Who is told of certificates, and remembers it."""

    handshakes: list[tuple[str, str]] = field(default_factory=list)
    amiss: list[tuple[str, str, str]] = field(default_factory=list)

    def handshake_failed(self, door: Door, failure: Failure) -> None:
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
            told=self.heard,
            leads=leads,
            clock=clock or Clock(),
        )


def test_a_handshake_that_fails_is_told_with_why() -> None:
    kept = Kept()
    replica = kept.keeper()
    asyncio.run(replica.prepare())
    guarded(replica, kept.clients.data)
    assert kept.heard.handshakes == []
    stranger = next_client(datetime.now(UTC), kept=first(datetime.now(UTC)), found={}, lives=LIVES)
    for data in (None, stranger):
        with pytest.raises((OSError, EOFError)):
            guarded(replica, data)
    with pytest.raises(ssl.SSLCertVerificationError):
        reached(replica.extender, kept.clients.data, first(datetime.now(UTC)).bundle)
    with (
        served(replica.extender.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
    ):
        plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            plain.recv(100)
    with (
        served(replica.extender.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=10),
    ):
        pass  # who only looks whether somebody listens
    why = ["no_certificate", "wrong_certificate", "distrusted", "other"]
    assert kept.heard.handshakes == [("extender", each) for each in why]


def test_whom_another_authority_locks_out_is_told_once() -> None:
    """Not at the first start, and not when the authority is renewed in time."""
    kept = Kept()
    replica = kept.keeper()
    asyncio.run(replica.prepare())
    asyncio.run(replica.prepare())
    assert kept.heard.amiss == []
    kept.secret.data = {}
    for _ in range(2):
        asyncio.run(replica.prepare())
    assert kept.heard.amiss == [("allotment-system/clients", "", "AuthorityReplaced")]


def test_while_a_new_authority_waits_to_sign_whoever_leads_tells_it_each_day() -> None:
    """Events last for an hour, kube-scheduler for months: once is not enough."""
    kept = Kept(lives=replace(LIVES, overlap=10 * DAY))
    clock = Clock()
    leads = [True, False]
    replicas = [kept.keeper(clock=clock, leads=partial(leads.__getitem__, each)) for each in (0, 1)]
    told = ("allotment-system/clients", "", "AuthorityRenewed")

    def look_for(days: int) -> int:
        kept.heard.amiss.clear()
        for _ in range(4 * days):
            for each in reversed(replicas):
                asyncio.run(each.prepare())
            clock.now += DAY / 4
        assert set(kept.heard.amiss) <= {told}
        return len(kept.heard.amiss)

    def successor() -> Signed | None:
        return read_set(kept.secret.data or {}).successor

    while kept.secret.data is None or successor() is None:
        clock.now += DAY / 4
        asyncio.run(replicas[1].prepare())  # who follows may be the one to make it
    assert kept.heard.amiss == []
    assert look_for(3) == 3
    leads.reverse()
    assert look_for(3) == 3
    leads[:] = [False, False]
    assert look_for(1) == 0
    leads[0] = True
    while successor() is not None:
        look_for(1)
    assert look_for(2) == 0


def test_a_secret_that_cannot_be_read_is_told() -> None:
    kept = Kept()
    replica = kept.keeper()
    asyncio.run(replica.prepare())
    kept.secret.data = {"tls.crt": b"junk"}
    with pytest.raises(UsageError):
        asyncio.run(replica.prepare())
    assert kept.heard.amiss == [
        ("allotment-system/allotment-webhook", "", "CertificatesUnreadable")
    ]


# ---- the API server's certificate ----------------------------------------------------------------


def test_the_webhook_answers_whom_the_file_s_authorities_have_signed(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    one, other = first(now), first(now)
    certificates = [
        next_client(now, kept=each, found={}, lives=LIVES) or {} for each in (one, other)
    ]
    path = tmp_path / "ca.crt"
    path.write_bytes(one.bundle)
    kept = Kept()
    replica = kept.keeper(path)
    asyncio.run(replica.prepare())
    # Nor does the scheduler's own authority open it: that one is kube-scheduler's.
    for data, is_answered in (
        (certificates[0], True),
        (certificates[1], False),
        (kept.clients.data, False),
        (None, False),
    ):
        assert reached(replica.webhook, data, replica.bundle) == is_answered
    assert [door for door, _ in kept.heard.handshakes] == ["webhook"] * 3
    path.write_bytes(one.bundle + other.bundle)
    asyncio.run(replica.prepare())
    assert all(reached(replica.webhook, each, replica.bundle) for each in certificates)
    path.write_bytes(other.bundle)
    asyncio.run(replica.prepare())
    assert [reached(replica.webhook, each, replica.bundle) for each in certificates] == [
        False,
        True,
    ]


@pytest.mark.parametrize("text", [None, b"", b"junk", b"\xff"], ids=str)
def test_authorities_that_cannot_be_read_let_nobody_in_and_put_nobody_out(
    tmp_path: Path, text: bytes | None
) -> None:
    now = datetime.now(UTC)
    signer = first(now)
    path = tmp_path / "ca.crt"
    path.write_bytes(signer.bundle)
    replica = Kept().keeper(path)
    asyncio.run(replica.prepare())
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    late = Kept().keeper(path)
    for each in (replica, late):
        with pytest.raises(UsageError) as caught:
            asyncio.run(each.prepare())
        assert "PEM" in str(caught.value.hint)
    assert not late.webhook.serves
    assert late.extender.serves
    data = next_client(now, kept=signer, found={}, lives=LIVES)
    assert reached(replica.webhook, data, replica.bundle)
    assert not reached(replica.webhook, None, replica.bundle)


@pytest.mark.parametrize("text", [None, b"junk"], ids=str)
def test_authorities_that_cannot_be_read_keep_no_certificate_from_being_renewed(
    tmp_path: Path, text: bytes | None
) -> None:
    now = datetime.now(UTC)
    signer = first(now)
    path = tmp_path / "ca.crt"
    path.write_bytes(signer.bundle)
    kept = Kept()
    replica = kept.keeper(path)
    asyncio.run(replica.prepare())
    before = replica.bundle
    path.unlink()
    if text is not None:
        path.write_bytes(text)
    kept.secret.data = {}
    with pytest.raises(UsageError):
        asyncio.run(replica.prepare())
    assert replica.bundle != before
    assert replica.is_ready
    data = next_client(now, kept=signer, found={}, lives=LIVES)
    assert reached(replica.webhook, data, replica.bundle)
    assert not reached(replica.webhook, None, replica.bundle)
