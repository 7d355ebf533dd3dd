"""Bounds how many requests run at once and how many queue; any other is refused (429).

Invariants: a place is held until the application has returned, which for a stream is its end, and
is released on every exit path. A request that leaves the queue, or is cancelled there, takes no
place. The queue is first in, first out, and no request waits longer than the timeout (also a 429).
Only requests that may use an engine count: health, metrics, sessions and administration must answer
under full load, too.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Scope, Send

from torchtitan_rl.serving.auth import ADMIN_PREFIX
from torchtitan_rl.serving.body import BufferedRequest, Handler
from torchtitan_rl.serving.errors import HttpError

SESSIONS_PREFIX = "/v1/sessions"
PROBLEMS_PREFIX = "/v1/problems"


def generates(scope: Scope) -> bool:
    """Whether a request may use an engine."""
    if scope["method"] != "POST":
        return False
    prefixes = (ADMIN_PREFIX, SESSIONS_PREFIX, PROBLEMS_PREFIX)
    return not any(scope["path"] == p or scope["path"].startswith(p + "/") for p in prefixes)


class Admission:
    """Layer between `Retries` and the application."""

    def __init__(
        self, handler: Handler, *, max_running: int, max_queued: int, timeout_s: float = 600.0
    ) -> None:
        self._handler = handler
        self._timeout_s = timeout_s
        self._max_running = max_running
        self._max_queued = max_queued
        self._queue: deque[asyncio.Future[None]] = deque()
        self.num_running = 0
        self.num_refused = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        if not generates(scope):
            await self._handler(scope, request, send)
        elif await self._enter(request):
            try:
                await self._handler(scope, request, send)
            finally:
                self._leave()

    async def _enter(self, request: BufferedRequest) -> bool:
        """Take a place; False where the client left before there was one."""
        if self.num_running < self._max_running:
            self.num_running += 1
            return True
        if len(self._queue) >= self._max_queued:
            raise self._refusal("queue_full")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        is_in = False
        try:
            async with asyncio.timeout(self._timeout_s):
                is_in = await request.unless_gone(place)
        except TimeoutError:
            raise self._refusal("queue_timeout") from None
        finally:
            if place in self._queue:
                self._queue.remove(place)
            elif not is_in:  # it got the place while it was ending
                self._leave()
        return is_in

    def _refusal(self, code: str) -> HttpError:
        self.num_refused += 1
        return HttpError(
            429,
            f"{self.num_running} requests run and {len(self._queue)} wait: try again later.",
            code=code,
            headers={"retry-after": "1"},
        )

    def _leave(self) -> None:
        """Pass the place to the request that has waited longest, or release it."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self.num_running -= 1
