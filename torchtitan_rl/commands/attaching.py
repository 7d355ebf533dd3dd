"""Attaching a command to the hosts of its configuration, before anything is planned.

Monarch reports every cause for which a worker cannot be attached as the same time-out, so each
address is tried first, with the keys that Monarch will use (`probe_errors`). A worker sees a
connection that ends before its first message, and goes on listening.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.run import LaunchConfig, RunConfig, existing_parent
from torchtitan_rl.errors import ConfigError, HostsBusyError
from torchtitan_rl.launch.addresses import LOCAL, Address
from torchtitan_rl.launch.interfaces import accepts, free_port, why_not_listen
from torchtitan_rl.launch.monarch_environment import set_monarch_environment
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S, find_lives

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.hosts import Hosts

_Attached = TypeVar("_Attached")

_START_S = 15.0  # for workers that are started at the same time
_LOOK_S = 1.0


class Attachment:
    """The hosts that a run is attached to: none until `ask`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.hosts: Hosts | None = None

    def ask(self, policy_dir: Path) -> tuple[HostFacts, ...]:
        """Attach to them, and return what they have; see `AskHosts`."""
        launch = self._config.launch
        own = _own_address(launch)
        far = [text for text in launch.attach if text != LOCAL]
        lives: dict[str, str] = {}
        if own is not None:
            if why := why_not_listen(own):
                raise ConfigError(
                    f"launch.address is '{own}': this process cannot listen there ({why}); give "
                    "an address of this machine, and a free port"
                )
            from torchtitan_rl.launch.keys import own_folder  # loads cryptography

            set_monarch_environment(launch.keys, own, field="launch.keys")
            lives = find_lives(far)
            workers = [Address.parse(text) for text in lives.values()]
            folder = None if launch.keys is None else own_folder(launch.keys, own.host)
            if errors := probe_errors("launch.attach", workers, folder, wait_s=_START_S):
                raise ConfigError(errors)
        with silent_libraries():
            from torchtitan_rl.backends.monarch.host_agent import describe_host  # seconds
            from torchtitan_rl.backends.monarch.hosts import attach

            given = self._config.policy.checkpoint
            checkpoint = str(policy_dir) if Path(given).exists() else given
            here = describe_host(LOCAL, checkpoint)
            self.hosts = attach_once_free(
                lambda lives: attach(launch, own, lives=lives, checkpoint=checkpoint, here=here),
                lives,
                lambda: find_lives(far),
            )
        return self.hosts.facts

    def prepare(self) -> PreparedRun:
        """See `prepare_run` and `require_folders`."""
        prepared = prepare_run(self._config, ask_hosts=self.ask)
        if not prepared.is_complete:
            self.require_folders(prepared)
        return prepared

    def require_folders(self, prepared: PreparedRun) -> None:
        """All processes write logs into the run's folder, and the trainer checkpoints, which the
        controller reads.

        Raises:
            ConfigError: a host of the plan cannot write there, or one of the trainer has another
                folder of that name, or none.
        """
        config, plan = prepared.config, prepared.plan
        if self.hosts is None or plan.trainer is None:
            return
        indices = [part.host for part in plan.trainer.on_each_host()]
        used = {*indices, *(group.host for group in plan.replicas)}
        if unwritable := self.hosts.cannot_write(sorted(used), config.log_dir.absolute()):
            raise ConfigError(
                [
                    f"output_dir is {config.output_dir}: on {host}, {why}; give another"
                    for host, why in unwritable.items()
                ]
            )
        folder = existing_parent(config.run_dir)
        if apart := self.hosts.without_folder(indices, folder):
            raise ConfigError(
                f"output_dir is {config.output_dir}: {', '.join(apart)}, where the trainer writes "
                "checkpoints, has another folder of that name or none; give one on storage that "
                "both have, or a launch.trainer_hosts that is local"
            )


@contextmanager
def attachment(config: RunConfig) -> Iterator[Attachment]:
    """Whatever it attaches to is left at the end, and can be used by the next run."""
    attached = Attachment(config)
    try:
        yield attached
    finally:
        if attached.hosts is not None:
            attached.hosts.detach()


def attach_once_free(
    attach: Callable[[Mapping[str, str]], _Attached],
    lives: Mapping[str, str],
    find: Callable[[], Mapping[str, str]],
    *,
    within_s: float = CONTROLLER_LOST_S + 10.0,
) -> _Attached:
    """Attach to workers where they listen (``lives``). Those that serve another run may be left by
    a lost controller: they are waited for, and attached where ``find`` then finds them.

    Raises:
        ConfigError: they cannot be attached; `HostsBusyError`: not within this time, or not by this
            process.
    """
    deadline_s = time.monotonic() + within_s
    tried: set[str] = set()  # Monarch attaches none of them again
    ended: set[str] = set()  # of these, where it no longer was the same life
    while True:
        try:
            return attach(lives)
        except HostsBusyError as error:
            if not tried:
                print("waiting for workers that serve another run", file=sys.stderr)
            tried.update(lives.values())
            while not (tried.isdisjoint(lives.values()) and all(map(accepts, lives.values()))):
                ended.update(one for one in tried if not accepts(one))
                free = {worker for worker, one in lives.items() if one not in tried - ended}
                if free == lives.keys() and all(map(accepts, lives.values())):
                    raise HostsBusyError(
                        "launch.attach: all workers are free by now, and this process cannot use "
                        "an address twice; start the command again"
                    ) from error
                if time.monotonic() >= deadline_s:
                    raise error
                time.sleep(_LOOK_S)
                lives = find()


def _own_address(launch: LaunchConfig) -> Address | None:
    """Where this controller listens; None where all hosts are this machine."""
    if launch.address:
        return Address.parse(launch.address)
    schemes = {Address.parse(text).scheme for text in launch.attach} - {"local"}
    if not schemes:
        return None
    return Address(scheme=schemes.pop(), host="127.0.0.1", port=free_port())


@contextmanager
def silent_libraries() -> Iterator[None]:
    """What native code writes to the console meanwhile is dropped (Monarch has a log of its own);
    what this program says is not."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    saved = [os.dup(standard) for standard in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for standard in (1, 2):
            os.dup2(nowhere, standard)
        sys.stdout, sys.stderr = (os.fdopen(copy, "w", 1, closefd=False) for copy in saved)
        yield
    finally:
        sys.stdout, sys.stderr = streams
        os.close(nowhere)
        for standard, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, standard)
            os.close(copy)


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
        from torchtitan_rl.launch.keys import AUTHORITY, CERTIFICATE, KEY  # loads cryptography

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
