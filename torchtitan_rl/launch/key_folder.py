"""What ``torchtitan-rl keys`` writes: an authority, and a folder to copy to each host.

The private key of the authority is in this folder alone. Private keys are readable by their owner
only, from their first byte on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.certificates import Identity, make_authority, make_host
from torchtitan_rl.launch.tls import AUTHORITY, CERTIFICATE, KEY, folder_name

AUTHORITY_KEY = "ca-key.pem"


def create(folder: Path, hosts: Sequence[str], *, days: int) -> list[Path]:
    """Make an authority, and keys for each host; a host is ``NAME`` or ``NAME,OTHER_NAME,...``.
    Returns the folders to copy, in order.

    Raises:
        ConfigError: a host is not one, or the folder has something in it, or cannot be written.
    """
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
    """Make keys for more hosts, by the same authority. Returns the folders to copy.

    Raises:
        ConfigError: a host is not one or has keys, or the folder has no authority.
    """
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
    """The end of a host's certificate."""
    certificate = x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes())
    return certificate.not_valid_after_utc


def _parse(option: str, hosts: Sequence[str]) -> list[list[str]]:
    """The names of each host, which must be addresses without scheme and port."""
    parsed: list[list[str]] = []
    for host in hosts:
        names = host.split(",")
        for name in names:
            try:
                address = Address.parse(f"tls://[{name}]:1" if ":" in name else f"tls://{name}:1")
            except ConfigError as error:
                fix = "give a host's name or IP address, such as node2 or 10.0.0.2"
                raise ConfigError(f"{option} is {name!r}: {fix}") from error
            if address.is_wildcard:
                raise ConfigError(f"{option} is {name!r}: give the address of one interface")
        parsed.append(names)
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
