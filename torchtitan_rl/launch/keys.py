"""The keys of a run's machines: its own certificate authority, and a certificate and a private key
for each host.

`create` and `add` write the files of ``torchtitan-rl keys``: the authority, and a folder for each
host, to be copied there. `tls_environment` checks a host's folder and passes it to Monarch. If all
hosts read the whole folder that ``torchtitan-rl keys`` wrote, each uses the subfolder with its own
name.

A host's certificate has all its names and IP addresses, and is valid for servers and clients,
because each host listens and connects to others. Keys are ECDSA on P-256. The private key of the
authority is only in the written folder itself, not in the hosts' folders. Files of private keys are
created readable by their owner only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address, ip_of

CERTIFICATE = "cert.pem"
KEY = "key.pem"
AUTHORITY = "ca.pem"
AUTHORITY_KEY = "ca-key.pem"
_CLOCKS_DIFFER = timedelta(days=1)  # largest difference between the clocks of hosts
_MAX_COMMON_NAME = 64
_LEAST_LEFT = timedelta(days=1)
_MAKE = "make keys with `torchtitan-rl keys`"


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
    """Make a certificate authority that can only sign certificates of hosts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("torchtitan-rl run")
    end = now + timedelta(days=days)
    builder = _builder(name, name, key, now=now, end=end, is_authority=True)
    return Identity(certificate=builder.sign(key, hashes.SHA256()), key=key)


def make_host(authority: Identity, names: Sequence[str], *, now: datetime, days: int) -> Identity:
    """Make a certificate for a host with these names and IP addresses. The certificate expires no
    later than the authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    end = min(now + timedelta(days=days), issuer.not_valid_after_utc)
    ips = [(name, ip_of(name)) for name in names]
    alternatives = [x509.DNSName(name) if ip is None else x509.IPAddress(ip) for name, ip in ips]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(_name(names[0]), issuer.subject, key, now=now, end=end, is_authority=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
    )
    return Identity(certificate=builder.sign(authority.key, hashes.SHA256()), key=key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    now: datetime,
    end: datetime,
    is_authority: bool,
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
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
    path_length = 0 if is_authority else None
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=path_length), True)
        .add_extension(usage, critical=True)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_MAX_COMMON_NAME])])


def create(folder: Path, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Make an authority, and keys for each host; a host is ``NAME`` or ``NAME,OTHER_NAME,...``.
    Returns the folders to copy, in the order of ``hosts``. Raises ConfigError if a host is invalid,
    or the folder is not empty or cannot be written."""
    names = _parse("--hosts", hosts)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"--output is {folder}: it exists; give another, or --add for keys of more hosts"
        )
    authority = make_authority(now=datetime.now(UTC), days=days)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        _write_private(folder / AUTHORITY_KEY, authority.key_pem)
        (folder / AUTHORITY).write_bytes(authority.certificate_pem)
        return [_write_host(folder, authority, one, days) for one in names]
    except OSError as error:
        raise ConfigError(f"--output is {folder}: it cannot be written ({error})") from error


def add(folder: Path, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Make keys for more hosts, by the same authority; see `create`. Raises ConfigError if a host
    is invalid or already has keys, or the folder has no authority."""
    names = _parse("--add", hosts)
    for one in names:
        if (folder / folder_name(one[0])).exists():
            raise ConfigError(f"--add is {one[0]}: {folder / folder_name(one[0])} exists")
    try:
        certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{AUTHORITY_KEY} is not an ECDSA key")
        authority = Identity(certificate=certificate, key=key)
        return [_write_host(folder, authority, one, days) for one in names]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--output is {folder}: keys cannot be added there ({error}); give the folder that "
            "`torchtitan-rl keys` wrote"
        ) from error


def valid_until(folder: Path) -> datetime:
    """The time when the certificate in a host's folder expires."""
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    return certificate.not_valid_after_utc


def _parse(option: str, hosts: Sequence[str]) -> list[list[str]]:
    """Parse the names of each host, which must be addresses without scheme and port."""
    parsed = [host.split(",") for host in hosts]
    for name in (name for names in parsed for name in names):
        try:
            address = Address.parse(str(Address(scheme="tls", host=name, port=1)))
        except ConfigError as error:
            fix = "give a host's name or IP address, such as node2 or 10.0.0.2"
            raise ConfigError(f"{option} is {name!r}: {fix}") from error
        if address.is_wildcard:
            raise ConfigError(f"{option} is {name!r}: give the address of one interface")
    folders = [folder_name(names[0]) for names in parsed]
    if twice := {name for name in folders if folders.count(name) > 1}:
        raise ConfigError(f"{option} has {', '.join(sorted(twice))} more than once")
    return parsed


def _write_host(folder: Path, authority: Identity, names: Sequence[str], days: int) -> Path:
    identity = make_host(authority, names, now=datetime.now(UTC), days=days)
    own = folder / folder_name(names[0])
    own.mkdir(mode=0o700)
    _write_private(own / KEY, identity.key_pem)
    (own / CERTIFICATE).write_bytes(identity.certificate_pem)
    (own / AUTHORITY).write_bytes(authority.certificate_pem)
    return own


def _write_private(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def tls_environment(
    keys: Path, *, host: str = "", field: str = "launch.keys", now: datetime | None = None
) -> dict[str, str]:
    """The environment variables that tell Monarch its keys. Set them before Monarch is imported.

    Args:
        host: name or IP address on which this process listens; the certificate must be for it.
        field: the option that the messages name, such as ``--keys``.

    Raises:
        ConfigError: a file is missing, readable by others, damaged, expired, signed by another
            authority or not for ``host``. There is one message for each such file.
    """
    folder = own_folder(keys, host)
    if errors := _file_errors(folder) or _content_errors(folder, host, now or datetime.now(UTC)):
        raise ConfigError([f"{field} is {keys}: {error}" for error in errors])
    return {
        "HYPERACTOR_TLS_CERT": str((folder / CERTIFICATE).absolute()),
        "HYPERACTOR_TLS_KEY": str((folder / KEY).absolute()),
        "HYPERACTOR_TLS_CA": str((folder / AUTHORITY).absolute()),
    }


def own_folder(keys: Path, host: str) -> Path:
    """The subfolder of ``keys`` whose name is ``host``, or whose certificate is for ``host``;
    ``keys`` itself if there is none."""
    own = keys / folder_name(host)
    if host and own.is_dir():
        return own
    if not host or (keys / CERTIFICATE).exists():
        return keys
    for path in sorted(keys.glob(f"*/{CERTIFICATE}")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):  # skip it: if it is this host's, a later check reports it
            continue
        if _covers(certificate, host):
            return path.parent
    return keys


def folder_name(host: str) -> str:
    """The folder's name for a host. The name has no colons, because ``scp`` takes the text before a
    colon for the name of a machine."""
    return host.lower().replace(":", "-")


def _file_errors(folder: Path) -> list[str]:
    if not folder.is_dir():
        return [f"there is no such folder; {_MAKE}, and copy this host's"]
    names = (CERTIFICATE, KEY, AUTHORITY)
    if missing := [name for name in names if not (folder / name).exists()]:
        hosts = sorted(path.parent.name for path in folder.glob(f"*/{CERTIFICATE}"))
        fix = f"give the folder of this host ({', '.join(hosts)})" if hosts else _MAKE
        return [f"{folder} has no {', '.join(missing)}; {fix}"]
    errors = [
        f"{folder / name} cannot be read by this user"
        for name in names
        if not os.access(folder / name, os.R_OK)
    ]
    found = (folder / KEY).stat()
    # Kubernetes lets the group of a pod read a Secret, which is root's.
    if stat.S_IMODE(found.st_mode) & (0o077 if found.st_uid else 0o037):
        errors.append(f"{folder / KEY} can be read by others; `chmod 600 {folder / KEY}`")
    return errors


def _content_errors(folder: Path, host: str, now: datetime) -> list[str]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
        authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        key = load_pem_private_key((folder / KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        return [f"a file of {folder} is not in PEM form ({error}); {_MAKE}"]
    errors = []
    if key.public_key() != certificate.public_key():
        errors.append(f"{folder / KEY} is not the key of {CERTIFICATE}; copy both again")
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        errors.append(f"{folder / CERTIFICATE} is not from this {AUTHORITY}; copy both again")
    for name, one in ((CERTIFICATE, certificate), (AUTHORITY, authority)):
        if fix := _time_error(one, now):
            errors.append(f"{folder / name} {fix}")
    if host and not _covers(certificate, host):
        errors.append(
            f"{folder / CERTIFICATE} is for {', '.join(_names_of(certificate)) or 'no name'}, and "
            f"this host is {host}; make keys for it with `torchtitan-rl keys --add {host}`"
        )
    return errors


def _time_error(certificate: x509.Certificate, now: datetime) -> str:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begin:
        return f"is valid from {begin:%Y-%m-%d %H:%M} UTC on: set this host's clock"
    if now > end:
        return f"expired at {end:%Y-%m-%d %H:%M} UTC; {_MAKE}"
    if now > end - _LEAST_LEFT:
        return f"expires at {end:%Y-%m-%d %H:%M} UTC, in less than a day; {_MAKE}"
    return ""


def _covers(certificate: x509.Certificate, host: str) -> bool:
    ip = ip_of(host)
    wanted = host.lower() if ip is None else str(ip)
    return wanted in map(str.lower, _names_of(certificate))


def _names_of(certificate: x509.Certificate) -> list[str]:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *found.get_values_for_type(x509.DNSName),
        *map(str, found.get_values_for_type(x509.IPAddress)),
    ]
