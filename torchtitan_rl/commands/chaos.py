"""``torchtitan-rl chaos RUN_DIR``: disturbs the processes of a running run by a seeded schedule,
waits for the run's end, and audits what it wrote.

Exit codes: 0 the run has ended and its audit finds nothing; 1 the audit finds something; 2 an
option is wrong, or no such run is running here; 128 + n: ended by signal n, while the run goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
import tyro

from torchtitan_rl.audit import run as audit
from torchtitan_rl.bounds import Count, Positive, Seconds, check_fields
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.lease import LOCK_FILE
from torchtitan_rl.observability.failures import read_failures, summarize_failures
from torchtitan_rl.observability.page_files import NOW_FILE

Kind = Literal["kill", "stop", "slow", "disconnect", "disk"]
RunPart = Literal["replica", "trainer", "endpoint", "controller"]

_DISTURBED: tuple[RunPart, ...] = ("replica", "trainer", "endpoint")  # unless --parts is given
_STOPPED_S = 5.0  # of a controller; the run itself ends other processes that are stopped
_SLOW_S = 10.0
_SLICE_S = (0.4, 0.1)  # of a slow process: stopped, and running
_FULL_S = 5.0
_FULL_BYTES = 1024  # up to which files can still be written
_POLL_S = 0.25
_NOT_UNDER_WAY = ("start", "export")  # phases
_PIDFD_GETFD = 438  # on all architectures; Python has no name for this system call


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Kill, stop, slow down and disconnect processes of a running run by a seeded schedule, wait
    for the run's end, and audit it. Only processes that the run's controller started on this
    machine are disturbed."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
    """Folder of a running run."""
    seed: Count = 0
    """Seed of the schedule."""
    every: str = "30s"
    """Mean time between the end of a fault and the next one, such as 30s or 2m."""
    times: Positive | None = None
    """Number of faults; None: until the run ends."""
    kinds: tuple[Kind, ...] = ("kill", "stop", "slow")
    """What is done: kill (SIGKILL), stop (SIGSTOP; a controller goes on after 5 s), slow (the
    process runs for a fifth of 10 s), disconnect (its connections are closed), disk (for 5 s no
    file can grow beyond 1 KiB)."""
    parts: tuple[RunPart, ...] = ()
    """Whose processes, in random order; one that is named twice gets twice as many faults. None:
    those that the run has, without the controller. Name the controller only if something starts the
    run again with --checkpoint.resume."""
    patience_s: Seconds = 300.0
    """A fault waits for so long, in seconds, until there is a process to disturb."""
    restart_s: Seconds = 30.0
    """With the controller among the parts: the run has ended if nothing starts it again within this
    time, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a schedule: ``wait_s`` after the one before. ``place`` in [0, 1) chooses among
    the processes of the part, in the order of their names."""

    wait_s: float
    kind: Kind
    part: RunPart
    place: float


def _fits(kind: Kind, part: RunPart) -> bool:
    return kind != "disk" or part == "controller"  # which writes the run's books


def schedule(
    seed: int, every_s: float, kinds: Sequence[Kind], parts: Sequence[RunPart]
) -> Iterator[Fault]:
    """Draw faults without end. In rounds, each of ``parts`` gets one, with one of the ``kinds``
    that fit it; the waits are uniform between half of ``every_s`` and one and a half."""
    chance = random.Random(seed)
    while True:
        for part in chance.sample(parts, len(parts)):
            yield Fault(
                wait_s=every_s * chance.uniform(0.5, 1.5),
                kind=chance.choice([kind for kind in kinds if _fits(kind, part)]),
                part=part,
                place=chance.random(),
            )


def main(words: Sequence[str]) -> int:
    options = parse_options(ChaosOptions, words, prog="torchtitan-rl chaos")
    check_fields(options, "--")
    controller = find_controller(options.run)
    if not options.parts:
        present = [part for part in _DISTURBED if processes_of(options.run, part)]
        options = replace(options, parts=tuple(present))
    errors = list(_errors(options))
    if controller is None:
        errors = [f"RUN_DIR is {options.run}: no run of yours is running in it on this machine"]
    elif "disconnect" in options.kinds and not _may_copy_descriptors(controller):
        errors.append(
            "--kinds has disconnect: this process may not use descriptors of others (see "
            "kernel.yama.ptrace_scope); leave it out, or run as root"
        )
    if errors:
        raise ConfigError(errors)
    return _Chaos(options).run()


def _errors(options: ChaosOptions) -> Iterator[str]:
    if _seconds(options.every) is None:
        yield f"--every is {options.every!r}: give a time of at least 1 s, such as 30s or 2m"
    if not options.parts:
        yield f"RUN_DIR is {options.run}: the run has no processes yet; try again in a minute"
    for part in dict.fromkeys(options.parts):
        if not processes_of(options.run, part):
            yield f"--parts has {part}: the run has none on this machine now; leave it out"
        if not any(_fits(kind, part) for kind in options.kinds):
            yield f"--kinds has nothing that is done to a {part}: give kill, or another --parts"


def _seconds(text: str) -> float | None:
    found = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)(s|m|)", text)
    seconds = float(found[1]) * (60 if found[2] == "m" else 1) if found else 0.0
    return seconds if seconds >= 1 else None


class _Chaos:
    def __init__(self, options: ChaosOptions) -> None:
        self._options = options
        self._began_s = time.monotonic()
        self._back_s: list[float] = []  # until a controller that had ended had a successor

    def run(self) -> int:
        options = self._options
        faults = schedule(
            options.seed, _seconds(options.every) or 0.0, options.kinds, options.parts
        )
        num_faults = 0
        while options.times is None or num_faults < options.times:
            fault = next(faults)
            if self._ends_within(fault.wait_s):
                break
            num_faults += self._disturb(fault)
        self._say(f"{num_faults} faults; waiting for the end of the run")
        while not self._ends_within(_POLL_S):
            pass
        self._summarize()
        return audit.main([str(options.run)])

    def _disturb(self, fault: Fault) -> bool:
        """Disturb a process once the run is under way; return whether that was possible."""
        end_s = time.monotonic() + self._options.patience_s
        found: dict[str, psutil.Process] = {}
        while not found:
            if time.monotonic() > end_s or self._ends_within(_POLL_S):
                self._say(f"{fault.kind} {fault.part}: there is none")
                return False
            if _is_under_way(self._options.run):
                found = processes_of(self._options.run, fault.part)
        name = sorted(found)[int(fault.place * len(found))]
        self._say(f"{fault.kind} {name} (process {found[name].pid})")
        try:
            disturb(found[name], fault.kind, fault.part)
        except psutil.NoSuchProcess:
            self._say(f"{name} has ended by itself")
        return True

    def _ends_within(self, seconds: float) -> bool:
        """Wait; return at once, with True, if the run has ended."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if find_controller(self._options.run) is None and not self._comes_back():
                return True
            time.sleep(_POLL_S)
        return False

    def _comes_back(self) -> bool:
        """Whether something starts the run again, if this is expected."""
        began_s = time.monotonic()
        if "controller" not in self._options.parts:
            return False
        while find_controller(self._options.run) is None:
            if time.monotonic() - began_s > self._options.restart_s:
                return False
            time.sleep(_POLL_S)
        self._back_s.append(time.monotonic() - began_s)
        self._say(f"controller back after {self._back_s[-1]:.1f} s")
        return True

    def _summarize(self) -> None:
        by_sign = defaultdict(list)
        for row in read_failures(self._options.run):
            by_sign[row["sign"]].append(row)
        for rows in by_sign.values():
            for line in summarize_failures(rows):
                self._say(line)
        if self._back_s:
            ordered = sorted(self._back_s)
            self._say(
                f"controller ended {len(ordered)} times, back after "
                f"{ordered[len(ordered) // 2]:.1f} s (at most {ordered[-1]:.1f} s)"
            )

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began_s
        print(f"[{seconds // 60:.0f}:{seconds % 60:04.1f}] {text}", file=sys.stderr, flush=True)


def find_controller(run_dir: Path) -> psutil.Process | None:
    """Return the process that holds the folder's lock, if it is this user's."""
    lock = (run_dir / LOCK_FILE).absolute()
    with suppress(OSError, ValueError, KeyError, TypeError, psutil.Error):
        process = psutil.Process(json.loads(lock.read_bytes())["pid"])
        is_ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
        if is_ours and any(_is_same(lock, file.path) for file in process.open_files()):
            return process
    return None


def _is_same(one: Path, other: str) -> bool:
    with suppress(OSError):  # a temporary file that was renamed meanwhile
        return os.path.samefile(one, other)
    return False


def _is_under_way(run_dir: Path) -> bool:
    """Whether the run has started: one that cannot start ends, and is not healed."""
    controller = find_controller(run_dir)
    with suppress(OSError, ValueError, psutil.Error):
        now = json.loads((run_dir / NOW_FILE).read_bytes())
        is_new = controller is not None and now["at_unix_s"] > controller.create_time()
        return is_new and now["phase"] not in _NOT_UNDER_WAY
    return False


def processes_of(run_dir: Path, part: RunPart) -> dict[str, psutil.Process]:
    """Return a part's processes by name, such as ``replica1-rank0``: those that lead a process
    group and print to the run's log of this name, below the controller."""
    controller = find_controller(run_dir)
    if controller is None:
        return {}
    if part == "controller":
        return {"controller": controller}
    found = {}
    with suppress(psutil.Error):
        for process in controller.children(recursive=True):
            with suppress(OSError):
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
                leads = os.getpgid(process.pid) == process.pid
                if leads and log.name.startswith(part) and log.is_relative_to(run_dir.resolve()):
                    found[log.stem] = process
    return found


def disturb(process: psutil.Process, kind: Kind, part: RunPart) -> None:
    """Do to a process what a fault says. Returns when the fault is over, or is left to the run.
    Raises NoSuchProcess if the process has ended."""
    match kind:
        case "kill":
            process.kill()
        case "stop" if part == "controller":
            with _later(process.resume):
                process.suspend()
                time.sleep(_STOPPED_S)
        case "stop":
            process.suspend()
        case "slow":
            _slow(process)
        case "disconnect":
            _disconnect(process)
        case "disk":
            _fill_disk(process)


def _slow(process: psutil.Process) -> None:
    end_s = time.monotonic() + _SLOW_S
    with _later(process.resume):
        while time.monotonic() < end_s:
            process.suspend()
            time.sleep(_SLICE_S[0])
            process.resume()
            time.sleep(_SLICE_S[1])


def _fill_disk(process: psutil.Process) -> None:
    """Let the process write as on a full disk: Python ignores the signal of this limit."""
    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    with _later(lambda: process.rlimit(psutil.RLIMIT_FSIZE, (soft, hard))):
        process.rlimit(psutil.RLIMIT_FSIZE, (_FULL_BYTES, hard))
        time.sleep(_FULL_S)


@contextmanager
def _later(undo: Callable[[], object]) -> Iterator[None]:
    """End a fault in any case, also on Ctrl-C."""
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            undo()


def _disconnect(process: psutil.Process) -> None:
    """Shut down all connections that have an address: not pairs of sockets within the process."""
    with _handle(process) as handle:
        for number in _descriptors(process):
            with suppress(OSError), closing(_copied_socket(handle, number)) as copied:
                if _is_connection(copied):
                    copied.shutdown(socket.SHUT_RDWR)


def _is_connection(one: socket.socket) -> bool:
    if one.type != socket.SOCK_STREAM or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    return one.family != socket.AF_UNIX or bool(one.getsockname() or one.getpeername())


def _descriptors(process: psutil.Process) -> list[int]:
    folder = Path(f"/proc/{process.pid}/fd")
    found = []
    for name in os.listdir(folder):
        with suppress(OSError):
            if os.readlink(folder / name).startswith("socket:"):
                found.append(int(name))
    return found


def _copied_socket(handle: int, number: int) -> socket.socket:
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, number, 0)
    if copy < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return socket.socket(fileno=copy)


@contextmanager
def _handle(process: psutil.Process) -> Iterator[int]:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError as error:
        raise psutil.NoSuchProcess(process.pid) from error
    try:
        yield handle
    finally:
        os.close(handle)


def _may_copy_descriptors(process: psutil.Process) -> bool:
    try:
        with _handle(process) as handle:
            _copied_socket(handle, _descriptors(process)[0]).close()
    except PermissionError:
        return False
    except (OSError, IndexError, psutil.Error):
        pass  # it has ended, or the descriptor was closed
    return True
