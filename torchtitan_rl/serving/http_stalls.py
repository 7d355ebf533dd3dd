"""A client that does not read its answer is treated as one that is gone.

The server holds back what a client does not read, so the app waits in ``send``, with its place and
its request in an engine's batch. After ``timeout_s`` of that, `ClientStalledError` goes through the
app, which ends as at a disconnect, and the server closes the connection.

Answers are bounded before that, too: what waits is at most one chunk, and in the front end the
pieces of one completion.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)


class ClientStalledError(Exception):
    """A client has not read for too long; there is nothing more to be sent."""


class StalledClients:
    """ASGI middleware, the outermost. ``num_stalled`` counts them since the start."""

    def __init__(self, app: ASGIApp, *, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self.num_stalled = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    await send(message)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                self.num_stalled += 1
                logger.warning("a client has not read for %.0f s", self._timeout_s)
                raise ClientStalledError from error

        try:
            await self._app(scope, receive, send_in_time)
        except ClientStalledError:
            return  # an answer that is not whole: the server closes the connection
