# SPDX-License-Identifier: Apache-2.0
"""A certificate that somebody else makes, in files: served, and again when they have changed."""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Self

import structlog

from allotment.model.errors import UsageError

__all__ = ["CertificateFiles"]

_LOOK_S: Final = 2.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """A certificate and its key, and the TLS server's context that has both."""

    certificate: Path
    key: Path
    context: ssl.SSLContext

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None) -> Self | None:
        """Read both; None: neither is given. Raises `UsageError`."""
        if certificate is None and key is None:
            return None
        if certificate is None or key is None:
            raise UsageError(
                "a certificate and its key belong together",
                hint="give both, --tls-cert-file and --tls-key-file, or neither",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{certificate} and {key} are no certificate and key: {error}",
                hint="both are PEM files; the certificate comes first in its own",
            ) from error
        return cls(certificate, key, context)

    async def run(self) -> NoReturn:
        """Serve a new certificate as soon as its files have changed."""
        known = self._stamp()
        while True:
            await asyncio.sleep(_LOOK_S)
            stamp = self._stamp()
            if stamp == known or stamp is None:
                continue
            try:
                self.context.load_cert_chain(self.certificate, self.key)
            except (OSError, ssl.SSLError) as error:
                _log.warning(
                    "the certificate cannot be read; the old one is served", why=str(error)
                )
                continue
            known = stamp
            _log.info("a new certificate is served")

    def _stamp(self) -> tuple[float, ...] | None:
        """Return when both files were written; None: they are being replaced."""
        try:
            return tuple(each.stat().st_mtime for each in (self.certificate, self.key))
        except OSError:
            return None
