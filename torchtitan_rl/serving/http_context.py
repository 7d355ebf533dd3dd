"""What belongs to the HTTP request that is handled: its session, and what to close at its end.

The shell sets it before the handler runs, so whatever the handler awaits or starts as a task
reads it: context variables are copied into tasks. It imports nothing of ours, so anyone can read
it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

session_id: ContextVar[str | None] = ContextVar("torchtitan_rl_session_id", default=None)

closings: ContextVar[list[Callable[[], Awaitable[None]]] | None] = ContextVar(
    "torchtitan_rl_closings", default=None
)
"""Called when the app has returned, however it did: a stream that was left in the middle of sending
a piece would else run until the garbage collector finds it."""


def close_at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Nothing happens outside of a request."""
    registered = closings.get()
    if registered is not None:
        registered.append(close)
