"""Processes of this machine: start and watch them, end them with all their descendants, choose
their cores, and reduce garbage collection in them."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from torchtitan_rl import shim
from torchtitan_rl.aio import uninterrupted
from torchtitan_rl.errors import ProcessEndedError, ProcessStoppedError, TorchtitanRLError
from torchtitan_rl.shim import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

MARK_VARIABLE = "TORCHTITAN_RL_MARK"  # by which the processes of one start are found

_POLL_S = 0.05
_KILLED_S = 5.0  # for a killed process to be gone

LOOK_S = 0.25
"""Seconds between two looks whether processes are alive."""
STOPPED_S = 1.5
"""A process that was stopped for this time counts as lost. Time in which this process was stopped
itself does not count."""


class Processes:
    """Running processes, given by their pids; each may lead a process group. A later process that
    reuses a pid is never killed. Stopped processes (SIGSTOP) are killed too. Raises
    ProcessEndedError: one has ended before this call."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._handles: dict[int, int] = {}
        for pid in pids:
            try:
                self._handles[pid] = os.pidfd_open(pid)
            except ProcessLookupError as error:
                self._close()
                raise ProcessEndedError(f"process {pid} has ended") from error

    @property
    def are_lost(self) -> bool:
        """Whether the host of the processes is lost: False, because they run on this host."""
        return False

    async def wait_until_lost(self, name: str) -> NoReturn:
        """Watch the processes, of which messages speak as ``name``. The kernel says whether a
        process has ended or is stopped, so neither load nor long work is mistaken for a loss. A
        process that a debugger has stopped is not lost. Raises ProcessEndedError: a process has
        ended; or ProcessStoppedError: one was stopped (SIGSTOP) for `STOPPED_S`, and is killed."""
        now = asyncio.get_running_loop().time
        looked_s, stopped_s = now(), dict.fromkeys(self._handles, 0.0)
        stops: dict[int, bytes | None] = dict.fromkeys(self._handles)
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._handles:
                raise ProcessEndedError(f"{name}: its processes were ended")
            gap_s, looked_s = now() - looked_s, now()
            for pid, handle in self._handles.items():
                if _has_exited(handle):
                    raise ProcessEndedError(f"{name}: process {pid} has ended", silent_s=gap_s)
                stop = _stop_of(pid)
                is_same = stop is not None and stops[pid] in (None, stop)
                stops[pid] = stop
                stopped_s[pid] = (stopped_s[pid] + min(gap_s, 2 * LOOK_S)) * is_same
                if stopped_s[pid] >= STOPPED_S:
                    self._kill([pid])
                    message = f"{name}: process {pid} is stopped (SIGSTOP)"
                    raise ProcessStoppedError(message, silent_s=stopped_s[pid])

    async def end(self, timeout_s: float) -> list[int]:
        """Wait ``timeout_s`` for the processes to exit, then kill the others with their process
        groups. Returns the pids of the killed processes."""
        killed: list[int] = []
        if not await self._have_exited(timeout_s):
            killed = self._alive()
            self._kill(killed)
            await self._have_exited(_KILLED_S)
        self._close()
        return killed

    def _close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def _alive(self) -> list[int]:
        return [pid for pid, handle in self._handles.items() if not _has_exited(handle)]

    async def _have_exited(self, within_s: float) -> bool:
        end_s = time.monotonic() + within_s
        while self._alive():
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # the process has just exited by itself
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._handles[pid], signal.SIGKILL)


async def hold_marked(ancestor: int, mark: str, number: int) -> Processes:
    """Wait until at least ``number`` processes below ``ancestor`` have been started with ``mark``
    as their environment's `MARK_VARIABLE`, and return these without those that they started.
    Raises ProcessEndedError: one has just ended."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()

    def find() -> list[int]:
        below = psutil.Process(ancestor).children(recursive=True)
        marked = {one.pid: one for one in below if wanted in _environment_of(one.pid)}
        return [pid for pid, one in marked.items() if _parent_of(one) not in marked]

    while True:
        pids = await asyncio.to_thread(find)  # it looks at all processes of the machine
        if len(pids) >= number:
            return Processes(pids)
        await asyncio.sleep(_POLL_S)


def _parent_of(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None  # it has just ended


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has just ended


def _has_exited(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def _stop_of(pid: int) -> bytes | None:
    """What tells one stop of a process from the next: how often it has left the processor. None if
    it is not stopped. Tools such as cpulimit stop a process again and again to slow it down."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return None  # it has just ended
    is_stopped = b"\nState:\tT" in status
    return status.partition(b"\nvoluntary_ctxt_switches")[2] if is_stopped else None


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose own parents end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent, or the thread that started it,
    ends."""
    prctl(PR_SET_PDEATHSIG, number)


def end_descendants(
    within_s: float,
    spared: Sequence[psutil.Process],
    *,
    may_finish: Callable[[psutil.Process, float], bool],
) -> list[int]:
    """Kill all descendants of this process, which has called `adopt_orphans`, until none is left,
    or ``within_s`` have passed. Returns the pids of those left.

    ``spared`` children and their descendants are not killed: a shell may have given this process
    children, such as the reader of its output. ``may_finish``: whether a process may still end by
    itself, so many seconds after this call.
    """
    started_s = time.monotonic()
    while (left := _descendants(spared)) and (age_s := time.monotonic() - started_s) < within_s:
        for process in left:
            with suppress(psutil.Error):
                if not may_finish(process, age_s):
                    process.kill()
        _reap()
        time.sleep(_POLL_S)
    _reap()
    return [process.pid for process in left]


def _descendants(spared: Sequence[psutil.Process]) -> list[psutil.Process]:
    others = set(spared)
    for one in spared:
        with suppress(psutil.Error):
            others.update(one.children(recursive=True))
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process not in others and _is_running(process)]


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def stay_on_cores(cores: tuple[int, ...]) -> None:
    """Run all threads of this process, and child processes that do not choose their own, on
    ``cores``; () changes nothing."""
    if not cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


_NEW_OBJECTS = 10_000  # allocations between two collections; Python's default is 700


def collect_less(*, full_after: int = 50) -> None:
    """Exclude all objects alive now (mainly imports) from garbage collection, and collect less
    often: in the controller, collections took 30 % of the CPU time of its Python code. One of all
    objects, which held it up for 0.8 s with 16,000 rollouts, comes after ``full_after`` times two
    of young objects; rollouts leave no reference cycles. Objects are young for two collections:
    with ten, each that ended their youth held it up for 0.05 to 0.15 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 1, full_after)


@contextmanager
def collecting_later() -> Iterator[None]:
    """Turn garbage collection off while the block runs (a fifth of the CPU time of importing vLLM
    or torchtitan), and collect less often afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        collect_less()


class ChildProcess:
    """A process that a launcher starts and ends; created by `started`.

    The process leads its own session, so that a signal to the launcher's process group reaches it
    only once, through the launcher. The process gets ``end_by`` when the launcher dies.
    """

    def __init__(self, process: Process, ready_at: str, end_by: signal.Signals) -> None:
        self._process = process
        self._end_by = end_by
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready_at = ready_at
        self._printing = asyncio.create_task(self._print()) if ready_at else None

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        command: Sequence[str],
        *,
        end_within_s: float,
        ready_at: str = "",
        end_by: signal.Signals = signal.SIGTERM,
    ) -> AsyncIterator[ChildProcess]:
        """Start the process, and end it when the block ends: by the signal ``end_by``, and by
        SIGKILL ``end_within_s`` later. ``ready_at``: a text in the line that it prints when it is
        ready."""
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=PIPE if ready_at else None,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(end_by),
        )
        child = cls(process, ready_at, end_by)
        try:
            yield child
        finally:
            await child._end(end_within_s)

    async def wait(self) -> int:
        """Wait for the process to end. Returns its exit code; 128 + n if signal n ended it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def ready(self) -> str | None:
        """Return the rest of the line with ``ready_at``; None if the process ended first."""
        ended = asyncio.create_task(self.wait())
        either: list[asyncio.Future[Any]] = [self._ready, ended]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return self._ready.result() if self._ready.done() else None
        finally:
            ended.cancel()

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _print(self) -> None:
        output = self._process.stdout
        assert output is not None
        async for line in output:
            text = line.decode(errors="replace")
            _, found, rest = text.partition(self._ready_at)
            if found and not self._ready.done():
                self._ready.set_result(rest.strip())
            with suppress(OSError):  # our output is closed; the process continues
                sys.stdout.write(text)
                sys.stdout.flush()

    async def _end(self, within_s: float) -> None:
        self.send(self._end_by)
        try:
            await asyncio.wait_for(self._process.wait(), within_s)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        if self._printing is not None:
            self._printing.cancel()


def shim_command(link: str) -> list[str]:
    """Return the words to put before a program's command line, to run it below a shim. ``link``:
    see `shim.py`."""
    return [sys.executable, "-I", "-S", shim.__file__, link]


_CHUNK_BYTES = 1 << 16
_OUTPUT_GRACE_S = 10.0  # from the end of the program to the end of its output


class CommandError(TorchtitanRLError):
    """A program could not be started or killed, or it is unknown how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a program ended: exactly one of ``exit_code``, ``signal`` and ``timed_out`` is set.

    ``truncated``: stdout or stderr was longer than the limit.
    """

    exit_code: int | None
    signal: int | None  # the signal that killed the program
    timed_out: bool
    stdout: bytes
    stderr: bytes
    truncated: bool


async def run_command(
    argv: Sequence[str],
    *,
    timeout_s: float,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    max_output_bytes: int = 1 << 20,
) -> CommandResult:
    """Run a program in a process session of its own, until it ends or times out.

    This call returns or raises, even when it is cancelled, only after the program and all its
    descendants are dead. If this process dies, even by SIGKILL, a shim between this process and the
    program (`shim.py`) kills them a moment later. This is not a sandbox.

    ``env`` replaces the environment. ``stdin`` None is an empty input. The first
    ``max_output_bytes`` of stdout and of stderr are kept. Synchronous environments call this
    through `asyncio.run`.

        result = await run_command(["pytest", "-q"], timeout_s=60, cwd=folder)
        reward = float(result.exit_code == 0)

    Raises:
        CommandError: the program could not be started, could not be killed, or killed its shim.
    """
    if not argv:
        raise CommandError("a command needs at least the program's name")
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        running = _run(argv, ours, theirs, timeout_s, cwd, env, stdin, max_output_bytes)
        return await uninterrupted(running, on_cancel=lambda: hang_up(ours))


async def _run(
    argv: Sequence[str],
    ours: socket.socket,
    theirs: socket.socket,
    timeout_s: float,
    cwd: str | Path | None,
    env: Mapping[str, str] | None,
    stdin: bytes | None,
    max_output_bytes: int,
) -> CommandResult:
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *shim_command(str(theirs.fileno())),
                *argv,
                stdin=DEVNULL if stdin is None else PIPE,
                stdout=PIPE,
                stderr=PIPE,
                cwd=cwd,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except (OSError, ValueError) as error:  # no such folder, a null byte in an argument, ...
        raise CommandError(f"{argv[0]}: {error}") from error
    transfers = asyncio.gather(
        _feed(process.stdin, stdin),
        _read(process.stdout, max_output_bytes),
        _read(process.stderr, max_output_bytes),
    )
    reporting = asyncio.ensure_future(_report(ours))  # ends with the shim
    timed_out = not (await asyncio.wait([reporting], timeout=timeout_s))[0]
    hang_up(ours)
    pid, kind, value = await reporting
    if not kind and pid:  # the shim was killed: kill at least the program's process group
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    ended, _ = await asyncio.wait([transfers], timeout=_OUTPUT_GRACE_S)
    if not ended:
        transfers.cancel()
        with suppress(asyncio.CancelledError):
            await transfers
        raise CommandError(f"{argv[0]}: something it started cannot be killed; {kind} {value}")
    await process.wait()  # reaped
    _, (stdout, more_stdout), (stderr, more_stderr) = transfers.result()
    if kind == "error" or (not kind and not timed_out):
        raise CommandError(f"{argv[0]}: {value or 'its shim was killed'}")
    return CommandResult(
        exit_code=int(value) if kind == "exit" else None,
        signal=int(value) if kind == "signal" else None,
        timed_out=timed_out and not kind,
        stdout=stdout,
        stderr=stderr,
        truncated=more_stdout or more_stderr,
    )


def hang_up(link: socket.socket) -> None:
    """Tell the watcher of a program, at the other end of ``link``, to kill it and its
    descendants."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_WR)


async def _feed(writer: asyncio.StreamWriter | None, data: bytes | None) -> None:
    if writer is None:
        return
    # The program may end, or close its input, without reading all of it.
    with suppress(BrokenPipeError, ConnectionResetError):
        writer.write(data or b"")
        await writer.drain()
    writer.close()


async def _read(reader: asyncio.StreamReader | None, limit: int) -> tuple[bytes, bool]:
    """Read to the end. Returns the first ``limit`` bytes, and whether there were more."""
    kept, more = bytearray(), False
    while reader is not None and (chunk := await reader.read(_CHUNK_BYTES)):
        left = limit - len(kept)
        kept += chunk[:left]
        more = more or len(chunk) > left
    return bytes(kept), more


async def _report(link: socket.socket) -> tuple[int, str, str]:
    """Read the shim's report: the program's pid (0: not started), and how it ended as a kind and a
    value (``exit``, ``3``; empty if there was no report)."""
    loop, report = asyncio.get_running_loop(), b""
    while chunk := await loop.sock_recv(link, _CHUNK_BYTES):
        report += chunk
    first, _, rest = report.decode(errors="replace").partition("\n")
    pid, last = (int(first[4:]), rest) if first.startswith("pid ") else (0, first)
    kind, _, value = last.partition(" ")
    return pid, kind, value
