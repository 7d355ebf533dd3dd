"""A run's own certificate authority, and the certificates of its hosts. Nothing here is written.

A host's certificate has all its names and IP addresses, and is both a server's and a client's: each
host listens, and connects to the others. Keys are ECDSA on P-256.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchtitan_rl.launch.addresses import ip_of

_CLOCKS_DIFFER = timedelta(days=1)  # at most so much, between hosts
_MAX_COMMON_NAME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A certificate and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )


def make_authority(*, now: datetime, days: int) -> Identity:
    """A certificate authority that can make hosts' certificates and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("torchtitan-rl run")
    builder = (
        _builder(name, name, key, now=now, end=now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_authority=True), critical=True)
    )
    return Identity(certificate=builder.sign(key, hashes.SHA256()), key=key)


def make_host(authority: Identity, names: Sequence[str], *, now: datetime, days: int) -> Identity:
    """For a host with these names and IP addresses. It does not outlive the authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    end = min(now + timedelta(days=days), issuer.not_valid_after_utc)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(_name(names[0]), issuer.subject, key, now=now, end=end)
        .add_extension(x509.SubjectAlternativeName(map(_alternative, names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    return Identity(certificate=builder.sign(authority.key, hashes.SHA256()), key=key)


def names_of(certificate: x509.Certificate) -> list[str]:
    """The names and IP addresses that a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    ]


def covers(certificate: x509.Certificate, host: str) -> bool:
    """Whether a certificate is for this name or IP address."""
    ip = ip_of(host)
    wanted = host.lower() if ip is None else str(ip)
    return wanted in map(str.lower, names_of(certificate))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def _alternative(host: str) -> x509.GeneralName:
    ip = ip_of(host)
    return x509.DNSName(host) if ip is None else x509.IPAddress(ip)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )
