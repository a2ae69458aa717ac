# SPDX-License-Identifier: Apache-2.0
"""Rotates certificates: in a Secret shared by all replicas, in the TLS servers, in the webhook.

Every replica reads the Secret, takes the next step if due, and serves the result. Conflicting
writes fail and are retried. An unreadable Secret is replaced only if no certificate is in use. A
bundle is published before anything that needs it is served.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Protocol

import msgspec
import structlog

from allotment.kube.clients import Backoff
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.webhooks import KeptSecret, Webhook
from allotment.model.errors import AllotError, UsageError
from allotment.model.structs import replace
from allotment.scheduler.admission.rules import CONDITION
from allotment.scheduler.tls.authority import (
    AUTHORITY_CERT,
    CertificateSet,
    Lives,
    next_client,
    next_set,
    read_set,
)
from allotment.scheduler.tls.context import HandshakeFailure, ReloadingTlsContext

_ATTEMPTS: Final = 10
"""So often in a row replicas may conflict."""
_REMIND_AFTER: Final = timedelta(days=1)

_log = structlog.get_logger(__name__)


class SecretStore(Protocol):
    """The Secret of the certificates: `kube.webhooks.Secret`."""

    name: str

    async def read(self) -> KeptSecret | None: ...

    async def write(self, data: Mapping[str, bytes], *, over: KeptSecret | None) -> None: ...


class ConfigurationStore(Protocol):
    """The webhook's trust: `kube.webhooks.WebhookConfiguration`."""

    name: str

    async def read(self) -> tuple[str, tuple[Webhook, ...]]: ...

    async def write(self, webhooks: tuple[Webhook, ...], *, version: str) -> None: ...


class TlsEndpoint(StrEnum):
    """The TLS servers, by their client."""

    WEBHOOK = "webhook"
    """The API server."""
    EXTENDER = "extender"
    """kube-scheduler."""


class RotationObserver(Protocol):
    """Receives problems, for metrics, the log and events."""

    def handshake_failed(self, door: TlsEndpoint, failure: HandshakeFailure) -> None:
        """A TLS client was rejected, or closed the connection."""

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        """A Secret, as NAMESPACE/NAME, has a problem or needs an action."""


class _NoObserver:
    """Ignores all reports."""

    def handshake_failed(self, door: TlsEndpoint, failure: HandshakeFailure) -> None:
        del door, failure

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        del name, uid, reason, text


class KeepingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state."""

    names: tuple[str, ...]
    """The server's DNS names and addresses."""
    lives: Lives = msgspec.field(default=Lives())
    conditions: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The match condition of each webhook, by its name; of others it is unchanged."""
    look_s: float = 30.0
    """The interval between checks."""
    client_authority: Path | None = None
    """A PEM file of authorities: the webhook only answers clients with a certificate of one of
    them. None: it answers any client."""


class CertificateKeeper:
    """Keeps the certificates of one replica. `prepare` once, then `run`."""

    def __init__(
        self,
        secret: SecretStore,
        configuration: ConfigurationStore | None,
        settings: KeepingSettings,
        *,
        clients: SecretStore | None = None,
        observer: RotationObserver | None = None,
        leads: Callable[[], bool] = lambda: True,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Without `configuration`, another program publishes the authority.

        `clients` is the Secret of kube-scheduler's certificate; None: it has none. `leads`: only
        the leader repeats reminders.
        """
        self._secret = secret
        self._configuration = configuration
        self._settings = settings
        self._clock = clock
        self._clients = clients
        self._observer: Final = observer or _NoObserver()
        self._leads = leads
        self._reminded: datetime | None = None
        """When this replica last reminded of a waiting authority."""
        self._authorities: bytes | None = None
        """Authorities of the webhook's clients, as last read."""
        self._ends = datetime.min.replace(tzinfo=UTC)
        self.webhook: Final = ReloadingTlsContext(
            asks=settings.client_authority is not None,
            on_failure=partial(self._observer.handshake_failed, TlsEndpoint.WEBHOOK),
        )
        """The webhook's context, valid after `prepare`."""
        self.extender: Final = ReloadingTlsContext(
            asks=True, on_failure=partial(self._observer.handshake_failed, TlsEndpoint.EXTENDER)
        )
        """The extender's context: clients need a certificate of the authority."""
        self.bundle: bytes = b""
        """All trusted authorities, in PEM."""
        self.problem: Exception | None = None
        """Why the last check failed."""

    @property
    def is_ready(self) -> bool:
        """Whether clients can trust the certificate: it was published and has not expired.

        A later problem, such as an unreachable API server, does not change that.
        """
        return self.webhook.serves and self._clock() < self._ends

    async def prepare(self) -> None:
        """Do what is due once. Raises `KubeError`, `UsageError`, `PrerequisiteError`."""
        for _ in range(_ATTEMPTS):
            try:
                kept = await self._kept()
                if self._clients is not None:
                    self.extender.serve(kept.server, authorities=kept.bundle)
                try:
                    await self._keep_client(kept)
                finally:
                    # Pods must be created even if kube-scheduler's certificate fails.
                    await self._publish(kept)
                    await self._serve(kept)
            except ConflictError:
                continue  # another replica wrote first: read its result
            self.problem = None
            return
        raise KubeError(
            f"conflict on every attempt to update Secret {self._secret.name}",
            hint="check whether two installations use this Secret for the webhook's certificates",
        )

    async def run(self) -> NoReturn:
        backoff = Backoff(most_s=self._settings.look_s)
        while True:
            try:
                await self.prepare()
            except AllotError as error:
                if str(error) != str(self.problem):
                    _log.warning(error.message, hint=error.hint)
                self.problem = error
                await asyncio.sleep(backoff.next())
                continue
            except Exception as error:  # noqa: BLE001 - reason below
                # Other programs may write to the Secret, so its contents must not end the process:
                # the certificates in use are valid for weeks.
                if str(error) != str(self.problem):
                    _log.exception("defect: the webhook's certificates are not renewed")
                self.problem = error
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            await asyncio.sleep(self._settings.look_s)

    async def _kept(self) -> CertificateSet:
        """Return what all replicas serve, after the next due step."""
        stored = await self._secret.read()
        kept = None
        if stored is not None and stored.data:
            try:
                kept = read_set(dict(stored.data))
            except UsageError as error:
                if self.is_ready:
                    # A new authority locks kube-scheduler out until it is restarted.
                    self._observer.secret_amiss(
                        self._secret.name,
                        stored.uid,
                        reason="CertificatesUnreadable",
                        text=f"{error.message}; the certificates in use are served until they"
                        " expire. Restore the Secret, or empty it: then all are replaced",
                    )
                    raise UsageError(
                        f"Secret {self._secret.name}: {error.message}",
                        hint="restore the Secret; or empty it: then all certificates are replaced,"
                        " and kube-scheduler must be restarted to trust them",
                    ) from error
                _log.warning(error.message, hint=error.hint, secret=self._secret.name)
        settings = self._settings
        wanted = next_set(self._clock(), names=settings.names, kept=kept, lives=settings.lives)
        if wanted is None and kept is not None:
            return kept
        assert wanted is not None  # noqa: S101 - without a stored set, one is issued
        await self._secret.write(wanted.as_data(), over=stored)
        _log.info(
            "webhook certificates renewed",
            secret=self._secret.name,
            until=str(wanted.server.parsed().not_valid_after_utc),
        )
        return wanted

    async def _keep_client(self, kept: CertificateSet) -> None:
        if self._clients is None:
            return
        stored = await self._clients.read()
        lives = self._settings.lives
        data = dict(stored.data) if stored is not None else {}
        wanted = next_client(self._clock(), kept=kept, found=data, lives=lives)
        uid = stored.uid if stored is not None else ""
        if wanted is not None:
            await self._clients.write(wanted, over=stored)
            _log.info("kube-scheduler's certificate renewed", secret=self._clients.name)
            trusted = data.get(AUTHORITY_CERT, b"")
            if trusted and kept.authority.certificate not in trusted:
                text = "the authority was replaced, and kube-scheduler trusts the old one until"
                self._report_restart(self._clients, uid, "AuthorityReplaced", f"{text} it is")
        self._remind(kept, self._clients, uid)

    def _remind(self, kept: CertificateSet, clients: SecretStore, uid: str) -> None:
        """Remind daily that kube-scheduler must be restarted before a new authority signs.

        Whether it was restarted is unknown here.
        """
        if kept.successor is None:
            self._reminded = None
            return
        now, lives = self._clock(), self._settings.lives
        if not self._leads() or (self._reminded and now - self._reminded < _REMIND_AFTER):
            return
        self._reminded = now
        made = kept.successor.parsed().not_valid_before_utc + lives.skew
        text = f"a new authority signs from {made + lives.overlap:%Y-%m-%d} on, and kube-scheduler"
        text += f" trusts it if it started after {made:%Y-%m-%d %H:%M} UTC; otherwise it must be"
        self._report_restart(clients, uid, "AuthorityRenewed", text)

    def _report_restart(self, clients: SecretStore, uid: str, reason: str, text: str) -> None:
        namespace = clients.name.partition("/")[0]
        text += f" restarted: kubectl -n {namespace} rollout restart deployment"
        text += " allotment-kube-scheduler"
        _log.warning(text, secret=clients.name)
        self._observer.secret_amiss(clients.name, uid, reason=reason, text=text)

    async def _publish(self, kept: CertificateSet) -> None:
        """Write the bundle into the webhook.

        The Secret is read again after the configuration, so that this write is never older than
        another replica's.
        """
        if self._configuration is None:
            return
        try:
            version, webhooks = await self._configuration.read()
        except ObjectMissingError as error:
            raise KubeError(
                f"no mutating webhook configuration {self._configuration.name}",
                hint="kubectl apply -f deploy/manifests/scheduler.yaml",
            ) from error
        stored = await self._secret.read()
        if stored is None or read_set(dict(stored.data)).bundle != kept.bundle:
            raise ConflictError("the certificates were renewed by another replica")
        wanted = tuple(
            replace(webhook, bundle=kept.bundle, conditions=self._conditions_of(webhook))
            for webhook in webhooks
        )
        if wanted != webhooks:
            await self._configuration.write(wanted, version=version)

    def _conditions_of(self, webhook: Webhook) -> Mapping[str, str]:
        wanted = self._settings.conditions.get(webhook.name)
        return {**webhook.conditions, **({CONDITION: wanted} if wanted else {})}

    async def _serve(self, kept: CertificateSet) -> None:
        """Serve the webhook's certificate, even if the client authorities are invalid."""
        self.bundle = kept.bundle
        try:
            authorities = await self._client_authorities()
            self.webhook.serve(kept.server, authorities=authorities)
            self._authorities = authorities
        finally:
            if self._authorities is not None:
                self.webhook.serve(kept.server, authorities=self._authorities)
                self._ends = kept.server.parsed().not_valid_after_utc

    async def _client_authorities(self) -> bytes:
        path = self._settings.client_authority
        if path is None:
            return b""
        try:
            return await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise UsageError(
                f"--webhook-client-ca {path} cannot be read: {error.strerror}",
                hint="it is a file of certificates, in PEM",
            ) from error


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    return tuple(f"{service}.{namespace}{suffix}" for suffix in ("", ".svc"))
