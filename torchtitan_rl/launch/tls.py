"""The keys of a host as Monarch takes them: `tls_environment`, which checks them first.

A folder has `CERTIFICATE`, `KEY` and `AUTHORITY`. Where all hosts read the same folder that
``torchtitan-rl keys`` wrote, each finds its own in the subfolder of its name.
"""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509

CERTIFICATE = "cert.pem"
KEY = "key.pem"
AUTHORITY = "ca.pem"
_LEAST_LEFT = timedelta(days=1)
_MAKE = "make keys with `torchtitan-rl keys`"


def tls_environment(
    keys: Path, *, host: str = "", field: str = "launch.keys", now: datetime | None = None
) -> dict[str, str]:
    """The variables that Monarch reads its keys from; set them before it is imported.

    Args:
        host: name or IP address that this process listens on; its certificate must be for it.
        field: what the messages name, such as ``--keys``.

    Raises:
        ConfigError: a file is missing, readable by others, damaged, expired, not of this authority
            or not for ``host``; a message for each.
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
    """Where the keys of this host are: in the subfolder of its name, or of another name that its
    certificate has, if there is one."""
    own = keys / folder_name(host)
    if host and own.is_dir():
        return own
    if not host or (keys / CERTIFICATE).exists():
        return keys
    return _folder_by_certificate(keys, host) or keys


def _folder_by_certificate(keys: Path, host: str) -> Path | None:
    from cryptography import x509

    from torchtitan_rl.launch.certificates import covers

    for path in sorted(keys.glob(f"*/{CERTIFICATE}")):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):  # not this host's, or its own error names it
            continue
        if covers(certificate, host):
            return path.parent
    return None


def folder_name(host: str) -> str:
    """``scp`` takes what is before a colon for a machine."""
    return host.lower().replace(":", "-")


def _file_errors(folder: Path) -> list[str]:
    if not folder.is_dir():
        return [f"there is no such folder; {_MAKE}, and copy this host's"]
    if missing := [name for name in (CERTIFICATE, KEY, AUTHORITY) if not (folder / name).exists()]:
        hosts = sorted(path.parent.name for path in folder.glob(f"*/{CERTIFICATE}"))
        fix = f"give the folder of this host ({', '.join(hosts)})" if hosts else _MAKE
        return [f"{folder} has no {', '.join(missing)}; {fix}"]
    errors = []
    for name in (CERTIFICATE, KEY, AUTHORITY):
        if not os.access(folder / name, os.R_OK):
            errors.append(f"{folder / name} cannot be read by this user")
    mode = stat.S_IMODE((folder / KEY).stat().st_mode)
    if mode & 0o077:
        errors.append(f"{folder / KEY} can be read by others; `chmod 600 {folder / KEY}`")
    return errors


def _content_errors(folder: Path, host: str, now: datetime) -> list[str]:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from torchtitan_rl.launch.certificates import covers, names_of

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
    if host and not covers(certificate, host):
        errors.append(
            f"{folder / CERTIFICATE} is for {', '.join(names_of(certificate)) or 'no name'}, and "
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
