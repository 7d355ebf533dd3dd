"""So many requests run at once, so many wait in their order, and the next is refused (429).

Invariants: a place is held until the app has returned, which for a stream is its end, and is given
back on every way out; who waits and leaves (or is cancelled) leaves the queue and takes no place;
nobody waits longer than the time-out (also a 429).
Only requests that generate are counted: health, metrics, sessions and administration must answer
exactly when everything else is full.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Scope, Send

from torchtitan_rl.serving.http_auth import ADMIN_PREFIX
from torchtitan_rl.serving.http_body import BufferedRequest, Handler
from torchtitan_rl.serving.http_errors import HttpError

SESSIONS_PREFIX = "/v1/sessions"

_RETRY_AFTER_S = 1


def generates(scope: Scope) -> bool:
    """Whether a request may cost an engine's time."""
    if scope["method"] != "POST":
        return False
    prefixes = (ADMIN_PREFIX, SESSIONS_PREFIX)
    return not any(scope["path"] == p or scope["path"].startswith(p + "/") for p in prefixes)


class Admission:
    """Layer of the shell between `BufferedBody` and the app."""

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
        """True with a place; False when the client left before there was one."""
        if self.num_running < self._max_running:
            self.num_running += 1
            return True
        if len(self._queue) >= self._max_queued:
            raise self._refusal("queue_full")
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        leaves = asyncio.ensure_future(request.gone())
        is_in = False
        try:
            await asyncio.wait(
                {place, leaves}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not (place.done() or leaves.done()):
                raise self._refusal("queue_timeout")
            if leaves.done():
                leaves.result()
            is_in = place.done() and not leaves.done()
            return is_in
        finally:
            leaves.cancel()
            if not place.done():
                self._queue.remove(place)
            elif not is_in:  # given in the moment in which it was no longer wanted
                self._leave()

    def _refusal(self, code: str) -> HttpError:
        self.num_refused += 1
        return HttpError(
            429,
            f"{self.num_running} requests run and {len(self._queue)} wait: try again later.",
            code=code,
            headers=((b"retry-after", str(_RETRY_AFTER_S).encode()),),
        )

    def _leave(self) -> None:
        """Hand the place to who waits longest, or give it back."""
        if self._queue:
            self._queue.popleft().set_result(None)
        else:
            self.num_running -= 1
