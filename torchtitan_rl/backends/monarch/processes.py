"""Ends processes of this machine, also stopped ones, which answer nothing.

Invariant: only processes that were named here while they ran are killed, never a later process
with the same id.

Keeping a process on some of the machine's CPU cores.

Python's garbage collector in processes that import much and create many short-lived objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import select
import signal
from collections.abc import Iterable
from pathlib import Path

_POLL_S = 0.05


class Processes:
    """Children by their numbers, taken hold of while they run; each may lead a process group."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._handles = {pid: os.pidfd_open(pid) for pid in pids}

    @property
    def are_lost(self) -> bool:
        """Their host is: never this one."""
        return False

    def alive(self) -> list[int]:
        return [pid for pid, handle in self._handles.items() if not _has_exited(handle)]

    async def wait(self, timeout_s: float) -> bool:
        """True once all have exited; False where one has not in ``timeout_s``."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.alive():
            if asyncio.get_running_loop().time() >= deadline_s:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def kill(self) -> list[int]:
        """Kill those that are alive, with their process groups; returns their numbers."""
        killed = self.alive()
        for pid in killed:
            try:
                if os.getpgid(pid) == pid:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._handles[pid], signal.SIGKILL)
            except ProcessLookupError:
                pass  # by itself, just now
        return killed

    async def end(self, timeout_s: float) -> list[int]:
        """Let them exit by themselves for ``timeout_s``, and kill those that do not; returns their
        numbers."""
        killed = []
        if not await self.wait(timeout_s):
            killed = self.kill()
            await self.wait(timeout_s)
        self.close()
        return killed

    def close(self) -> None:
        """Let go of them."""
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _has_exited(handle: int) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def stay_on_cores(cores: tuple[int, ...]) -> None:
    """Run all threads of this process, and those it starts later, on ``cores``; () changes nothing.

    Processes that it starts inherit this until they choose for themselves.
    """
    if not cores:
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


_NEW_OBJECTS = 10_000  # between two collections; Python's default is 700


def collect_less() -> None:
    """Never scan again what is alive now, imports above all, and collect less often. In the
    controller, collections took 30 % of the CPU time of its Python code."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
