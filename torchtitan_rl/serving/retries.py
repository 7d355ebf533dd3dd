"""Answers a repeated request with the response of its first run, instead of running it again.

Two requests of one session, method, path and query are the same where they have

- the same ``Idempotency-Key``; with another body the key is refused (422);
- the same ``X-Request-Id`` and body (proxies also send ids that several requests share);
- the same body from the same address, where the client says that it retries, as the official
  clients do (``x-stainless-retry-count`` of 1 or more). Equal bodies alone do not count: a client
  may want several samples. Among several equal attempts a retry repeats one that lost its client,
  else one that was refused or failed (the retry runs), else a running one, else one that was
  delivered whole.

The response, streamed or not, is replayed from its beginning and followed to its end. A failed one
(not 2xx, or unfinished) is never replayed once it has ended. A run with such an identity is aborted
``grace_s`` after its last client has left. Without an identity, or where an official client already
reads a stream (which it never retries), a disconnect aborts at once: the application receives
``http.disconnect``. A repetition that arrives during an abort waits for its end.

Invariants: at most one run of an identity is running, and after one that succeeded none starts
within ``keep_s`` of its end or its last repetition. A lack of memory leads to refusals, never to a
second run: a repetition whose answer was dropped is a 410, and with ``max_remembered`` identities a
request with a new one is a 429.

Memory: a running attempt keeps its response. Responses of ended ones are dropped where they take
more than ``max_kept_bytes`` together: delivered ones first, then oldest first. Of failed attempts
the newest ``max_failed`` are kept, without their response, so that their retry runs.

One run of a request whose response is recorded, so that clients can follow it from its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

from starlette.types import Message, Scope, Send

from torchtitan_rl.serving import context
from torchtitan_rl.serving.body import BufferedRequest, Handler
from torchtitan_rl.serving.errors import HttpError

_REPLAYED = (b"x-replayed", b"true")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """``keep_s``: an official client whose connection was cut silently repeats its request after
    its own timeout of 600 s. A remembered identity takes about 1 KB."""

    grace_s: float = 10.0  # the official clients pause for at most 8 s between two attempts
    keep_s: float = 900.0
    max_remembered: int = 200_000
    max_kept_bytes: int = 64 << 20
    max_failed: int = 4096


class Retries:
    """Layer between `BufferedBody` and `Admission`: queued attempts can be followed, too."""

    def __init__(
        self,
        handler: Handler,
        options: RetryOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,  # the loop's
    ) -> None:
        self._handler = handler
        self._options = options
        self._clock = clock
        self._call_later = call_later
        self._running: set[Attempt] = set()
        # Ended attempts with the time of their end or last repetition, oldest first. OrderedDict
        # finds its first item at once, where a dict that has lost many searches for it.
        self._succeeded: OrderedDict[Attempt, float] = OrderedDict()
        self._failed: OrderedDict[Attempt, float] = OrderedDict()
        self._by_key: dict[Key, list[Attempt]] = {}  # all of the above
        # Succeeded ones whose response is kept, by whether it was delivered; oldest first.
        self._kept: dict[bool, OrderedDict[Attempt, None]]
        self._kept = {True: OrderedDict(), False: OrderedDict()}
        self._kept_bytes = 0
        self.num_replayed = 0

    @property
    def num_kept(self) -> int:
        """Answers that can be given again."""
        return sum(map(len, self._kept.values()))

    @property
    def num_remembered(self) -> int:
        """Requests whose repetition would be recognized."""
        return len(self._running) + len(self._succeeded)

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        identity = identify(scope, request.body)
        if identity is None:
            await self._handler(scope, request, send)
            return
        while (attempt := self._find(identity)) is not None and attempt.is_ending:
            if not await request.unless_gone(attempt.ended()):
                return
        if attempt is None:
            attempt = self._start(identity, scope, request)
            await self._follow(attempt, request, send)
            return
        attempt.num_retries += 1
        if attempt in self._succeeded:
            self._succeeded[attempt] = self._clock()
            self._succeeded.move_to_end(attempt)
        if attempt.is_dropped:
            raise HttpError(
                410,
                "This request was run, and its answer is no longer kept. It is not run again.",
                code="answer_gone",
            )
        self.num_replayed += 1
        await self._follow(attempt, request, send, _REPLAYED)

    async def close(self) -> None:
        """Abort all running attempts, and wait for their ends."""
        tasks = [attempt.task for attempt in self._running if attempt.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, identity: Identity) -> Attempt | None:
        """The attempt that ``identity`` repeats; None where it has to run.

        Raises:
            HttpError: 422, its idempotency key was used with another body.
        """
        self._forget_old()
        for key in identity.keys:
            for attempt in self._by_key.get(key, ()):
                if attempt.is_failed:
                    continue
                if attempt.identity.digest != identity.digest:
                    raise HttpError(
                        422,
                        "This Idempotency-Key was used with another body.",
                        code="idempotency_key_reused",
                        param="Idempotency-Key",
                    )
                return attempt
        if not identity.is_retry or identity.retry_key is None:
            return None
        equal = self._by_key.get(identity.retry_key, ())
        likeliest = min(equal, key=Attempt.rank, default=None)
        if likeliest is not None and likeliest.is_failed:
            self._forget(likeliest)  # this run replaces it
            return None
        return likeliest

    def _start(self, identity: Identity, scope: Scope, request: BufferedRequest) -> Attempt:
        """Raises:
        HttpError: 429, no more identities can be remembered.
        """
        if self.num_remembered >= self._options.max_remembered:
            raise HttpError(
                429,
                f"{self.num_remembered} requests that may be repeated are remembered: "
                "try again later.",
                code="too_many_remembered",
                headers={"retry-after": "10"},
            )
        attempt = Attempt(identity)
        self._running.add(attempt)
        for key in identity.all_keys:
            self._by_key.setdefault(key, []).append(attempt)
        # A task of its own, so that it outlives its client; it inherits the session's id.
        attempt.task = asyncio.create_task(self._run(attempt, scope, request.body))
        request.held.hold()
        attempt.task.add_done_callback(lambda _: request.held.release())
        return attempt

    async def _run(self, attempt: Attempt, scope: Scope, body: bytes) -> None:
        try:
            await self._handler(scope, BufferedRequest(body, attempt.gone), attempt.record)
        finally:
            attempt.end()
            self._running.discard(attempt)
            self._keep(attempt)

    async def _follow(
        self, attempt: Attempt, request: BufferedRequest, send: Send, *headers: tuple[bytes, bytes]
    ) -> None:
        attempt.num_followers += 1
        try:
            if await request.unless_gone(attempt.replay(send, headers=headers)):
                if not attempt.has_begun:
                    raise HttpError(503, "The request was cancelled.", code="cancelled")
                self._note_delivered(attempt)
        finally:
            attempt.num_followers -= 1
            if not attempt.num_followers and not attempt.has_ended:
                self._abort_later(attempt)

    def _abort_later(self, attempt: Attempt) -> None:
        """Abort an attempt without followers: at once, or when its grace is over."""
        if attempt.has_begun and not attempt.identity.keys:
            self._forget(attempt)  # its client will not retry it
            attempt.abandon()
            return
        attempt.num_departures += 1
        departure = attempt.num_departures

        def end_grace() -> None:
            if not attempt.num_followers and attempt.num_departures == departure:
                attempt.abandon()

        call_later = self._call_later or asyncio.get_running_loop().call_later
        call_later(self._options.grace_s, end_grace)

    def _keep(self, attempt: Attempt) -> None:
        if attempt.is_failed:
            attempt.drop()
            if attempt.identity.retry_key is None:
                self._forget(attempt)
            elif not attempt.is_forgotten:
                self._failed[attempt] = self._clock()
        elif not attempt.is_forgotten:
            attempt.compact()
            self._succeeded[attempt] = self._clock()
            self._kept[attempt.is_delivered][attempt] = None
            self._kept_bytes += attempt.num_bytes
            while self._kept_bytes > self._options.max_kept_bytes:
                self._drop_answer(next(iter(self._kept[True] or self._kept[False])))
        self._forget_old()

    def _note_delivered(self, attempt: Attempt) -> None:
        attempt.is_delivered = True
        if attempt in self._kept[False]:
            del self._kept[False][attempt]
            self._kept[True][attempt] = None

    def _drop_answer(self, attempt: Attempt) -> None:
        del self._kept[attempt.is_delivered][attempt]
        self._kept_bytes -= attempt.num_bytes
        attempt.drop()

    def _forget_old(self) -> None:
        too_old_s = self._clock() - self._options.keep_s
        for ended, max_ended in ((self._succeeded, None), (self._failed, self._options.max_failed)):
            while ended:
                oldest, ended_s = next(iter(ended.items()))
                if ended_s >= too_old_s and (max_ended is None or len(ended) <= max_ended):
                    break
                self._forget(oldest)

    def _forget(self, attempt: Attempt) -> None:
        if attempt.is_forgotten:
            return
        attempt.is_forgotten = True
        self._failed.pop(attempt, None)
        self._succeeded.pop(attempt, None)
        if attempt in self._kept[attempt.is_delivered]:
            self._drop_answer(attempt)
        for key in attempt.identity.all_keys:
            attempts = self._by_key[key]
            attempts.remove(attempt)
            if not attempts:
                del self._by_key[key]


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
