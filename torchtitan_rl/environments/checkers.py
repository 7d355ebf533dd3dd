"""Calls of functions that may hang, crash or eat the memory: in processes that are killed then.

For checkers of answers, which compute with what a policy wrote. A process serves one call after
another and is replaced when it was killed. Its time limit is kept twice: here, and by a timer of
the kernel in the process itself, so that none outlives a controller that was killed. Not a sandbox.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from typing import IO, Any, cast

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.calls import in_thread

IMPORT_TIMEOUT_S = 300.0  # of the function's module, which a busy machine loads slowly
_MAX_PROCESSES = 4
_MAX_TIMEOUT_S = 86400.0


class CheckTimeoutError(TorchtitanRLError):
    """A call took too long, or its process died of it."""


class CheckFailedError(TorchtitanRLError):
    """What a function raised, in one line."""


async def run_checker(function: str, *args: Any, timeout_s: float) -> Any:
    """The result of ``function`` ("package.module:name") in a process of its own.

    Arguments and result are JSON. At most ``timeout_s`` of the function itself: waiting for a free
    process, its start and the import of the module do not count.

    Raises:
        CheckTimeoutError: it took too long, or killed its process.
        CheckFailedError: it raised an error, or there is no such function.
    """
    return await in_thread(_pool.call, function, args, timeout_s)


def timeout_errors(timeout_s: float) -> list[str]:
    """Of a task's field ``check_timeout_s``."""
    if 0 < timeout_s <= _MAX_TIMEOUT_S:
        return []
    return [f"task.check_timeout_s={timeout_s}: must be above 0, and at most {_MAX_TIMEOUT_S:g}"]


class _Pool:
    """Idle processes; threads that call wait for one."""

    def __init__(self, size: int) -> None:
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()  # the last used is warm
        for _ in range(size):
            self._idle.put(None)

    def call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        process = self._idle.get()
        try:
            if process is None or not process.is_alive():
                process = _Process()
            return process.call(function, args, timeout_s)
        finally:
            self._idle.put(process)


class _Process:
    """A running `checker_process`; used by one thread at a time."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torchtitan_rl.environments.checker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the controller's
        )
        self._unread = b""

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        request = {"function": function, "args": args, "timeout_s": timeout_s}
        line = json.dumps(request).encode() + b"\n"
        try:
            cast("IO[bytes]", self._process.stdin).write(line)
            cast("IO[bytes]", self._process.stdin).flush()
            loaded = self._read(IMPORT_TIMEOUT_S)
            if "error" not in loaded:
                loaded = self._read(timeout_s)
        except (OSError, TimeoutError, ValueError) as error:
            self._kill()
            raise CheckTimeoutError(f"{function}: no answer within {timeout_s} s") from error
        if "error" in loaded:
            raise CheckFailedError(f"{function}: {loaded['error']}")
        return loaded["result"]

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """The next line; ValueError where the process has ended before."""
        output = cast("IO[bytes]", self._process.stdout).fileno()
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([output], [], [], left_s)[0]:
                raise TimeoutError
            chunk = os.read(output, 1 << 16)
            if not chunk:
                raise ValueError("the process has ended")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()


_pool = _Pool(min(_MAX_PROCESSES, os.cpu_count() or 1))
