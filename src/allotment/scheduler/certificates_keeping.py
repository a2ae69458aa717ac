# SPDX-License-Identifier: Apache-2.0
"""Keeping the certificates: in a Secret that all replicas share, in the TLS server, in the webhook.

Every replica does the same, whoever leads: reads the Secret, takes the next step if one is due, and
serves what is kept there (`guards`). Two that take the same step at a time write over the same
version; one of them is refused, reads again and finds it done.

What cannot be read is left while there is something to serve: it may be put back, and who empties
the Secret means it. Where nothing is left to serve, all is made anew.

The order is what makes it safe: a bundle is in the webhook before anything that needs it is served.

The extender's side is the same authority's: its server, and the certificate by which it knows
kube-scheduler, in a Secret of its own. Neither side waits for the other: where nobody can be told
to trust the webhook, kube-scheduler is answered all the same. It reads whom to trust at its start
alone: where that changes at once, its administrator is told; where it is about to, each day.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.backoff import Backoff
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.webhooks import KeptSecret, Webhook
from allotment.model.errors import AllotError, UsageError
from allotment.scheduler.admission_rules import CONDITION
from allotment.scheduler.certificates import (
    AUTHORITY_CERT,
    CertificateSet,
    Lives,
    next_client,
    next_set,
    read_set,
)
from allotment.scheduler.guards import Failure, Guard

__all__ = ["CertificateKeeper", "Door", "KeepingSettings", "Told", "service_names"]

_ATTEMPTS: Final = 10
"""So often two replicas can get in each other's way at one time."""
_REMIND_AFTER: Final = timedelta(days=1)

_log = structlog.get_logger(__name__)


class SecretStore(Protocol):
    """Where the certificates are: `kube.webhooks.Secret`."""

    name: str

    async def read(self) -> KeptSecret | None:
        """Return what is kept; None: nothing."""
        ...

    async def write(self, data: Mapping[str, bytes], *, over: KeptSecret | None) -> None:
        """Keep this in place of what was read."""
        ...


class ConfigurationStore(Protocol):
    """Where the API server reads whom to trust: `kube.webhooks.WebhookConfiguration`."""

    name: str

    async def read(self) -> tuple[str, tuple[Webhook, ...]]:
        """Return its version and webhooks."""
        ...

    async def write(self, webhooks: tuple[Webhook, ...], *, version: str) -> None:
        """Replace what is ours of them."""
        ...


class Door(StrEnum):
    """Who is served by TLS here."""

    WEBHOOK = "webhook"
    """The API server."""
    EXTENDER = "extender"
    """kube-scheduler."""


class Told(Protocol):
    """Who tells people of it: figures, the log, events."""

    def handshake_failed(self, door: Door, failure: Failure) -> None:
        """Somebody came and was not let in, or went away."""

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        """A Secret, as NAMESPACE/NAME, is not as it should be, or has consequences."""


class _Nobody:
    """Is told, and does nothing."""

    def handshake_failed(self, door: Door, failure: Failure) -> None:
        del door, failure

    def secret_amiss(self, name: str, uid: str, *, reason: str, text: str) -> None:
        del name, uid, reason, text


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingSettings:
    """What is kept."""

    names: tuple[str, ...]
    """By which the server is reached: DNS names and addresses."""
    lives: Lives = field(default=Lives())
    condition: str = ""
    """The webhook's match condition for the dialects in force; empty: as it is."""
    look_s: float = 30.0
    """How often to look whether all is as it should be."""
    client_authority: Path | None = None
    """A file of authorities in PEM: the webhook answers those alone whom one of them has signed.
    None: it answers whoever asks."""


class CertificateKeeper:
    """Keeps the certificates of one replica. `prepare` once, then `run`."""

    def __init__(
        self,
        secret: SecretStore,
        configuration: ConfigurationStore | None,
        settings: KeepingSettings,
        *,
        clients: SecretStore | None = None,
        told: Told | None = None,
        leads: Callable[[], bool] = lambda: True,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Hold nothing yet. Without a configuration, somebody else says whom to trust.

        `clients` is where kube-scheduler's certificate is kept; None: it has none. `leads`: whether
        this replica is the one of all that says again what is to be done in time.
        """
        self._secret = secret
        self._configuration = configuration
        self._settings = settings
        self._clock = clock
        self._clients = clients
        self._told: Final = told or _Nobody()
        self._leads = leads
        self._reminded: datetime | None = None
        """When this replica last said that a new authority waits to sign."""
        self._authorities: bytes | None = None
        """Who has signed those that may ask the webhook, as it was read last."""
        self._ends = datetime.min.replace(tzinfo=UTC)
        self.webhook: Final = Guard(
            asks=settings.client_authority is not None,
            on_failure=partial(self._told.handshake_failed, Door.WEBHOOK),
        )
        """The webhook's side; to be served when `prepare` is done."""
        self.extender: Final = Guard(
            asks=True, on_failure=partial(self._told.handshake_failed, Door.EXTENDER)
        )
        """The extender's: only who has a certificate of the authority gets in."""
        self.bundle: bytes = b""
        """Every authority to trust, in PEM."""
        self.problem: Exception | None = None
        """Why the certificates are not as they should be."""

    @property
    def is_ready(self) -> bool:
        """Whether whoever calls can trust what is served: it was published, and has not ended.

        A problem since then, an API server that is away for a moment, takes nothing from that.
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
                    # Whatever becomes of kube-scheduler's, pods are to be created.
                    await self._publish(kept)
                    await self._serve(kept)
            except ConflictError:
                continue  # another replica was there first: see what it did
            self.problem = None
            return
        raise KubeError(
            f"the webhook's certificates in {self._secret.name} are changed all the time",
            hint="does more than one installation keep them there?",
        )

    async def run(self) -> NoReturn:
        """Keep them for ever. Only cancelling ends it."""
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
            except Exception as error:  # noqa: BLE001 - as said below
                # What stands in the Secret is anybody's who may write it, and is no reason to end:
                # what is served is good for weeks.
                if str(error) != str(self.problem):
                    _log.exception("the webhook's certificates are not kept: this is a defect")
                self.problem = error
                await asyncio.sleep(backoff.next())
                continue
            backoff.reset()
            await asyncio.sleep(self._settings.look_s)

    async def _kept(self) -> CertificateSet:
        """Return what all replicas serve, after the step that is due."""
        found = await self._secret.read()
        kept = None
        if found is not None and found.data:
            try:
                kept = read_set(dict(found.data))
            except UsageError as error:
                if self.is_ready:
                    # A new authority locks kube-scheduler out until it is started again.
                    self._told.secret_amiss(
                        self._secret.name,
                        found.uid,
                        reason="CertificatesUnreadable",
                        text=f"{error.message}; what is served goes on until it ends. Put back"
                        " what was there, or empty it: all is made anew then",
                    )
                    raise UsageError(
                        f"Secret {self._secret.name}: {error.message}",
                        hint="put back what was there; or empty it: all is made anew then, and"
                        " kube-scheduler has to be started again to trust it",
                    ) from error
                _log.warning(error.message, hint=error.hint, secret=self._secret.name)
        settings = self._settings
        wanted = next_set(self._clock(), names=settings.names, kept=kept, lives=settings.lives)
        if wanted is None and kept is not None:
            return kept
        assert wanted is not None  # noqa: S101 - of nothing something is made
        await self._secret.write(wanted.as_data(), over=found)
        _log.info(
            "webhook certificates renewed",
            secret=self._secret.name,
            until=str(wanted.server.parsed().not_valid_after_utc),
        )
        return wanted

    async def _keep_client(self, kept: CertificateSet) -> None:
        """Let kube-scheduler have its certificate, and whom it is to trust."""
        if self._clients is None:
            return
        found = await self._clients.read()
        lives = self._settings.lives
        data = dict(found.data) if found is not None else {}
        wanted = next_client(self._clock(), kept=kept, found=data, lives=lives)
        uid = found.uid if found is not None else ""
        if wanted is not None:
            await self._clients.write(wanted, over=found)
            _log.info("kube-scheduler's certificate renewed", secret=self._clients.name)
            trusted = data.get(AUTHORITY_CERT, b"")
            if trusted and kept.authority.certificate not in trusted:
                text = "the authority was made anew, and kube-scheduler trusts the one before until"
                self._tell_of_trust(self._clients, uid, "AuthorityReplaced", f"{text} it is")
        self._remind(kept, self._clients, uid)

    def _remind(self, kept: CertificateSet, clients: SecretStore, uid: str) -> None:
        """Say each day that kube-scheduler has to be started again before a new authority signs.

        Whether it was since, nobody here can see.
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
        text += f" trusts it where it was started after {made:%Y-%m-%d %H:%M} UTC; else it is"
        self._tell_of_trust(clients, uid, "AuthorityRenewed", text)

    def _tell_of_trust(self, clients: SecretStore, uid: str, reason: str, text: str) -> None:
        """Say why kube-scheduler has to be started again, and how."""
        namespace = clients.name.partition("/")[0]
        text += f" started again: kubectl -n {namespace} rollout restart deployment"
        text += " allotment-kube-scheduler"
        _log.warning(text, secret=clients.name)
        self._told.secret_amiss(clients.name, uid, reason=reason, text=text)

    async def _publish(self, kept: CertificateSet) -> None:
        """Write the bundle into the webhook.

        The Secret is read again after the configuration: what is written over that version of it
        is then never older than what another replica wrote before.
        """
        if self._configuration is None:
            return
        try:
            version, there = await self._configuration.read()
        except ObjectMissingError as error:
            raise KubeError(
                f"there is no mutating webhook configuration {self._configuration.name}",
                hint="kubectl apply -f deploy/manifests/scheduler.yaml",
            ) from error
        found = await self._secret.read()
        if found is None or read_set(dict(found.data)).bundle != kept.bundle:
            raise ConflictError("the certificates were renewed by another replica")
        condition = self._settings.condition
        conditions = {CONDITION: condition} if condition else {}
        wanted = tuple(
            replace(each, bundle=kept.bundle, conditions={**each.conditions, **conditions})
            for each in there
        )
        if wanted != there:
            await self._configuration.write(wanted, version=version)

    async def _serve(self, kept: CertificateSet) -> None:
        """Serve the webhook's certificate, whatever has become of the API server's authorities."""
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
        """Return who has signed those that may ask the webhook. Raises `UsageError`."""
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
    """Return the names by which a Service is reached from inside a cluster."""
    return tuple(f"{service}.{namespace}{suffix}" for suffix in ("", ".svc"))
