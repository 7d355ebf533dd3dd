"""Attaches a command to the hosts of its configuration, before anything is planned.

If a worker cannot be attached, Monarch reports the same time-out for every cause. So each address
is first probed, with the keys that Monarch will use (`probe_errors`). For the worker a probe is a
connection that ends before its first message; the worker goes on listening.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.run import LaunchConfig, RunConfig, existing_parent
from torchtitan_rl.errors import ConfigError, HostsBusyError
from torchtitan_rl.launch.addresses import LOCAL, Address
from torchtitan_rl.launch.interfaces import accepts, free_port, why_not_listen
from torchtitan_rl.launch.monarch_environment import set_monarch_environment
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.hosts import Hosts

_Attached = TypeVar("_Attached")

_START_S = 15.0  # time for workers that are started together with this command
_BUSY_S = CONTROLLER_LOST_S + 10.0  # in which a worker ends what a lost controller left there
_LOOK_S = 0.25


class Attachment:
    """The hosts to which a run is attached. `ask` attaches to them; before `ask`, ``hosts`` is
    None."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._job = ExitStack()
        self.hosts: Hosts | None = None

    def ask(self, policy_dir: Path) -> tuple[HostFacts, ...]:
        """Attach to the hosts, and return the facts about each; see `AskHosts`."""
        self.hosts = (self._ask_job if self._config.launch.job else self._ask_workers)(policy_dir)
        return self.hosts.facts

    def _ask_workers(self, policy_dir: Path) -> Hosts:
        launch = self._config.launch
        own = _own_address(launch)
        if own is not None:
            if why := why_not_listen(own):
                raise ConfigError(
                    f"launch.address is '{own}': this process cannot listen there ({why}); give "
                    "an address of this machine, and a free port"
                )
            from torchtitan_rl.launch.keys import own_folder  # loads cryptography

            set_monarch_environment(launch.keys, own, field="launch.keys")
            workers = [Address.parse(text) for text in launch.attach]
            folder = None if launch.keys is None else own_folder(launch.keys, own.host)
            if errors := probe_errors("launch.attach", workers, folder, wait_s=_START_S):
                raise ConfigError(errors)
        with silent_libraries():
            from torchtitan_rl.backends.monarch.host_agent import describe_host  # seconds
            from torchtitan_rl.backends.monarch.hosts import attach

            checkpoint = self._checkpoint(policy_dir)
            here = describe_host(LOCAL, checkpoint)
            return attach_once_free(
                lambda is_again: attach(
                    launch, own, checkpoint=checkpoint, here=here, is_again=is_again
                )
            )

    def _ask_job(self, policy_dir: Path) -> Hosts:
        set_monarch_environment(None, Address(scheme="local"), field="launch.keys")
        launch, console = self._config.launch, sys.stderr
        # What a job reports goes to the console for as long as this process runs.
        with silent_libraries(), redirect_stderr(console):
            from torchtitan_rl.backends.monarch.host_agent import describe_host  # seconds
            from torchtitan_rl.backends.monarch.hosts import attach_job
            from torchtitan_rl.backends.monarch.job import applied_job
        meshes = self._job.enter_context(applied_job(launch.job))  # waits for a scheduler
        checkpoint = self._checkpoint(policy_dir)
        with silent_libraries():
            here = describe_host(LOCAL, checkpoint)
            return attach_job(launch, meshes, checkpoint=checkpoint, here=here)

    def _checkpoint(self, policy_dir: Path) -> str:
        given = self._config.policy.checkpoint
        return str(policy_dir) if Path(given).exists() else given

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *error: object) -> None:
        """Detach from all hosts, so that other runs can use them."""
        with self._job:
            if self.hosts is not None:
                self.hosts.detach()

    def prepare(self) -> PreparedRun:
        """Call `prepare_run`, attaching to the hosts, and then `require_folders`."""
        prepared = prepare_run(self._config, ask_hosts=self.ask)
        if not prepared.is_complete:
            self.require_folders(prepared)
        return prepared

    def require_folders(self, prepared: PreparedRun) -> None:
        """Check the run's folder on all hosts. All processes write logs there, and the trainer
        writes checkpoints, which the controller reads.

        Raises:
            ConfigError: a host of the plan cannot write to the folder; or a host of the trainer
                does not share it with the controller.
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


def attach_once_free(
    attach: Callable[[bool], _Attached], *, within_s: float = _BUSY_S
) -> _Attached:
    """Call ``attach``. If workers serve another run, that run's controller may be lost. So wait
    until the workers have ended that run, and call ``attach`` again, with True.

    Raises:
        ConfigError: the workers cannot be attached.
        HostsBusyError: the workers are still busy after ``within_s``. This error is also a
            ConfigError.
    """
    end_s, is_again = time.monotonic() + within_s, False
    while True:
        try:
            return attach(is_again)
        except HostsBusyError as error:
            if time.monotonic() >= end_s:
                raise
            if not is_again:
                print("waiting for workers that serve another run", file=sys.stderr)
            is_again, busy = True, list(error.workers)
        while busy and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
            busy = [worker for worker in busy if accepts(worker)]  # between two runs it does not


def _own_address(launch: LaunchConfig) -> Address | None:
    """The address on which this controller listens; None if all hosts are this machine."""
    if launch.address:
        return Address.parse(launch.address)
    schemes = {Address.parse(text).scheme for text in launch.attach} - {"local"}
    if not schemes:
        return None
    return Address(scheme=schemes.pop(), host="127.0.0.1", port=free_port())


@contextmanager
def silent_libraries() -> Iterator[None]:
    """While the context is open, drop the console output of native code; Python's output is still
    shown. (Monarch writes its own log.)"""
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
_ANSWER_S = 1.0  # time for a server to refuse a certificate after the handshake
_OWN_REFUSED = "ALERT"  # part of OpenSSL's name for errors that the other end sent
_EXPIRED, _TOO_EARLY = 10, 9  # OpenSSL's error numbers for certificates
_OTHER_NAME = (62, 64)  # OpenSSL's error numbers: wrong host name, wrong IP address


def probe_errors(
    field: str, addresses: Sequence[Address], keys: Path | None, *, wait_s: float = 0.0
) -> list[str]:
    """Probe all workers at the same time. Returns one message, which names ``field``, for each
    worker that cannot be attached. Blocks.

    Args:
        keys: this host's folder (`keys.own_folder`), for ``tls://``.
        wait_s: a worker that does not listen may be starting, so it is tried again for this time.
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
    """The reason why a worker at ``address`` would not accept this process; empty if it would. If
    nothing listens, the address is tried again until ``end_s`` of the monotonic clock."""
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
    """Send a TLS greeting: a plain worker closes the connection, a TLS worker answers. Returns the
    error, or an empty text."""
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
            if tls.version() == "TLSv1.3":  # the server checks this host after the handshake
                tls.settimeout(_ANSWER_S)
                with contextlib.suppress(TimeoutError):
                    tls.recv(1)
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
