"""Requests that are being completed, each in as many pieces as it takes.

Invariants: the load of a piece is released on every exit path; a piece that came back aborted is
continued unless its caller asked for the abort; a lost replica costs the tokens since they were
last heard of (every second, or at once where the caller streams) or read (`snapshot`); a request
does not take all engines with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchtitan_rl.errors import (
    DeadlineError,
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    LoopFailedError,
    ReplicaError,
)
from torchtitan_rl.routing.continuation import check_resumable, remaining_request, used_up
from torchtitan_rl.routing.known import KnownTokens
from torchtitan_rl.routing.slots import Slot, Slots
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress

_ABORT_TIMEOUT_S = 30.0
_SNAPSHOT_TIMEOUT_S = 30.0
_MAX_ENGINE_FAILURES = 2  # under one request

Choose = Callable[[GenerationRequest], Slot | None]
"""A slot that may serve the request now, or None: ask again when something has changed."""


@dataclass(slots=True, eq=False)
class _Running:
    """``deadline`` is in the event loop's time; ``piece_id`` is the id on ``slot``'s engine."""

    request: GenerationRequest
    deadline: float
    tokens: KnownTokens
    attempts: int = 0
    engine_failures: int = 0
    piece_id: str | None = None
    slot: Slot | None = None
    is_abort_asked: bool = False


class RunningRequests:
    """All requests of one router."""

    def __init__(self, slots: Slots, *, timeout_s: float) -> None:
        self._slots = slots
        self._timeout_s = timeout_s
        self._running: dict[str, _Running] = {}
        self._is_closed = False

    async def complete(
        self, request: GenerationRequest, choose: Choose, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete it on the slots that ``choose`` names; see `GeneratorRouter.generate`."""
        request_id = request.request_id
        if request_id in self._running:
            raise InvalidRequestError(
                f"request {request_id!r} refused: request_id is still outstanding: wait for that "
                "request, or use another id"
            )
        check_resumable(request)
        tokens = KnownTokens(request, on_progress)
        running = _Running(request, _now() + self._timeout_s, tokens)
        self._running[request_id] = running
        try:
            return await self._all_pieces(running, choose)
        finally:
            del self._running[request_id]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with the tokens they have; unknown and ended ids are ignored."""
        asked = [self._running[name] for name in request_ids if name in self._running]
        for running in asked:
            running.is_abort_asked = True
        self._slots.notify()
        await asyncio.gather(*(self._abort_piece(running) for running in asked))

    async def snapshot(self) -> dict[str, Completion]:
        """The tokens so far of every request that runs, by id.

        Of a replica that does not answer in time, what was known before is given.
        """
        await asyncio.gather(*(self._read(slot) for slot in self._slots.live()))
        return {name: running.tokens.known for name, running in self._running.items()}

    def close(self) -> None:
        """Requests that wait for a replica fail."""
        self._is_closed = True
        self._slots.notify()

    async def _all_pieces(self, running: _Running, choose: Choose) -> Completion:
        tokens = running.tokens
        while True:
            piece = remaining_request(running.request, tokens.so_far, attempt=running.attempts)
            if piece is None:
                return used_up(tokens.so_far)
            slot = await self._slot_for(running, choose)
            if slot is None:
                return tokens.so_far
            running.attempts += 1
            tokens.start_piece(piece.request_id)
            try:
                done = await self._call(slot, piece, running)
            except ReplicaError as error:
                self._slots.bury(slot, error)
                tokens.lose_piece()
                running.engine_failures += isinstance(error, LoopFailedError)
                self._refuse_poison(running, error)
                continue
            tokens.end_piece(done)
            if running.is_abort_asked:
                return tokens.so_far

    def _refuse_poison(self, running: _Running, error: ReplicaError) -> None:
        """Keep a request under which engine after engine fails from those that are left."""
        if running.engine_failures >= _MAX_ENGINE_FAILURES and self._slots.serving():
            raise GenerationError(
                f"request {running.request.request_id}: {running.engine_failures} engines failed "
                f"while they had it, so no other is given it; the last: {error}"
            ) from error

    async def _slot_for(self, running: _Running, choose: Choose) -> Slot | None:
        """The replica that is to serve the next piece, once there is one; None: abort instead."""
        request = running.request
        chosen: Slot | None = None

        def find() -> bool:
            nonlocal chosen
            if self._is_closed:
                raise GenerationError(f"request {request.request_id}: the router is closed")
            if running.is_abort_asked:
                return True
            chosen = None if self._slots.is_paused else choose(request)
            return chosen is not None

        if not await self._slots.wait_until(find, timeout_s=running.deadline - _now()):
            what = (
                "the router to resume"
                if self._slots.is_paused
                else f"a replica that takes requests at version {request.min_version} or newer"
            )
            states = {slot.name: (slot.state.value, slot.version) for slot in self._slots.all}
            raise GenerationTimeoutError(
                f"request {request.request_id} waited for {what} when its {self._timeout_s:.0f} s "
                f"were over; (state, version) of replicas: {states}"
            )
        return chosen

    async def _call(self, slot: Slot, piece: GenerationRequest, running: _Running) -> Completion:
        known = running.tokens
        tokens = len(piece.prompt_token_ids) + piece.sampling.max_tokens
        self._slots.add_request(slot, tokens)
        running.slot, running.piece_id = slot, piece.request_id
        try:
            async with asyncio.timeout_at(running.deadline):
                return await slot.replica.generate(piece, known.hear, streams=known.streams)
        except TimeoutError as error:
            await self._abort_piece(running)
            raise GenerationTimeoutError(
                f"request {running.request.request_id} was not completed by replica {slot.name} "
                f"within {self._timeout_s:.0f} s"
            ) from error
        except asyncio.CancelledError:
            await asyncio.shield(self._abort_piece(running))
            raise
        finally:
            running.slot = running.piece_id = None
            self._slots.release_request(slot, tokens)

    async def _abort_piece(self, running: _Running) -> None:
        """Free the replica of what it samples for a request that nobody waits for any more."""
        slot, piece_id = running.slot, running.piece_id
        if slot is None or piece_id is None:
            return
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT_S):
                await slot.replica.abort((piece_id,))
        except ReplicaError as error:
            self._slots.bury(slot, error)
        except TimeoutError:
            message = f"{slot.name} did not answer within {_ABORT_TIMEOUT_S:.0f} s"
            self._slots.bury(slot, ReplicaError(message))

    async def _read(self, slot: Slot) -> None:
        try:
            async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
                partials = await slot.replica.partials()
        except ReplicaError as error:
            self._slots.bury(slot, error)
            return
        except (TimeoutError, DeadlineError):
            return  # busy with something long; less is known, and nothing is wrong
        for running in self._running.values():
            if running.slot is slot and running.piece_id in partials:
                running.tokens.read(partials[running.piece_id])


def _now() -> float:
    return asyncio.get_running_loop().time()
