"""A worker's lives: one process, with all its descendants, for each run that uses this host.

A life ends when its run has ended, when it is given up (see `patience`), when the process ends by
itself, or when the worker is told to stop. Then every process that it started is killed, whoever
their parents are by now, and a new life begins.

Neither a controller nor the processes of its run can connect to an address again that they lost
(Monarch 0.7). So the life after one that did not end with its run has the next of the worker's
addresses: same host, next port, the first one after the last; see `life_addresses`. Which one that
is outlives the worker, in a file: the one that is started in its place begins there.

Invariant: two lives never overlap, and nothing of a life outlives it, except for a process that the
kernel does not end (state D), which the worker names.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.files import replace_file
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.patience import UNUSED_S, Patience, unused_limit_s
from torchtitan_rl.launch.silence import CONTROLLER_LOST_S
from torchtitan_rl.weights.shm_cleanup import GUARD_NAME, remove_leftovers

NUM_LIFE_PORTS = 100
"""How many ports a worker may use, from the one of its address on: as many as a run can lose it."""
ADDRESS_VARIABLE = "TORCHTITAN_RL_WORKER"  # the address that the worker was given
MEMORY_VARIABLE = "TORCHTITAN_RL_WORKER_MEMORY"  # the file where a worker notes its next port

_SIGN_VARIABLE = "TORCHTITAN_RL_WORKER_SIGN"
_ENDED, _MOVED = "ended", "moved"
_LOOK_S = 0.5
_GUARD_S = 5.0  # for published weights to be removed
_END_S = 30.0  # for killed processes to end
_QUICK_S = 5.0  # a life that ends sooner did not listen
_MAX_FAILURES = 16  # of such lives in a row
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

_TRY_S = 2.0  # to connect
_NUM_TRIES = 32  # at once


def life_addresses(address: str, num_ports: int = NUM_LIFE_PORTS) -> tuple[str, ...]:
    """Where a worker of ``address`` may listen: this port and those that follow it.

    >>> life_addresses("tcp://10.0.0.2:26600")[:2]
    ('tcp://10.0.0.2:26600', 'tcp://10.0.0.2:26601')
    """
    first = Address.parse(address)
    ports = range(first.port, min(first.port + num_ports, 1 << 16))
    return tuple(str(replace(first, port=port)) for port in ports)


def listening(address: str) -> list[str]:
    """Those of a worker's addresses that accept a connection now, in their order. Blocks."""
    addresses = life_addresses(address)
    ips = _ips(address)
    with ThreadPoolExecutor(_NUM_TRIES, thread_name_prefix="worker") as pool:
        accepted = pool.map(lambda one: _accepts(ips, one), addresses)
        return [one for one, is_there in zip(addresses, accepted, strict=True) if is_there]


def find_lives(workers: Sequence[str]) -> dict[str, str]:
    """Where each of these workers, by its own address, is to be attached: its own address, or the
    first of those that follow it where that alone listens. Blocks."""
    if not workers:
        return {}
    with ThreadPoolExecutor(min(16, len(workers)), thread_name_prefix="workers") as pool:
        found = pool.map(listening, workers)
        return {worker: [*there, worker][0] for worker, there in zip(workers, found, strict=True)}


def accepts(address: str) -> bool:
    """Whether something listens there. Blocks."""
    return _accepts(_ips(address), address)


def _ips(address: str) -> list[str]:
    """Of its host; empty where the name is not known."""
    try:
        found = socket.getaddrinfo(Address.parse(address).host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(place[0]) for *_, place in found]


def _accepts(ips: Sequence[str], address: str) -> bool:
    for ip in ips:
        with contextlib.suppress(OSError):
            socket.create_connection((ip, Address.parse(address).port), timeout=_TRY_S).close()
            return True
    return False


def claim_life() -> bool:
    """Take this life for the run of the caller; False where another run has it."""
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return True
    try:
        os.close(os.open(f"{path}.owner", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def note_beat() -> None:
    """The controller was heard. For the processes of a life; elsewhere nothing happens."""
    _sign(f"{time.monotonic_ns()}")


def note_run_end() -> None:
    """The run has ended: this life, with the process that calls this, may end."""
    _sign(_ENDED)


def note_move() -> None:
    """Whoever has this life wants the next one, which it can attach: this one may end."""
    _sign(_MOVED)


def _sign(text: str) -> None:
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return
    replace_file(Path(path), text.encode(), is_durable=False)


class _End(Enum):
    """How a life ended."""

    RUN_ENDED = auto()
    LOST = auto()  # its controller, or the process while it had one; or see `note_move`
    UNUSED = auto()  # no controller came
    FAILED = auto()  # the process ended before one came


class WorkerLives:
    """Runs ``command(address)`` again and again until `stop`.

    ``memory`` is the file that outlives the worker; ``say`` gets a line for each life's end.
    """

    def __init__(
        self,
        command: Callable[[str], Sequence[str]],
        address: str,
        *,
        memory: Path,
        say: Callable[[str], None],
        num_ports: int = NUM_LIFE_PORTS,
        silence_s: float = CONTROLLER_LOST_S,
        unused_s: float = UNUSED_S,
        end_s: float = _END_S,
    ) -> None:
        self._command = command
        self._addresses = life_addresses(address, num_ports)
        self._memory = memory
        self._say = say
        self._silence_s = silence_s
        self._unused_s = unused_s
        self._end_s = end_s
        self._stopped = threading.Event()
        self._others: Sequence[psutil.Process] = ()  # children that no life has started

    def stop(self, *_: Any) -> None:
        """End the life that runs, and begin no other; also as a signal handler."""
        self._stopped.set()

    def run(self) -> int:
        """All lives; returns 0 once stopped, 1 where no address can be listened on."""
        _adopt_orphans()
        self._others = psutil.Process().children()
        remembered = self._remembered()
        index, num_failures = remembered or 0, 0
        num_unused = None if remembered is None else 0  # since a run was lost that may look for it
        while not self._stopped.is_set():
            started_s = time.monotonic()
            end = self._live(index, num_unused)
            if self._stopped.is_set():
                break
            was_quick = end is _End.FAILED and time.monotonic() - started_s < _QUICK_S
            num_failures = num_failures + 1 if was_quick else 0
            if num_failures >= min(len(self._addresses), _MAX_FAILURES):
                self._say(f"gave up: none of {self._addresses[0]} and the next ports can be used")
                return 1
            if end is _End.RUN_ENDED:
                index, num_unused = 0, None
                continue
            index = self._after(index)
            if end is _End.LOST:
                num_unused = 0
            elif end is _End.UNUSED and num_unused is not None:
                num_unused += 1
        return 0

    def _after(self, index: int) -> int:
        return (index + 1) % len(self._addresses)

    def _remembered(self) -> int | None:
        """Where the first life begins; None if the last one ended with its run or had none."""
        try:
            return int(self._memory.read_text()) % len(self._addresses)
        except (OSError, ValueError):
            return None

    def _remember(self, index: int | None) -> None:
        with contextlib.suppress(OSError):  # then the next worker begins at 0
            if index is None:
                self._memory.unlink(missing_ok=True)
                return
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            self._memory.write_text(str(index))

    def _live(self, index: int, num_unused: int | None) -> _End:
        """One life, after so many that the controller of a lost run did not use; None where no run
        was lost."""
        address = self._addresses[index]
        with _sign_file() as sign:
            environment = {
                **os.environ,
                _SIGN_VARIABLE: str(sign),
                ADDRESS_VARIABLE: self._addresses[0],
            }
            process = subprocess.Popen(
                self._command(address), env=environment, start_new_session=True
            )
            patience = Patience(
                time.monotonic(),
                unused_s=None if num_unused is None else unused_limit_s(num_unused, self._unused_s),
                silence_s=self._silence_s,
            )
            try:
                cause = self._watch(process, sign, index, patience)
            finally:
                has_failed = process.poll() is not None
                left = end_descendants(self._end_s, self._others)
            if left:
                pids = ", ".join(map(str, left))
                self._say(f"{address}: processes that were killed do not end: {pids}")
            if cause:
                ended = "" if left else "; its processes have ended"
                self._say(f"{address}: {cause}{ended}")
            heard = sign.read_text()
            if heard == _ENDED:
                self._remember(None)
                return _End.RUN_ENDED
            if heard:
                return _End.LOST
            if has_failed:
                return _End.FAILED
            if cause:
                self._remember(self._after(index))
            return _End.UNUSED

    def _watch(
        self, process: subprocess.Popen[bytes], sign: Path, index: int, patience: Patience
    ) -> str:
        """Why this life is over; empty where the worker was stopped."""
        has_run = False
        port = Address.parse(self._addresses[index]).port
        while not self._stopped.wait(_LOOK_S):
            if process.poll() is not None:
                return f"the worker process ended with code {process.returncode}"
            heard = sign.read_text()
            if heard == _ENDED:
                return "the run has ended"
            if heard and not has_run:
                has_run = True
                self._remember(self._after(index))
            if heard == _MOVED:
                return (
                    "the run that is to use it waits for other workers, and then for the next port"
                )
            if cause := patience.look(
                time.monotonic(), heard, lambda: _is_contacted(process.pid, port)
            ):
                return cause
        return ""


def _is_contacted(pid: int, port: int) -> bool:
    """Whether this process has a connection that came in at its port."""
    with contextlib.suppress(psutil.Error):
        return any(
            one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
            for one in psutil.Process(pid).net_connections("tcp")
        )
    return False


def end_descendants(within_s: float, others: Sequence[psutil.Process] = ()) -> list[int]:
    """Kill all descendants of this process, which must have adopted orphans, until none is left, or
    for so long; returns the ids of those that are left. ``others`` are spared with theirs: a shell
    may have given this process children of its own, such as the reader of its output.

    The guards of published weights, which end by themselves once they have removed them, get a few
    seconds for it.
    """
    started_s = time.monotonic()
    while (children := _children(others)) and time.monotonic() - started_s < within_s:
        spares_guards = time.monotonic() - started_s < _GUARD_S
        for process in children:
            with contextlib.suppress(psutil.Error):
                if not (spares_guards and GUARD_NAME in process.cmdline()):
                    process.kill()
        _reap()
        time.sleep(0.05)
    _reap()
    remove_leftovers()
    return [process.pid for process in children]


def _children(others: Sequence[psutil.Process]) -> list[psutil.Process]:
    spared = set(others)
    for one in others:
        with contextlib.suppress(psutil.Error):
            spared.update(one.children(recursive=True))
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process not in spared and _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _adopt_orphans() -> None:
    """Descendants whose parents end become children of this process, not of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


@contextmanager
def _sign_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-worker-") as folder:
        sign = Path(folder) / "sign"
        sign.write_text("")
        yield sign


@contextmanager
def stopped_by_signals(lives: WorkerLives) -> Iterator[list[int]]:
    """SIGINT and SIGTERM stop ``lives``; yields the list of those that came."""
    received: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        received.append(number)
        lives.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
