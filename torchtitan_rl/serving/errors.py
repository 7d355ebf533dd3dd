"""Errors of the endpoint, and how clients get them.

An error is an OpenAI error object: ``{"error": {"message", "type", "param", "code"}}``. On
``/v1/messages`` it has Anthropic's shape, with our code and param:
``{"type": "error", "error": {"type", "message", "code", "param"}}``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from torchtitan_rl.errors import TorchtitanRLError

if TYPE_CHECKING:
    from starlette.types import Message, Scope, Send

logger = logging.getLogger(__name__)

MESSAGES_PATH = "/v1/messages"
_MAX_LOGGED_BYTES = 2000
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


class RefusedError(TorchtitanRLError):
    """A client's request is refused: an HTTP status, a code such as ``session_closed``, and a
    message without internals. The exception can be pickled."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = headers or {}

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        else:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        inner = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": inner}


def anthropic_error(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """Convert the inner object of an OpenAI error to Anthropic's error object."""
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    own = {"message": str(error["message"]), "code": error.get("code"), "param": error.get("param")}
    return {"type": "error", "error": {"type": kind, **own}}


async def answer_errors(
    scope: Scope,
    send: Send,
    handle: Callable[[Send], Awaitable[None]],
    *,
    replaces_500: bool = True,
) -> None:
    """Call ``handle`` with a ``send``, and answer the request with an error if ``handle`` raises.

    A `RefusedError` is answered with its own status and body. Any other exception, and (with
    ``replaces_500``) every 500 that ``handle`` sends, becomes one sentence with an incident id,
    under which the traceback or message is logged. Other errors pass in the shape of their route.

    Invariant: a response that has begun is never followed by another one. If the application fails
    then, the server cuts the connection, and the client sees that the response is incomplete.
    """
    answer = _Answer(scope, send, replaces_500=replaces_500)
    try:
        await handle(answer.send)
    except RefusedError as error:
        if answer.has_begun:
            raise
        await answer.send_error(error)
    except Exception:
        # Starlette raises an exception again after its own handler has answered: only log it then.
        answer.log("failed with an exception", exc_info=True)
        if not answer.has_begun:
            await answer.send_internal_error()


class _Answer:
    """Passes on an application's messages, but holds an error back to replace or translate it."""

    def __init__(self, scope: Scope, send: Send, *, replaces_500: bool) -> None:
        self._scope = scope
        self._send = send
        self._replaces_500 = replaces_500
        path = scope["path"]
        self._is_anthropic = path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")
        self._incident = uuid.uuid4().hex[:12]
        self._held: Message | None = None  # the start message of an error response
        self._body = bytearray()  # the body of that error response
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if self._held is not None:
            self._body += message.get("body", b"")
            if not self.has_begun and not message.get("more_body", False):
                await self._send_held(self._held)
        elif self._is_replaced(message) or (self._is_anthropic and message.get("status", 0) >= 400):
            self._held = message
        else:
            self.has_begun = True
            await self._send(message)

    def _is_replaced(self, start: Message) -> bool:
        return self._replaces_500 and start.get("status") == HTTPStatus.INTERNAL_SERVER_ERROR

    async def _send_held(self, start: Message) -> None:
        body = bytes(self._body)
        if self._is_replaced(start):
            self.log(f"was answered 500: {body[:_MAX_LOGGED_BYTES]!r}")
            await self.send_internal_error()
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):  # other bodies pass unchanged
            body = json.dumps(anthropic_error(json.loads(body)["error"], start["status"])).encode()
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        await self._respond(start["status"], headers, body)

    async def send_error(self, error: RefusedError) -> None:
        content = error.body()
        if self._is_anthropic:
            content = anthropic_error(content["error"], error.status)
        headers = {"content-type": "application/json", **error.headers}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._respond(error.status, pairs, json.dumps(content).encode())

    async def send_internal_error(self) -> None:
        message = f"The server failed to answer this request (incident {self._incident})."
        await self.send_error(RefusedError(500, "internal_error", message))

    async def _respond(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> None:
        self.has_begun = True
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    def log(self, what: str, *, exc_info: bool = False) -> None:
        method, path = self._scope["method"], self._scope["path"]
        logger.error("incident %s: %s %s %s", self._incident, method, path, what, exc_info=exc_info)
