"""Reads and checks a request's body before the application sees the request.

The layers further in get a `BufferedRequest`. Reading is bounded in bytes (for a chunked body while
it arrives) and in time, and all bodies together are bounded in bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.types import Message, Receive, Scope, Send

from torchtitan_rl.serving.anthropic_errors import MESSAGES_PATH
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import HttpError
from torchtitan_rl.serving.limits import check_request

_CLOSE = {"connection": "close"}
_MAX_HELD_BODIES = 64  # of the largest size, all requests together
_MAX_EXCESS = 4  # bodies that are read and dropped, so that the client gets to read the refusal


class HeldBody:
    """Counts the users of one body; ``release`` is called when the last one has released it."""

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
    """A request's whole body. As an ASGI ``receive`` it gives the body, then waits for the
    client's disconnect.

    ``gone`` returns once the client has disconnected, at every call. Code that keeps the body
    longer than the client's request calls ``held.hold()``, and ``held.release()`` afterwards.
    """

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

    async def unless_gone(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work``; False where the client leaves first, and ``work`` is cancelled."""
        works, leaves = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({works, leaves}, return_when=asyncio.FIRST_COMPLETED)
            (works if works.done() else leaves).result()
            return works.done()
        finally:
            works.cancel()
            leaves.cancel()


class Handler(Protocol):
    """Handles a request with a buffered body; any ASGI application does."""

    async def __call__(self, scope: Scope, receive: BufferedRequest, send: Send, /) -> None: ...


class BufferedBody:
    """ASGI middleware: reads and checks the body, then calls ``handler`` with it."""

    def __init__(
        self,
        handler: Handler,
        limits: EndpointConfig,
        *,
        timeout_s: float,
        max_requests: int = sys.maxsize,
    ) -> None:
        self._handler = handler
        self._max_requests = max_requests
        self._num_requests = 0  # that are whole
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
                return  # the client left before the body was complete
            chunks[:] = [b"".join(chunks)]
            if chunks[0]:
                caps_tokens = scope["path"] == MESSAGES_PATH
                check_request(chunks[0], self._limits, caps_tokens=caps_tokens)
            request = BufferedRequest(chunks[0], _until_gone(receive), held)
            await self._handle(scope, request, send)
        finally:
            held.release()

    async def _handle(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        if self._num_requests >= self._max_requests:
            raise HttpError(
                429,
                f"{self._num_requests} requests are open, as many as may be.",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self._num_requests += 1
        try:
            await self._handler(scope, request, send)
        finally:
            self._num_requests -= 1

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> bool:
        """Whether the client stayed until the end of the body."""
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
                headers={"retry-after": "1", **_CLOSE},
            )
        self._held_bytes += len(chunk)
        chunks.append(chunk)

    def _excess(self, scope: Scope) -> int:
        """By how many bytes the announced length exceeds the limit."""
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit():
                # Converting more digits than any length has would be slow.
                announced = int(value) if len(value) < 19 else sys.maxsize
                return max(0, announced - self._limits.max_body_bytes)
        return 0


def _until_gone(receive: Receive) -> Callable[[], Awaitable[None]]:
    is_gone = False

    async def gone() -> None:
        nonlocal is_gone
        while not is_gone:
            is_gone = (await receive())["type"] == "http.disconnect"

    return gone
