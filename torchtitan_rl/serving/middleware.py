"""Keys, bodies and places: `EndpointApp` checks a request's key, then reads its whole body, then
waits for a place, before the application sees the request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope

from torchtitan_rl.serving.config import Keys
from torchtitan_rl.serving.errors import RefusedError

logger = logging.getLogger(__name__)

ADMIN_PREFIX = "/admin"
SESSIONS_PREFIX = "/v1/sessions"
PROBLEMS_PREFIX = "/v1/problems"
DRIVEN = "torchtitan-rollout-"  # of ids of the run's own sessions, which clients cannot open


# The context of the current request. Tasks inherit it, so all code that a handler awaits or starts
# has it.

session_id: ContextVar[str | None] = ContextVar("torchtitan_rl_session_id", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentRun:
    """The run of the current request; see `serving.retries`. ``name`` is empty if the request
    cannot be repeated. ``request_id``: what the ids of a repeated run's requests have in common;
    empty for a new run."""

    name: str = ""
    request_id: str = ""


_NO_RUN = CurrentRun()
current_run: ContextVar[CurrentRun] = ContextVar("torchtitan_rl_run", default=_NO_RUN)
_at_end: ContextVar[contextlib.AsyncExitStack] = ContextVar("torchtitan_rl_at_end")


def close_at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Call ``close`` when the request's handler has returned, failed or been cancelled.

    Otherwise a stream that its handler abandons would run until it is garbage collected. Outside of
    a request this has no effect.
    """
    stack = _at_end.get(None)
    if stack is not None:
        stack.push_async_callback(close)


@contextlib.asynccontextmanager
async def request_scope() -> AsyncIterator[None]:
    """On exit, even after a cancellation, call the functions that were passed to `close_at_end`."""
    stack = contextlib.AsyncExitStack()
    token = _at_end.set(stack)
    try:
        yield
    finally:
        _at_end.reset(token)
        await asyncio.shield(_close(stack))


async def _close(stack: contextlib.AsyncExitStack) -> None:
    try:
        await stack.aclose()
    except Exception:
        logger.exception("a stream could not be closed")


# Keys.

_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_session_id(text: str) -> bool:
    """Whether ``text`` has 1 to 128 of the characters ``A-Za-z0-9._:/-``, begins with a letter or
    digit, and has no ``.`` or ``..`` between slashes, so that it can be part of a URL's path."""
    return _SESSION_ID.fullmatch(text) is not None and not {".", "..", ""} & set(text.split("/"))


def checked_session_id(text: str) -> str:
    """Return ``text``, or raise RefusedError (400) if it is not a session id."""
    if not is_session_id(text):
        message = "A session id is 1 to 128 characters of A-Z, a-z, 0-9 and ._:/-"
        raise RefusedError(400, "invalid_session_id", message, param="session_id")
    return text


def is_open(scope: Scope) -> bool:
    """Whether the request needs no key, because it says only whether the endpoint serves."""
    return bool(scope["path"] == "/health" and scope["method"] == "GET")


def authenticate(scope: Scope, keys: Keys) -> str | None:
    """Check the key of a request, and return the session that the request names.

    - Clients send the API key as a bearer token, or in ``x-api-key`` without a bearer token. If no
      key is configured (on a loopback address), any token is accepted, and none is needed.
    - ``/admin/...`` needs the admin key, which is valid for no other route; 404 if there is none.
    - The session is the value of ``X-Session-ID``, or the text after the first ":" of the token. A
      request that names two different sessions is refused.

    Keys are compared as bytes in constant time, so no header can make the comparison fail. Raises
    RefusedError: the key or the session is missing or wrong (400, 401, 403 or 404).
    """
    bearer = _bearer(scope)
    if scope["path"] == ADMIN_PREFIX or scope["path"].startswith(ADMIN_PREFIX + "/"):
        if not keys.admin:
            raise RefusedError(404, "no_admin", "There are no admin routes: no admin key is set.")
        if bearer is None:
            raise _unauthorized("This route needs the admin key as a bearer token.")
        if not hmac.compare_digest(bearer, keys.admin.encode()):
            raise RefusedError(403, "not_admin", "This is not the admin key.")
        return None
    key, colon, suffix = (bearer or b"").partition(b":")
    if keys.api and not hmac.compare_digest(key, keys.api.encode()):
        raise _unauthorized(
            "No API key was given: send it as a bearer token or in x-api-key."
            if bearer is None
            else "The API key is wrong."
        )
    named = {
        checked_session_id(text.decode("latin-1"))
        for text in ((suffix if colon else None), _header(scope, b"x-session-id"))
        if text is not None
    }
    if len(named) > 1:
        message = "X-Session-ID and the suffix of the API key name different sessions."
        raise RefusedError(400, "session_conflict", message)
    return named.pop() if named else None


def _unauthorized(message: str) -> RefusedError:
    return RefusedError(401, "invalid_api_key", message, headers={"www-authenticate": "Bearer"})


def _bearer(scope: Scope) -> bytes | None:
    """The bearer token, or else the key in ``x-api-key``, the header of Anthropic's clients; None
    without either."""
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    key = token if scheme.lower() == b"bearer" else _header(scope, b"x-api-key") or b""
    return key.strip() or None


def _header(scope: Scope, name: bytes) -> bytes | None:
    values = [value for key, value in scope["headers"] if key.lower() == name]
    if len(values) > 1:
        message = f"The header {name.decode()} was sent more than once."
        raise RefusedError(400, "repeated_header", message)
    return values[0] if values else None


# Bodies.

_CLOSE = {"connection": "close"}
_MAX_HELD_BODIES = 64  # memory limit of all requests together, in bodies of the largest size
_MAX_EXCESS = 4  # this many times the limit is read and dropped, so that clients read the refusal


@dataclass(slots=True, eq=False)
class BufferedRequest:
    """A request's whole body. As an ASGI ``receive`` it returns the body, then waits for the
    client's disconnect, as ``gone`` does. What keeps the body after the request has ended calls
    `hold`, and `release` afterwards."""

    body: bytes
    gone: Callable[[], Awaitable[None]]
    free: Callable[[], None] = lambda: None
    _num_users: int = 1
    _is_given: bool = False

    async def __call__(self) -> Message:
        if not self._is_given:
            self._is_given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone()
        return {"type": "http.disconnect"}

    async def unless_gone(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work`` and return True. If the client disconnects first, cancel ``work`` and
        return False."""
        works, leaves = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({works, leaves}, return_when=asyncio.FIRST_COMPLETED)
            (works if works.done() else leaves).result()
            return works.done()
        finally:
            works.cancel()
            leaves.cancel()

    def hold(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self.free()


class Bodies:
    """Reads bodies. Each body is bounded in bytes (a chunked one while it arrives) and in time, and
    all bodies together are bounded in bytes."""

    def __init__(self, max_bytes: int, *, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> BufferedRequest | None:
        """Read a request's body; None if the client disconnected before the body was complete. The
        caller must `release` the request. Raises RefusedError: the body is late (408), too large
        (413), or there is no memory for the body now (429)."""
        body = bytearray()
        request = None
        try:
            async with asyncio.timeout(self._timeout_s):
                is_whole = await self._read(scope, receive, body)
            if is_whole:
                free = partial(self._free, len(body))
                request = BufferedRequest(bytes(body), until_gone(receive), free)
        except TimeoutError:
            message = f"The request's body did not arrive within {self._timeout_s:g} s."
            raise RefusedError(408, "body_timeout", message, headers=_CLOSE) from None
        finally:
            if request is None:
                self._free(len(body))
        return request

    def _free(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Append the body to ``body``; False if the client disconnected before its end."""
        num_bytes, more = _announced_bytes(scope), True
        num_received = 0
        while more and num_bytes < (1 + _MAX_EXCESS) * self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk, more = message.get("body", b""), message.get("more_body", False)
            num_received += len(chunk)
            num_bytes = max(num_bytes, num_received)
            if num_bytes > self._max_bytes:
                continue
            if self._held_bytes + len(chunk) > _MAX_HELD_BODIES * self._max_bytes:
                why = "The server holds as many bytes of requests as it may."
                headers = {"retry-after": "1", **_CLOSE}
                raise RefusedError(429, "too_many_bytes", why, headers=headers)
            self._held_bytes += len(chunk)
            body += chunk
        if num_bytes > self._max_bytes:
            why = f"The request's body is larger than {self._max_bytes} bytes."
            raise RefusedError(413, "body_too_large", why, headers=_CLOSE)
        return True


def _announced_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name.lower() == b"content-length" and value.isdigit():
            # Converting more digits than any length has would be slow.
            return int(value) if len(value) < 19 else sys.maxsize
    return 0


def until_gone(receive: Receive) -> Callable[[], Awaitable[None]]:
    """Return a function that waits for the client's disconnect."""
    is_gone = False

    async def gone() -> None:
        nonlocal is_gone
        while not is_gone:
            is_gone = (await receive())["type"] == "http.disconnect"

    return gone


# Places.


def generates(scope: Scope) -> bool:
    """Whether a request may use an engine."""
    if scope["method"] != "POST":
        return False
    prefixes = (ADMIN_PREFIX, SESSIONS_PREFIX, PROBLEMS_PREFIX)
    return not any(scope["path"] == p or scope["path"].startswith(p + "/") for p in prefixes)


class Admission:
    """Bounds how many requests run concurrently and how many queue, first in, first out; others,
    and those that wait longer than ``timeout_s``, are refused (429).

    Invariants: a place is held until the application has returned (for a stream, until its end),
    and is released on every exit path. Only requests that may use an engine count: health, metrics,
    sessions and administration must answer under full load, too. Requests of the run's own
    rollouts, whose number is bounded, do not count: those of training may wait for weights until an
    evaluation ends, and would hold the places that its agents need.
    """

    def __init__(self, *, max_running: int, max_queued: int, timeout_s: float = 600.0) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self.num_running = 0
        self.num_queued = 0
        self.num_refused = 0

    @contextlib.asynccontextmanager
    async def place(self, scope: Scope, request: BufferedRequest) -> AsyncIterator[bool]:
        """Hold a place while the context is open; False if the client disconnected while queued.
        Raises RefusedError: the queue is full, or the request has waited too long (429)."""
        if not generates(scope) or (session_id.get() or "").startswith(DRIVEN):
            yield True
        elif await self._enter(request):
            self.num_running += 1
            try:
                yield True
            finally:
                self.num_running -= 1
                self._places.release()
        else:
            yield False

    async def _enter(self, request: BufferedRequest) -> bool:
        if not self._places.locked():
            return await self._places.acquire()  # returns at once
        if self.num_queued >= self._max_queued:
            raise self._refusal("queue_full")
        place = asyncio.ensure_future(self._places.acquire())
        is_in = False
        self.num_queued += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                is_in = await request.unless_gone(place)
        except TimeoutError:
            raise self._refusal("queue_timeout") from None
        finally:
            self.num_queued -= 1
            if not is_in and place.done() and not place.cancelled():
                self._places.release()  # the request got the place while its wait was ending
        return is_in

    def _refusal(self, code: str) -> RefusedError:
        self.num_refused += 1
        message = f"{self.num_running} requests run and {self.num_queued} wait: try again later."
        return RefusedError(429, code, message, headers={"retry-after": "1"})
