"""A machine's worker: `WorkerSupervisor` runs one *life* of it, a process with all its descendants,
for each run that uses the machine.

A life ends when its run has ended, when it is given up (see `Patience`), when the process ends by
itself, or when the worker is told to stop. Then every process that it started is killed, and the
next life begins.

Neither a controller nor the processes of its run can connect to an address again that they lost
(Monarch 0.7). So the life after one that did not end with its run has the next of the worker's
addresses: same host, next port, the first one after the last (`life_addresses`). A file keeps which
one that is for a worker that is started again. The controller finds the address by trying all of
them (`listening`), and `Attempts` decides where and when it attaches.

A run's machines and its controller notice the loss of each other by their silence (`Heartbeat`):

| who | hears nothing for | then |
|---|---|---|
| controller | ``HOST_LOST_S`` | it gives the host's replicas up; a trainer there ends the run |
| host | ``CONTROLLER_LOST_S`` | the processes of the run on this host are ended |

Beats come every ``BEAT_S``. A controller that stands still for 10 to 20 s (a garbage collection, a
suspended laptop) loses nothing, and a killed one leaves nothing behind after a minute.

Invariants: two lives never overlap, and nothing of a life outlives it, except for a process that
the kernel does not end (state D), which the worker names. Time in which a listener itself stood
still does not count as the other's silence.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.files import replace_file
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.processes import adopt_orphans, end_descendants
from torchtitan_rl.weights.shm_cleanup import GUARD_NAME, remove_leftovers

BEAT_S = 2.0
HOST_LOST_S = 12.0
CONTROLLER_LOST_S = 40.0
_MAX_GAP_S = 2 * BEAT_S  # between two looks; what is longer is the listener's own stop


class Heartbeat:
    """How long nothing was heard, for a listener that looks every few seconds or more often."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._sign: object = None
        self.silent_s = 0.0

    def look(self, now_s: float, sign: object) -> float:
        """Seconds since ``sign`` has changed, as far as this listener was running."""
        self.silent_s += min(now_s - self._seen_s, _MAX_GAP_S)
        self._seen_s = now_s
        if sign != self._sign:
            self._sign, self.silent_s = sign, 0.0
        return self.silent_s


NEXT_LIFE_S = CONTROLLER_LOST_S + 10.0
"""Until a worker that was lost listens on its next address; before, the old one is not tried."""
_PAUSE_S = 30.0
_MAX_PAUSE_S = 480.0


@dataclass(slots=True)
class _Tried:
    not_before_s: float
    num_failures: int = 0  # in a row


class Attempts:
    """Where and when one host is attached again, from its first loss to the end of the run.

    An address that was not used before is tried at once. One that was used is tried again, too,
    because a long run may use all of them. After an attempt that failed there are pauses.
    """

    def __init__(self) -> None:
        self._tried: dict[str, _Tried] = {}

    def choose(self, now_s: float, listening: Sequence[str]) -> str | None:
        """Which of these addresses is to be tried now: unused ones first."""
        for address in listening:
            if address not in self._tried:
                return address
        due = [one for one in listening if self._tried[one].not_before_s <= now_s]
        return min(due, key=lambda one: self._tried[one].not_before_s, default=None)

    def note_loss(self, now_s: float, address: str) -> None:
        """The host, which was attached there, is lost."""
        self._tried[address] = _Tried(now_s + NEXT_LIFE_S)

    def note_failure(self, now_s: float, address: str) -> float:
        """It was not attached there. Returns for how many seconds it is not tried there again."""
        tried = self._tried.setdefault(address, _Tried(now_s))
        pause_s = min(_PAUSE_S * 2.0 ** min(tried.num_failures, 8), _MAX_PAUSE_S)
        tried.num_failures += 1
        tried.not_before_s = now_s + pause_s
        return pause_s


UNUSED_S = 60.0
_MAX_UNUSED_S = 300.0
_ATTACHING_S = 60.0  # longer than any attempt of a controller


def unused_limit_s(num_unused: int, first_s: float = UNUSED_S) -> float:
    """How long a life that a lost run may look for waits, after so many that waited in vain.

    >>> [unused_limit_s(number) for number in range(5)]
    [60.0, 120.0, 240.0, 300.0, 300.0]
    """
    return min(first_s * 2.0 ** min(num_unused, 8), _MAX_UNUSED_S)


class Patience:
    """When a life is given up; its worker looks every half second.

    | the life | is given up after |
    |---|---|
    | its controller was heard | 40 s without another beat |
    | not yet, and the run that was lost before may look for it | 1 minute; 2, 4, 5, 5... in a row |
    | not yet, and there is no such run | - |

    The second row is for the controller that looks for this host and could not attach it here: it
    may not be able to try again at the same address. A life that is being attached gets a minute
    more.

    ``unused_s`` is how long it waits for its first beat; None: for as long as it takes.
    """

    def __init__(
        self, now_s: float, *, unused_s: float | None, silence_s: float = CONTROLLER_LOST_S
    ) -> None:
        self._silence = Heartbeat(now_s)
        self._unused_s = unused_s
        self._silence_s = silence_s

    def look(self, now_s: float, heard: str, is_contacted: Callable[[], bool]) -> str:
        """Why the life is given up now; empty where it is not.

        Args:
            heard: differs for each beat of the controller; empty before the first.
            is_contacted: whether anything has a connection to this life.
        """
        silent_s = self._silence.look(now_s, heard)
        if heard:
            is_over = silent_s >= self._silence_s
            return f"nothing was heard from the controller for {silent_s:.0f} s" if is_over else ""
        if self._unused_s is None or silent_s < self._unused_s:
            return ""
        if silent_s < self._unused_s + _ATTACHING_S and is_contacted():
            return ""
        return f"the run that was lost did not come back for {silent_s:.0f} s"


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


class WorkerSupervisor:
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
        adopt_orphans()
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
                left = end_descendants(self._end_s, self._others, may_finish=_is_guard)
                remove_leftovers()
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


def _is_guard(process: psutil.Process, age_s: float) -> bool:
    """The guards of published weights end by themselves once they have removed them."""
    return age_s < _GUARD_S and GUARD_NAME in process.cmdline()


@contextmanager
def _sign_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-worker-") as folder:
        sign = Path(folder) / "sign"
        sign.write_text("")
        yield sign


@contextmanager
def stopped_by_signals(lives: WorkerSupervisor) -> Iterator[list[int]]:
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
