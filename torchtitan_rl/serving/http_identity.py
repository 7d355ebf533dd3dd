"""Which requests are the same request: what their headers say, for one session, method, path and
query (see `http_retries` for what follows from it)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.types import Scope

from torchtitan_rl.serving import http_context
from torchtitan_rl.serving.http_errors import HttpError

Key = bytes  # a digest: thousands of identities are remembered

_MAX_KEY_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """``keys`` name the request for whoever sends them again; ``retry_key`` names it only for
    requests that say that they are retries."""

    digest: bytes  # of the body
    keys: tuple[Key, ...] = ()
    retry_key: Key | None = None
    is_retry: bool = False


def identify(scope: Scope, body: bytes) -> Identity | None:
    """None where nothing says that this request could be repeated.

    Raises:
        HttpError: 400, for an idempotency key that is empty or too long.
    """
    if scope["method"] not in ("POST", "DELETE"):
        return None
    headers = {name.lower(): value for name, value in scope["headers"]}
    idempotency_key = headers.get(b"idempotency-key")
    request_id = headers.get(b"x-request-id", b"")[:_MAX_KEY_BYTES]
    retry_count = headers.get(b"x-stainless-retry-count", b"")
    if idempotency_key is None and not request_id and not retry_count.isdigit():
        return None
    if idempotency_key is not None and not 0 < len(idempotency_key) <= _MAX_KEY_BYTES:
        raise HttpError(
            400,
            f"An Idempotency-Key has 1 to {_MAX_KEY_BYTES} bytes.",
            code="invalid_idempotency_key",
            param="Idempotency-Key",
        )
    digest = hashlib.sha256(body).digest()
    place = (
        http_context.session_id.get(),
        scope["method"],
        scope["path"],
        scope.get("query_string", b""),
    )
    if idempotency_key is not None:  # says all there is to say
        return Identity(digest=digest, keys=(_key("key", idempotency_key, place),))
    address = (scope.get("client") or ("",))[0]
    return Identity(
        digest=digest,
        keys=(_key("id", request_id, digest, place),) if request_id else (),
        retry_key=_key("body", digest, place, address) if retry_count.isdigit() else None,
        is_retry=retry_count.isdigit() and retry_count.strip(b"0") != b"",
    )


def _key(*parts: object) -> Key:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
