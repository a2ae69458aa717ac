# SPDX-License-Identifier: Apache-2.0
"""Keeping the certificates: in a Secret that all replicas share, in the TLS server, in the webhook.

Every replica does the same, whoever leads: reads the Secret, takes the next step if one is due, and
serves what is kept there. Two that take the same step at a time write over the same version; one of
them is refused, reads again and finds it done. What is served changes on the live context: those
who are connected stay so, those who come see the new certificate.

What cannot be read is left while there is something to serve: it may be put back, and who empties
the Secret means it. Where nothing is left to serve, all is made anew.

The order is what makes it safe: a bundle is in the webhook before anything that needs it is served.

The extender's side is the same authority's: its server, and the certificate by which it knows
kube-scheduler, in a Secret of its own. Neither side waits for the other: where nobody can be told
to trust the webhook, kube-scheduler is answered all the same.
"""

import asyncio
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn, Protocol

import structlog

from allotment.kube.backoff import Backoff
from allotment.kube.errors import ConflictError, KubeError, ObjectMissingError
from allotment.kube.webhooks import KeptSecret, Webhook
from allotment.model.errors import AllotError, PrerequisiteError, UsageError
from allotment.scheduler.admission_rules import CONDITION
from allotment.scheduler.certificates import (
    CertificateSet,
    Lives,
    next_client,
    next_set,
    read_set,
)

__all__ = ["CertificateKeeper", "KeepingSettings", "load_chain", "service_names"]

_ATTEMPTS: Final = 10
"""So often two replicas can get in each other's way at one time."""

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


class CertificateKeeper:
    """Keeps the certificates of one replica. `prepare` once, then `run`."""

    def __init__(
        self,
        secret: SecretStore,
        configuration: ConfigurationStore | None,
        settings: KeepingSettings,
        *,
        clients: SecretStore | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Hold nothing yet. Without a configuration, somebody else says whom to trust.

        `clients` is where kube-scheduler's certificate is kept; None: it has none.
        """
        self._secret = secret
        self._configuration = configuration
        self._settings = settings
        self._clock = clock
        self._clients = clients
        self._served = b""
        self._guarded = b""
        self._ends = datetime.min.replace(tzinfo=UTC)
        self.context: Final = _context()
        """For the TLS server; usable when `prepare` is done, and alive afterwards."""
        self.guarding_context: Final = _guarding()
        """For the extender's TLS server: only who has a certificate of the authority gets in."""
        self._inner = self.guarding_context
        self.guarding_context.sni_callback = self._enter
        self.bundle: bytes = b""
        """Every authority to trust, in PEM."""
        self.problem: Exception | None = None
        """Why the certificates are not as they should be."""

    @property
    def has_certificate(self) -> bool:
        """Whether there is something to serve."""
        return bool(self._served)

    @property
    def guards(self) -> bool:
        """Whether `guarding_context` can be served."""
        return bool(self._guarded)

    @property
    def is_ready(self) -> bool:
        """Whether whoever calls can trust what is served: it was published, and has not ended.

        A problem since then, an API server that is away for a moment, takes nothing from that.
        """
        return bool(self._served) and self._clock() < self._ends

    async def prepare(self) -> None:
        """Do what is due once. Raises `KubeError`, `UsageError`, `PrerequisiteError`."""
        for _ in range(_ATTEMPTS):
            try:
                kept = await self._kept()
                self._guard(kept)
                try:
                    await self._keep_client(kept)
                finally:
                    # Whatever becomes of kube-scheduler's, pods are to be created.
                    await self._publish(kept)
                    self._serve(kept)
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
        if wanted is not None:
            await self._clients.write(wanted, over=found)
            _log.info("kube-scheduler's certificate renewed", secret=self._clients.name)

    def _guard(self, kept: CertificateSet) -> None:
        """Serve the extender with it, to those whom it has signed."""
        served = kept.server.certificate + kept.bundle
        if self._clients is None or served == self._guarded:
            return
        # Another context each time: what one trusts can be added to, and not be taken away.
        inner = _guarding()
        load_chain(inner, kept.server.certificate, kept.server.key)
        inner.load_verify_locations(cadata=kept.bundle.decode("ascii"))
        self._inner = inner
        self._guarded = served

    def _enter(self, connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        """Let who comes be asked by the context of now; called of each, whatever name it gives."""
        del name, outer
        connection.context = self._inner

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

    def _serve(self, kept: CertificateSet) -> None:
        self.bundle = kept.bundle
        if kept.server.certificate == self._served:
            return
        load_chain(self.context, kept.server.certificate, kept.server.key)
        self._ends = kept.server.parsed().not_valid_after_utc
        self._served = kept.server.certificate


def service_names(service: str, namespace: str) -> tuple[str, ...]:
    """Return the names by which a Service is reached from inside a cluster."""
    return tuple(f"{service}.{namespace}{suffix}" for suffix in ("", ".svc"))


def load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Put a certificate into a context, also one in use. ssl reads it from a file alone.

    Raises `PrerequisiteError`: there is nowhere to write it.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="allotment-") as folder:
            path = Path(folder, "chain.pem")
            path.touch(mode=0o600)
            path.write_bytes(certificate + key)
            context.load_cert_chain(path)
    except OSError as error:
        raise PrerequisiteError(
            f"the webhook's certificate cannot be put into a file to be read by TLS: {error}",
            hint="give it a folder to write to: mount an emptyDir at /tmp, or set TMPDIR",
        ) from error


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _guarding() -> ssl.SSLContext:
    """Return a context that asks each who comes for a certificate.

    No session is given out to go on with later: in one that is, nobody is asked again, though the
    authority may be gone by then.
    """
    context = _context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    return context
