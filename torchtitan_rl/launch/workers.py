"""A machine's worker: `WorkerSupervisor` runs one *life* for each run that uses the machine. A life
is a process with all its descendants.

A life ends when its run has ended, when it is given up (see `Patience`), when its process ends by
itself, or when the worker is stopped. Then every process of the life is killed, and the next life
begins.

After a controller or a process of its run has lost the connection to an address, it cannot connect
to this address again (Monarch 0.7). So after a life that did not end with its run, the next life
has the next of the worker's addresses: same host, next port, and after the last port the first
(`life_addresses`). A file remembers the next address in case the worker is started again. The
controller tries all addresses (`listening`), and `Attempts` decides where and when to attach.

A run's machines and its controller notice each other's loss by silence (`Heartbeat`):

| who | hears nothing for | then |
|---|---|---|
| controller | ``HOST_LOST_S`` | the host's replicas are lost; a lost trainer ends the run |
| host | ``CONTROLLER_LOST_S`` | the processes of the run on this host are ended |

Beats are sent every ``BEAT_S``. If a controller is stopped for 10 to 20 s (a garbage collection, a
suspended laptop), nothing is lost. A minute after a controller is killed, all its processes have
ended.

Invariants: two lives never overlap. No process of a life outlives the life, except a process that
the kernel cannot end (state D), which the worker reports. Time in which a listener itself was
stopped does not count as silence.
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
_MAX_GAP_S = 2 * BEAT_S  # between two looks; in a longer gap the listener itself was stopped


class Heartbeat:
    """Measures how long nothing was heard, for a listener that looks at least every few seconds."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._sign: object = None
        self.silent_s = 0.0

    def look(self, now_s: float, sign: object) -> float:
        """Seconds since ``sign`` last changed, without time in which this listener was stopped."""
        self.silent_s += min(now_s - self._seen_s, _MAX_GAP_S)
        self._seen_s = now_s
        if sign != self._sign:
            self._sign, self.silent_s = sign, 0.0
        return self.silent_s


NEXT_LIFE_S = CONTROLLER_LOST_S + 10.0
"""After this time a lost worker listens on its next address. Until then, the address at which it
was lost is not tried."""
_PAUSE_S = 30.0
_MAX_PAUSE_S = 480.0


@dataclass(slots=True)
class _Tried:
    not_before_s: float
    num_failures: int = 0  # consecutive failures


class Attempts:
    """Decides where and when to attach one host again, from its first loss to the end of the run.

    An unused address is tried at once. Used addresses are tried again, too, because a long run may
    have used all of them. After a failed attempt the address is not tried for some time.
    """

    def __init__(self) -> None:
        self._tried: dict[str, _Tried] = {}

    def choose(self, now_s: float, listening: Sequence[str]) -> str | None:
        """The address to try now, unused ones first; None if no address is due."""
        for address in listening:
            if address not in self._tried:
                return address
        due = [one for one in listening if self._tried[one].not_before_s <= now_s]
        return min(due, key=lambda one: self._tried[one].not_before_s, default=None)

    def note_loss(self, now_s: float, address: str) -> None:
        """Record that the host, which was attached at ``address``, is lost."""
        self._tried[address] = _Tried(now_s + NEXT_LIFE_S)

    def note_failure(self, now_s: float, address: str) -> float:
        """Record that attaching at ``address`` failed. Returns the number of seconds until it is
        tried again."""
        tried = self._tried.setdefault(address, _Tried(now_s))
        pause_s = min(_PAUSE_S * 2.0 ** min(tried.num_failures, 8), _MAX_PAUSE_S)
        tried.num_failures += 1
        tried.not_before_s = now_s + pause_s
        return pause_s


UNUSED_S = 60.0
_MAX_UNUSED_S = 300.0
_ATTACHING_S = 60.0  # longer than any attempt of a controller to attach


def unused_limit_s(num_unused: int, first_s: float = UNUSED_S) -> float:
    """How long a life waits for a lost run, after ``num_unused`` lives that waited in vain.

    >>> [unused_limit_s(number) for number in range(5)]
    [60.0, 120.0, 240.0, 300.0, 300.0]
    """
    return min(first_s * 2.0 ** min(num_unused, 8), _MAX_UNUSED_S)


class Patience:
    """Decides when a life is given up; its worker checks every half second.

    | the life | is given up after |
    |---|---|
    | has heard its controller | 40 s without another beat |
    | has not, and a run that lost this host may look for it | 1 minute, then 2, 4, 5, 5, ... |
    | has not, and there is no such run | never |

    The second row is for a controller that looks for this host but could not attach to this life:
    it may be unable to try the same address again. A life that is just being attached gets another
    minute.

    ``unused_s`` is how long the life waits for its first beat; None: without a limit.
    """

    def __init__(
        self, now_s: float, *, unused_s: float | None, silence_s: float = CONTROLLER_LOST_S
    ) -> None:
        self._silence = Heartbeat(now_s)
        self._unused_s = unused_s
        self._silence_s = silence_s

    def look(self, now_s: float, heard: str, is_contacted: Callable[[], bool]) -> str:
        """The reason why the life is given up now; empty if it is not.

        Args:
            heard: a text that differs for each beat of the controller; empty before the first.
            is_contacted: returns whether this life has an incoming connection.
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
"""Number of ports that a worker may use, from the port of its address on. A run that has lost the
worker as often cannot attach to it again."""
ADDRESS_VARIABLE = "TORCHTITAN_RL_WORKER"  # the worker's own address
MEMORY_VARIABLE = "TORCHTITAN_RL_WORKER_MEMORY"  # the file with a worker's next port

_SIGN_VARIABLE = "TORCHTITAN_RL_WORKER_SIGN"
_ENDED, _MOVED = "ended", "moved"
_LOOK_S = 0.5
_GUARD_S = 5.0  # time for removing published weights
_END_S = 30.0  # time for killed processes to end
_QUICK_S = 5.0  # a life that ends sooner did not listen
_MAX_FAILURES = 16  # limit of consecutive lives that did not listen

_TRY_S = 2.0  # time for connecting
_NUM_TRIES = 32  # number of concurrent attempts to connect


def life_addresses(address: str, num_ports: int = NUM_LIFE_PORTS) -> tuple[str, ...]:
    """The addresses on which a worker of ``address`` may listen: its port and the following ones.

    >>> life_addresses("tcp://10.0.0.2:26600")[:2]
    ('tcp://10.0.0.2:26600', 'tcp://10.0.0.2:26601')
    """
    first = Address.parse(address)
    ports = range(first.port, min(first.port + num_ports, 1 << 16))
    return tuple(str(replace(first, port=port)) for port in ports)


def listening(address: str) -> list[str]:
    """The addresses of a worker that accept a connection now, in their order. Blocks."""
    addresses = life_addresses(address)
    ips = _ips(address)
    with ThreadPoolExecutor(_NUM_TRIES, thread_name_prefix="worker") as pool:
        accepted = pool.map(lambda one: _accepts(ips, one), addresses)
        return [one for one, is_there in zip(addresses, accepted, strict=True) if is_there]


def find_lives(workers: Sequence[str]) -> dict[str, str]:
    """The address at which to attach each worker, by the worker's own address: the first of its
    addresses that accepts a connection, or its own address if none does. Blocks."""
    if not workers:
        return {}
    with ThreadPoolExecutor(min(16, len(workers)), thread_name_prefix="workers") as pool:
        found = pool.map(listening, workers)
        return {worker: [*there, worker][0] for worker, there in zip(workers, found, strict=True)}


def _ips(address: str) -> list[str]:
    """The IP addresses of an address's host; empty if the name is unknown."""
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
    """Take this life for the caller's run; False if another run has taken it."""
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return True
    try:
        os.close(os.open(f"{path}.owner", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def note_beat() -> None:
    """Tell the worker that the controller was heard. No effect outside of a life."""
    _sign(f"{time.monotonic_ns()}")


def note_run_end() -> None:
    """Tell the worker that the run has ended, so that it ends this life, with the calling
    process."""
    _sign(_ENDED)


def note_move() -> None:
    """Tell the worker to end this life and begin the next one, because the run that has taken this
    life can only attach to the next one."""
    _sign(_MOVED)


def _sign(text: str) -> None:
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return
    replace_file(Path(path), text.encode(), is_durable=False)


class _End(Enum):
    """How a life ended."""

    RUN_ENDED = auto()
    LOST = auto()  # the controller was lost, the process ended during a run, or `note_move`
    UNUSED = auto()  # no controller attached
    FAILED = auto()  # the process ended before a controller attached


class WorkerSupervisor:
    """Runs one life after another, by ``command(address)``, until `stop`.

    ``memory`` is the file that remembers the next address; ``say`` gets a line at each life's end.
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
        self._others: Sequence[psutil.Process] = ()  # children that do not belong to a life

    def stop(self, *_: Any) -> None:
        """End the current life, and begin no other. May be used as a signal handler."""
        self._stopped.set()

    def run(self) -> int:
        """Run all lives. Returns 0 after `stop`, and 1 if a life cannot listen on any address."""
        adopt_orphans()
        self._others = psutil.Process().children()
        remembered = self._remembered()
        index, num_failures = remembered or 0, 0
        num_unused = None if remembered is None else 0  # unused lives since a run lost this host
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
        """The index of the first life's address, from the file of an earlier worker; None if its
        last life ended with its run or had no run."""
        try:
            return int(self._memory.read_text()) % len(self._addresses)
        except (OSError, ValueError):
            return None

    def _remember(self, index: int | None) -> None:
        with contextlib.suppress(OSError):  # without the file the next worker begins at index 0
            if index is None:
                self._memory.unlink(missing_ok=True)
                return
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            self._memory.write_text(str(index))

    def _live(self, index: int, num_unused: int | None) -> _End:
        """Run one life. ``num_unused`` is the number of unused lives since a run lost this host;
        None if no run has lost it."""
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
        """Wait for the end of a life, and return its reason; empty if the worker was stopped."""
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
    """Whether a process has an incoming connection at this port."""
    with contextlib.suppress(psutil.Error):
        return any(
            one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED
            for one in psutil.Process(pid).net_connections("tcp")
        )
    return False


def _is_guard(process: psutil.Process, age_s: float) -> bool:
    """Whether a process is a guard of published weights, which ends by itself after removing
    them."""
    return age_s < _GUARD_S and GUARD_NAME in process.cmdline()


@contextmanager
def _sign_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-worker-") as folder:
        sign = Path(folder) / "sign"
        sign.write_text("")
        yield sign


@contextmanager
def stopped_by_signals(lives: WorkerSupervisor) -> Iterator[list[int]]:
    """While the context is open, SIGINT and SIGTERM stop ``lives``. Yields the list of received
    signals."""
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
