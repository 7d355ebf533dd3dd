"""Decorators for tests that are coroutines: each runs to its end on an event loop of its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

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
