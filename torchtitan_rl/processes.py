"""Processes of this machine: how they end in any case, and with whom; on which cores they run, and
how often Python's garbage collector runs in them."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from torchtitan_rl.shim import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

_POLL_S = 0.05


class Processes:
    """Processes by their numbers, named here while they run; each may lead a process group. A later
    process with the same number is never killed. Stopped ones, which answer nothing, are."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._handles = {pid: os.pidfd_open(pid) for pid in pids}

    @property
    def are_lost(self) -> bool:
        """Their host is: never this one."""
        return False

    async def end(self, timeout_s: float) -> list[int]:
        """Let them exit by themselves for ``timeout_s``, and kill those that do not, with their
        process groups; returns their numbers."""
        killed: list[int] = []
        if not await self._have_exited(timeout_s):
            killed = self._kill()
            await self._have_exited(timeout_s)
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()
        return killed

    def _alive(self) -> list[int]:
        return [pid for pid, handle in self._handles.items() if not _has_exited(handle)]

    async def _have_exited(self, within_s: float) -> bool:
        import asyncio  # which the processes that a worker starts need not wait for

        end_s = time.monotonic() + within_s
        while self._alive():
            if time.monotonic() >= end_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _kill(self) -> list[int]:
        killed = self._alive()
        for pid in killed:
            with suppress(ProcessLookupError):  # it has exited by itself, just now
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._handles[pid], signal.SIGKILL)
        return killed


def _has_exited(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def adopt_orphans() -> None:
    """Make descendants whose parents end children of this process, not of init."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent, or the thread that started it,
    ends."""
    prctl(PR_SET_PDEATHSIG, number)


def end_descendants(
    within_s: float,
    spared: Sequence[psutil.Process] = (),
    *,
    may_finish: Callable[[psutil.Process, float], bool] = lambda process, age_s: False,
) -> list[int]:
    """Kill all descendants of this process, which must have adopted orphans, until none is left, or
    for ``within_s``; returns the numbers of those that are left.

    Args:
        spared: children that are left alone with their descendants. A shell may have given this
            process children of its own, such as the reader of its output.
        may_finish: whether a process may still end by itself, so many seconds after the call.
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
    """Run all threads of this process, and those it starts later, on ``cores``; () changes nothing.

    Processes that it starts inherit this until they choose for themselves.
    """
    if not cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended by now
            os.sched_setaffinity(int(thread.name), cores)


_NEW_OBJECTS = 10_000  # between two collections; Python's default is 700


def collect_less() -> None:
    """Never scan again what is alive now, imports above all, and collect less often: for processes
    that import much and create many short-lived objects. In the controller, collections took 30 %
    of the CPU time of its Python code."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
