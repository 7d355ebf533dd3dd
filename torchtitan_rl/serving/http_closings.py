"""Nothing that a request began outlives it: what was registered is closed when the app returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Scope, Send

from torchtitan_rl.serving import http_context
from torchtitan_rl.serving.http_body import BufferedRequest

logger = logging.getLogger(__name__)


class Closings:
    """Layer of the shell around the app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        registered: list[Callable[[], Awaitable[None]]] = []
        token = http_context.closings.set(registered)
        try:
            await self._app(scope, request, send)
        finally:
            http_context.closings.reset(token)
            if registered:
                # To the end, also where the request is cancelled.
                await asyncio.shield(asyncio.ensure_future(_close_all(registered)))


async def _close_all(registered: list[Callable[[], Awaitable[None]]]) -> None:
    for close in registered:
        try:
            await close()
        except Exception:
            logger.exception("a stream could not be closed")
