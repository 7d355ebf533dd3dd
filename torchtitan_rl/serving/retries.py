"""Answers a repeated request with the response of its first run, instead of running it again.

Each request that the application handles is a *run*, whose response is recorded. A second request
of the same session, method, path and query repeats a run if it has

- the same ``Idempotency-Key``; a key that is used again with another body is refused (422); or
- the same body and the same address, and the client says that it retries, as the official clients
  do (``x-stainless-retry-count`` of 1 or more), and the run's last attempt had a lower count. Equal
  bodies alone do not count: a client may want several samples. If there are several equal runs, a
  retry repeats, in this order of preference: a run that lost its client; one that was refused or
  failed (then the retry starts a new run); a running one; one whose response was delivered
  completely.

The response, streamed or not, is replayed from its beginning and followed to its end. A failed
response (not 2xx, or unfinished) is never replayed once its run has ended. A run that may be
repeated is aborted ``grace_s`` after its last client has left. Two kinds are aborted at once: a run
that cannot be repeated, and a run whose response an official client has begun to read (official
clients do not retry after that). To abort a run, the application is sent ``http.disconnect``; a
repetition that arrives meanwhile waits until the run has ended.

Invariants: at most one run of an ``Idempotency-Key`` is running. After a run that succeeded, no
other run of the same key starts within ``keep_s`` of the run's end or last repetition. A lack of
memory leads to refusals, never to a second run. A repetition whose response was dropped is refused
with 410; a request that needs a new run, while ``max_remembered`` are remembered, with 429.

A process of the endpoint that follows a lost one asks the controller for the runs of that one
(``repeated``), and starts such a run again; the controller then answers its calls with the results
of the first time (`serving.runs`). If the run fails then, for instance because the queue is full,
the next repetition takes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope, Send

from torchtitan_rl.aio import loop_s
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.middleware import BufferedRequest, CurrentRun, current_run, session_id

Handler = Callable[[Scope, BufferedRequest, Send], Awaitable[None]]

Repeated = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends the command ``repeat``."""

_REPLAYED = (b"x-replayed", b"true")
_REQUEST_ID = b"x-request-id"  # vLLM makes the ids of requests and answers of it
_MAX_KEY_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Limits of `Retries`. ``keep_s`` exceeds 600 s: after a time-out of 600 s, an official client
    that did not notice a lost connection repeats its request. A run takes about 1 KB."""

    grace_s: float = 10.0  # the official clients pause for at most 8 s between two attempts
    keep_s: float = 900.0
    max_remembered: int = 200_000
    max_kept_bytes: int = 64 << 20  # of responses of ended runs; the oldest are dropped
    max_failed: int = 4096  # runs that are remembered, without their responses


class Retries:
    """Runs requests with ``handler``, which answers errors itself."""

    def __init__(
        self, handler: Handler, options: RetryOptions, repeated: Repeated | None = None
    ) -> None:
        self._handler = handler
        self._options = options
        self._repeated = repeated
        self._running: dict[_Run, asyncio.Task[None]] = {}
        # Ended runs with the time of their end or last repetition, oldest first. An OrderedDict
        # finds its first item at once; a dict from which many items were deleted must search.
        self._succeeded: OrderedDict[_Run, float] = OrderedDict()
        self._failed: OrderedDict[_Run, float] = OrderedDict()
        self._kept: OrderedDict[_Run, None] = OrderedDict()  # succeeded runs with a response
        self._kept_bytes = 0
        self._by_key: dict[bytes, list[_Run]] = {}  # all remembered runs, running or ended
        # By key: runs of lost processes that were taken, and whose repetition has failed.
        self._again: dict[bytes, list[CurrentRun]] = {}
        self.num_replayed = 0

    @property
    def num_kept(self) -> int:
        """Number of responses that can be replayed."""
        return len(self._kept)

    @property
    def num_remembered(self) -> int:
        """Number of requests whose repetition would be recognized."""
        return len(self._running) + len(self._succeeded)

    async def __call__(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        identity = identify(scope, request.body)
        if identity is None:
            await self._handler(scope, request, send)
            return
        if (current := await self._of_lost_process(identity)) is not None:
            self.num_replayed += 1
            repeated = self._start(identity, scope, request, current)
            await self._follow(repeated, request, send, _REPLAYED)
            return
        while (run := self._find(identity)) is not None and run.is_ending:
            if not await request.unless_gone(run.ended()):
                return
        if run is None:
            await self._follow(self._start(identity, scope, request), request, send)
            return
        run.num_retries += 1
        run.attempt = identity.attempt
        if run in self._succeeded:
            self._succeeded[run] = loop_s()
            self._succeeded.move_to_end(run)
        if run.is_dropped:
            message = "This request was run, and its answer is no longer kept. It is not run again."
            raise RefusedError(410, "answer_gone", message)
        self.num_replayed += 1
        await self._follow(run, request, send, _REPLAYED)

    async def close(self) -> None:
        """Abort all runs, and wait for their ends."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _find(self, identity: Identity) -> _Run | None:
        """The run that a request repeats; None if the request needs a new run. Raises RefusedError:
        the request's idempotency key was used with another body (422)."""
        self._forget_old()
        runs = self._by_key.get(identity.key, ())
        if identity.is_named:
            for run in runs:
                if run.identity.digest != identity.digest:
                    raise _key_reused()
                return run
        earlier = [run for run in runs if run.attempt < identity.attempt]
        likeliest = min(earlier, key=_Run.rank, default=None)
        if likeliest is not None and likeliest.has_failed:
            self._forget(likeliest)  # the new run replaces the failed one
            return None
        return likeliest

    async def _of_lost_process(self, identity: Identity) -> CurrentRun | None:
        """Return the run of a lost process that a request repeats. Raises RefusedError: the run was
        of another body (422)."""
        if self._repeated is None or not (identity.is_named or identity.attempt):
            return None
        if failed := self._again.pop(identity.key, []):
            current = failed.pop()
        elif found := await self._repeated({"key": identity.key.hex()}):
            current = CurrentRun(name=found["run"], request_id=found["request_id"])
        else:
            return None
        is_same = current.name.startswith(identity.prefix)
        if left := [*failed, *([] if is_same else [current])]:
            self._again.setdefault(identity.key, []).extend(left)
        if not is_same:
            raise _key_reused()
        return current

    def _start(
        self,
        identity: Identity,
        scope: Scope,
        request: BufferedRequest,
        current: CurrentRun | None = None,
    ) -> _Run:
        """Start a run for a request; ``current`` is that of a lost process. Raises RefusedError: no
        more runs can be remembered (429)."""
        number = self.num_remembered
        if number >= self._options.max_remembered:
            message = f"{number} requests that may be repeated are remembered: try again later."
            headers = {"retry-after": "10"}
            raise RefusedError(429, "too_many_remembered", message, headers=headers)
        run = _Run(identity, attempt=identity.attempt, taken=current)
        current = current or CurrentRun(name=identity.prefix + uuid.uuid4().hex)
        self._by_key.setdefault(identity.key, []).append(run)
        # The run outlives its client in its own task, which inherits the session's id.
        running = self._run(run, current, scope, request.body)
        task = self._running[run] = asyncio.create_task(running)
        request.hold()
        task.add_done_callback(lambda _: request.release())
        return run

    async def _run(self, run: _Run, current: CurrentRun, scope: Scope, body: bytes) -> None:
        current_run.set(current)
        if current.request_id:  # the answer's id is to be that of the first time
            headers = [one for one in scope["headers"] if one[0].lower() != _REQUEST_ID]
            name = current.request_id.encode("latin-1", "replace")
            scope = {**scope, "headers": [*headers, (_REQUEST_ID, name)]}
        try:
            await self._handler(scope, BufferedRequest(body, run.gone), run.record)
        finally:
            run.end()
            del self._running[run]
            self._remember(run)

    def _remember(self, run: _Run) -> None:
        if run.has_failed:
            run.drop()
            if run.taken is not None:
                self._again.setdefault(run.identity.key, []).append(run.taken)
            if run.identity.is_named:
                self._forget(run)
            elif not run.is_forgotten:
                self._failed[run] = loop_s()
        elif not run.is_forgotten:
            run.compact()
            self._succeeded[run] = loop_s()
            self._kept[run] = None
            self._kept_bytes += run.num_bytes
            while self._kept_bytes > self._options.max_kept_bytes:
                self._drop_answer(next(iter(self._kept)))
        self._forget_old()

    async def _follow(
        self, run: _Run, request: BufferedRequest, send: Send, *headers: tuple[bytes, bytes]
    ) -> None:
        run.num_followers += 1
        if run.grace is not None:
            run.grace.cancel()
        try:
            if await request.unless_gone(run.replay(run.messages, send, headers)):
                if not run.has_begun:
                    raise RefusedError(503, "cancelled", "The request was cancelled.")
                run.is_delivered = True
        finally:
            run.num_followers -= 1
            if run.num_followers or run.has_ended:
                pass
            elif run.has_begun and not run.identity.is_named:
                self._forget(run)  # its client will not retry it
                run.abandon()
            else:
                loop = asyncio.get_running_loop()
                run.grace = loop.call_later(self._options.grace_s, run.abandon)

    def _drop_answer(self, run: _Run) -> None:
        del self._kept[run]
        self._kept_bytes -= run.num_bytes
        run.drop()

    def _forget_old(self) -> None:
        too_old_s = loop_s() - self._options.keep_s
        for ended, most in ((self._succeeded, None), (self._failed, self._options.max_failed)):
            while ended:
                oldest, ended_s = next(iter(ended.items()))
                if ended_s >= too_old_s and (most is None or len(ended) <= most):
                    break
                self._forget(oldest)

    def _forget(self, run: _Run) -> None:
        if run.is_forgotten:
            return
        run.is_forgotten = True
        self._failed.pop(run, None)
        self._succeeded.pop(run, None)
        if run in self._kept:
            self._drop_answer(run)
        runs = self._by_key[run.identity.key]
        runs.remove(run)
        if not runs:
            del self._by_key[run.identity.key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identifies a request, to recognize its repetitions. Without an idempotency key, an equal
    request is a repetition only if its client says that this is a retry."""

    key: bytes  # digest of session, method, path, query, and idempotency key (or body and address)
    digest: bytes  # digest of the body
    is_named: bool  # the request has an Idempotency-Key
    attempt: int = 0  # the retry count, without an Idempotency-Key

    @property
    def prefix(self) -> str:
        """What the names of its runs begin with."""
        return f"{self.key.hex()}-{self.digest.hex()}-"


def identify(scope: Scope, body: bytes) -> Identity | None:
    """The identity of a request; None if its headers do not say that it may be repeated. Raises
    RefusedError: the idempotency key is empty or too long (400)."""
    if scope["method"] not in ("POST", "DELETE"):
        return None
    headers = {name.lower(): value for name, value in scope["headers"]}
    name = headers.get(b"idempotency-key")
    count = headers.get(b"x-stainless-retry-count", b"")
    if name is None and not count.isdigit():
        return None
    digest = hashlib.sha256(body).digest()
    place = session_id.get(), scope["method"], scope["path"], scope.get("query_string", b"")
    if name is None:
        address = (scope.get("client") or ("",))[0]
        key = _digest("body", digest, place, address)
        return Identity(key=key, digest=digest, is_named=False, attempt=int(count[:9]))
    if not 0 < len(name) <= _MAX_KEY_BYTES:
        message = f"An Idempotency-Key has 1 to {_MAX_KEY_BYTES} bytes."
        raise RefusedError(400, "invalid_idempotency_key", message, param="Idempotency-Key")
    return Identity(key=_digest("key", name, place), digest=digest, is_named=True)


@dataclass(slots=True, eq=False)
class _Run:
    """A recorded run: `record` is the application's ``send``, and followers get a replay. It has
    failed if it ended without a complete 2xx response, or after `gone` told the application."""

    identity: Identity
    attempt: int = 0  # of its last follower
    taken: CurrentRun | None = None  # the run of a lost process that it repeats
    num_followers: int = 0
    num_retries: int = 0
    num_bytes: int = 0
    grace: asyncio.TimerHandle | None = None  # grace period after its last follower has left
    is_abandoned: bool = False  # its clients are gone, and the application should stop
    is_delivered: bool = False  # at least one follower got the complete response
    has_ended: bool = False
    is_dropped: bool = False  # it has ended, and its response is no longer kept
    is_forgotten: bool = False  # `Retries` no longer knows it
    _has_told_app: bool = False  # the application was sent `http.disconnect`
    _status: int = 0
    _is_whole: bool = False
    messages: list[Message] = field(default_factory=list)
    _changed: asyncio.Event | None = field(default_factory=asyncio.Event)  # None after the end

    @property
    def has_begun(self) -> bool:
        return self._status != 0

    @property
    def has_failed(self) -> bool:
        is_good = self._is_whole and 200 <= self._status < 300 and not self._has_told_app
        return self.has_ended and not is_good

    @property
    def is_ending(self) -> bool:
        return self.is_abandoned and not self.has_ended

    def rank(self) -> tuple[int, bool, int]:
        """Sort key: the run that a retry most likely repeats comes first."""
        if self.has_failed or self.is_ending:
            likelihood = 1
        elif not self.num_followers and not self.is_delivered:
            likelihood = 0
        else:
            likelihood = 3 if self.has_ended else 2
        return (likelihood, self.is_dropped, self.num_retries)

    async def record(self, message: Message) -> None:
        self.messages.append(message)
        self.num_bytes += len(message.get("body", b""))
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_whole = True
        self._notify()

    def abandon(self) -> None:
        """Let `gone` return, so that the application stops."""
        self.is_abandoned = True
        self._notify()

    async def gone(self) -> None:
        """Wait until the run is abandoned. The application waits here for a disconnect."""
        while not self.is_abandoned and self._changed is not None:
            await self._changed.wait()
        self._has_told_app |= not self.has_ended

    async def ended(self) -> None:
        while self._changed is not None:
            await self._changed.wait()

    def end(self) -> None:
        self.has_ended = True
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.set()
        self._changed = None if self.has_ended else asyncio.Event()

    async def replay(
        self, messages: list[Message], send: Send, headers: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        """Send the response from its start to its end, with ``headers`` added. ``messages`` are
        those at the time of the call: the response may be dropped before this begins."""
        num_sent = 0
        while True:
            changed = self._changed
            for message in messages[num_sent:]:
                num_sent += 1
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), *headers]}
                await send(message)
            if changed is None:
                return
            await changed.wait()

    def compact(self) -> None:
        """Join the messages of an ended run, because thousands of small ones take more memory."""
        body = b"".join(message.get("body", b"") for message in self.messages[1:])
        # Make a new list, because a running replay still reads the old one.
        self.messages = [
            *self.messages[:1],
            {"type": "http.response.body", "body": body, "more_body": False},
        ]

    def drop(self) -> None:
        """Free the response of an ended run; running replays keep theirs."""
        self.is_dropped = True
        self.messages = []
        self.num_bytes = 0


def _key_reused() -> RefusedError:
    message = "This Idempotency-Key was used with another body."
    return RefusedError(422, "idempotency_key_reused", message, param="Idempotency-Key")


def _digest(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
