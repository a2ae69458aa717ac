# SPDX-License-Identifier: Apache-2.0
"""Hot-reloading TLS contexts.

SNI selects a fresh context per connection, because an SSLContext's trust store can only grow. Open
connections stay. Handshake failures are reported here: asyncio just closes the connection.
"""

import asyncio
import ssl
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final, NoReturn, Self

import msgspec
import structlog

from allotment.model.errors import PrerequisiteError, UsageError
from allotment.scheduler.tls.authority import Signed


class HandshakeFailure(StrEnum):
    """Why a handshake failed."""

    DISTRUSTED = "distrusted"
    """The client does not trust the server's certificate."""
    NO_CERTIFICATE = "no_certificate"
    """The client shows no certificate."""
    WRONG_CERTIFICATE = "wrong_certificate"
    """The client's certificate has expired, or its authority is not trusted here."""
    OTHER = "other"


_DISTRUST: Final = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")
"""Alerts by which a client rejects a server's certificate (RFC 8446, 6.2). Go sends
`bad_certificate` in all cases, OpenSSL `unknown_ca`."""


class ReloadingTlsContext:
    """The context of a TLS server, reloadable with a new certificate."""

    def __init__(
        self, *, asks: bool = False, on_failure: Callable[[HandshakeFailure], None] = lambda _: None
    ) -> None:
        """`asks`: clients must show a certificate."""
        self._asks = asks
        self._served = b""
        self._inner = self.context = _context(asks=asks)
        self.context.sni_callback = self._enter
        self.context.sslobject_class = _reporting(on_failure)

    @property
    def serves(self) -> bool:
        return bool(self._served)

    def serve(self, server: Signed, *, authorities: bytes = b"") -> None:
        """Use this certificate for new connections, and accept clients of these authorities.

        Raises `UsageError` for invalid authorities (PEM), `PrerequisiteError` as `load_chain`.
        """
        served = server.certificate + authorities
        if served == self._served:
            return
        inner = _context(asks=self._asks)
        load_chain(inner, server.certificate, server.key)
        if self._asks:
            try:
                inner.load_verify_locations(cadata=authorities.decode("ascii"))
            except (ssl.SSLError, ValueError) as error:
                raise UsageError(
                    f"these are not CA certificates: {error}",
                    hint="write them in PEM, one after the other",
                ) from error
        self._inner = inner
        self._served = served

    def _enter(self, connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        """Switch each connection to the current context, whatever name it asks for."""
        del name, outer
        connection.context = self._inner


def load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load a certificate into a context. `ssl` can only read it from a file.

    Raises `PrerequisiteError` if no temporary file can be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="allotment-") as folder:
            path = Path(folder, "chain.pem")
            path.touch(mode=0o600)
            path.write_bytes(certificate + key)
            context.load_cert_chain(path)
    except OSError as error:
        raise PrerequisiteError(
            f"cannot write the webhook's certificate to a temporary file: {error}",
            hint="mount an emptyDir at /tmp, or set TMPDIR to a writable folder",
        ) from error


def _context(*, asks: bool) -> ssl.SSLContext:
    """Return a context; with `asks`, one that requires a client certificate.

    That one issues no session tickets: a resumed session would skip the check of a client whose
    authority was removed. It trusts exactly the listed certificates, also if they are not
    self-signed, as Kubernetes' programs do.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if asks:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _reporting(report: Callable[[HandshakeFailure], None]) -> type[ssl.SSLObject]:
    class Reporting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # the handshake continues
            except ssl.SSLError as error:
                report(_failure(error))
                raise

    return Reporting


def _failure(error: ssl.SSLError) -> HandshakeFailure:
    reason = error.reason or ""
    if "ALERT" in reason and any(alert in reason for alert in _DISTRUST):
        return HandshakeFailure.DISTRUSTED
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return HandshakeFailure.NO_CERTIFICATE
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return HandshakeFailure.WRONG_CERTIFICATE
    return HandshakeFailure.OTHER


_LOOK_S: Final = 2.0

_log = structlog.get_logger(__name__)


class CertificateFiles(msgspec.Struct, frozen=True):
    """A certificate and key in files, and their TLS context."""

    certificate: Path
    key: Path
    context: ssl.SSLContext

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> Self | None:
        """Read both; None if neither is given. Raises `UsageError`."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise UsageError(
                "a certificate needs its key",
                hint="give both, --tls-cert-file and --tls-key-file, or neither",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{certificate} and {key} are not a certificate and its key: {error}",
                hint="both are PEM files; the server's certificate is the first in its file",
            ) from error
        return cls(certificate, key, context)

    async def run(self) -> NoReturn:
        last = self._stamp()
        while True:
            await asyncio.sleep(_LOOK_S)
            stamp = self._stamp()
            if stamp == last or stamp is None:
                continue
            try:
                self.context.load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "cannot read the certificate; still serving the old one", why=str(error)
                )
                continue
            last = stamp
            _log.info("serving a new certificate")

    def _stamp(self) -> tuple[float, ...] | None:
        """Return both files' modification times; None while they are being replaced."""
        try:
            return tuple(path.stat().st_mtime for path in (self.certificate, self.key))
        except OSError:
            return None
