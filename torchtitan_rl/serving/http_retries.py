"""A request that a client repeats is answered by its first attempt, not run again.

Which requests are the same request, for one session, method, path and query:

- the same ``Idempotency-Key``; with another body the key is refused (422);
- the same ``X-Request-Id`` and body (proxies also send ids that several requests share);
- the same body from the same address where the client says that it retries, as the official
  clients do (``x-stainless-retry-count`` of 1 or more). Equal bodies alone are no repetition: a
  client may want several samples. Among several equal attempts a retry belongs to one that lost
  its client, else to one that was refused or failed (and is owed a new run), else to a running
  one, else to one that has been delivered whole.

The response, stream or not, is replayed from its beginning and followed to its end. A failed one
(not 2xx, or unfinished) is never replayed once it has ended. A run with such an identity whose
client is gone has ``grace_s`` until it is aborted; without identity, or where an official client
already reads a stream (it never retries those), a disconnect aborts at once: the app receives
``http.disconnect``. A repetition that comes during an abort waits for its end.

Invariants: of one identity one run at most is under way, and after one that succeeded there is none
for ``keep_s`` (from its end, or from its last repetition), whatever else is served meanwhile. What
memory does not allow is refused, not forgotten: a repetition whose answer had to go is a 410, and
where ``max_known`` identities are remembered a request with a new one is a 429.

Memory: a running attempt keeps its response; those of ended ones, oldest first and delivered ones
before others, go where they are over ``max_kept_bytes`` together. Of failed ones, which are owed a
new run, only that is remembered, of the newest ``max_failed``.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope, Send

from torchtitan_rl.serving.http_attempt import Attempt
from torchtitan_rl.serving.http_body import BufferedRequest, Handler
from torchtitan_rl.serving.http_errors import HttpError
from torchtitan_rl.serving.http_identity import Identity, Key, identify

_REPLAYED = (b"x-replayed", b"true")
_RETRY_AFTER = (b"retry-after", b"10")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """``keep_s``: an official client whose connection was cut silently repeats its request when
    its own time-out of 600 s is over. An identity takes about 1 KB."""

    grace_s: float = 5.0  # the official clients' first two retries come after at most 1 s each
    keep_s: float = 900.0
    max_known: int = 200_000
    max_kept_bytes: int = 64 << 20
    max_failed: int = 4096


class Retries:
    """Layer of the shell between `BufferedBody` and `Admission`: an attempt that waits for a place
    is attached to like one that runs."""

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
        # Ended ones, each with the time of its end or last repetition, oldest first (a plain dict
        # would search for its first item).
        self._succeeded: OrderedDict[Attempt, float] = OrderedDict()
        self._failed: OrderedDict[Attempt, float] = OrderedDict()
        self._by_key: dict[Key, list[Attempt]] = {}  # all of the above
        # Succeeded ones whose response is kept, oldest first; by whether it was delivered.
        self._kept: dict[bool, OrderedDict[Attempt, None]]
        self._kept = {True: OrderedDict(), False: OrderedDict()}
        self._kept_bytes = 0
        self.num_replayed = 0

    @property
    def num_kept(self) -> int:
        """Answers that can be given again."""
        return sum(map(len, self._kept.values()))

    @property
    def num_known(self) -> int:
        """Requests that would be recognized."""
        return len(self._running) + len(self._succeeded)

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        identity = identify(scope, request.body)
        if identity is None:
            await self._handler(scope, request, send)
            return
        while (attempt := self._find(identity)) is not None and attempt.is_ending:
            if not await _stays(request, attempt):
                return
        if attempt is None:
            attempt = self._start(identity, scope, request)
            await self._follow(attempt, request, send, headers=[])
            return
        attempt.num_retries += 1
        if attempt in self._succeeded:
            self._note_use(attempt)
        if attempt.is_spent:
            raise HttpError(
                410,
                "This request was run, and its answer is no longer kept. It is not run again.",
                code="answer_gone",
            )
        self.num_replayed += 1
        await self._follow(attempt, request, send, headers=[_REPLAYED])

    async def close(self) -> None:
        """Abort what runs, and wait for its end."""
        tasks = [attempt.task for attempt in self._running if attempt.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, identity: Identity) -> Attempt | None:
        """The attempt that ``identity`` repeats; None where it is to be run.

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
        meant = min(equal, key=Attempt.rank, default=None)
        if meant is not None and meant.is_failed:
            self._forget(meant)  # the run that it was owed is this one
            return None
        return meant

    def _start(self, identity: Identity, scope: Scope, request: BufferedRequest) -> Attempt:
        """Raises:
        HttpError: 429, more identities cannot be remembered.
        """
        if self.num_known >= self._options.max_known:
            raise HttpError(
                429,
                f"{self.num_known} requests that may be repeated are remembered: try again later.",
                code="too_many_remembered",
                headers=(_RETRY_AFTER,),
            )
        attempt = Attempt(identity)
        self._running.add(attempt)
        for key in _all_keys(identity):
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
        self,
        attempt: Attempt,
        request: BufferedRequest,
        send: Send,
        *,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        attempt.num_followers += 1
        sends = attempt.replay(send, headers=headers)
        leaves = asyncio.ensure_future(request.gone())
        try:
            await asyncio.wait({sends, leaves}, return_when=asyncio.FIRST_COMPLETED)
            if not sends.done():
                leaves.result()
                return
            sends.result()
            if not attempt.has_begun:
                raise HttpError(503, "The request was cancelled.", code="cancelled")
            self._note_delivered(attempt)
        finally:
            sends.cancel()
            leaves.cancel()
            attempt.num_followers -= 1
            if not attempt.num_followers and not attempt.has_ended:
                self._look_after(attempt)

    def _look_after(self, attempt: Attempt) -> None:
        """It has no follower left: abort it, at once or when its grace is over."""
        if attempt.has_begun and not attempt.identity.keys:
            self._forget(attempt)  # no retry will come that would be owed a run
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
        """Of a failed attempt only that a retry of it is owed a new run."""
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
            self._drop_answers()
        self._forget_old()

    def _note_use(self, attempt: Attempt) -> None:
        self._succeeded[attempt] = self._clock()
        self._succeeded.move_to_end(attempt)

    def _note_delivered(self, attempt: Attempt) -> None:
        attempt.is_delivered = True
        if attempt in self._kept[False]:
            del self._kept[False][attempt]
            self._kept[True][attempt] = None

    def _drop_answers(self) -> None:
        while self._kept_bytes > self._options.max_kept_bytes:
            oldest = next(iter(self._kept[True] or self._kept[False]))
            self._drop_answer(oldest)

    def _drop_answer(self, attempt: Attempt) -> None:
        del self._kept[attempt.is_delivered][attempt]
        self._kept_bytes -= attempt.num_bytes
        attempt.drop()

    def _forget_old(self) -> None:
        too_old_s = self._clock() - self._options.keep_s
        while self._succeeded and self._succeeded[next(iter(self._succeeded))] < too_old_s:
            self._forget(next(iter(self._succeeded)))
        while self._failed and (
            len(self._failed) > self._options.max_failed
            or self._failed[next(iter(self._failed))] < too_old_s
        ):
            self._forget(next(iter(self._failed)))

    def _forget(self, attempt: Attempt) -> None:
        if attempt.is_forgotten:
            return
        attempt.is_forgotten = True
        self._failed.pop(attempt, None)
        self._succeeded.pop(attempt, None)
        if attempt in self._kept[attempt.is_delivered]:
            self._drop_answer(attempt)
        for key in _all_keys(attempt.identity):
            attempts = self._by_key[key]
            attempts.remove(attempt)
            if not attempts:
                del self._by_key[key]


async def _stays(request: BufferedRequest, attempt: Attempt) -> bool:
    """Wait for an attempt's end; False where the client leaves before."""
    ends, leaves = asyncio.ensure_future(attempt.ended()), asyncio.ensure_future(request.gone())
    try:
        await asyncio.wait({ends, leaves}, return_when=asyncio.FIRST_COMPLETED)
        if not ends.done():
            leaves.result()
        return ends.done()
    finally:
        ends.cancel()
        leaves.cancel()


def _all_keys(identity: Identity) -> tuple[Key, ...]:
    return identity.keys if identity.retry_key is None else (*identity.keys, identity.retry_key)
