# SPDX-License-Identifier: Apache-2.0
"""Who is let in by which certificate, and who is told of those who are not."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
from certificates_twin import (
    DAY,
    LIVES,
    NAMES,
    Clock,
    ConfigurationTwin,
    Kept,
    SecretTwin,
    first,
    guarded,
    reached,
    served,
)

from allotment.kube.errors import KubeError, UnreachableError
from allotment.model.errors import UsageError
from allotment.model.structs import replace
from allotment.scheduler.tls.authority import Signed, next_client, read_set
from allotment.scheduler.tls.context import load_chain
from allotment.scheduler.tls.rotation import CertificateKeeper, KeepingSettings


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
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
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
        socket.create_connection(("127.0.0.1", port), timeout=30) as raw,
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
        socket.create_connection(("127.0.0.1", port), timeout=30) as plain,
    ):
        plain.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            plain.recv(100)
    with (
        served(replica.extender.context) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30),
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
