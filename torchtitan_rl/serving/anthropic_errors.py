"""Errors of `/v1/messages` in Anthropic's shape:
``{"type": "error", "error": {"type", "message", "code", "param"}}``; the last two are ours.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MESSAGES_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error(error: Mapping[str, Any], status: int) -> dict[str, Any]:
    """``error`` is the inner object of an OpenAI error."""
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {
            "type": kind,
            "message": str(error["message"]),
            "code": error.get("code"),
            "param": error.get("param"),
        },
    }


class AnthropicErrors:
    """ASGI middleware: translates the error objects of all layers inside, for this API alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/"):
            send = _Translation(send).send
        await self._app(scope, receive, send)


class _Translation:
    """Passes a response on, but replaces the body of an error."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None  # of an error, whose body is awaited
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._start)

    async def _send_error(self, start: Message) -> None:
        body = bytes(self._body)
        with contextlib.suppress(ValueError, KeyError, TypeError):  # what is none passes as it is
            body = json.dumps(anthropic_error(json.loads(body)["error"], start["status"])).encode()
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
