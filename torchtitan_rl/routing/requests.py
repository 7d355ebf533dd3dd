"""Completes requests, each in as many pieces as necessary.

Invariants
- The load of a piece is released on every exit path.
- A request whose piece was aborted is continued, unless its caller asked for the abort.
- A request returns only after its running piece has ended, even if the request was cancelled or
  timed out. So all its tokens are known. If the replica dies, the piece ends immediately.
- If a replica is lost, the tokens since its last report are lost. A replica reports about once a
  second, or every few milliseconds if the caller streams. `partials` makes replicas report all
  tokens.
- A request whose steps failed on two engines is not sent to a third.
- A deadline counts only the time in which the request could run.
- `on_ended` is called once for each request that is not refused here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchtitan_rl.aio import deadline, for_each, uninterrupted
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
    RequestGivenUpError,
    StepFailedError,
)
from torchtitan_rl.generation.commands import AbortRequests, ReadTokens
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.routing.continuation import (
    PartialTokens,
    check_resumable,
    remaining_request,
    used_up,
)
from torchtitan_rl.routing.placement import Placement
from torchtitan_rl.routing.replicas import ReplicaPool, ReplicaState, lost_error
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    FinishReason,
    GenerationRequest,
    OnProgress,
)

_READING_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 30.0  # for the replica to receive the abort
_END_TIMEOUT_S = 900.0  # for the aborted piece to end
_MAX_ENGINE_FAILURES = 2  # during one request

OnEnded = Callable[[GenerationRequest, Completion, bool], None]
"""Called when a request has ended: with the request, the completion as far as it was received
(including ``resume_from``), and whether the caller gets this completion. Called right before the
request's call returns or raises; must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAccount:
    """Token counts of one replica since it started, at one moment.

    ``sampled`` is the engine's own count, or its last known one if the replica is dead or did not
    answer. ``received`` counts the tokens of pieces that came back, and the reported ones of lost
    pieces. ``running`` counts those that the engine has not ended; None without an answer.
    """

    is_live: bool
    sampled: int
    received: int
    running: int | None

    @property
    def unaccounted(self) -> int | None:
        """Number of sampled tokens that are neither received nor running; must be 0."""
        return None if self.running is None else self.sampled - self.received - self.running

    @property
    def lost(self) -> int:
        """Number of tokens that a dead replica has sampled, and that were never received."""
        return 0 if self.is_live else max(0, self.sampled - self.received)


@dataclass(slots=True, eq=False)
class _InFlight:
    """One request. ``deadline_s`` is a time of ``clock``. ``sampling`` is the task that waits for
    the piece on ``state``. ``is_sent`` is True once the replica may have received the piece."""

    request: GenerationRequest
    pinned: ReplicaState | None  # the only replica that may serve it
    clock: ActiveTime
    deadline_s: float
    paused_s: float  # the clock's paused time when the request began
    tokens: PartialTokens
    attempts: int = 0
    engine_failures: int = 0
    state: ReplicaState | None = None
    sampling: asyncio.Task[None] | None = None
    waiting: asyncio.Future[None] | None = None  # set while it waits for a replica
    is_sent: bool = False
    is_abort_asked: bool = False


class RequestTracker:
    """All requests of one router. ``timeout_s`` limits the time in which a request could run."""

    def __init__(
        self, pool: ReplicaPool, placement: Placement, *, timeout_s: float, on_ended: OnEnded | None
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._timeout_s = timeout_s
        self._on_ended = on_ended
        self.probe_numbers = itertools.count()  # see `rejoining`
        self._running: dict[str, _InFlight] = {}
        self._is_closed = False

    async def complete(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        pinned: ReplicaState | None = None,
    ) -> Completion:
        """See `GeneratorRouter.generate`; with ``pinned``, only on this replica."""
        request_id = request.request_id
        if request_id in self._running:
            why = "request_id is still outstanding: wait, or use another id"
            raise InvalidRequestError(f"request {request_id!r} refused: {why}")
        check_resumable(request)
        tokens = PartialTokens(request, on_progress)
        clock = self._pool.active_time if pinned is None else pinned.active_time
        deadline_s = clock.now_s() + self._timeout_s
        running = _InFlight(request, pinned, clock, deadline_s, clock.paused_s(), tokens)
        self._running[request_id] = running
        done: Completion | None = None
        try:
            done = await self._all_pieces(running)
            return done
        finally:
            del self._running[request_id]
            if self._on_ended is not None:
                self._on_ended(request, done or tokens.partial, done is not None)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with their tokens so far. Unknown and ended ids are ignored."""
        asked = [self._running[name] for name in request_ids if name in self._running]
        for running in asked:
            running.is_abort_asked = True
            if running.waiting is not None and not running.waiting.done():
                running.waiting.set_result(None)
        await asyncio.gather(*(self._abort_piece(running) for running in asked))

    def note_answer(
        self, state: ReplicaState, request: GenerationRequest, done: Completion
    ) -> None:
        """Count the tokens of a request that was not placed here, but sent to this replica."""
        state.received_tokens += len(done.token_ids)
        if self._on_ended is not None:
            self._on_ended(request, done, True)

    async def cut(self, state: ReplicaState) -> None:
        """End the pieces on this replica, except those of its pin. The requests of the ended pieces
        continue elsewhere or later."""
        cut = [one for one in self._running.values() if one.state is state and one.pinned is None]
        await asyncio.gather(*map(self._abort_and_wait, cut))

    async def move_newest(self, state: ReplicaState, count: int) -> None:
        """Let the ``count`` newest requests of this replica, without its pin's, run elsewhere."""
        sent = [one for one in self._running.values() if one.state is state and one.is_sent]
        moved = [one for one in sent if one.pinned is None][-count:]
        for one in moved:
            self._placement.forget(one.request)
        await asyncio.gather(*map(self._abort_and_wait, moved))

    async def partials(self) -> dict[str, Completion]:
        """Return the tokens so far of every running request, by id; those that are known, if a
        replica does not answer in time."""
        await for_each(self._pool.live(), self.read)
        return {name: running.tokens.partial for name, running in self._running.items()}

    async def accounts(self) -> dict[str, ReplicaAccount]:
        """Return the accounts by the replica's name; see `GeneratorRouter.account`."""
        counted = tuple(self._pool.all)  # others may join while the replicas answer
        accounts = await for_each(counted, self.read)
        return {state.name: account for state, account in zip(counted, accounts, strict=True)}

    async def read(self, state: ReplicaState) -> ReplicaAccount:
        """Make a live replica report all progress and its counts, in the order in which they
        happened."""
        accounts: list[ReplicaAccount] = []

        def on_reading(reading: EngineReading) -> None:
            state.note_sampled(reading.sampled_tokens)
            accounts.append(
                ReplicaAccount(
                    is_live=True,
                    sampled=reading.sampled_tokens,
                    received=state.received_tokens,  # read at the same moment
                    running=reading.running_tokens,
                )
            )

        if state.is_live:
            # A replica that does not answer is busy with a long operation, which has its own
            # deadline.
            work = state.replica.execute(ReadTokens(), on_reading)
            await self._pool.ask(state, work, timeout_s=_READING_TIMEOUT_S)
        if accounts and state.is_live:
            return accounts[0]
        return ReplicaAccount(
            is_live=state.is_live,
            sampled=state.sampled_tokens,
            received=state.received_tokens,
            running=None,
        )

    def held_tokens(self) -> int:
        """Number of tokens sampled in completed pieces of the requests still in progress; tokens
        from ``resume_from`` are not counted."""
        return sum(running.tokens.num_sampled for running in self._running.values())

    def close(self) -> None:
        """Make all requests fail that wait for a replica, now or later."""
        self._is_closed = True
        self._pool.notify()

    async def _all_pieces(self, running: _InFlight) -> Completion:
        tokens = running.tokens
        while True:
            piece = remaining_request(running.request, tokens.ended, attempt=running.attempts)
            if piece is None:
                return used_up(tokens.ended)
            state = await self._replica_for(running)
            if state is None:
                return tokens.ended
            running.attempts += 1
            tokens.start_piece(piece.request_id)
            try:
                await self._call(state, piece, running)
            except ReplicaError as error:
                self._pool.mark_dead(state, error)
                running.engine_failures += isinstance(error, StepFailedError)
                number = running.engine_failures
                if number >= _MAX_ENGINE_FAILURES and self._pool.has_unreserved():
                    raise GenerationError(
                        f"request {running.request.request_id}: {number} engines failed while they "
                        f"had it, so no other is given it; the last: {error}"
                    ) from error
                continue
            if running.is_abort_asked:
                return tokens.ended

    async def _replica_for(self, running: _InFlight) -> ReplicaState | None:
        """Wait for a replica for the next piece; None after an abort."""
        request, pinned, place = running.request, running.pinned, self._placement
        version = request.min_version

        def choose() -> ReplicaState | None:
            if self._is_closed:
                raise GenerationError(f"request {request.request_id}: the router is closed")
            return None if running.is_abort_asked else place.choose(request, pinned)

        chosen = choose()
        if chosen is not None:
            return chosen
        try:
            async with running.clock.timeout_at(running.deadline_s):
                while chosen is None and not running.is_abort_asked:
                    running.waiting = asyncio.get_running_loop().create_future()
                    await self._pool.wakeups.once(
                        lambda: self._is_closed or place.can_schedule(version, pinned),
                        place.wait_key(version, pinned),
                        running.waiting,
                    )
                    chosen = choose()
                return chosen
        except TimeoutError as error:
            states = {one.name: (one.phase.value, one.version) for one in self._pool.all}
            raise GenerationTimeoutError(
                f"request {request.request_id} waited for a replica that takes requests at version "
                f"{version} or newer when {self._limit(running)} were over; (state, version) of "
                f"replicas: {states}"
            ) from error
        finally:
            running.waiting = None

    def _limit(self, running: _InFlight) -> str:
        paused_s = running.clock.paused_s() - running.paused_s
        pauses = f" (and {paused_s:.0f} s of pauses)" if paused_s else ""
        return f"its {self._timeout_s:.0f} s{pauses}"

    async def _call(
        self, state: ReplicaState, piece: GenerationRequest, running: _InFlight
    ) -> None:
        """Have one piece sampled. When this returns or raises, the piece no longer runs."""
        num_tokens = len(piece.prompt_token_ids) + piece.sampling.max_tokens
        self._pool.add_request(state, num_tokens)
        running.state, running.is_sent = state, False
        # Sample in a separate task, so that the result is recorded even if this task is cancelled.
        sampling = asyncio.create_task(
            self._sample(state, piece, running), name=f"{piece.request_id} on {state.name}"
        )
        running.sampling = sampling
        state.work.add(sampling)
        try:
            async with running.clock.timeout_at(running.deadline_s):
                await asyncio.wait({sampling})
        except TimeoutError as error:
            await self._end_piece(running, state, sampling)
            if running.tokens.ended.finish_reason is not FinishReason.ABORT:
                return  # the piece completed normally before the abort arrived
            raise GenerationTimeoutError(
                f"request {running.request.request_id} was not completed by replica {state.name} "
                f"within {self._limit(running)}"
            ) from error
        except asyncio.CancelledError:
            await self._end_piece(running, state, sampling)
            raise
        finally:
            running.state = running.sampling = None
            state.work.discard(sampling)
            self._pool.release_request(state, num_tokens)
        if sampling.cancelled() and not state.is_live:
            raise lost_error(state)
        sampling.result()

    async def _sample(
        self, state: ReplicaState, piece: GenerationRequest, running: _InFlight
    ) -> None:
        tokens = running.tokens
        if running.is_abort_asked:
            return
        running.is_sent = True
        try:
            done = await state.replica.generate(piece, tokens.add_progress, streams=tokens.streams)
        except RequestGivenUpError as error:
            state.received_tokens += len(error.completion.token_ids)
            tokens.end_piece(error.completion)
            raise
        except BaseException:
            state.received_tokens += tokens.lose_piece()
            raise
        state.received_tokens += len(done.token_ids)
        tokens.end_piece(done)

    async def _end_piece(
        self, running: _InFlight, state: ReplicaState, sampling: asyncio.Task[None]
    ) -> None:
        """Abort the piece and wait for its tokens, even if this call is cancelled."""
        running.is_abort_asked = True
        try:
            await uninterrupted(self._abort_and_wait(running))
        finally:
            error = None if sampling.cancelled() or not sampling.done() else sampling.exception()
            if isinstance(error, ReplicaError):
                self._pool.mark_dead(state, error)

    async def _abort_and_wait(self, running: _InFlight) -> None:
        state, sampling = running.state, running.sampling
        if state is None or sampling is None:
            return
        try:
            async with deadline(_END_TIMEOUT_S):
                await self._abort_piece(running)
                await asyncio.wait({sampling})
        except TimeoutError:
            message = f"{state.name} did not end an aborted request within {_END_TIMEOUT_S:.0f} s"
            self._pool.mark_dead(state, ReplicaError(message))
            await asyncio.wait({sampling})

    async def _abort_piece(self, running: _InFlight) -> None:
        """Abort the running piece on its replica."""
        state, piece_id = running.state, running.tokens.piece_id
        if state is None or piece_id is None or not running.is_sent:
            return
        abort = state.replica.execute(AbortRequests((piece_id,)))
        await self._pool.ask(state, abort, timeout_s=ABORT_TIMEOUT_S, required="take an abort")
