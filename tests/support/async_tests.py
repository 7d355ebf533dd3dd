"""Tests that are coroutines: each runs to its end on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.virtual_clock import run_virtually

AsyncTest = Callable[..., Coroutine[Any, Any, None]]


def on_event_loop(test: AsyncTest) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))

    return run


def on_virtual_clock(test: AsyncTest) -> Callable[..., None]:
    """Waiting takes no time: see `virtual_clock`."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        run_virtually(test(*arguments, **options))

    return run


async def ticks(number: int = 30) -> None:
    """Let the event loop turn so often."""
    for _ in range(number):
        await asyncio.sleep(0)


async def cancel(task: asyncio.Task[Any]) -> None:
    """Cancel a task, which then raises the cancellation."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
