"""Time-outs that do not count time in which this process was stopped, or its event loop blocked.

When a stopped process continues (after Ctrl-Z, a debugger, a suspended laptop), all its deadlines
have passed, although the answers have arrived and only have to be read. A blocked event loop is the
same for as long as it is blocked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

STOOD_STILL_S = 5.0  # load alone does not delay a timer by more than this
_BLOCKED_S = 1.0  # a timer that is later than this may have been due before answers were read


async def wait_within(delay_s: float | None, task: asyncio.Future[Any]) -> bool:
    """Return when ``task`` is done, or False after ``delay_s``: cheaper than `deadline`."""
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
    """As `asyncio.timeout`, but the time starts again where the event loop finds that the deadline
    passed more than 5 s ago, and is prolonged where it passed more than 1 s ago.

    Raises:
        TimeoutError: the block took longer than ``delay_s`` (None: it may take any time).
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
    """How much longer to wait, in seconds, where the event loop found out ``late_s`` too late that
    the time was over; None: no longer."""
    if late_s > STOOD_STILL_S:
        return delay_s
    return min(late_s, delay_s) if late_s > _BLOCKED_S else None
