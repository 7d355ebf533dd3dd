"""Time-outs that do not count time in which this process was stopped.

When a stopped process continues (after Ctrl-Z, a debugger, a suspended laptop), all its deadlines
have passed, although the answers have arrived and only have to be read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

STOOD_STILL_S = 5.0  # load alone does not delay a timer by more than this


async def wait_within(delay_s: float | None, task: asyncio.Future[Any]) -> bool:
    """Return when ``task`` is done, or False after ``delay_s``: cheaper than `deadline`."""
    if delay_s is None:
        await asyncio.wait((task,))
        return True
    loop = asyncio.get_running_loop()
    late_s = math.inf
    while not task.done() and late_s > STOOD_STILL_S:
        due_s = loop.time() + delay_s
        await asyncio.wait((task,), timeout=delay_s)
        late_s = loop.time() - due_s
    return task.done()


@asynccontextmanager
async def deadline(delay_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, but the time starts again where the event loop finds that the deadline
    passed more than 5 s ago.

    Raises:
        TimeoutError: the block took longer than ``delay_s`` (None: it may take any time).
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def start() -> None:
        nonlocal timer
        if delay_s is not None:
            due_s = loop.time() + delay_s
            timer = loop.call_at(due_s, look, due_s)

    def look(due_s: float) -> None:
        if loop.time() - due_s > STOOD_STILL_S:
            start()
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        start()
        try:
            yield limit
        finally:
            if timer is not None:
                timer.cancel()
