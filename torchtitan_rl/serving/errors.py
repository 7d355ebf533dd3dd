"""Errors as OpenAI error objects: ``{"error": {"message", "type", "param", "code"}}``.

The endpoint's layers raise `HttpError`. An exception that escapes the application, and every 500
that it answers, becomes one sentence with an incident id; the traceback, or the application's own
message, is in the log (standard error) under that id. Other errors of the application pass as they
are: its exception handlers make error objects.

Invariants: a response that has begun is never followed by another; one whose application failed
after that stays unfinished, so the server cuts the connection and the client sees that it is short.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope, Send

logger = logging.getLogger(__name__)

_MAX_LOGGED_BYTES = 2000


class HttpError(Exception):
    """A request that the endpoint refuses by itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def response(self) -> JSONResponse:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, self.status, self.headers)


class OpenAIErrors:
    """ASGI middleware for HTTP requests; it passes any ``receive`` on to the layers inside.

    ``replaces_500``: the 500s that ``app`` answers itself are replaced too.
    """

    def __init__(
        self, app: Callable[[Scope, Any, Send], Awaitable[None]], *, replaces_500: bool = True
    ) -> None:
        self._app = app
        self._replaces_500 = replaces_500

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        answer = _Answer(scope, receive, send, replaces_500=self._replaces_500)
        try:
            await self._app(scope, receive, answer.send)
        except HttpError as error:
            if answer.has_begun:
                raise
            await error.response()(scope, receive, send)
        except Exception:
            # Starlette raises again what its own handler has answered: then it is only logged.
            answer.log("failed with an exception", exc_info=True)
            if not answer.has_begun:
                await answer.send_internal_error()


class _Answer:
    """Passes on what the application sends, but replaces a 500."""

    def __init__(self, scope: Scope, receive: Any, send: Send, *, replaces_500: bool) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._replaces_500 = replaces_500
        self._incident = uuid.uuid4().hex[:12]
        self._replaced_body: bytearray | None = None
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if self._replaced_body is not None:
            await self._replace(message, self._replaced_body)
        elif self._replaces_500 and message.get("status") == HTTPStatus.INTERNAL_SERVER_ERROR:
            self._replaced_body = bytearray()
        else:
            self.has_begun = True
            await self._send(message)

    async def _replace(self, message: Message, body: bytearray) -> None:
        body += message.get("body", b"")[: _MAX_LOGGED_BYTES - len(body)]
        if not self.has_begun and not message.get("more_body", False):
            self.has_begun = True
            self.log(f"was answered 500: {bytes(body)!r}")
            await self.send_internal_error()

    async def send_internal_error(self) -> None:
        message = f"The server failed to answer this request (incident {self._incident})."
        error = HttpError(500, message, code="internal_error")
        await error.response()(self._scope, self._receive, self._send)

    def log(self, what: str, *, exc_info: bool = False) -> None:
        method, path = self._scope["method"], self._scope["path"]
        logger.error("incident %s: %s %s %s", self._incident, method, path, what, exc_info=exc_info)
