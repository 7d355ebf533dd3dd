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
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope, Send

from torchtitan_rl.serving.attempts import Attempt, Identity, Key, identify
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
