"""The context of the current HTTP request: its session, and what to close after it.

Context variables are inherited by tasks, so all code that the handler awaits or starts has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar

logger = logging.getLogger(__name__)

session_id: ContextVar[str | None] = ContextVar("torchtitan_rl_session_id", default=None)

_at_end: ContextVar[contextlib.AsyncExitStack | None] = ContextVar(
    "torchtitan_rl_at_end", default=None
)


def close_at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Call ``close`` when the request's handler has returned, failed or been cancelled.

    A stream that its handler left half-way would otherwise run until it is garbage collected.
    Outside of a request nothing happens.
    """
    stack = _at_end.get()
    if stack is not None:
        stack.push_async_callback(close)


@contextlib.asynccontextmanager
async def request_scope() -> AsyncIterator[None]:
    """The scope of `close_at_end`: everything is closed on leaving, also where it is cancelled."""
    stack = contextlib.AsyncExitStack()
    token = _at_end.set(stack)
    try:
        yield
    finally:
        _at_end.reset(token)
        await asyncio.shield(asyncio.ensure_future(_close(stack)))


async def _close(stack: contextlib.AsyncExitStack) -> None:
    try:
        await stack.aclose()
    except Exception:
        logger.exception("a stream could not be closed")
