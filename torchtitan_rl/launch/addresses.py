"""The addresses of a run's machines: `Address` parses one, `address_errors` checks it.

- ``tls://HOST:PORT`` is encrypted and authenticated at both ends; it needs the run's keys.
- ``tcp://HOST:PORT`` is neither encrypted nor authenticated. Everyone who can reach the address can
  run programs there; all users of a machine can reach its loopback addresses. Plain TCP must be
  allowed explicitly.
- ``local`` is this machine, without an address.

A process listens on one address, never on all interfaces of a machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from torchtitan_rl.errors import ConfigError

LOCAL = "local"
_FORM = re.compile(r"(?P<scheme>[^:/]*)://(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:/\[\]]*)):(?P<port>.*)")
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.IGNORECASE | re.ASCII)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address on which a process listens. ``host`` is an IP address or a name; the address
    ``local`` has no host and no port.

    ``str()`` returns the form that Monarch accepts, with an IPv6 host in brackets.
    """

    scheme: Literal["local", "tcp", "tls"]
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ConfigError, which says what to give instead, without the field's name."""
        if text == LOCAL:
            return cls(scheme="local")
        form = _FORM.fullmatch(text)
        if form is None or form["scheme"] not in ("tcp", "tls"):
            raise ConfigError(
                "give tls://HOST:PORT, such as tls://10.0.0.2:26600 or tls://[fd00::2]:26600"
            )
        host = form["host"] if form["v6"] is None else form["v6"]
        if error := _host_error(host, in_brackets=form["v6"] is not None):
            raise ConfigError(error)
        if not re.fullmatch(r"[0-9]{1,5}", form["port"]) or not 0 < int(form["port"]) < 1 << 16:
            raise ConfigError(f"its port is {form['port']!r}; give 1 to 65535")
        scheme = cast(Literal["tcp", "tls"], form["scheme"])
        return cls(scheme=scheme, host=host, port=int(form["port"]))

    def __str__(self) -> str:
        if self.scheme == "local":
            return LOCAL
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only the machine that listens can reach this address. The only host name that
        counts as loopback is ``localhost``; other names are not looked up."""
        if self.scheme == "local" or self.host.lower() == "localhost":
            return True
        ip = ip_of(self.host)
        return ip is not None and ip.is_loopback

    @property
    def neighbourhood(self) -> str:
        """A phrase for error messages: from where the address can be reached."""
        return "on this machine" if self.is_loopback else "in the network"

    @property
    def is_wildcard(self) -> bool:
        """Whether the address stands for all interfaces of the machine."""
        ip = ip_of(self.host)
        return ip is not None and ip.is_unspecified


def address_errors(
    field: str, text: str, *, keys: Path | None, allow_plain_tcp: bool, is_own: bool = False
) -> list[str]:
    """Return at most one message: why this address cannot be used, with the field's name and the
    fix.

    ``field`` is ``launch.attach`` or an option such as ``--address``; the message names related
    fields in the same style. ``is_own``: the caller will listen there, so ``local`` is not allowed.

    >>> address_errors("--address", "tcp://10.0.0.2:26600", keys=None, allow_plain_tcp=True)
    []
    """
    try:
        address = Address.parse(text)
    except ConfigError as error:
        return [f"{field} is {text!r}: {error}"]
    fix = ""
    if address.scheme == "local":
        fix = "give the address to listen on, tls://HOST:PORT" if is_own else ""
    elif address.is_wildcard:
        fix = "that is every interface of the machine; give the address of one"
    elif address.scheme == "tls" and keys is None:
        fix = f"tls:// needs {_next_to(field, 'keys')}; make them with `torchtitan-rl keys`"
    elif address.scheme == "tcp" and not allow_plain_tcp:
        fix = (
            "tcp:// is neither encrypted nor authenticated; make keys with `torchtitan-rl keys` "
            f"and give tls:// and {_next_to(field, 'keys')}, or, where no one else is "
            f"{address.neighbourhood}, {_next_to(field, 'allow_plain_tcp')}"
        )
    elif address.scheme == "tcp" and keys is not None:
        fix = f"tcp:// does not use {_next_to(field, 'keys')}; give tls://, or no keys"
    return [f"{field} is {text!r}: {fix}"] if fix else []


def mixed_errors(field: str, texts: Iterable[str]) -> list[str]:
    """Errors if the machines cannot all connect to each other, because TLS and plain TCP are mixed
    or an address is given twice. Invalid addresses are ignored."""
    addresses = []
    for text in texts:
        try:
            addresses.append(Address.parse(text))
        except ConfigError:
            continue
    errors = []
    if len({address.scheme for address in addresses} - {"local"}) > 1:
        errors.append(f"{field} has tls:// and tcp:// addresses: give one kind for all machines")
    twice = {str(address) for address in addresses if addresses.count(address) > 1}
    errors += [f"{field} has {address} more than once: give each once" for address in sorted(twice)]
    return errors


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of ``host``; None if ``host`` is a name. An IPv4-mapped IPv6 address becomes
    an IPv4 address."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def _host_error(host: str, *, in_brackets: bool) -> str:
    ip = ip_of(host)
    if in_brackets and (ip is None or ":" not in host or "%" in host):
        return f"[{host}] is not an IPv6 address; scopes (%eth0) are not supported"
    if ip is None and (
        not all(map(_LABEL.fullmatch, host.split(".")))
        or len(host) > 253
        or _NUMBER.fullmatch(host.rpartition(".")[2])  # for the system, 0x0 is 0.0.0.0, not a name
    ):
        return f"{host!r} is neither an IP address nor the name of a machine"
    return ""


def _next_to(field: str, name: str) -> str:
    """The related field ``name``, written in the style of ``field``: as a field of the same
    configuration section, or as an option of the same command."""
    if field.startswith("--"):
        return f"--{name.replace('_', '-')}"
    return f"{field.rpartition('.')[0]}.{name}".lstrip(".")
