"""Calls user code (environments, rewards, agents) without blocking the event loop.

A synchronous function runs in a new daemon thread: any number of calls may block together, and a
hanging call does not keep the process alive. A call that cannot be ended is abandoned
(`abandoned`): it runs on and keeps its resources, and its result is dropped. The number of such
calls is logged whenever it doubles. If too many hang for long, the run fails with an error that
names them; from then on, environments are closed but not called.

Invariant: a call is counted once, from the moment its caller stops waiting until it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from torchtitan_rl.aio import wait_within
from torchtitan_rl.errors import TorchtitanRLError, one_line

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_GRACE_S = 5.0  # the time to clean up after a cancellation
_computing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="compute")


class HangingCallsError(TorchtitanRLError):
    """Too many calls of environments, rewards or agents hang. The message names the functions."""


@dataclass(kw_only=True)
class AbandonedCalls:
    """The abandoned calls of one process. May be used from any thread. A call counts as hanging
    ``hangs_after_s`` after its caller stopped waiting; before, it may only be slow to notice."""

    max_hanging: int = 256
    hangs_after_s: float = 60.0

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._running: dict[object, tuple[str, float]] = {}  # name, abandoned at
        self._next_report = 1

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, call: object, name: str) -> None:
        with self._lock:
            self._running[call] = (name, time.monotonic())
            number = len(self._running)
        if number >= self._next_report:
            self._next_report = 2 * number
            logger.warning(
                "%d calls run on after their time-out or cancellation (%s)", number, self.names()
            )

    def end(self, call: object) -> None:
        """Record that the call has ended. Ignored if the call was not abandoned."""
        with self._lock:
            self._running.pop(call, None)

    def names(self) -> str:
        """Name the functions with the most abandoned calls, with their numbers."""
        with self._lock:
            counts = Counter(name for name, _ in self._running.values())
        return ", ".join(f"{name}: {number}" for name, number in counts.most_common(5))

    def require_few(self) -> None:
        """Raise HangingCallsError if ``max_hanging`` calls or more hang."""
        if len(self._running) < self.max_hanging:
            return
        latest = time.monotonic() - self.hangs_after_s
        with self._lock:
            hanging = sum(since <= latest for _, since in self._running.values())
        if hanging >= self.max_hanging:
            raise HangingCallsError(
                f"{hanging} calls have hung for {self.hangs_after_s:.0f} s or more after their "
                f"time-out ({self.names()}), and each keeps its thread: give what they wait for a "
                "time-out of its own"
            )


abandoned = AbandonedCalls()
"""The instance of this process."""


class CallTimeoutError(Exception):
    """A call took too long. Not a `TimeoutError`, which the called code may raise itself."""


class CallFailedError(Exception):
    """A call raised an error, possibly its own CancelledError or SystemExit. The message describes
    it in one line."""


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call an async function, or a synchronous one in a thread, and return the result."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await in_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a synchronous function in a new daemon thread, with the caller's context variables."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()
    has_ended = threading.Event()

    def deliver(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # cancelled or timed out: the caller no longer waits
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
        except StopIteration as raised:  # a future cannot hold it
            error = RuntimeError(f"StopIteration raised by {function!r}")
            error.__cause__ = raised
        except BaseException as raised:  # passed on to the awaiting task
            error = raised
        has_ended.set()
        abandoned.end(outcome)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the caller no longer waits
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name=f"call {_name_of(function)}", daemon=True).start()
    try:
        return await outcome
    except asyncio.CancelledError:
        if outcome.cancelled():  # otherwise the function raised it
            abandoned.add(outcome, _name_of(function))
            if has_ended.is_set():  # the thread may have called `end` before this `add`
                abandoned.end(outcome)
        raise


async def compute(function: Callable[..., Any], *args: Any) -> Any:
    """Run a synchronous function that computes briefly and never waits, in one of two threads.

    With more computing threads, the event loop would wait for the interpreter's lock.
    """
    return await asyncio.get_running_loop().run_in_executor(_computing, function, *args)


def is_cancelled() -> bool:
    """Whether the current task is being cancelled from outside; otherwise the called code raised
    the CancelledError itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def within(
    timeout_s: float | None,
    function: Callable[..., Coroutine[Any, Any, _T]],
    *args: Any,
    name: str | None = None,
) -> _T:
    """Return the result of an async function, which is cancelled after ``timeout_s``, if given, or
    with the caller. A call that ignores this for another ``timeout_s`` (at most `_GRACE_S`) is
    abandoned, and counted under ``name`` (default: the function's).

    Raises:
        CallTimeoutError: there was no result within ``timeout_s``.
        CallFailedError: ``function`` raised an error.
    """

    async def outcome() -> tuple[_T | None, BaseException | None]:
        try:
            return await function(*args), None
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return None, error  # a task's SystemExit would end the event loop

    task = asyncio.create_task(outcome())
    try:
        if not await wait_within(timeout_s, task):
            raise CallTimeoutError(f"no answer after {timeout_s} s")
        result, error = task.result()
    finally:
        if not task.done():
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=min(timeout_s or _GRACE_S, _GRACE_S))
            finally:
                if not task.done():
                    abandoned.add(task, name or _name_of(function))
                    task.add_done_callback(abandoned.end)
    if error is not None:
        raise CallFailedError(summary(error)) from error
    return cast("_T", result)


def summary(error: BaseException) -> str:
    """Describe an error in one line: type, message and place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{one_line(error)}{place}"


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
