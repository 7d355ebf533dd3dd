"""Faults at the awaits of a program: each suspension is counted, and one of them goes wrong.

A task factory drives every coroutine by hand. Where it suspends in one of the watched files, the
suspension has a site (the lines of those files that wait, outermost first) and a number. The
chosen one is raised into, cancelled (from within, or as a task) or delayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.support.package_frames import file_and_line, suspended_frames

Site = tuple[str, ...]


class Kind(StrEnum):
    RAISE = "raise"
    CANCEL_WITHIN = "cancel_within"  # what is awaited turns out to be cancelled
    CANCEL_TASK = "cancel_task"
    DELAY = "delay"


class InjectedError(RuntimeError):
    """Of no kind that anything expects."""


@dataclass
class Faults:
    """``watches`` says of a file whether its suspensions count. ``number`` None: only count."""

    watches: Callable[[str], bool]
    number: int | None = None
    kind: Kind = Kind.RAISE
    delay_s: float = 20.0
    sites: list[Site] = field(default_factory=list)
    hit: asyncio.Task[Any] | None = None  # once it has happened
    hit_s: float = 0.0
    is_counting: bool = False

    def factory(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        options.setdefault("name", getattr(work, "__qualname__", ""))
        task = asyncio.Task(self._driven(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # where it was cancelled before it began
        return task

    async def _driven(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await _Driven(self, work)

    def is_next(self, work: Any) -> bool:
        site = _site(work, self.watches)
        if not self.is_counting or not site:
            return False
        self.sites.append(site)
        return len(self.sites) - 1 == self.number


@dataclass
class _Driven:
    faults: Faults
    work: Coroutine[Any, Any, Any]

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                waits_for = self.work.send(value) if error is None else self.work.throw(error)
            except StopIteration as ended:
                return ended.value
            value, error = None, None
            try:
                if self.faults.is_next(self.work) and not (yield from self._fail(waits_for)):
                    continue
                value = yield waits_for
            except BaseException as raised:
                error = raised

    def _fail(self, waits_for: Any) -> Generator[Any, Any, bool]:
        """Whether it is still to be waited for what it waits for."""
        task = asyncio.current_task()
        assert task is not None
        self.faults.hit, self.faults.hit_s = task, task.get_loop().time()
        if self.faults.kind is Kind.CANCEL_TASK:
            task.cancel()
            return True
        if asyncio.isfuture(waits_for):
            waits_for._asyncio_future_blocking = False  # this task does not wait for it
        if self.faults.kind is Kind.RAISE:
            raise InjectedError
        if self.faults.kind is Kind.CANCEL_WITHIN:
            raise asyncio.CancelledError
        yield from asyncio.sleep(self.faults.delay_s).__await__()
        if asyncio.isfuture(waits_for):
            waits_for._asyncio_future_blocking = not waits_for.done()
            return not waits_for.done()
        return True


def _site(work: Any, watches: Callable[[str], bool]) -> Site:
    """Empty where the innermost line of ours is in no watched file."""
    frames = list(suspended_frames(work))
    if not frames or not watches(frames[-1].f_code.co_filename):
        return ()
    return tuple(map(file_and_line, frames))
