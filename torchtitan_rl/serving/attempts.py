"""One run of a request whose response is recorded, so that clients can follow it from its start."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import dataclass, field

from starlette.types import Message, Scope, Send

from torchtitan_rl.serving import context
from torchtitan_rl.serving.errors import HttpError

Key = bytes  # a digest: thousands of identities are remembered

_MAX_KEY_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The keys by which a repeated request is recognized.

    ``keys`` hold for every request that has one of them, ``retry_key`` only for requests whose
    client says that it retries. Both include session, method, path and query.
    """

    digest: bytes  # of the body
    keys: tuple[Key, ...] = ()
    retry_key: Key | None = None
    is_retry: bool = False

    @property
    def all_keys(self) -> tuple[Key, ...]:
        return self.keys if self.retry_key is None else (*self.keys, self.retry_key)


def identify(scope: Scope, body: bytes) -> Identity | None:
    """The identity of a request; None where no header says that it may be repeated.

    Raises:
        HttpError: 400, the idempotency key is empty or too long.
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
        context.session_id.get(),
        scope["method"],
        scope["path"],
        scope.get("query_string", b""),
    )
    if idempotency_key is not None:  # it alone decides
        return Identity(digest=digest, keys=(_key("key", idempotency_key, place),))
    address = (scope.get("client") or ("",))[0]
    return Identity(
        digest=digest,
        keys=(_key("id", request_id, digest, place),) if request_id else (),
        retry_key=_key("body", digest, place, address) if retry_count.isdigit() else None,
        is_retry=retry_count.isdigit() and retry_count.strip(b"0") != b"",
    )


@dataclass(slots=True, eq=False)
class Attempt:
    """A recorded run: `record` is the application's ``send``; followers get a replay.

    An attempt fails when it ends without a whole 2xx response, or after the application was told
    that its client is gone, because that response is for no client. A failed attempt is replayed
    only to clients that already follow it.
    """

    identity: Identity
    task: asyncio.Task[None] | None = None
    num_followers: int = 0
    num_departures: int = 0  # of followers that left before its end
    num_retries: int = 0
    num_bytes: int = 0
    is_abandoned: bool = False  # it is to end, for its clients are gone
    is_delivered: bool = False  # whole, to at least one follower
    has_ended: bool = False
    is_dropped: bool = False  # it has ended, and its response is no longer kept
    is_forgotten: bool = False  # by `Retries`
    _messages: list[Message] = field(default_factory=list)
    _status: int = 0
    _is_whole: bool = False
    _has_told_app: bool = False  # that it is abandoned
    _changed: asyncio.Event | None = field(default_factory=asyncio.Event)  # None once it has ended

    @property
    def has_begun(self) -> bool:
        """Whether the response has begun."""
        return self._status != 0

    @property
    def is_failed(self) -> bool:
        return self.has_ended and (
            self._has_told_app or not (self._is_whole and 200 <= self._status < 300)
        )

    @property
    def is_ending(self) -> bool:
        """It is being aborted, and has not ended yet."""
        return self.is_abandoned and not self.has_ended

    def rank(self) -> tuple[int, bool, int]:
        """Sort key: the attempt that a retry most likely repeats comes first."""
        if self.is_failed or self.is_ending:
            likelihood = 1
        elif not self.num_followers and not self.is_delivered:
            likelihood = 0
        else:
            likelihood = 3 if self.has_ended else 2
        return (likelihood, self.is_dropped, self.num_retries)

    async def record(self, message: Message) -> None:
        self._messages.append(message)
        self.num_bytes += len(message.get("body", b""))
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_whole = True
        self._notify()

    def abandon(self) -> None:
        """Have `gone` return, because all clients are gone."""
        self.is_abandoned = True
        self._notify()

    async def gone(self) -> None:
        """Wait until it is abandoned. The application waits for its client's disconnect here."""
        while not self.is_abandoned and self._changed is not None:
            await self._changed.wait()
        self._has_told_app = self._has_told_app or not self.has_ended

    async def ended(self) -> None:
        while self._changed is not None:
            await self._changed.wait()

    def end(self) -> None:
        """The application has returned."""
        self.has_ended = True
        self._notify()

    def replay(
        self, send: Send, *, headers: tuple[tuple[bytes, bytes], ...]
    ) -> Coroutine[None, None, None]:
        """Send the response from its start to its end. ``headers`` are added."""
        # Bound now, not at the first await: the recording may be dropped in between.
        return self._replay(self._messages, send, headers)

    async def _replay(
        self, recorded: list[Message], send: Send, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        num_sent = 0
        while True:
            changed = self._changed
            for message in recorded[num_sent:]:
                num_sent += 1
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)
            if changed is None:
                return
            await changed.wait()

    def compact(self) -> None:
        """Join the messages of an ended attempt, because thousands of small ones take more room."""
        body = b"".join(message.get("body", b"") for message in self._messages[1:])
        # A new list: a running replay still reads the old one.
        self._messages = [
            *self._messages[:1],
            {"type": "http.response.body", "body": body, "more_body": False},
        ]

    def drop(self) -> None:
        """Free the response of an ended attempt; running replays keep theirs."""
        self.is_dropped = True
        self._messages = []
        self.num_bytes = 0
        self.task = None

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
        self._changed = None if self.has_ended else asyncio.Event()


def _key(*parts: object) -> Key:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
