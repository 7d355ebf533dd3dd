"""Calling code of others, async or plain, from the event loop without blocking it.

A plain function gets a daemon thread of its own: any number may block at once, none waits for
another's end, and one that hangs does not keep the process alive. Such a thread cannot be killed:
after a time-out or a cancellation it runs on, its result is dropped, and it is counted
(`abandoned`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from torchtitan_rl.deadlines import deadline
from torchtitan_rl.rollout.abandoned import abandoned

_T = TypeVar("_T")

_GRACE_S = 5.0  # for work to clean up when it is cancelled
_computing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compute")


class CallTimeoutError(Exception):
    """A call took too long; no `TimeoutError`, which the called code may raise by itself."""


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function``, await what it returns where that can be awaited, and return the result.

    Plain functions run in a thread, with the caller's context variables.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a plain function in a new daemon thread and await its result or its exception."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()
    name = _name_of(function)
    has_ended = threading.Event()

    def deliver(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # cancelled or timed out meanwhile: nobody wants it any more
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function, *args)
        except StopIteration as raised:  # a future refuses to carry it
            error = RuntimeError(f"StopIteration raised by {function!r}")
            error.__cause__ = raised
        except BaseException as raised:  # carried to the awaiting task
            error = raised
        has_ended.set()
        abandoned.end(outcome)
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:  # the loop closed between the two lines: nobody waits
                return

    threading.Thread(target=work, name=f"call {name}", daemon=True).start()
    try:
        return await outcome
    except asyncio.CancelledError:
        if outcome.cancelled():  # else the function raised it
            abandoned.add(outcome, name)
            if has_ended.is_set():  # in this moment: it may have said so before
                abandoned.end(outcome)
        raise


async def compute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a plain function that computes for a moment and never waits, in one of few threads.

    Many threads that compute would keep the event loop from the interpreter's lock.
    """
    return await asyncio.get_running_loop().run_in_executor(_computing, function, *args)


def is_cancelled() -> bool:
    """Whether the current task is being cancelled from outside.

    False inside ``except CancelledError`` means that the called code raised it by itself.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def within(timeout_s: float, work: Callable[..., Coroutine[Any, Any, _T]], *args: Any) -> _T:
    """The result of ``work(*args)``, which is cancelled after ``timeout_s`` or with the caller.

    Work that does not heed its cancellation gets ``timeout_s`` (at most `_GRACE_S`) more and is
    then left behind: whoever waits here goes on.

    Raises:
        CallTimeoutError: there was no result in time.
        Exception: what ``work`` raised, a CancelledError of its own included.
    """

    async def outcome() -> tuple[_T | None, BaseException | None]:
        try:
            return await work(*args), None
        except (Exception, SystemExit) as error:  # an event loop would end by a task's SystemExit
            return None, error

    task = asyncio.ensure_future(outcome())
    try:
        with contextlib.suppress(TimeoutError):
            async with deadline(timeout_s):
                await asyncio.wait({task})
        if not task.done():
            raise CallTimeoutError(f"no answer after {timeout_s} s")
        result, error = task.result()
    finally:
        if not task.done():
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=min(timeout_s, _GRACE_S))
            finally:
                _note_abandoned(task, args[0] if work is call else work)
    if error is not None:
        raise error
    return cast("_T", result)


def _note_abandoned(task: asyncio.Future[Any], function: Callable[..., Any]) -> None:
    """Work that does not heed its cancellation either."""
    if not task.done():
        abandoned.add(task, _name_of(function))
        task.add_done_callback(abandoned.end)


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def summary(error: BaseException) -> str:
    """Type, message and place of an error in one line, for a person."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    try:
        message = str(error)
    except Exception:  # the error's own class is broken
        message = "<its message cannot be made>"
    return f"{type(error).__name__}: {message}{place}"
