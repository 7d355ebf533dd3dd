"""Runs a side of a benchmark in its own process, on its own cores, on request.

So the sides can be measured alternately in one run, and share no interpreter, memory or threads. A
side that is not being measured is stopped (SIGSTOP), with all processes that it started. Sides with
Monarch are not stopped, because Monarch treats a stopped process as lost.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Self

import psutil

Side = Callable[[str, Any], Any]
"""A function that is called with the name of an operation and an argument, and returns the
operation's result."""


class Worker:
    """The process of one side. ``build(*args)`` makes the side in this process. ``build``,
    ``args``, and the arguments and results of calls must be picklable. Several workers can build at
    the same time: create all of them, then call `wait_until_built` on each."""

    def __init__(
        self,
        build: Callable[..., Side],
        *args: Any,
        cores: tuple[int, ...],
        environment: Mapping[str, str],
        is_stopped_between: bool = True,
    ) -> None:
        self._is_stopped_between = is_stopped_between
        self._cores = cores
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, build, args, cores, dict(environment))
        )
        held = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # the child needs them before its first imports
        try:
            self._process.start()
        finally:
            for name, value in held.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        theirs.close()

    def wait_until_built(self) -> None:
        self._receive()
        self._check_cores()
        self._stop()

    def call(self, name: str, argument: Any = None) -> tuple[Any, float]:
        """Call the side. Returns the answer, and the CPU seconds that the side's processes spent on
        it."""
        self._signal(signal.SIGCONT)
        before = self._cpu_seconds()
        self._connection.send((name, argument))
        answer = self._receive()
        spent = self._cpu_seconds() - before
        self._stop()
        return answer, spent

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # the process failed, and has ended
            self._connection.send(None)
        self._process.join(30.0)
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._is_stopped_between:
            self._signal(signal.SIGSTOP)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.join()

    def _check_cores(self) -> None:
        for process in self._processes():
            used = process.cpu_affinity()
            if self._cores and not set(used) <= set(self._cores):
                raise RuntimeError(f"{process.name()} runs on cores {used}, not on {self._cores}")

    def _receive(self) -> Any:
        try:
            is_fine, answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("a side's process ended by itself") from None
        if not is_fine:
            raise RuntimeError(f"a side failed:\n{answer}")
        return answer

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _signal(self, number: int) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(one.user + one.system for one in times)


def _serve(
    connection: Connection,
    build: Callable[..., Side],
    args: tuple[Any, ...],
    cores: tuple[int, ...],
    environment: dict[str, str],
) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    os.environ.update(environment)
    try:
        side = build(*args)
        gc.collect()
        gc.freeze()  # as in a replica's process: exclude these objects from collections
        connection.send((True, None))
        while (work := connection.recv()) is not None:
            connection.send((True, side(*work)))
        side("close", None)
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise
