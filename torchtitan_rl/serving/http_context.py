"""Which session the HTTP request that is being handled belongs to.

The shell sets it before the handler runs, so whatever the handler awaits or starts as a task
reads it: context variables are copied into tasks. It imports nothing, so anyone can read it.
"""

from __future__ import annotations

from contextvars import ContextVar

session_id: ContextVar[str | None] = ContextVar("torchtitan_rl_session_id", default=None)
