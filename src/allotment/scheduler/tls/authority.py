# SPDX-License-Identifier: Apache-2.0
"""The scheduler's certificate authority: decides what to issue, without I/O; time is an argument.

The authority signs the webhook's and the extender's server certificates and kube-scheduler's client
certificate. All are renewed with a third of their life left. A new authority is in the bundle for
`overlap` before it signs, so no trusted bundle ever rejects a current certificate.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allotment.model.errors import UsageError
from allotment.model.structs import replace

_AUTHORITY: Final = "Allotment webhook authority"
_SERVER: Final = ("Allotment webhook", ExtendedKeyUsageOID.SERVER_AUTH)
_CLIENT: Final = ("Allotment kube-scheduler", ExtendedKeyUsageOID.CLIENT_AUTH)
_PATH_LENGTH: Final = 0
"""The authority signs servers and no further authority."""

_UNREADABLE: Final = (
    *(KeyError, ValueError, TypeError, InvalidSignature),
    *(UnsupportedAlgorithm, x509.ExtensionNotFound, x509.DuplicateExtension),
)

AUTHORITY_CERT, AUTHORITY_KEY = "ca.crt", "ca.key"
NEXT_CERT, NEXT_KEY = "next-ca.crt", "next-ca.key"
SERVER_CERT, SERVER_KEY = "tls.crt", "tls.key"
BUNDLE = "bundle.crt"


class Lives(msgspec.Struct, frozen=True):
    """Lifetimes of certificates."""

    authority: timedelta = timedelta(days=3650)
    server: timedelta = timedelta(days=90)
    overlap: timedelta = timedelta(days=30)
    """So long a new authority is in the bundle before it signs: kube-scheduler reads trusted
    authorities only at start."""
    skew: timedelta = timedelta(hours=1)
    """Certificates begin so long before they are issued, for clocks that differ."""


class Signed(msgspec.Struct, frozen=True):
    """A certificate with its key, in PEM."""

    certificate: bytes
    key: bytes

    def parsed(self) -> x509.Certificate:
        return x509.load_pem_x509_certificate(self.certificate)


class CertificateSet(msgspec.Struct, frozen=True, kw_only=True):
    """All certificates and keys, as stored."""

    authority: Signed
    server: Signed
    successor: Signed | None = None
    """The next authority, already in the bundle."""
    bundle: bytes
    """All trusted authorities."""

    def as_data(self) -> dict[str, bytes]:
        """Return the data of a Secret of type kubernetes.io/tls, with further keys of ours."""
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
    """Parse stored data. Raises `UsageError` if it is incomplete or invalid."""
    try:
        certificates = CertificateSet(
            authority=Signed(data[AUTHORITY_CERT], data[AUTHORITY_KEY]),
            server=Signed(data[SERVER_CERT], data[SERVER_KEY]),
            successor=Signed(data[NEXT_CERT], data[NEXT_KEY]) if NEXT_CERT in data else None,
            bundle=data[BUNDLE],
        )
        for signed in (certificates.authority, certificates.successor):
            if signed is not None:
                _check_pair(signed)
                _check_authority(signed)
        _check_pair(certificates.server)
        certificates.server.parsed().extensions.get_extension_for_class(x509.SubjectAlternativeName)
        x509.load_pem_x509_certificates(certificates.bundle)
    except _UNREADABLE as error:
        what = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"the webhook's certificates cannot be read: {what}",
            hint="the scheduler replaces them unless they are in use; check who changed the Secret",
        ) from error
    return certificates


def next_set(
    now: datetime, *, names: Sequence[str], kept: CertificateSet | None, lives: Lives
) -> CertificateSet | None:
    """Return what to store in place of `kept`; None if nothing is due.

    `names` are the server's DNS names or addresses. One step at a time: the result may need another
    step later.
    """
    if kept is None or _has_ended(kept.authority, now) or _is_early(kept.authority, now):
        # No valid authority is left, or it was issued by a clock far ahead.
        authority = _authority(now, lives)
        server = _issued(_SERVER, authority, now, names=names, lives=lives)
        bundle = authority.certificate
        if kept is not None:
            bundle = _bundle(now, authority, *_authorities(kept.bundle))
        return CertificateSet(authority=authority, server=server, bundle=bundle)
    changed = _with_successor(kept, now, lives)
    if _is_due(changed.server, now, lives) or not _serves(changed, names):
        server = _issued(_SERVER, changed.authority, now, names=names, lives=lives)
        changed = replace(changed, server=server)
    bundle = _bundle(now, changed.authority, changed.successor, *_authorities(changed.bundle))
    changed = replace(changed, bundle=bundle)
    return None if changed == kept else changed


def next_client(
    now: datetime, *, kept: CertificateSet, found: Mapping[str, bytes], lives: Lives
) -> dict[str, bytes] | None:
    """Return kube-scheduler's Secret in place of `found`; None if it is up to date.

    A certificate, its key, and the trusted authorities; never the authority's key.
    """
    client = _client_of(found)
    if client is None or _is_due(client, now, lives) or not _is_of(client, kept.authority):
        client = _issued(_CLIENT, kept.authority, now, lives=lives)
    wanted = {
        SERVER_CERT: client.certificate,
        SERVER_KEY: client.key,
        AUTHORITY_CERT: kept.bundle,
    }
    return None if wanted == found else wanted


def _client_of(found: Mapping[str, bytes]) -> Signed | None:
    try:
        client = Signed(found[SERVER_CERT], found[SERVER_KEY])
        _check_pair(client)
        usage = client.parsed().extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    except _UNREADABLE:
        return None
    return client if ExtendedKeyUsageOID.CLIENT_AUTH in usage.value else None


def _with_successor(kept: CertificateSet, now: datetime, lives: Lives) -> CertificateSet:
    """Issue the next authority when due, and let it sign after `overlap`."""
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
    """Return whether at most a third of its life is left, or it begins in the future."""
    certificate = signed.parsed()
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc - lives.skew
    return certificate.not_valid_after_utc - now <= life / 3 or _is_early(signed, now)


def _is_nearly_over(signed: Signed, now: datetime, lives: Lives) -> bool:
    return signed.parsed().not_valid_after_utc - now <= min(lives.overlap, lives.authority / 6)


def _has_ended(signed: Signed, now: datetime) -> bool:
    return signed.parsed().not_valid_after_utc <= now


def _is_early(signed: Signed, now: datetime) -> bool:
    return signed.parsed().not_valid_before_utc > now


def _serves(kept: CertificateSet, names: Sequence[str]) -> bool:
    if not _is_of(kept.server, kept.authority):
        return False
    extensions = kept.server.parsed().extensions
    extension = extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return list(extension.value) == [_alternative(name) for name in names]


def _is_of(signed: Signed, authority: Signed) -> bool:
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


def _issued(
    role: tuple[str, x509.ObjectIdentifier],
    authority: Signed,
    now: datetime,
    *,
    names: Sequence[str] = (),
    lives: Lives,
) -> Signed:
    subject, purpose = role
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.parsed()
    signer = _curve_key(authority)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    # A certificate that outlives its issuer is worthless afterwards.
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
            x509.SubjectAlternativeName(map(_alternative, names)), critical=False
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


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _authorities(bundle: bytes) -> list[Signed]:
    return [
        Signed(certificate.public_bytes(serialization.Encoding.PEM), b"")
        for certificate in x509.load_pem_x509_certificates(bundle)
    ]


def _bundle(now: datetime, *authorities: Signed | None) -> bytes:
    """Join all current authorities, each once, in this order."""
    certificates = [
        authority.certificate
        for authority in authorities
        if authority is not None
        and not _has_ended(authority, now)
        and not _is_early(authority, now)
    ]
    return b"".join(dict.fromkeys(certificates))


def _check_pair(signed: Signed) -> None:
    if _curve_key(signed).public_key() != signed.parsed().public_key():
        raise ValueError("a key does not belong to its certificate")


def _check_authority(signed: Signed) -> None:
    """Raise unless clients accept it as a CA certificate."""
    constraints = signed.parsed().extensions.get_extension_for_class(x509.BasicConstraints)
    if not constraints.value.ca:
        raise ValueError("the authority's certificate is not a CA certificate")


def _curve_key(signed: Signed) -> ec.EllipticCurvePrivateKey:
    """Return its key. Raises `ValueError`, `TypeError` for other types of keys."""
    key = serialization.load_pem_private_key(signed.key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("a key is of another type than Allotment creates")
    return key
