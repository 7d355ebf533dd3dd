"""Asyncio tasks that outlive a failure or a cancellation of the code that started them.

`asyncio.TaskGroup` is for tasks of which one that fails ends all others at once. The parts of a run
must not end like that: when one fails, the others finish their step, save, and are ended in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")


class BackgroundTask:
    """At most one task at a time; its error is raised where it is waited for."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(
        self, name: str, work: Callable[..., Coroutine[Any, Any, None]], *args: Any
    ) -> asyncio.Task[None]:
        """Begin ``work(*args)``; the task before has ended.

        Raises:
            Exception: what the task before raised, if `wait` has not.
        """
        if self._task is not None:
            self._task.result()
        self._task = asyncio.create_task(work(*args), name=name)
        return self._task

    async def wait(self) -> None:
        """Return when the task has ended. Cancelling this call does not cancel the task.

        Raises:
            Exception: what the task raised; once.
        """
        task = self._task
        if task is None:
            return
        await asyncio.wait({task})
        if self._task is task:
            self._task = None
        task.result()

    async def close(self) -> None:
        """Cancel the task and wait for its end."""
        if self._task is not None:
            await cancel_all([self._task])


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait until all have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


def retrieve(task: asyncio.Future[Any]) -> None:
    """Mark its error as retrieved, which asyncio otherwise logs: no one waits for it any more."""
    if not task.cancelled():
        task.exception()


async def first_of(*works: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work that ends first; of several at once, that of the first one given.

    The others are cancelled, and have ended; what they raised is dropped.

    Raises:
        Exception: what that work raised.
    """
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
    """The result of ``work``, which runs to its end even if this call is cancelled meanwhile.

    ``on_cancel`` is called at each cancellation, for example to make ``work`` end sooner.

    Raises:
        asyncio.CancelledError: this call was cancelled; ``work`` has ended.
        Exception: what ``work`` raised.
    """
    task = asyncio.ensure_future(work)
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
