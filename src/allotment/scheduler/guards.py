# SPDX-License-Identifier: Apache-2.0
"""TLS servers' contexts that are renewed while they are served, and that know who comes.

Each who comes is met by a context that was made of what is served now: what a context trusts can be
added to, and not be taken away. Those who are connected stay so.

What fails of a handshake, a server hears of in no other way: asyncio ends the connection, and no
request comes.
"""

import ssl
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Final

from allotment.model.errors import PrerequisiteError, UsageError
from allotment.scheduler.certificates import Signed

__all__ = ["Failure", "Guard", "load_chain"]


class Failure(StrEnum):
    """Why a handshake failed."""

    DISTRUSTED = "distrusted"
    """Who came does not trust the certificate that is served."""
    NO_CERTIFICATE = "no_certificate"
    """Who came shows none."""
    WRONG_CERTIFICATE = "wrong_certificate"
    """Who came shows one of an authority that is not trusted here, or one that has ended."""
    OTHER = "other"


_DISTRUST: Final = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN", "CERTIFICATE_EXPIRED")
"""Of the alerts by which a client refuses a server's certificate (RFC 8446, 6.2). Go's sends
`bad_certificate`, whatever it is that it minds; OpenSSL's `unknown_ca`."""


class Guard:
    """One TLS server's context, which is served anew with each certificate."""

    def __init__(
        self, *, asks: bool = False, on_failure: Callable[[Failure], None] = lambda _: None
    ) -> None:
        """Serve nothing yet. `asks`: only who shows a certificate gets in."""
        self._asks = asks
        self._served = b""
        self._inner = self.context = _context(asks=asks)
        self.context.sni_callback = self._enter
        self.context.sslobject_class = _telling(on_failure)

    @property
    def serves(self) -> bool:
        """Whether there is something to serve."""
        return bool(self._served)

    def serve(self, server: Signed, *, authorities: bytes = b"") -> None:
        """Show this certificate from here on, to those whom one of the authorities has signed.

        Raises `UsageError`: these are no authorities (PEM). `PrerequisiteError`: as `load_chain`.
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
                    f"these are no certificates of authorities: {error}",
                    hint="they are to be in PEM, one after the other",
                ) from error
        self._inner = inner
        self._served = served

    def _enter(self, connection: ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
        """Let who comes be asked by the context of now; called of each, whatever name it gives."""
        del name, outer
        connection.context = self._inner


def load_chain(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Put a certificate into a context. ssl reads it from a file alone.

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


def _context(*, asks: bool) -> ssl.SSLContext:
    """Return a context; one that asks each who comes for a certificate.

    That one gives out no session to go on with later: in one that is, nobody is asked again, though
    the authority may be gone by then. And it trusts what it was told to trust, of whomever that is
    itself a certificate, as Kubernetes' own programs do.
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


def _telling(tell: Callable[[Failure], None]) -> type[ssl.SSLObject]:
    class Telling(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise  # it goes on
            except ssl.SSLError as error:
                tell(_failure(error))
                raise

    return Telling


def _failure(error: ssl.SSLError) -> Failure:
    reason = error.reason or ""
    if "ALERT" in reason and any(each in reason for each in _DISTRUST):
        return Failure.DISTRUSTED
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return Failure.NO_CERTIFICATE
    if reason == "CERTIFICATE_VERIFY_FAILED":
        return Failure.WRONG_CERTIFICATE
    return Failure.OTHER
