"""Time-outs that do not count the time in which this process was stopped, and tasks that continue
when another one fails.

When a stopped process continues (after Ctrl-Z, a debugger, a suspended laptop), or the event loop
was blocked, all its deadlines have passed, although the answers only have to be read.

`asyncio.TaskGroup` ends all its tasks at once when one fails. When one part of a run fails, the
others finish their step and save before they are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

STOOD_STILL_S = 5.0  # load alone does not delay a timer by more than this
_BLOCKED_S = 1.0  # a timer this late may have fired before pending answers were read


def loop_s() -> float:
    """The time of the running event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


async def wait_within(delay_s: float | None, task: asyncio.Future[Any]) -> bool:
    """Return True when ``task`` is done, or False after ``delay_s``. Cheaper than `deadline`."""
    if delay_s is None:
        await asyncio.wait((task,))
        return True
    loop = asyncio.get_running_loop()
    left_s: float | None = delay_s
    while not task.done() and left_s is not None:
        due_s = loop.time() + left_s
        await asyncio.wait((task,), timeout=left_s)
        left_s = _still_granted_s(delay_s, late_s=loop.time() - due_s)
    return task.done()


@asynccontextmanager
async def deadline(delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, but tolerant of a process that was stopped.

    If the event loop notices the deadline more than 5 s late, the whole time starts again. If it
    notices the deadline between 1 and 5 s late, it waits once more, for as long as it was late.
    Raises TimeoutError: the block took longer than ``delay_s`` (None: no limit).
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def start(left_s: float) -> None:
        nonlocal timer
        due_s = loop.time() + left_s
        timer = loop.call_at(due_s, look, due_s)

    def look(due_s: float) -> None:
        assert delay_s is not None
        left_s = _still_granted_s(delay_s, late_s=loop.time() - due_s)
        if left_s is None:
            limit.reschedule(loop.time())
        else:
            start(left_s)

    async with asyncio.timeout(None) as limit:
        if delay_s is not None:
            start(delay_s)
        try:
            yield limit
        finally:
            if timer is not None:
                timer.cancel()


def _still_granted_s(delay_s: float, *, late_s: float) -> float | None:
    """Return how many seconds longer to wait (None: not at all) if the loop looks ``late_s`` after
    the deadline."""
    if late_s > STOOD_STILL_S:
        return delay_s
    return min(late_s, delay_s) if late_s > _BLOCKED_S else None


_T = TypeVar("_T")
_Item = TypeVar("_Item")

_AT_ONCE = 64
_FREE_S = 0.01


async def in_parts(items: Iterable[_Item]) -> AsyncIterator[_Item]:
    """Yield the items, and leave the event loop free for 10 ms after each 64. If something begins
    for thousands of replicas at one moment, the loop does nothing else meanwhile."""
    for number, item in enumerate(items):
        if number and number % _AT_ONCE == 0:
            await asyncio.sleep(_FREE_S)
        yield item


async def for_each(
    items: Iterable[_Item], work: Callable[[_Item], Coroutine[Any, Any, _T]]
) -> list[_T]:
    """Return the results of ``work`` for the items, in their order. The works run at the same time;
    they begin `in_parts`. If one fails, the others are cancelled, and ExceptionGroup is raised."""
    async with asyncio.TaskGroup() as tasks:
        begun = [tasks.create_task(work(item)) async for item in in_parts(items)]
    return [task.result() for task in begun]


class BackgroundTask:
    """Runs at most one task at a time. An error of the task is raised by `wait`, or by the next
    `start`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(
        self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> asyncio.Task[None]:
        """Start ``work(*args)`` as a task. The previous one must have ended; its error is raised,
        unless `wait` has raised it."""
        if self._task is not None:
            self._task.result()
        self._task = asyncio.create_task(work(*args), name=name)
        return self._task

    async def wait(self) -> None:
        """Return when the task has ended; raises its error, only once. Cancelling this call does
        not cancel the task."""
        task = self._task
        if task is None:
            return
        await asyncio.wait({task})
        if self._task is task:
            self._task = None
        task.result()

    async def close(self) -> None:
        if self._task is not None:
            await cancel_all([self._task])


@asynccontextmanager
async def background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run ``work`` while the block runs, then cancel it. If ``work`` failed, its error is raised at
    the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_all([task])
    if not task.cancelled():
        task.result()


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


def retrieve(task: asyncio.Future[Any]) -> None:
    """Keep asyncio from logging the task's error, because no one waits for the task any more."""
    if not task.cancelled():
        task.exception()


async def first_of(*works: Coroutine[Any, Any, Any]) -> Any:
    """Return the result (or raise the error) of the coroutine that ends first; at the same time,
    the first of the arguments counts. The others are cancelled, and have ended when this call
    returns; their errors are dropped."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        await uninterrupted(cancel_all(tasks))
        for task in tasks:
            retrieve(task)


async def uninterrupted(
    work: Coroutine[Any, Any, _T], *, on_cancel: Callable[[], object] | None = None
) -> _T:
    """Return the result (or raise the error) of ``work``, which runs to its end even if this call
    is cancelled; then it raises CancelledError after the end. ``on_cancel`` is called at each
    cancellation, for example to make ``work`` end sooner."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is None:
        return task.result()
    raise cancelled from (None if task.cancelled() else task.exception())
