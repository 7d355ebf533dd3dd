"""A request's body is read whole, and judged, before anything is done with it.

The layers further in get a `BufferedRequest`: it is their ``receive`` (the body at once, then
silence until the client is gone) and tells them of a client that leaves, which they may ask for
as often as they like. Reading is bounded in bytes (for a chunked body while it comes) and in
time, and all bodies together in bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

from torchtitan_rl.serving.http_errors import HttpError
from torchtitan_rl.serving.http_limits import RequestLimits, check_request

_CLOSE = ((b"connection", b"close"),)
_MAX_HELD_BODIES = 64  # of the largest size, all requests together
_MAX_EXCESS = 4  # bodies that are read and dropped so that the client gets to read the refusal


class HeldBody:
    """The bytes of one body, counted among those of all until its last user has released it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._num_users = 1

    def hold(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._release()


class BufferedRequest:
    """A request's body, usable as an ASGI ``receive``; ``gone`` returns once no client waits.
    Who keeps the body for longer than the client's request holds ``held``, and releases it."""

    def __init__(
        self, body: bytes, gone: Callable[[], Awaitable[None]], held: HeldBody | None = None
    ) -> None:
        self.body = body
        self.gone = gone
        self.held = held or HeldBody(lambda: None)
        self._is_given = False

    async def __call__(self) -> Message:
        if not self._is_given:
            self._is_given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone()
        return {"type": "http.disconnect"}


class Handler(Protocol):
    """What handles a request that is read whole; any ASGI app can."""

    async def __call__(self, scope: Scope, receive: BufferedRequest, send: Send, /) -> None: ...


class BufferedBody:
    """ASGI middleware: reads and judges the body, then calls ``handler`` with it."""

    def __init__(self, handler: Handler, *, limits: RequestLimits, timeout_s: float) -> None:
        self._handler = handler
        self._limits = limits
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: list[bytes] = []

        def release() -> None:
            self._held_bytes -= sum(map(len, chunks))

        held = HeldBody(release)
        try:
            if not await self._read(scope, receive, chunks):
                return  # the client left in the middle of it
            chunks[:] = [b"".join(chunks)]
            if chunks[0]:
                check_request(chunks[0], self._limits)
            request = BufferedRequest(chunks[0], _until_gone(receive), held)
            await self._handler(scope, request, send)
        finally:
            held.release()

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> bool:
        """Whether the client stayed until the end of it."""
        excess = self._excess(scope)
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while excess < _MAX_EXCESS * self._limits.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    excess = max(excess, num_bytes - self._limits.max_body_bytes)
                    if not excess:
                        self._hold(chunk, chunks)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(
                408,
                f"The request's body did not arrive within {self._timeout_s:g} s.",
                code="body_timeout",
                headers=_CLOSE,
            ) from None
        if excess:
            raise HttpError(
                413,
                f"The request's body is larger than {self._limits.max_body_bytes} bytes.",
                code="body_too_large",
                headers=_CLOSE,
            )
        return True

    def _hold(self, chunk: bytes, chunks: list[bytes]) -> None:
        if self._held_bytes + len(chunk) > _MAX_HELD_BODIES * self._limits.max_body_bytes:
            raise HttpError(
                429,
                "The server holds as many bytes of requests as it may.",
                code="too_many_bytes",
                headers=((b"retry-after", b"1"), *_CLOSE),
            )
        self._held_bytes += len(chunk)
        chunks.append(chunk)

    def _excess(self, scope: Scope) -> int:
        """By how many bytes the announced length is over the limit."""
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit():
                # More digits than any length has would be slow to convert.
                announced = int(value) if len(value) < 19 else sys.maxsize
                return max(0, announced - self._limits.max_body_bytes)
        return 0


def _until_gone(receive: Receive) -> Callable[[], Awaitable[None]]:
    """What returns once ``receive`` has told of the disconnect, now or in an earlier call."""
    is_gone = False

    async def gone() -> None:
        nonlocal is_gone
        while not is_gone:
            is_gone = (await receive())["type"] == "http.disconnect"

    return gone
