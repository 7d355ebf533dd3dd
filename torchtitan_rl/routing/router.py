"""`GeneratorRouter.generate` is the only way to a replica.

Invariants: a call's load is released on every exit path. A failed replica is dead and gets no
further request, so a replica that fails fast never looks idle. A request that was interrupted, or
whose replica was lost, continues from its tokens so far; its caller sees one completion, and never
an abort that it did not request. Every wait has a deadline, whose error says what it waited for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from torchtitan_rl.aio import for_each
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.generation.commands import PauseMode, ReadStats
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.routing.pausing import (
    PinnedReplica,
    pause_replicas,
    pin_replica,
    put_to_sleep,
    restore_pinned,
    resume_replicas,
    wake_up,
)
from torchtitan_rl.routing.placement import Placement
from torchtitan_rl.routing.rejoining import DifferentAnswerError, prove
from torchtitan_rl.routing.replicas import (
    Halt,
    Phase,
    Replica,
    ReplicaPool,
    ReplicaState,
    lost_error,
)
from torchtitan_rl.routing.requests import OnEnded, ReplicaAccount, RequestTracker
from torchtitan_rl.routing.weights import SyncMode, SyncOrder, SyncReport, WeightSync
from torchtitan_rl.types import Completion, EngineStats, GenerationRequest, OnProgress
from torchtitan_rl.weights.distribution import WeightHandle

__all__ = ["GeneratorRouter", "OnEnded", "ReplicaAccount", "SyncMode", "SyncOrder", "SyncReport"]

_STATS_TIMEOUT_S = 60.0


class GeneratorRouter:
    """Distributes requests over replicas, and makes replicas load new weights.

    ``reserved`` names replicas that only pins use. ``request_timeout_s`` limits one request with
    all its pieces, in `active_time`; ``sync_timeout_s`` each fetch and each swap of weights by a
    replica. ``on_ended`` is called at the end of each request that was not refused here, including
    those of pins. With ``keeps_requests``, requests wait instead of failing if no replica is left,
    so that `partials` still has their tokens; the caller of `wait_until_lost` has to end them.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        request_timeout_s: float = 600.0,
        sync_timeout_s: float = 300.0,
        reserved: Collection[str] = (),
        on_ended: OnEnded | None = None,
        keeps_requests: bool = False,
    ) -> None:
        self._pool = ReplicaPool(replicas, reserved)
        self._weights = WeightSync(self._pool, timeout_s=sync_timeout_s)
        self._placement = Placement(self._pool, self._weights, keeps_requests=keeps_requests)
        self._request_timeout_s = request_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._requests = RequestTracker(
            self._pool, self._placement, timeout_s=request_timeout_s, on_ended=on_ended
        )

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete one request on a replica that holds its ``min_version`` or newer. While several
        load this version at the same time, it may wait for them (`WeightSync.may_start_on`).

        ``on_progress`` is called with the tokens sampled after ``resume_from``; their indices are
        those in the whole completion. It must not raise.

        Continued requests: see `continuation`.

        Raises:
            InvalidRequestError: the request was refused; other requests are not affected.
            GenerationTimeoutError: the request took longer than ``request_timeout_s``.
            GenerationError: no replica is left, and ``keeps_requests`` is not set.
        """
        return await self._requests.complete(request, on_progress)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with their tokens so far. Unknown and ended ids are ignored."""
        await self._requests.abort(request_ids)

    async def partials(self) -> dict[str, Completion]:
        """Return the partial completion of every running request, by id, which can be its
        ``resume_from``, without interrupting it. If a replica does not answer in time, its requests
        have only the tokens reported before."""
        return await self._requests.partials()

    async def account(self) -> dict[str, ReplicaAccount]:
        """Return by replica the number of tokens that it sampled, and what happened to them."""
        return await self._requests.accounts()

    def received_tokens(self) -> int:
        """Return the number of tokens that the router received from all replicas. For a running
        request, only the tokens of pieces that have ended are included."""
        return sum(state.received_tokens for state in self._pool.all)

    def held_tokens(self) -> int:
        """Return how many of the `received_tokens` belong to requests that still run."""
        return self._requests.held_tokens()

    async def pause(self, mode: PauseMode = "keep", *, pinned: bool = True) -> None:
        """Stop all replicas. Returns once each rank is between two steps.

        With ``keep``, running requests freeze with their KV cache. With ``abort``, they are
        interrupted, which empties the engines, and continue after `resume`. With ``wait``, they
        finish first, and only then time-outs stop. New requests wait in the router. Weights can be
        pulled during a pause. A replica that does not stop is marked dead.

        With ``pinned`` False (only with ``abort``), pinned replicas continue to serve their pins,
        including later ones; all their other requests are interrupted.

        Raises:
            GenerationError: `resume` was called before all replicas were paused.
        """
        await pause_replicas(
            self._pool, self._requests, mode, pinned=pinned, timeout_s=self._request_timeout_s
        )

    async def resume(self) -> None:
        """Continue after a pause; no effect without one."""
        await resume_replicas(self._pool)

    async def sleep(self) -> None:
        """Pause with mode ``abort``, and release the devices of all replicas, including pinned
        ones. A running weight swap is finished first, and none begins before `wake_up`. A replica
        that does not fall asleep is marked dead. Waits for the end of `keeping_awake`."""
        await self._pool.wait_until(lambda: not self._pool.num_keeping_awake)
        await put_to_sleep(self._pool, timeout_s=self._sync_timeout_s)

    async def wake_up(self) -> None:
        """Take the devices again. Replicas stay paused and without weights: call `sync_weights`,
        with any version, then `resume`. The weights of pinned replicas are loaded here."""
        await wake_up(self._pool, timeout_s=self._sync_timeout_s)
        await self._weights.follow_all()  # for a `sync` call that already waits
        await restore_pinned(self._pool, self._weights)

    async def sync_weights(
        self,
        handle: WeightHandle,
        *,
        mode: SyncMode,
        order: SyncOrder = "together",
        lag_timeout_s: float | None = None,
    ) -> SyncReport:
        """Make every live replica load ``handle.version`` or newer.

        Weights are staged while decoding continues. With ``drain``, running requests then finish
        before the swap, and new ones wait; with ``hot_swap``, weights are swapped while requests
        run. Returns once all replicas that are not pinned (if all are: one) hold the version, or
        after ``lag_timeout_s``, if given; lagging replicas continue in the background. A replica
        whose pull fails is marked dead.

        Raises:
            WeightSyncError: no replica is left that holds the new weights or could load them.
        """
        return await self._weights.sync(handle, mode=mode, order=order, lag_timeout_s=lag_timeout_s)

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[PinnedReplica]:
        """Pin a live replica, which then does not pull weights: ``async with router.pin() as pin``.

        A reserved replica is pinned if one is alive, after it has loaded the newest synced weights;
        otherwise the least loaded replica with the newest weights (with ``version``: this one, or
        else the next newer one), which continues to serve other requests.

        Raises (on entering):
            GenerationError: no replica is left.
            WeightSyncError: the reserved replica could not load the newest synced weights.
            DeadlineError: no replica was free within ``request_timeout_s``.
        """
        return pin_replica(
            self._pool,
            self._weights,
            self._requests,
            version=version,
            timeout_s=self._request_timeout_s,
        )

    @property
    def active_time(self) -> ActiveTime:
        """The clock for requests' deadlines. It is stopped while the router is paused or its
        replicas sleep."""
        return self._pool.active_time

    @property
    def newest_version(self) -> int:
        """The newest version with which `sync_weights` was called; 0 before the first call."""
        newest = self._weights.newest
        return 0 if newest is None else newest.version

    def versions(self) -> dict[str, int]:
        """Return the version of each live replica, by name."""
        return {state.name: state.version for state in self._pool.live()}

    async def stats(self) -> dict[str, EngineStats]:
        """Return the statistics of every live replica, by name. Replicas that do not answer in time
        are left out."""
        live = self._pool.live()
        found = await for_each(live, self._stats)
        return {state.name: stats for state, stats in zip(live, found, strict=True) if stats}

    async def _stats(self, state: ReplicaState) -> EngineStats | None:
        reading = state.replica.execute(ReadStats())
        stats = await self._pool.ask(state, reading, timeout_s=_STATS_TIMEOUT_S)
        if stats is not None:
            state.note_sampled(stats.generated_tokens)
        return stats

    def require_unreserved(self) -> None:
        self._pool.require_unreserved()

    async def wait_until_lost(self) -> None:
        """Never return; GenerationError: no replica takes requests any more."""

        def never() -> bool:
            self.require_unreserved()
            return False

        await self._pool.wait_until(never, key="lost")

    def unreserved(self) -> dict[str, bool]:
        """The live replicas for requests without a pin, by name; whether each takes requests now,
        rather than pausing or draining."""
        return {
            state.name: state.takes_requests and state.halt is Halt.RUNNING
            for state in self._pool.live_unreserved()
        }

    @property
    def num_unreserved(self) -> int:
        """The number of live replicas for requests without a pin."""
        return self._pool.num_unreserved

    def states(self) -> dict[str, Phase]:
        """The phases of all replicas but those that have left."""
        return {one.name: one.phase for one in self._pool.all if one.phase is not Phase.LEFT}

    def outstanding_tokens(self) -> dict[str, int]:
        return {state.name: state.outstanding_tokens for state in self._pool.all}

    async def join(self, replica: Replica, *, is_reserved: bool = False) -> str:
        """Add a replica with a new name, whose engine has the weights of version 0, and wait until
        it serves. Waits while the router is paused.

        It gets no request before it holds the newest weights and has answered as another replica
        does, unless it is reserved. Returns what `rejoining.prove` showed, as a clause.

        Raises:
            ReplicaError: the replica is lost or answers otherwise. It is marked dead.
        """
        await self._pool.wait_until(lambda: not self._pool.is_paused, key="join")
        state = self._weights.join(replica, is_reserved=is_reserved)
        if is_reserved:
            return "not compared, because it is reserved"
        version = self.newest_version
        await self._pool.wait_until(lambda: state.version >= version or not state.is_live)
        try:
            shown = await prove(self._pool, self._weights, self._requests, state)
        except DifferentAnswerError as error:
            self._pool.mark_dead(state, error)
            raise
        if not state.is_live:
            raise lost_error(state)
        self._pool.set_proven(state)
        return shown

    async def share_queues(self) -> None:
        """Let requests in the queues of crowded engines continue on the least loaded replicas, for
        instance on one that has joined."""
        serving = [one for one in self._pool.live_unreserved() if one.takes_requests]
        share = math.ceil(sum(one.outstanding_requests for one in serving) / max(1, len(serving)))

        async def share_queue(state: ReplicaState) -> None:
            excess = state.outstanding_requests - share
            stats = await self._stats(state) if excess > 0 else None
            if stats is not None and stats.waiting:
                await self._requests.move_newest(state, min(stats.waiting, excess))

        await for_each(serving, share_queue)

    def last_to_join(self, number: int) -> list[str]:
        """Name the live replicas that should leave first: those that joined last and are neither
        reserved nor pinned. Only if these are too few, pinned ones are named, too."""
        live = sorted(self._pool.live_unreserved(), key=lambda one: (one.is_pinned, -one.index))
        return [state.name for state in live[:number]]

    async def leave(self, name: str) -> Replica:
        """Take a replica out of service: its requests continue on others with their tokens. A
        pinned replica first serves its pin; a pause that has not emptied the replica is waited for.
        Returns the replica once nothing runs on it, or it is dead; it can then be closed."""
        (state,) = (one for one in self._pool.all if one.name == name)
        self._pool.set_leaving(state)
        await self._pool.wait_until(
            lambda: not (state.is_pinned or state.halt is Halt.STOPPED) or not state.is_live
        )
        await asyncio.sleep(0)  # a piece that was just placed here is sent, so it can be aborted
        while state.is_live:
            await self._requests.cut(state)
            await self._pool.wait_until(
                lambda: state.outstanding_requests == 0 or not state.is_live
            )
            await self._requests.read(state)  # its last counts
            if state.outstanding_requests == 0:
                self._pool.mark_left(state)
        return state.replica

    def give_up(self, is_lost: Callable[[str], bool], error: ReplicaError) -> None:
        """Mark every replica dead for which ``is_lost(name)`` is true, even if it answers."""
        for state in self._pool.live():
            if is_lost(state.name):
                self._pool.mark_dead(state, error)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Declare that a replica will `join` during this block: if no other replica is left,
        requests and weight syncs wait for it instead of failing."""
        self._pool.num_expected += 1
        try:
            yield
        finally:
            self._pool.num_expected -= 1
            self._pool.notify()

    @asynccontextmanager
    async def keeping_awake(self) -> AsyncIterator[None]:
        """Wait until the replicas are neither paused nor asleep; they do not sleep during the
        block. So an engine can start on devices that it shares with the trainer."""
        await self._pool.wait_until(lambda: not self._pool.is_paused)
        self._pool.num_keeping_awake += 1
        try:
            yield
        finally:
            self._pool.num_keeping_awake -= 1
            self._pool.notify()

    def on_dead(self, call: Callable[[Replica, BaseException], None]) -> None:
        """Set the function that is called once for each lost replica, with the replica and the
        cause."""
        self._pool.on_dead = call

    async def lost_tokens(self, name: str) -> int:
        """Return the number of tokens that a dead replica is known to have sampled and that were
        never received."""
        (state,) = (one for one in self._pool.all if one.name == name)
        await self._pool.wait_until(lambda: state.outstanding_requests == 0)
        return max(0, state.sampled_tokens - state.received_tokens)

    async def close(self) -> None:
        """Close every replica. Requests that still wait in the router fail."""
        self._requests.close()
        await self._weights.close()
        results = await asyncio.gather(
            *(state.replica.close() for state in self._pool.live()), return_exceptions=True
        )
        if errors := [result for result in results if isinstance(result, Exception)]:
            raise ExceptionGroup("replicas did not close", errors)
