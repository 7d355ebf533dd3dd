"""Authenticates requests, and finds their sessions.

- `GET /health` needs no key; its answer says only whether the endpoint serves.
- Everything else, `/metrics` and the OpenAPI document included, needs the API key as a bearer
  token, or as ``x-api-key`` where there is none. Only a loopback address without a configured key
  accepts any token, or none.
- `/admin/...` needs the admin key, which is valid for nothing else; where none is configured these
  routes do not exist (404).
- The session is the header ``X-Session-ID``, or what follows the first ":" of the bearer token
  (``KEY:SESSION``); two that differ are refused.

Keys are compared as bytes in constant time, so no header can make the comparison fail.
"""

from __future__ import annotations

import hmac
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving import context
from torchtitan_rl.serving.address import Keys
from torchtitan_rl.serving.errors import HttpError

ADMIN_PREFIX = "/admin"

_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def is_session_id(text: str) -> bool:
    """1 to 128 of ``A-Za-z0-9._:/-``, the first a letter or digit, no ``.`` or ``..`` between
    slashes: it has to survive as part of a URL's path."""
    return _SESSION_ID.fullmatch(text) is not None and not {".", "..", ""} & set(text.split("/"))


def checked_session_id(text: str) -> str:
    """Raises:
    HttpError: 400, it is not a session id.
    """
    if not is_session_id(text):
        raise HttpError(
            400,
            "A session id is 1 to 128 characters of A-Z, a-z, 0-9 and ._:/-",
            code="invalid_session_id",
            param="session_id",
        )
    return text


def is_open(scope: Scope) -> bool:
    """Whether the request needs no key."""
    return bool(scope["path"] == "/health" and scope["method"] == "GET")


class Authentication:
    """ASGI middleware that sets `context.session_id` for the requests that it passes on.

    Raises:
        ConfigError: the keys cannot protect an endpoint on ``host``.
    """

    def __init__(self, app: ASGIApp, *, host: str, keys: Keys) -> None:
        if errors := keys.errors(host):
            raise ConfigError(errors)
        self._app = app
        self._api_key = keys.api.encode()
        self._admin_key = keys.admin.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        bearer = _bearer(scope)
        session_id = None
        if scope["path"] == ADMIN_PREFIX or scope["path"].startswith(ADMIN_PREFIX + "/"):
            self._check_admin(bearer)
        else:
            session_id = self._check_client(bearer, _header(scope, b"x-session-id"))
        token = context.session_id.set(session_id)
        try:
            await self._app(scope, receive, send)
        finally:
            context.session_id.reset(token)

    def _check_admin(self, bearer: bytes | None) -> None:
        if not self._admin_key:
            raise HttpError(404, "There are no admin routes: no admin key is set.", code="no_admin")
        if bearer is None:
            raise _unauthorized("This route needs the admin key as a bearer token.")
        if not hmac.compare_digest(bearer, self._admin_key):
            raise HttpError(403, "This is not the admin key.", code="not_admin")

    def _check_client(self, bearer: bytes | None, header: bytes | None) -> str | None:
        key, colon, suffix = (bearer or b"").partition(b":")
        if self._api_key and not hmac.compare_digest(key, self._api_key):
            raise _unauthorized(
                "No API key was given: send it as a bearer token."
                if bearer is None
                else "The API key is wrong."
            )
        named = {
            checked_session_id(text.decode("latin-1"))
            for text in ((suffix if colon else None), header)
            if text is not None
        }
        if len(named) > 1:
            raise HttpError(
                400,
                "X-Session-ID and the suffix of the API key name different sessions.",
                code="session_conflict",
            )
        return named.pop() if named else None


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _bearer(scope: Scope) -> bytes | None:
    """The bearer token, else the key in the header of Anthropic's clients; None without one."""
    scheme, _, token = (_header(scope, b"authorization") or b"").partition(b" ")
    key = token if scheme.lower() == b"bearer" else _header(scope, b"x-api-key") or b""
    return key.strip() or None


def _header(scope: Scope, name: bytes) -> bytes | None:
    values = [value for key, value in scope["headers"] if key.lower() == name]
    if len(values) > 1:
        raise HttpError(
            400, f"The header {name.decode()} was sent more than once.", code="repeated_header"
        )
    return values[0] if values else None
