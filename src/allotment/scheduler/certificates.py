# SPDX-License-Identifier: Apache-2.0
"""The scheduler's own certificate authority: what is made when, and nothing of where it is kept.

The API server trusts the webhook by the bundle in the webhook's configuration, and kube-scheduler
the extender by a file. Both are this authority's, and so is the certificate by which the extender
knows kube-scheduler: nothing has to be installed for it.

* The serving certificate is renewed when a third of its life is left, under the same authority;
  kube-scheduler's likewise.
* The authority is renewed likewise. For a while there are two: the bundle has both at once, and the
  new one signs only when the bundle with it has been out for long enough (`overlap`). The old one
  leaves the bundle when it has expired. So there is no moment at which whoever trusts the bundle of
  a minute ago refuses the certificate of now.

Clocks differ. Certificates begin an hour before they are made, and a renewal is due so early that
no clock that is wrong by hours can make one expire. Nothing here reads a clock or asks for
randomness but keys: the time is an argument, and so a decision can be looked at.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allotment.model.errors import UsageError

__all__ = ["CertificateSet", "Lives", "Signed", "next_client", "next_set", "read_set"]

_AUTHORITY: Final = "Allotment webhook authority"
_SERVER: Final = "Allotment webhook"
_CLIENT: Final = "Allotment kube-scheduler"
_PATH_LENGTH: Final = 0
"""Of the authority: it signs servers, and no other authority."""

_UNREADABLE: Final = (
    *(KeyError, ValueError, TypeError, InvalidSignature),
    *(UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension),
)

AUTHORITY_CERT, AUTHORITY_KEY = "ca.crt", "ca.key"
NEXT_CERT, NEXT_KEY = "next-ca.crt", "next-ca.key"
SERVER_CERT, SERVER_KEY = "tls.crt", "tls.key"
BUNDLE = "bundle.crt"


@dataclass(frozen=True, slots=True)
class Lives:
    """How long certificates are for."""

    authority: timedelta = timedelta(days=3650)
    server: timedelta = timedelta(days=90)
    overlap: timedelta = timedelta(days=30)
    """How long a new authority is in the bundle before it signs: kube-scheduler reads whom to trust
    at its start alone."""
    skew: timedelta = timedelta(hours=1)
    """How long before it is made a certificate begins."""


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate with its key, in PEM."""

    certificate: bytes
    key: bytes

    def parsed(self) -> x509.Certificate:
        """Return the certificate."""
        return x509.load_pem_x509_certificate(self.certificate)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSet:
    """All of it, as it is kept."""

    authority: Signed
    server: Signed
    successor: Signed | None = None
    """The authority that will sign next: in the bundle already."""
    bundle: bytes
    """Every authority that is to be trusted."""

    def as_data(self) -> dict[str, bytes]:
        """Return what a Secret of type kubernetes.io/tls holds, and what is ours besides."""
        data = {
            AUTHORITY_CERT: self.authority.certificate,
            AUTHORITY_KEY: self.authority.key,
            SERVER_CERT: self.server.certificate,
            SERVER_KEY: self.server.key,
            BUNDLE: self.bundle,
        }
        if self.successor is not None:
            data |= {NEXT_CERT: self.successor.certificate, NEXT_KEY: self.successor.key}
        return data


def read_set(data: dict[str, bytes]) -> CertificateSet:
    """Read what was kept. Raises `UsageError`: something is missing, or is no certificate."""
    try:
        found = CertificateSet(
            authority=Signed(data[AUTHORITY_CERT], data[AUTHORITY_KEY]),
            server=Signed(data[SERVER_CERT], data[SERVER_KEY]),
            successor=Signed(data[NEXT_CERT], data[NEXT_KEY]) if NEXT_CERT in data else None,
            bundle=data[BUNDLE],
        )
        for each in (found.authority, found.successor):
            if each is not None:
                _check_pair(each)
                _check_authority(each)
        _check_pair(found.server)
        found.server.parsed().extensions.get_extension_for_class(x509.SubjectAlternativeName)
        x509.load_pem_x509_certificates(found.bundle)
    except _UNREADABLE as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"the webhook's certificates cannot be read: {what}",
            hint="they are made anew where none are served; who wrote into their Secret?",
        ) from error
    return found


def next_set(
    now: datetime, *, names: Sequence[str], kept: CertificateSet | None, lives: Lives
) -> CertificateSet | None:
    """Say what has to be kept in place of `kept`; None: it is as it should be.

    `names` are those by which the server is reached, DNS names or addresses. One step at a time:
    what is returned may need another step later.
    """
    if kept is None or _has_ended(kept.authority, now) or _is_early(kept.authority, now):
        # Nothing is left to trust; or it was made by a clock that is far ahead.
        authority = _authority(now, lives)
        server = _server(authority, now, names=names, lives=lives)
        bundle = authority.certificate
        if kept is not None:
            bundle = _bundle(now, authority, *_authorities(kept.bundle))
        return CertificateSet(authority=authority, server=server, bundle=bundle)
    changed = _with_successor(kept, now, lives)
    if _is_due(changed.server, now, lives) or not _serves(changed, names):
        server = _server(changed.authority, now, names=names, lives=lives)
        changed = replace(changed, server=server)
    bundle = _bundle(now, changed.authority, changed.successor, *_authorities(changed.bundle))
    changed = replace(changed, bundle=bundle)
    return None if changed == kept else changed


def next_client(
    now: datetime, *, kept: CertificateSet, found: Mapping[str, bytes], lives: Lives
) -> dict[str, bytes] | None:
    """Say what kube-scheduler is to have in place of what was found; None: it has it.

    A certificate and its key, and whom to trust. Nothing of the authority's key.
    """
    client = _client_of(found)
    if client is None or _is_due(client, now, lives) or not _is_of(client, kept.authority):
        client = _issued(
            kept.authority,
            now,
            subject=_CLIENT,
            purpose=ExtendedKeyUsageOID.CLIENT_AUTH,
            names=(),
            lives=lives,
        )
    wanted = {
        SERVER_CERT: client.certificate,
        SERVER_KEY: client.key,
        AUTHORITY_CERT: kept.bundle,
    }
    return None if wanted == found else wanted


def _client_of(found: Mapping[str, bytes]) -> Signed | None:
    """Return the certificate that was found; None: none that could be gone on with."""
    try:
        client = Signed(found[SERVER_CERT], found[SERVER_KEY])
        _check_pair(client)
        usage = client.parsed().extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except _UNREADABLE:
        return None
    return client if ExtendedKeyUsageOID.CLIENT_AUTH in usage.value else None


def _with_successor(kept: CertificateSet, now: datetime, lives: Lives) -> CertificateSet:
    """Make the next authority in time, and let it sign when it is known."""
    successor = kept.successor
    if successor is None:
        if not _is_due(kept.authority, now, lives):
            return kept
        return replace(kept, successor=_authority(now, lives))
    made = successor.parsed().not_valid_before_utc + lives.skew
    if now - made < lives.overlap and not _is_nearly_over(kept.authority, now, lives):
        return kept
    return replace(kept, authority=successor, successor=None)


def _is_due(signed: Signed, now: datetime, lives: Lives) -> bool:
    """Whether no more than a third of its life is left, or it has not begun."""
    its = signed.parsed()
    life = its.not_valid_after_utc - its.not_valid_before_utc - lives.skew
    return its.not_valid_after_utc - now <= life / 3 or _is_early(signed, now)


def _is_nearly_over(signed: Signed, now: datetime, lives: Lives) -> bool:
    return signed.parsed().not_valid_after_utc - now <= min(lives.overlap, lives.authority / 6)


def _has_ended(signed: Signed, now: datetime) -> bool:
    return signed.parsed().not_valid_after_utc <= now


def _is_early(signed: Signed, now: datetime) -> bool:
    return signed.parsed().not_valid_before_utc > now


def _serves(kept: CertificateSet, names: Sequence[str]) -> bool:
    """Whether the serving certificate is for these names and of the authority that signs."""
    if not _is_of(kept.server, kept.authority):
        return False
    extensions = kept.server.parsed().extensions
    extension = extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(extension.value) == _alternatives(names)


def _is_of(signed: Signed, authority: Signed) -> bool:
    """Whether this authority has signed it."""
    try:
        signed.parsed().verify_directly_issued_by(authority.parsed())
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _authority(now: datetime, lives: Lives) -> Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _AUTHORITY)])
    builder = (
        _builder(name, name, key.public_key(), now, life=lives.authority, skew=lives.skew)
        .add_extension(x509.BasicConstraints(ca=True, path_length=_PATH_LENGTH), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
    )
    return _signed(builder, key, key)


def _server(authority: Signed, now: datetime, *, names: Sequence[str], lives: Lives) -> Signed:
    return _issued(
        authority,
        now,
        subject=_SERVER,
        purpose=ExtendedKeyUsageOID.SERVER_AUTH,
        names=names,
        lives=lives,
    )


def _issued(
    authority: Signed,
    now: datetime,
    *,
    subject: str,
    purpose: x509.ObjectIdentifier,
    names: Sequence[str],
    lives: Lives,
) -> Signed:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.parsed()
    signer = _curve_key(authority)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    # A certificate that outlives who signed it is worth nothing afterwards.
    life = min(lives.server, issuer.not_valid_after_utc - now)
    builder = (
        _builder(name, issuer.subject, key.public_key(), now, life=life, skew=lives.skew)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName(_alternatives(names)), critical=False
        )
    return _signed(builder, key, signer)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: datetime,
    *,
    life: timedelta,
    skew: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before((now - skew).astimezone(UTC))
        .not_valid_after((now + life).astimezone(UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
) -> Signed:
    certificate = builder.sign(signer, hashes.SHA256())
    return Signed(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    return [_alternative(each) for each in names]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _authorities(bundle: bytes) -> list[Signed]:
    return [
        Signed(each.public_bytes(serialization.Encoding.PEM), b"")
        for each in x509.load_pem_x509_certificates(bundle)
    ]


def _bundle(now: datetime, *authorities: Signed | None) -> bytes:
    """Join all authorities that have not ended, each once, in this order."""
    certificates = [
        each.certificate
        for each in authorities
        if each is not None and not _has_ended(each, now) and not _is_early(each, now)
    ]
    return b"".join(dict.fromkeys(certificates))


def _check_pair(signed: Signed) -> None:
    if _curve_key(signed).public_key() != signed.parsed().public_key():
        raise ValueError("a key does not belong to its certificate")


def _check_authority(signed: Signed) -> None:
    """Whether it may sign: what clients look at, besides who signed it."""
    constraints = signed.parsed().extensions.get_extension_for_class(x509.BasicConstraints)
    if not constraints.value.ca:
        raise ValueError("the authority's certificate is none of an authority")


def _curve_key(signed: Signed) -> ec.EllipticCurvePrivateKey:
    """Return its key. Raises `ValueError`, `TypeError`: it has none of those made here."""
    key = serialization.load_pem_private_key(signed.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("a key is of another kind than those made here")
    return key
