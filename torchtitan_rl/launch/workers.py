"""A machine's worker: `WorkerSupervisor` runs one *incarnation* for each run that uses the machine.
An incarnation is a process that listens at the worker's address, with all its descendants.

An incarnation ends when its run has ended, when its controller is silent, when its process ends by
itself, or when the worker is stopped. Then every process of the incarnation is killed, and the next
incarnation listens at the same address.

A worker that shall leave, because its machine will soon be gone, tells the run (`is_leaving`). The
run moves away what runs here, and then ends the incarnation, which is the last one.

A run's machines and its controller notice each other's loss by silence (`Heartbeat`):

| who | hears nothing for | then |
|---|---|---|
| controller | ``HOST_LOST_S`` | the host's replicas are lost; a lost trainer ends the run |
| host | ``CONTROLLER_LOST_S`` | the processes of the run on this host are ended |

Beats are sent every ``BEAT_S``. If a controller is stopped for 10 to 20 s (a garbage collection, a
suspended laptop), nothing is lost. A minute after a controller is killed, all its processes have
ended.

Invariants: two incarnations never overlap. No process of an incarnation outlives it, except a
process that the kernel cannot end (state D), which the worker reports. While the process that
listens is itself stopped, its time limit does not run.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from torchtitan_rl.files import replace_file
from torchtitan_rl.processes import adopt_orphans, end_descendants
from torchtitan_rl.weights.shm_cleanup import GUARD_NAME, remove_leftovers

BEAT_S = 2.0
HOST_LOST_S = 12.0
CONTROLLER_LOST_S = 40.0
_MAX_GAP_S = 2 * BEAT_S  # between two looks; in a longer gap the listener itself was stopped

_SIGN_VARIABLE = "TORCHTITAN_RL_WORKER_SIGN"
_ENDED = "ended"
_LEAVING = ".leaving"  # suffix of the file that says so
_LOOK_S = 0.5
_GUARD_S = 5.0  # time for removing published weights
_END_S = 30.0  # time for killed processes to end
_QUICK_S = 5.0  # an incarnation that ends sooner did not listen
_MAX_FAILURES = 16  # limit of consecutive incarnations that did not listen
_PAUSE_S = 1.0  # pause after such an incarnation


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


def claim_incarnation() -> bool:
    """Take this incarnation for the caller's run; False if another run has taken it. A worker that
    is not ours, such as one of a Monarch job, is taken until this process ends."""
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return _claim_parent()
    try:
        os.close(os.open(f"{path}.owner", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def record_beat() -> None:
    """Tell the worker that the controller was heard. No effect outside of an incarnation."""
    _sign(f"{time.monotonic_ns()}")


def record_run_end() -> bool:
    """Tell the worker that the run has ended, so that the worker ends this incarnation, and with it
    the calling process. False outside of an incarnation."""
    return _sign(_ENDED)


def is_leaving() -> bool:
    """Whether the worker waits for the run to leave this machine. False outside of an
    incarnation."""
    path = os.environ.get(_SIGN_VARIABLE)
    return path is not None and Path(path + _LEAVING).exists()


def _sign(text: str) -> bool:
    path = os.environ.get(_SIGN_VARIABLE)
    if path is None:
        return False
    replace_file(Path(path), text.encode(), is_durable=False)
    return True


def _claim_parent() -> bool:
    """Take the process that started this one. An abstract Unix socket is the lock: the kernel frees
    it with this process, and no one can connect to it, because it does not listen."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0torchtitan-rl-worker-{namespace}-{os.getppid()}")
    except OSError:
        lock.close()
        return False
    _locks.append(lock)
    return True


_locks: list[socket.socket] = []


class WorkerSupervisor:
    """Runs one incarnation after another until `stop` or `leave`. ``command`` starts an
    incarnation. ``say`` gets a line whenever an incarnation ends."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        say: Callable[[str], None],
        silence_s: float = CONTROLLER_LOST_S,
        end_s: float = _END_S,
    ) -> None:
        self._command = command
        self._say = say
        self._silence_s = silence_s
        self._end_s = end_s
        self._stopped = threading.Event()
        self._is_leaving = False
        self.was_left = False  # the last incarnation had no run, or ended after its run
        self._others: Sequence[psutil.Process] = ()  # children that do not belong to an incarnation

    def stop(self, *_: Any) -> None:
        """End the current incarnation, and begin no other. May be used as a signal handler."""
        self._stopped.set()

    def leave(self) -> None:
        """End once no run uses this machine, and begin no other incarnation. A run that uses it is
        told to leave. May be called by a signal handler."""
        self._is_leaving = True

    def run(self) -> int:
        """Run all incarnations. Returns 0 after `stop` or `leave`, and 1 if none can listen at the
        address."""
        adopt_orphans()
        self._others = psutil.Process().children()
        num_failures = 0
        while True:
            started_s = time.monotonic()
            was_used = self._run_incarnation()
            if self._stopped.is_set() or self._is_leaving:
                return 0
            has_failed = not was_used and time.monotonic() - started_s < _QUICK_S
            num_failures = num_failures + 1 if has_failed else 0
            if num_failures == _MAX_FAILURES:
                self._say(f"gave up after {num_failures} starts that failed")
                return 1
            self._stopped.wait(_PAUSE_S if has_failed else 0.0)

    def _run_incarnation(self) -> bool:
        """Returns whether a run has used it."""
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-worker-") as folder:
            sign = Path(folder) / "sign"
            sign.touch()
            process = subprocess.Popen(
                self._command,
                env={**os.environ, _SIGN_VARIABLE: str(sign)},
                start_new_session=True,
            )
            try:
                cause = self._watch(process, sign)
            finally:
                left = end_descendants(self._end_s, self._others, may_finish=_is_guard)
                remove_leftovers()
            if left:
                pids = ", ".join(map(str, left))
                self._say(f"processes that were killed do not end: {pids}")
            if cause:
                self._say(cause if left else f"{cause}; its processes have ended")
            return sign.read_text() != ""

    def _watch(self, process: subprocess.Popen[bytes], sign: Path) -> str:
        """Wait for the end of an incarnation, and return the reason for the end; empty if the
        worker was stopped, or leaves and has no run."""
        heartbeat, leaving = Heartbeat(time.monotonic()), Path(f"{sign}{_LEAVING}")
        self.was_left = False
        while not self._stopped.wait(_LOOK_S):
            if process.poll() is not None:
                return f"the worker process ended with code {process.returncode}"
            heard = sign.read_text()
            if heard == _ENDED or (self._is_leaving and not heard):
                self.was_left = True
                return "the run has ended" if heard else ""
            if self._is_leaving and not leaving.exists():
                leaving.touch()
                self._say("ends when the run has left this machine; SIGINT ends it at once")
            silent_s = heartbeat.look(time.monotonic(), heard)
            if heard and silent_s >= self._silence_s:
                return f"nothing was heard from the controller for {silent_s:.0f} s"
        return ""


def _is_guard(process: psutil.Process, age_s: float) -> bool:
    """Whether a process is a guard of published weights, which ends by itself after removing
    them."""
    return age_s < _GUARD_S and GUARD_NAME in process.cmdline()


@contextmanager
def stopped_by_signals(supervisor: WorkerSupervisor) -> Iterator[list[int]]:
    """While the context is open, SIGTERM makes ``supervisor`` leave, and SIGINT stops it. Yields
    the list of received signals."""
    received: list[int] = []

    def on_signal(number: int, frame: Any) -> None:
        received.append(number)
        if number == signal.SIGTERM:
            supervisor.leave()
        else:
            supervisor.stop()

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
