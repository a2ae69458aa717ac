# SPDX-License-Identifier: Apache-2.0
"""Replicas keep the certificates together, and whoever trusts the bundle trusts what is served."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
from awaiting import until
from certificates_twin import (
    DAY,
    HOUR,
    LIVES,
    NAMES,
    NOW,
    Clock,
    ConfigurationTwin,
    SecretTwin,
    closed,
    echo,
    first,
    keeper,
    served,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from allotment.kube.errors import KubeError, UnreachableError
from allotment.kube.webhooks import Webhook
from allotment.model.errors import PrerequisiteError, UsageError
from allotment.model.structs import replace
from allotment.scheduler.tls.authority import Signed, read_set
from allotment.scheduler.tls.context import load_chain


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
    foreign = Webhook("not-mine.example.com", conditions=other)
    configuration.webhooks = (replace(configuration.webhooks[0], conditions=other), foreign)
    replica = keeper(secret, configuration, clock, conditions={"pods.allotment.dev": "1 == 1"})
    for _ in range(3):
        asyncio.run(replica.prepare())
    assert configuration.webhooks[0].conditions == {**other, "asks-for-gpus": "1 == 1"}
    assert configuration.webhooks[1] == replace(foreign, bundle=replica.bundle)
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
        assert "restore the Secret" in str(told.value.hint)
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
        await until(lambda: replica.problem is not None)
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
        await until(lambda: isinstance(replica.problem, UnreachableError))
        secret.failure, configuration.is_there = None, True
        await until(lambda: replica.is_ready)
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
        await until(lambda: isinstance(replica.problem, UnreachableError))
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
        await until(lambda: isinstance(replica.problem, RuntimeError))
        secret.failure = None
        await until(lambda: replica.is_ready)
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
