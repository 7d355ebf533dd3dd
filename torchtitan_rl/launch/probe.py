"""Why a worker cannot be attached. Monarch tells every cause as the same time-out, so the address
is tried here first, with the keys that Monarch will use.

A worker sees a connection that ends before its first message, and goes on listening.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.tls import AUTHORITY, CERTIFICATE, KEY

TRY_S = 5.0
_PAUSE_S = 0.2
_ANSWER_S = 1.0  # for a server that says nothing more after the handshake
_OWN_REFUSED = "ALERT"  # in OpenSSL's name of an error that the other end sent
_EXPIRED, _TOO_EARLY = 10, 9  # OpenSSL's numbers of what is wrong with a certificate
_OTHER_NAME = (62, 64)  # name, IP address


@dataclass(frozen=True, slots=True)
class Cause:
    """``may_pass``: where the worker is only starting, this is so for a while."""

    text: str
    may_pass: bool = False


def probe_errors(
    field: str, addresses: Sequence[Address], keys: Path | None, *, wait_s: float = 0.0
) -> list[str]:
    """A message for each worker that cannot be attached, naming ``field``. Blocks.

    Args:
        keys: this host's folder (`tls.own_folder`), for ``tls://``.
        wait_s: how long a worker may take to start: until then, one that does not listen is tried
            again.
    """
    causes = find_causes(addresses, keys, wait_s=wait_s)
    return [f"{field} is '{address}': {cause.text}" for address, cause in causes.items()]


def find_causes(
    addresses: Sequence[Address], keys: Path | None, *, wait_s: float = 0.0
) -> Mapping[Address, Cause]:
    """The workers that cannot be attached, all tried at once."""
    remote = [address for address in addresses if address.scheme != "local"]
    if not remote:
        return {}
    deadline_s = time.monotonic() + wait_s
    with ThreadPoolExecutor(min(64, len(remote)), thread_name_prefix="probe") as pool:
        found = pool.map(lambda address: _find_cause(address, keys, deadline_s), remote)
        return {
            address: cause
            for address, cause in zip(remote, found, strict=True)
            if cause is not None
        }


def _find_cause(address: Address, keys: Path | None, deadline_s: float) -> Cause | None:
    while True:
        cause = try_worker(address, keys)
        if cause is None or not cause.may_pass or time.monotonic() >= deadline_s:
            return cause
        time.sleep(_PAUSE_S)


def try_worker(address: Address, keys: Path | None, *, timeout_s: float = TRY_S) -> Cause | None:
    """One attempt; None where a worker would accept us."""
    try:
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except (OSError, UnicodeError) as error:
        return _connection_cause(error, timeout_s)
    with connection:
        if address.scheme == "tls":
            return _try_tls(connection, address, keys)
        return _try_plain(connection, address)


def _connection_cause(error: Exception, timeout_s: float) -> Cause:
    match error:
        case socket.gaierror() | UnicodeError():
            return Cause(
                "no machine of this name is known here; give its IP address", may_pass=True
            )
        case ConnectionRefusedError():
            return Cause(
                "nothing listens there; start `torchtitan-rl worker` on that machine, with this "
                "address",
                may_pass=True,
            )
        case TimeoutError():
            return Cause(
                f"no answer within {timeout_s:g} s; is the machine up, and does a firewall let "
                "this port through?",
                may_pass=True,
            )
        case _:
            return Cause(f"it cannot be reached ({error})", may_pass=True)


def _try_plain(connection: socket.socket, address: Address) -> Cause | None:
    """A plain worker hangs up at a TLS greeting, a TLS one answers it."""
    greeting = _Handshake(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), address.host)
    try:
        answer = greeting.begin(connection)
    except OSError:
        return None
    if answer[:1] in (b"\x15", b"\x16"):  # an alert, or the server's greeting
        return Cause(f"it speaks TLS; give tls://{str(address).partition('//')[2]}, and keys")
    return Cause("what listens there is not a worker") if answer else None


def _try_tls(connection: socket.socket, address: Address, keys: Path | None) -> Cause | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if keys is not None:
        context.load_verify_locations(keys / AUTHORITY)
        context.load_cert_chain(keys / CERTIFICATE, keys / KEY)
    handshake = _Handshake(context, address.host)
    try:
        handshake.complete(connection)
    except ssl.SSLCertVerificationError as error:
        return Cause(_certificate_text(error, address.host))
    except ssl.SSLError as error:
        if _OWN_REFUSED not in (error.reason or ""):
            return Cause("what listens there does not speak TLS; is it a tcp:// worker?")
        said = (error.reason or "").rpartition("ALERT_")[2].replace("_", " ").lower()
        ours = "this host's certificate" if keys is not None else "a host without a certificate"
        return Cause(f"the worker refuses {ours} ({said}); are its keys of the same authority?")
    except TimeoutError:
        return Cause("it accepts connections and does not answer; is the worker stopped?")
    except OSError:
        return Cause("it hung up at the TLS greeting; is it a tcp:// worker?")
    return None


def _certificate_text(error: ssl.SSLCertVerificationError, host: str) -> str:
    if error.verify_code == _EXPIRED:
        return "the worker's certificate has expired; make keys with `torchtitan-rl keys`"
    if error.verify_code == _TOO_EARLY:
        return "the worker's certificate is not valid yet; compare the clocks of both machines"
    if error.verify_code in _OTHER_NAME:
        return (
            f"the worker's certificate is not for {host}; make keys for it with `torchtitan-rl "
            f"keys --add {host}`"
        )
    return (
        f"the worker's certificate is of another authority ({error.verify_message}); give all "
        "machines keys that one `torchtitan-rl keys` made"
    )


class _Handshake:
    """TLS over a socket whose bytes can be seen. Under TLS 1.3 a server checks the client's
    certificate after the client has finished: its refusal, or its session tickets, come later."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)

    def begin(self, connection: socket.socket) -> bytes:
        """Greet; the first bytes of the answer, none where the other end hung up."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self._send(connection)
        return connection.recv(1 << 14)

    def complete(self, connection: socket.socket) -> None:
        """
        Raises:
            ssl.SSLError: either end refused the other.
            OSError: the other end hung up, or said nothing in time.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._send(connection)
                self._receive(connection)
        self._send(connection)
        connection.settimeout(_ANSWER_S)
        with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
            self._receive(connection)
            self._tls.read(1)

    def _send(self, connection: socket.socket) -> None:
        if self._to_send.pending:
            connection.sendall(self._to_send.read())

    def _receive(self, connection: socket.socket) -> None:
        received = connection.recv(1 << 14)
        if not received:
            raise ConnectionResetError("the other end hung up")
        self._received.write(received)
