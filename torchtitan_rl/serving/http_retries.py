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
``http.disconnect``.

Memory: a running attempt keeps its response; ended ones are kept for ``keep_s``, at most
``max_kept`` of them and ``max_kept_bytes`` together, the oldest going first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Scope, Send

from torchtitan_rl.serving.http_attempt import Attempt
from torchtitan_rl.serving.http_body import BufferedRequest, Handler
from torchtitan_rl.serving.http_errors import HttpError
from torchtitan_rl.serving.http_identity import Identity, Key, identify

_REPLAYED = (b"x-replayed", b"true")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    grace_s: float = 5.0  # the official clients' first two retries come after at most 1 s each
    keep_s: float = 60.0
    max_kept: int = 1024
    max_kept_bytes: int = 64 << 20


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
        self._ended: dict[Attempt, float] = {}  # oldest first, with the time of its end
        self._by_key: dict[Key, list[Attempt]] = {}  # both of the above
        self._kept_bytes = 0  # of the ended ones
        self.num_replayed = 0

    @property
    def num_kept(self) -> int:
        return len(self._ended)

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        identity = identify(scope, request.body)
        if identity is None:
            await self._handler(scope, request, send)
            return
        self._forget_old()
        attempt = self._find(identity)
        if attempt is None:
            attempt = self._start(identity, scope, request.body)
            await self._follow(attempt, request, send, headers=[])
        else:
            self.num_replayed += 1
            attempt.num_retries += 1
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

    def _start(self, identity: Identity, scope: Scope, body: bytes) -> Attempt:
        attempt = Attempt(identity)
        self._running.add(attempt)
        for key in _all_keys(identity):
            self._by_key.setdefault(key, []).append(attempt)
        # A task of its own, so that it outlives its client; it inherits the session's id.
        attempt.task = asyncio.create_task(self._run(attempt, scope, body))
        return attempt

    async def _run(self, attempt: Attempt, scope: Scope, body: bytes) -> None:
        async def gone() -> None:
            await attempt.is_abandoned.wait()

        try:
            await self._handler(scope, BufferedRequest(body, gone), attempt.record)
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
            if sends.done():
                sends.result()
                attempt.is_delivered = True
        finally:
            sends.cancel()
            leaves.cancel()
            attempt.num_followers -= 1
            if not attempt.num_followers and not attempt.has_ended:
                self._look_after(attempt)

    def _look_after(self, attempt: Attempt) -> None:
        """Nobody follows it any more: abort it, at once or when its grace is over."""
        if attempt.has_begun and not attempt.identity.keys:
            self._forget(attempt)  # no retry will come that would be owed a run
            attempt.is_abandoned.set()
            return
        attempt.num_departures += 1
        departure = attempt.num_departures

        def end_grace() -> None:
            if not attempt.num_followers and attempt.num_departures == departure:
                attempt.is_abandoned.set()

        call_later = self._call_later or asyncio.get_running_loop().call_later
        call_later(self._options.grace_s, end_grace)

    def _keep(self, attempt: Attempt) -> None:
        """Of a failed attempt only that a retry of it is owed a new run."""
        if attempt.is_failed:
            attempt.drop()
            if attempt.identity.retry_key is None:
                self._forget(attempt)
        if not attempt.is_forgotten:
            self._ended[attempt] = self._clock()
            self._kept_bytes += attempt.num_bytes
            self._forget_old()

    def _forget_old(self) -> None:
        options = self._options
        while self._ended:
            oldest, ended_at = next(iter(self._ended.items()))
            if (
                len(self._ended) <= options.max_kept
                and self._kept_bytes <= options.max_kept_bytes
                and self._clock() - ended_at <= options.keep_s
            ):
                return
            self._forget(oldest)

    def _forget(self, attempt: Attempt) -> None:
        attempt.is_forgotten = True
        if self._ended.pop(attempt, None) is not None:
            self._kept_bytes -= attempt.num_bytes
        for key in _all_keys(attempt.identity):
            attempts = self._by_key[key]
            attempts.remove(attempt)
            if not attempts:
                del self._by_key[key]


def _all_keys(identity: Identity) -> tuple[Key, ...]:
    return identity.keys if identity.retry_key is None else (*identity.keys, identity.retry_key)
