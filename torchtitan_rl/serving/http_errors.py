"""Every error leaves as the OpenAI error object, and none shows what is inside the server.

``{"error": {"message", "type", "param", "code"}}``. The shell raises `HttpError`; what the app
answers in another shape (404 and 405 of the framework, say) is rewritten, keeping status and
headers; what escapes the app, and every 500 that it answers, becomes one sentence and an incident
id under which the traceback or the app's own message is in the log (standard error).

Invariants: a response that has begun is never followed by another; one whose app failed after
that is left unfinished, so the server cuts the connection and the client sees that it is short.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any

from starlette.types import Message, Scope, Send

from torchtitan_rl.serving.http_stalls import ClientStalledError

logger = logging.getLogger(__name__)

RawHeaders = Sequence[tuple[bytes, bytes]]

_INTERNAL = "The server failed to answer this request"
_MAX_REWRITTEN_BYTES = 1 << 20


class HttpError(Exception):
    """A request that the shell answers itself."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: RawHeaders = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers


def error_body(status: int, message: str, *, code: str | int, param: str | None = None) -> bytes:
    """The OpenAI error object, as JSON."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


async def send_error(send: Send, error: HttpError) -> None:
    body = error_body(error.status, error.message, code=error.code, param=error.param)
    await _send_whole(send, error.status, list(error.headers), body)


class OpenAIErrors:
    """ASGI middleware around an app and the shell's own layers, whatever their ``receive`` is."""

    def __init__(self, app: Callable[[Scope, Any, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, send)
        try:
            await self._app(scope, receive, answer.send)
        except HttpError as error:
            if answer.has_begun:
                raise  # a error of a layer: it refuses only what it has not answered
            await send_error(send, error)
        except ClientStalledError:
            raise  # there is no one to be told
        except Exception:
            # Frameworks re-raise what their own handler has answered: then it is only logged.
            incident = answer.incident
            _log(scope, incident, "failed with an exception", exc_info=True)
            if not answer.has_begun:
                await send_error(send, _internal_error(incident))


class _Answer:
    """What the app sends: passed on, but for errors, which are kept until they can be judged."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self.incident = uuid.uuid4().hex[:12]
        self._error: Message | None = None  # the start of an error whose body is awaited
        self._body = bytearray()
        self._passes_on = False

    @property
    def has_begun(self) -> bool:
        return self._passes_on

    async def send(self, message: Message) -> None:
        if self._error is None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._error = message
                return
            self._passes_on = True
            await self._send(message)
            return
        if message["type"] != "http.response.body" or self._passes_on:
            return
        if len(self._body) <= _MAX_REWRITTEN_BYTES:
            self._body += message.get("body", b"")
        if not message.get("more_body", False):
            self._passes_on = True
            await self._send_error(self._error, bytes(self._body))

    async def _send_error(self, start: Message, body: bytes) -> None:
        status = int(start["status"])
        headers = [pair for pair in start.get("headers", ()) if not _describes_body(pair[0])]
        error = _read_error(body)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR and not _is_ours(error):
            _log(self._scope, self.incident, f"was answered 500: {body[:2000]!r}")
            await send_error(self._send, _internal_error(self.incident))
            return
        if error is None:
            body = error_body(status, _detail(status, body), code=_code(status))
        await _send_whole(self._send, status, headers, body)


def _internal_error(incident: str) -> HttpError:
    return HttpError(500, f"{_INTERNAL} (incident {incident}).", code="internal_error")


def _log(scope: Scope, incident: str, what: str, *, exc_info: bool = False) -> None:
    logger.error(
        "incident %s: %s %s %s", incident, scope["method"], scope["path"], what, exc_info=exc_info
    )


async def _send_whole(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    headers = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _read_error(body: bytes) -> dict[str, Any] | None:
    """The error object in ``body``, or None where it has another shape."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return None
    if isinstance(error, dict) and {"message", "type", "param", "code"} <= error.keys():
        return error
    return None


def _is_ours(error: dict[str, Any] | None) -> bool:
    return error is not None and str(error["message"]).startswith(_INTERNAL)


def _detail(status: int, body: bytes) -> str:
    """What the frameworks' own errors say, in one line, or the status in words."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, TypeError, KeyError):
        return _phrase(status)
    if isinstance(detail, list):  # of a failed validation, one entry for each error
        errors = [entry for entry in detail if isinstance(entry, dict)]
        return "; ".join(
            f"{'.'.join(str(part) for part in entry.get('loc', ()))}: {entry.get('msg', '')}"
            for entry in errors
        )
    return str(detail)


def _code(status: int) -> str:
    return _phrase(status).lower().replace(" ", "_")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:  # 499, say
        return f"Error {status}"


def _describes_body(name: bytes) -> bool:
    return name.lower() in (b"content-type", b"content-length", b"transfer-encoding")
