"""`GeneratorRouter.generate` is the only way to a replica.

Invariants: a call's load is released on every exit path; a replica that failed is dead and gets no
further request (a fast-failing one never looks idle); a request that was interrupted, or lost its
replica, continues from its tokens so far, and its caller sees one completion and never an abort
that was not requested; every wait has a deadline and says what it waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager

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
from torchtitan_rl.routing.placement import Placement, RoutingStrategy
from torchtitan_rl.routing.replicas import Phase, Replica, ReplicaPool, ReplicaState
from torchtitan_rl.routing.requests import OnEnded, ReplicaAccount, RequestTracker
from torchtitan_rl.routing.weights import SyncMode, SyncOrder, SyncReport, WeightSync
from torchtitan_rl.types import Completion, EngineStats, GenerationRequest, OnProgress
from torchtitan_rl.weights.handle import WeightHandle

__all__ = ["GeneratorRouter", "OnEnded", "ReplicaAccount", "SyncMode", "SyncOrder", "SyncReport"]

_STATS_TIMEOUT_S = 60.0


class GeneratorRouter:
    """Spreads requests over replicas and brings new weights to them.

    ``reserved`` names replicas that only pins use. ``request_timeout_s`` is the deadline of one
    request with all its pieces, in `active_time`; ``sync_timeout_s`` that of one fetch, or one
    swap, of weights by one replica. ``on_ended`` is called at the end of each request that was not
    refused here, those of pins included. ``keeps_requests``: where no replica is left, requests
    wait instead of failing, so that `partials` still has their tokens; the caller of
    `wait_until_lost` has to end them.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        strategy: RoutingStrategy | None = None,
        request_timeout_s: float = 600.0,
        sync_timeout_s: float = 300.0,
        reserved: Collection[str] = (),
        on_ended: OnEnded | None = None,
        keeps_requests: bool = False,
    ) -> None:
        self._pool = ReplicaPool(replicas, reserved)
        self._weights = WeightSync(self._pool, timeout_s=sync_timeout_s)
        self._placement = Placement(
            self._pool, self._weights, strategy=strategy, keeps_requests=keeps_requests
        )
        self._request_timeout_s = request_timeout_s
        self._sync_timeout_s = sync_timeout_s
        self._requests = RequestTracker(
            self._pool, self._placement, timeout_s=request_timeout_s, on_ended=on_ended
        )

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete one request on some replica that holds its ``min_version``. While replicas get
        that version at the same time, it waits for all of them (see `WeightSync.may_start_on`).

        ``on_progress`` gets the tokens sampled after ``resume_from``, as tokens of the whole
        completion, and is not called once this has returned or
        raised. It must not raise.

        A greedy request that is continued, here or from ``resume_from``, ends as it would have
        without the interruption. A seeded one continues with a seed derived from its seed and its
        tokens so far: reproducible, but not the tokens of an uninterrupted run.

        Raises:
            InvalidRequestError: the replica refused it; other requests are not affected.
            GenerationTimeoutError: it took longer than the request time-out.
            GenerationError: no replica is left, without ``keeps_requests``.
        """
        return await self._requests.complete(request, on_progress)

    async def abort(self, request_ids: Collection[str]) -> None:
        """End these requests with the tokens they have; unknown and ended ids are ignored."""
        await self._requests.abort(request_ids)

    async def partials(self) -> dict[str, Completion]:
        """The partial completion of every running request, by id, with exact versions.

        For checkpoints: each can be the ``resume_from`` of the same request. Decoding is not
        interrupted. Requests of a replica that does not answer in time have the tokens that it had
        reported before.
        """
        return await self._requests.partials()

    async def account(self) -> dict[str, ReplicaAccount]:
        """By replica: how many tokens it counts as sampled, and where they are.

        ``unaccounted``, the tokens of a live replica that were not received and do not belong to a
        running request, is 0. Decoding is not interrupted.
        """
        return await self._requests.accounts()

    def received_tokens(self) -> int:
        """Tokens that the router received from all replicas; of running requests those of pieces
        that have ended."""
        return sum(state.received_tokens for state in self._pool.all)

    def held_tokens(self) -> int:
        """Those of `received_tokens` whose requests still run."""
        return self._requests.held_tokens()

    async def pause(self, mode: PauseMode = "keep", *, pinned: bool = True) -> None:
        """Stop all replicas; returns once each rank is between two steps.

        Running requests freeze with their KV (``keep``), are cut and continued at `resume`
        (``abort``: the engines are empty) or finish first (``wait``). New ones wait here. Paused
        time does not count against time-outs, except while ``wait`` lets requests finish. Weights
        can be pulled during a pause. A replica that does not stop is dead. Without ``pinned`` (only
        with ``abort``) pinned replicas continue to serve their pins, also those that begin later;
        all other requests are cut there, too.

        Raises:
            GenerationError: `resume` was called before this was done.
        """
        await pause_replicas(
            self._pool,
            mode,
            pinned=pinned,
            cut=self._requests.cut,
            timeout_s=self._request_timeout_s,
        )

    async def resume(self) -> None:
        """Continue after a pause; no effect without one."""
        await resume_replicas(self._pool)

    async def sleep(self) -> None:
        """Pause by abort and give the devices of all replicas back, pinned ones' too.

        Cut requests wait here, which does not count against their time-outs. A swap of weights that
        runs is finished first, and none begins before `wake_up`. A replica that does not fall
        asleep is dead.
        """
        await put_to_sleep(self._pool, timeout_s=self._sync_timeout_s)

    async def wake_up(self) -> None:
        """Take the devices back. Replicas stay paused and hold no weights: call `sync_weights`,
        with any version, then `resume`. Pinned replicas get their weights back here."""
        await wake_up(self._pool, timeout_s=self._sync_timeout_s)
        self._weights.follow_all()  # for a sync that waits already
        await restore_pinned(self._pool, self._weights)

    async def sync_weights(
        self,
        handle: WeightHandle,
        *,
        mode: SyncMode,
        order: SyncOrder = "together",
        lag_timeout_s: float | None = None,
    ) -> SyncReport:
        """Bring every live replica to ``handle.version`` or newer.

        Weights are staged alongside decoding. `drain` then lets running requests finish
        first, while new ones wait; `hot_swap` swaps underneath them. Returns once all
        replicas that are not pinned hold the version, or after ``lag_timeout_s`` (None: no limit
        but the pullers' own); those that lag go on in the background. A replica that cannot
        follow is dead. Where all replicas are pinned it waits for the first pin to end.

        Raises:
            WeightSyncError: no replica is left that holds the new weights or could get them.
        """
        return await self._weights.sync(handle, mode=mode, order=order, lag_timeout_s=lag_timeout_s)

    def pin(self, version: int | None = None) -> AbstractAsyncContextManager[PinnedReplica]:
        """``async with router.pin() as pin``: a live replica that is kept out of pulls.

        It is a reserved replica while one lives, which is first brought to the newest synced
        weights; else the least loaded of those with the newest weights, which goes on serving
        others. Given a ``version``, it is one with this version, or the next newer one that a
        replica holds; it waits for a replica that lags behind.

        Raises (on entering):
            GenerationError: no replica is left.
            WeightSyncError: the reserved replica could not be brought to those weights.
            DeadlineError: none was free within the request time-out.
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
        """The clock of requests' deadlines: it stands still while the router is paused or its
        replicas sleep."""
        return self._pool.active_time

    @property
    def newest_version(self) -> int:
        """The newest version that `sync_weights` was called with, 0 before the first."""
        newest = self._weights.newest
        return 0 if newest is None else newest.version

    def versions(self) -> dict[str, int]:
        """The version of each live replica, by name."""
        return {state.name: state.version for state in self._pool.live()}

    async def stats(self) -> dict[str, EngineStats]:
        """State of every live replica, by name, without those that are lost or do not answer in
        time."""
        live = self._pool.live()
        stats = await asyncio.gather(*(self._stats(state) for state in live))
        return {state.name: stat for state, stat in zip(live, stats, strict=True) if stat}

    async def _stats(self, state: ReplicaState) -> EngineStats | None:
        reading = state.replica.execute(ReadStats())
        stats = await self._pool.ask(state, reading, timeout_s=_STATS_TIMEOUT_S)
        if stats is not None:
            state.note_sampled(stats.generated_tokens)
        return stats

    def require_unreserved(self) -> None:
        """See `ReplicaPool.require_unreserved`."""
        self._pool.require_unreserved()

    async def wait_until_lost(self) -> None:
        """Never return.

        Raises:
            GenerationError: no replica takes requests any more; with every replica's cause.
        """

        def never() -> bool:
            self.require_unreserved()
            return False

        await self._pool.wait_until(never, key="lost")

    def states(self) -> dict[str, Phase]:
        return {state.name: state.phase for state in self._pool.all}

    def outstanding_tokens(self) -> dict[str, int]:
        return {state.name: state.outstanding_tokens for state in self._pool.all}

    async def join(self, replica: Replica, *, is_reserved: bool = False) -> None:
        """Take in one more replica, whose name is new and whose engine has the weights of version
        0. It gets no request before it holds the newest weights. Returns once the router is not
        paused and the replica belongs to it.
        """
        await self._pool.wait_until(lambda: not self._pool.is_paused, key="join")
        self._weights.join(replica, is_reserved=is_reserved)

    def give_up(self, is_lost: Callable[[str], bool], error: ReplicaError) -> None:
        """Mark every replica for which ``is_lost(name)`` is true as dead, even if it still answers:
        its requests continue elsewhere."""
        for state in self._pool.live():
            if is_lost(state.name):
                self._pool.mark_dead(state, error)

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """While this is open, a replica is about to `join`: where no other is left, requests and
        weight syncs wait for it instead of failing."""
        self._pool.num_expected += 1
        try:
            yield
        finally:
            self._pool.num_expected -= 1
            self._pool.notify()

    def on_dead(self, call: Callable[[Replica, str], None]) -> None:
        """From now on call this with each replica that is lost, once, and the cause."""
        self._pool.on_dead = lambda state: call(state.replica, " ".join(f"{state.failure}".split()))

    async def close(self) -> None:
        """Close every replica; requests that still wait here fail."""
        self._requests.close()
        await self._weights.close()
        results = await asyncio.gather(
            *(state.replica.close() for state in self._pool.live()), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            raise ExceptionGroup(
                "replicas did not close", [e for e in errors if isinstance(e, Exception)]
            )
