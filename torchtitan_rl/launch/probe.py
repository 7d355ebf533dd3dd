"""Why a worker cannot be attached. Monarch reports every cause as the same time-out, so each
address is tried here first, with the keys that Monarch will use.

A worker sees a connection that ends before its first message, and goes on listening.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.keys import AUTHORITY, CERTIFICATE, KEY

_TRY_S = 5.0
_PAUSE_S = 0.2
_ANSWER_S = 1.0  # for a server to refuse a certificate after the handshake
_OWN_REFUSED = "ALERT"  # in OpenSSL's name of an error that the other end sent
_EXPIRED, _TOO_EARLY = 10, 9  # OpenSSL's numbers of what is wrong with a certificate
_OTHER_NAME = (62, 64)  # name, IP address


def probe_errors(
    field: str, addresses: Sequence[Address], keys: Path | None, *, wait_s: float = 0.0
) -> list[str]:
    """A message for each worker that cannot be attached, naming ``field``. Blocks; all are tried at
    once.

    Args:
        keys: this host's folder (`keys.own_folder`), for ``tls://``.
        wait_s: how long a worker may take to start: until then, one that does not listen is tried
            again.
    """
    remote = [address for address in addresses if address.scheme != "local"]
    end_s = time.monotonic() + wait_s
    with ThreadPoolExecutor(min(64, len(remote) or 1), thread_name_prefix="probe") as pool:
        causes = list(pool.map(lambda one: why_not_attach(one, keys, end_s=end_s), remote))
    return [
        f"{field} is '{address}': {cause}"
        for address, cause in zip(remote, causes, strict=True)
        if cause
    ]


def why_not_attach(
    address: Address, keys: Path | None, *, end_s: float = 0.0, timeout_s: float = _TRY_S
) -> str:
    """Why a worker there would not accept us; empty if it would. One that does not listen is tried
    again until ``end_s`` of the monotonic clock."""
    while True:
        try:
            connection = socket.create_connection((address.host, address.port), timeout_s)
            break
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= end_s:
                return _why_no_connection(error, timeout_s)
            time.sleep(_PAUSE_S)
    with connection:
        if address.scheme == "tls":
            return _try_tls(connection, address, keys)
        return _try_plain(connection, address)


def _why_no_connection(error: Exception, timeout_s: float) -> str:
    match error:
        case socket.gaierror() | UnicodeError():
            return "no machine of this name is known here; give its IP address"
        case ConnectionRefusedError():
            return (
                "nothing listens there; start `torchtitan-rl worker` on that machine, with this "
                "address"
            )
        case TimeoutError():
            return (
                f"no answer within {timeout_s:g} s; is the machine up, and does a firewall let "
                "this port through?"
            )
        case _:
            return f"it cannot be reached ({error})"


def _try_plain(connection: socket.socket, address: Address) -> str:
    """A plain worker hangs up at a TLS greeting, a TLS one answers it."""
    incoming, greeting = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(
        incoming, greeting, server_hostname=address.host
    )
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    try:
        connection.sendall(greeting.read())
        answer = connection.recv(1 << 14)
    except OSError:
        return ""
    if answer[:1] in (b"\x15", b"\x16"):  # an alert, or the server's greeting
        return f"it speaks TLS; give tls://{str(address).partition('//')[2]}, and keys"
    return "what listens there is not a worker" if answer else ""


def _try_tls(connection: socket.socket, address: Address, keys: Path | None) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if keys is not None:
        context.load_verify_locations(keys / AUTHORITY)
        context.load_cert_chain(keys / CERTIFICATE, keys / KEY)
    try:
        with context.wrap_socket(connection, server_hostname=address.host) as tls:
            _await_refusal(tls)
    except ssl.SSLCertVerificationError as error:
        return _certificate_text(error, address.host)
    except ssl.SSLEOFError:
        return "it hung up at the TLS greeting; is it a tcp:// worker?"
    except ssl.SSLError as error:
        if _OWN_REFUSED not in (error.reason or ""):
            return "what listens there does not speak TLS; is it a tcp:// worker?"
        said = (error.reason or "").rpartition("ALERT_")[2].replace("_", " ").lower()
        ours = "this host's certificate" if keys is not None else "a host without a certificate"
        return f"the worker refuses {ours} ({said}); are its keys of the same authority?"
    except TimeoutError:
        return "it accepts connections and does not answer; is the worker stopped?"
    except OSError:
        return "it hung up at the TLS greeting; is it a tcp:// worker?"
    return ""


def _await_refusal(tls: ssl.SSLSocket) -> None:
    """Under TLS 1.3 a server checks the client's certificate after the client has finished: its
    refusal, or its session tickets, come later.

    Raises:
        ssl.SSLError: the server refuses the client.
    """
    if tls.version() != "TLSv1.3":
        return
    tls.settimeout(_ANSWER_S)
    with contextlib.suppress(TimeoutError):
        tls.recv(1)


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
