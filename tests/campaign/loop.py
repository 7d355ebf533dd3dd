"""The event loop of a campaign: virtual time, tasks in an order that is always the same, and a
machine that hears of every suspension. A loop may run several processes, each on its machine."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Coroutine
from functools import partial
from typing import Any

from tests.campaign.machine import CURRENT, Killed, Machine, place_in
from tests.support.package_frames import suspended_frames
from tests.support.virtual_clock import VirtualLoop

OF_THE_MACHINE = "machine: "  # tasks that stand for other processes


class _Counted(Coroutine[Any, Any, Any]):
    """A task's coroutine, of whose suspensions the machine hears."""

    __slots__ = ("inner", "is_counted", "loop", "machine", "name", "task")

    def __init__(
        self, inner: Coroutine[Any, Any, Any], machine: Machine, loop: CampaignLoop
    ) -> None:
        self.inner = inner
        self.machine = machine
        self.loop = loop
        self.name = ""
        self.is_counted = True
        self.task: _Task | None = None

    def send(self, value: Any) -> Any:
        return self._step(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self.inner.throw, *error)

    def _step(self, go_on: Any, *value: Any) -> Any:
        try:
            self._begin()
            result = go_on(*value)
            if self.is_counted:
                self.machine.suspended(place_of(self.inner))
            return result
        except Killed:
            if not self.loop.end_process(self.machine):
                raise
            raise asyncio.CancelledError from None

    def close(self) -> None:
        self.inner.close()

    def __await__(self) -> Any:
        return self.inner.__await__()

    def _begin(self) -> None:
        if self.machine.is_dead:
            raise Killed
        if not self.name and self.task is not None:  # asyncio names a task after making it
            self.name = self.task.get_name()
            self.is_counted = not self.name.startswith(OF_THE_MACHINE)
        self.machine.task_name = self.name


class _Task(asyncio.Task[Any]):
    """In sets, too, tasks have an order that is always the same."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class CampaignLoop(VirtualLoop):
    """Runs one life."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._num_tasks = 0
        self._counted: list[tuple[_Task, _Counted]] = []
        self.strays: list[str] = []  # what only the loop heard of
        machine.now_s = self.time
        machine.skip = self._skip
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._hear)

    def process_on(self, machine: Machine) -> contextvars.Context:
        """The context in which tasks are those of a process on another machine than the loop's
        own."""
        machine.now_s = self.time
        machine.skip = self._skip
        context = contextvars.copy_context()
        context.run(CURRENT.set, machine)
        return context

    def end_process(self, machine: Machine) -> bool:
        """Its tasks end where they are. False for the loop's own machine."""
        if machine is self._machine:
            return False
        machine.is_dead = True
        ours = [pair for pair in self._counted if pair[1].machine is machine]
        self._counted = [pair for pair in self._counted if pair[1].machine is not machine]
        for task, counted in ours:
            with contextlib.suppress(BaseException):
                counted.inner.close()
            task.cancel()
        return True

    def discard(self) -> None:
        """Drop all tasks where they are, without a word to any of them."""
        for task, counted in self._counted:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                counted.inner.close()
        self._counted.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    def waiting(self, machine: Machine) -> list[str]:
        """Tasks of a machine that have not ended, and where they are."""
        return [
            f"{task.get_name()} ({getattr(counted.inner, '__qualname__', '')}) at "
            f"{place_of(counted.inner)}"
            for task, counted in self._counted
            if counted.machine is machine
            and not task.done()
            and not task.get_name().startswith(OF_THE_MACHINE)
        ]

    def _make_task(self, loop: Any, coro: Any, context: Any = None) -> _Task:
        get = CURRENT.get if context is None else partial(context.get, CURRENT)
        counted = _Counted(coro, get(self._machine), self)
        self._num_tasks += 1
        # The base class hashes it while it is made.
        task = _Task.__new__(_Task)
        task.number = self._num_tasks
        name = f"task {self._num_tasks}"  # the usual ones count through all loops
        task.__init__(counted, loop=loop, context=context, name=name)  # type: ignore[misc]
        counted.task = task
        if len(self._counted) > 512:
            self._counted = [pair for pair in self._counted if not pair[0].done()]
        self._counted.append((task, counted))
        return task

    def _skip(self, seconds: float) -> None:
        """The loop is blocked for so long."""
        self._clock.now += seconds

    def _hear(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, Killed):
            self.strays.append(f"{context.get('message')}: {error!r}")


def place_of(coroutine: Any) -> str:
    """The innermost line of the package that a suspended coroutine stands at."""
    frames = list(suspended_frames(coroutine))
    return place_in(frames[-1]) if frames else "elsewhere"
