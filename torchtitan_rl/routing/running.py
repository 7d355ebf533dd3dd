"""Requests that are being completed, each in as many pieces as it takes.

Invariants: the load of a piece is released on every exit path; a piece that came back aborted is
continued unless its caller asked for the abort; a request returns, cancelled or timed out or not,
only after its running piece has ended, so all its tokens are known; when the replica dies the piece
ends immediately; a lost replica costs the tokens since the last report (every second, within
milliseconds where the caller streams, and at each `partials`); a request under which two engine
loops failed is given to no third; a deadline counts only time in which its request could run.
`on_ended` is called once for each request that is not refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass

from torchtitan_rl.aio import deadline
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    LoopFailedError,
    ReplicaError,
    RequestGivenUpError,
)
from torchtitan_rl.routing.account import read_slot
from torchtitan_rl.routing.active_time import ActiveTime
from torchtitan_rl.routing.continuation import (
    PartialTokens,
    check_resumable,
    remaining_request,
    used_up,
)
from torchtitan_rl.routing.slots import Slot, Slots, loss_of
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnProgress,
)

_ABORT_TIMEOUT_S = 30.0  # until the replica has the abort
_END_TIMEOUT_S = 900.0  # until the aborted piece has ended
_MAX_ENGINE_FAILURES = 2  # under one request

OnEnded = Callable[[GenerationRequest, Completion, bool], None]
"""Called with a request that has ended, the completion as far as it was received (``resume_from``
included), and whether its caller gets that completion. Called right before the call returns or
raises; must not raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The replicas that may serve a request. ``choose`` returns a slot that may serve it now, or
    None: it is called again once ``may_go`` holds, which is the same for all requests with this
    ``key``. ``active_time`` is the clock of their deadlines."""

    choose: Callable[[GenerationRequest], Slot | None]
    may_go: Callable[[], bool]
    key: Hashable
    active_time: ActiveTime
    is_pinned: bool = False


@dataclass(slots=True, eq=False)
class _Routed:
    """One request. ``deadline_s`` is in the route's active time. ``sampling`` is the task that
    waits for the piece that runs on ``slot``; ``is_sent`` is True once the replica may have
    received it."""

    request: GenerationRequest
    route: Route
    deadline_s: float
    paused_s: float  # before it began
    tokens: PartialTokens
    attempts: int = 0
    engine_failures: int = 0
    slot: Slot | None = None
    sampling: asyncio.Task[None] | None = None
    waiting: asyncio.Future[None] | None = None  # for a slot
    is_sent: bool = False
    is_abort_asked: bool = False


class RunningRequests:
    """All requests of one router. ``timeout_s``: of each, in time in which it could run."""

    def __init__(self, slots: Slots, *, timeout_s: float, on_ended: OnEnded | None) -> None:
        self._slots = slots
        self._timeout_s = timeout_s
        self._on_ended = on_ended
        self._running: dict[str, _Routed] = {}
        self._is_closed = False

    async def complete(
        self, request: GenerationRequest, route: Route, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete it where ``route`` leads; see `GeneratorRouter.generate`."""
        request_id = request.request_id
        if request_id in self._running:
            raise InvalidRequestError(
                f"request {request_id!r} refused: request_id is still outstanding: wait for that "
                "request, or use another id"
            )
        check_resumable(request)
        tokens, clock = PartialTokens(request, on_progress), route.active_time
        deadline_s = clock.now_s() + self._timeout_s
        running = _Routed(request, route, deadline_s, clock.paused_s(), tokens)
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
        """End these requests with the tokens they have; unknown and ended ids are ignored."""
        asked = [self._running[name] for name in request_ids if name in self._running]
        for running in asked:
            running.is_abort_asked = True
            if running.waiting is not None and not running.waiting.done():
                running.waiting.set_result(None)
        await asyncio.gather(*(self._abort_piece(running) for running in asked))

    async def cut(self, slot: Slot) -> None:
        """End the pieces on this slot of all requests but its pin's, which then continue elsewhere
        or later."""
        cut = [
            one for one in self._running.values() if one.slot is slot and not one.route.is_pinned
        ]
        await asyncio.gather(*(self._abort_and_wait(running) for running in cut))

    async def partials(self) -> dict[str, Completion]:
        """The tokens so far of every request that runs, by id.

        Requests of a replica that does not answer in time have the tokens reported before.
        """
        await asyncio.gather(*(read_slot(self._slots, slot) for slot in self._slots.live()))
        return {name: running.tokens.partial for name, running in self._running.items()}

    def held_tokens(self) -> int:
        """Tokens of ended pieces of requests that still run; ``resume_from`` is not counted."""
        return sum(running.tokens.num_sampled for running in self._running.values())

    def close(self) -> None:
        """Requests that wait for a replica fail."""
        self._is_closed = True
        self._slots.notify()

    async def _all_pieces(self, running: _Routed) -> Completion:
        tokens = running.tokens
        while True:
            piece = remaining_request(running.request, tokens.ended, attempt=running.attempts)
            if piece is None:
                return used_up(tokens.ended)
            slot = await self._slot_for(running)
            if slot is None:
                return tokens.ended
            running.attempts += 1
            tokens.start_piece(piece.request_id)
            try:
                await self._call(slot, piece, running)
            except ReplicaError as error:
                self._slots.mark_dead(slot, error)
                running.engine_failures += isinstance(error, LoopFailedError)
                self._refuse_poison(running, error)
                continue
            if running.is_abort_asked:
                return tokens.ended

    def _refuse_poison(self, running: _Routed, error: ReplicaError) -> None:
        """Refuse a request during which two engine loops have failed."""
        has_others = self._slots.live_unreserved() or self._slots.num_expected
        if running.engine_failures >= _MAX_ENGINE_FAILURES and has_others:
            raise GenerationError(
                f"request {running.request.request_id}: {running.engine_failures} engines failed "
                f"while they had it, so no other is given it; the last: {error}"
            ) from error

    async def _slot_for(self, running: _Routed) -> Slot | None:
        """The replica that is to serve the next piece, once there is one; None: abort instead."""
        request, route = running.request, running.route

        def choose() -> Slot | None:
            if self._is_closed:
                raise GenerationError(f"request {request.request_id}: the router is closed")
            return None if running.is_abort_asked else route.choose(request)

        chosen = choose()
        if chosen is not None:
            return chosen
        try:
            async with route.active_time.timeout_at(running.deadline_s):
                while chosen is None and not running.is_abort_asked:
                    running.waiting = asyncio.get_running_loop().create_future()
                    await self._slots.wakeups.once(
                        lambda: self._is_closed or route.may_go(), route.key, running.waiting
                    )
                    chosen = choose()
                return chosen
        except TimeoutError as error:
            states = {slot.name: (slot.state.value, slot.version) for slot in self._slots.all}
            raise GenerationTimeoutError(
                f"request {request.request_id} waited for a replica that takes requests at version "
                f"{request.min_version} or newer when {self._limit(running)} were over; (state, "
                f"version) of replicas: {states}"
            ) from error
        finally:
            running.waiting = None

    def _limit(self, running: _Routed) -> str:
        paused_s = running.route.active_time.paused_s() - running.paused_s
        pauses = f" (and {paused_s:.0f} s of pauses)" if paused_s else ""
        return f"its {self._timeout_s:.0f} s{pauses}"

    async def _call(self, slot: Slot, piece: GenerationRequest, running: _Routed) -> None:
        """Have one piece sampled. When this returns or raises, the piece no longer runs."""
        num_tokens = len(piece.prompt_token_ids) + piece.sampling.max_tokens
        self._slots.add_request(slot, num_tokens)
        running.slot, running.is_sent = slot, False
        # In a task of its own, so that its result is recorded even if this one is cancelled.
        sampling = asyncio.create_task(
            self._sample(slot, piece, running), name=f"{piece.request_id} on {slot.name}"
        )
        running.sampling = sampling
        slot.work.add(sampling)
        try:
            async with running.route.active_time.timeout_at(running.deadline_s):
                await asyncio.wait({sampling})
        except TimeoutError as error:
            await self._end_piece(running, slot, sampling)
            if running.tokens.ended.finish_reason is not FinishReason.ABORT:
                return  # it completed normally before the abort arrived
            raise GenerationTimeoutError(
                f"request {running.request.request_id} was not completed by replica {slot.name} "
                f"within {self._limit(running)}"
            ) from error
        except asyncio.CancelledError:
            await self._end_piece(running, slot, sampling)
            raise
        finally:
            running.slot = running.sampling = None
            slot.work.discard(sampling)
            self._slots.release_request(slot, num_tokens)
        if sampling.cancelled() and not slot.is_live:
            raise loss_of(slot)
        sampling.result()

    async def _sample(self, slot: Slot, piece: GenerationRequest, running: _Routed) -> None:
        tokens = running.tokens
        if running.is_abort_asked:
            return
        running.is_sent = True
        try:
            done = await slot.replica.generate(piece, tokens.add_progress, streams=tokens.streams)
        except RequestGivenUpError as error:
            slot.received_tokens += len(error.completion.token_ids)
            tokens.end_piece(error.completion)
            raise
        except BaseException:
            slot.received_tokens += tokens.lose_piece()
            raise
        slot.received_tokens += len(done.token_ids)
        tokens.end_piece(done)

    async def _end_piece(self, running: _Routed, slot: Slot, sampling: asyncio.Task[None]) -> None:
        """Abort the piece and wait for what it has, even where this call is cancelled meanwhile."""
        running.is_abort_asked = True
        ending = asyncio.create_task(self._abort_and_wait(running))
        is_cancelled = False
        while not ending.done():
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError:
                is_cancelled = True
        error = None if sampling.cancelled() or not sampling.done() else sampling.exception()
        if isinstance(error, ReplicaError):
            self._slots.mark_dead(slot, error)
        if is_cancelled or ending.cancelled():
            raise asyncio.CancelledError
        ending.result()

    async def _abort_and_wait(self, running: _Routed) -> None:
        slot, sampling = running.slot, running.sampling
        if slot is None or sampling is None:
            return
        try:
            async with deadline(_END_TIMEOUT_S):
                await self._abort_piece(running)
                await asyncio.wait({sampling})
        except TimeoutError:
            message = f"{slot.name} did not end an aborted request within {_END_TIMEOUT_S:.0f} s"
            self._slots.mark_dead(slot, ReplicaError(message))
            await asyncio.wait({sampling})

    async def _abort_piece(self, running: _Routed) -> None:
        """Abort the running piece on its replica."""
        slot, piece_id = running.slot, running.tokens.piece_id
        if slot is None or piece_id is None or not running.is_sent:
            return
        abort = slot.replica.abort((piece_id,))
        await self._slots.ask(slot, abort, timeout_s=_ABORT_TIMEOUT_S, required="take an abort")
