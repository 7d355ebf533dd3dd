"""Pins: a replica is kept at one version, so that evaluation can run alongside training.

Invariants: while a pin lasts its replica holds exactly ``version``; at its end, normal or not, the
replica follows the newest weights at once. A replica has at most one pin at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchtitan_rl.errors import DeadlineError, GenerationError, WeightSyncError
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.routing.pausing import leave_to_pin
from torchtitan_rl.routing.replicas import NO_WEIGHTS, Phase, ReplicaPool, ReplicaState
from torchtitan_rl.routing.requests import RequestTracker
from torchtitan_rl.routing.weights import LOSSES, WeightSync
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress


class PinnedReplica:
    """One pinned replica; what `pin_replica` yields."""

    def __init__(self, state: ReplicaState, requests: RequestTracker) -> None:
        self._state = state
        self._requests = requests
        self._version = state.version
        self._has_ended = False

    @property
    def replica(self) -> str:
        return self._state.name

    @property
    def version(self) -> int:
        """The version that every token is sampled under."""
        return self._version

    @property
    def active_time(self) -> ActiveTime:
        """The clock of its requests' deadlines: it stands still while the replica is stopped."""
        return self._state.active_time

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """A `GenerateFn` on this replica alone. Its calls must end before the pin does.

        Raises:
            GenerationError: the replica is lost, the pin has ended, or the request wants a newer
                version; and as `GeneratorRouter.generate`.
        """
        if self._has_ended:
            raise GenerationError(
                f"request {request.request_id}: the pin of {self.replica} has ended"
            )
        if request.min_version > self._version:
            raise GenerationError(
                f"request {request.request_id} wants version {request.min_version} or newer; the "
                f"pin of {self.replica} stays at {self._version}"
            )
        return await self._requests.complete(request, on_progress, pinned=self._state)

    def end(self) -> None:
        self._has_ended = True


@asynccontextmanager
async def pin_replica(
    pool: ReplicaPool,
    weights: WeightSync,
    requests: RequestTracker,
    *,
    version: int | None,
    timeout_s: float,
) -> AsyncIterator[PinnedReplica]:
    """See `GeneratorRouter.pin`."""
    state = await _take(pool, version, timeout_s)
    pin: PinnedReplica | None = None
    try:
        await leave_to_pin(pool, state)
        await _prepare(pool, weights, state)
        pin = PinnedReplica(state, requests)
        yield pin
    finally:
        if pin is not None:
            pin.end()
        state.is_pinned, state.pinned_weights = False, None
        pool.notify()
        weights.follow(state)


async def _take(pool: ReplicaPool, version: int | None, timeout_s: float) -> ReplicaState:
    """Pin a free replica, once there is one."""
    free: ReplicaState | None = None

    def find() -> bool:
        nonlocal free
        pool.require_unreserved()
        free = _free_replica(pool, version)
        return free is not None

    if not await pool.wait_until(find, timeout_s=timeout_s) or free is None:
        states = {state.name: (state.phase.value, state.is_pinned) for state in pool.all}
        raise DeadlineError(
            f"no replica could be pinned within {timeout_s:.0f} s; (state, is pinned): {states}"
        )
    free.is_pinned = True
    return free


def _free_replica(pool: ReplicaPool, version: int | None) -> ReplicaState | None:
    """A reserved replica while one lives; else the least loaded of those with ``version``, or the
    next newer version that a replica holds. Without ``version``: of those with the newest."""
    free = [
        state
        for state in pool.reserved() or pool.live_unreserved()
        if not state.is_pinned
        and state.phase is Phase.SERVING
        and (state.is_reserved or state.version != NO_WEIGHTS)
    ]
    if version is None:
        return min(free, key=lambda s: (-s.version, s.outstanding_tokens, s.index), default=None)
    free = [state for state in free if state.is_reserved or state.version >= version]
    return min(free, key=lambda s: (s.version, s.outstanding_tokens, s.index), default=None)


async def _prepare(pool: ReplicaPool, weights: WeightSync, state: ReplicaState) -> None:
    """Load the newest weights into a reserved replica; record from where to load them again."""
    newest = weights.newest
    if newest is None or not (state.is_reserved or state.version == newest.version):
        state.pinned_weights = None
        return
    state.pinned_weights = newest
    try:
        await weights.load(state, newest)
    except LOSSES as error:
        pool.mark_dead(state, error)
        raise WeightSyncError(
            f"{state.name} could not be brought to version {newest.version} for a pin: {error}"
        ) from error


async def restore_pinned(pool: ReplicaPool, weights: WeightSync) -> None:
    """Load the weights of pinned replicas again after a sleep; no sync restores them."""
    empty = [state for state in pool.live() if state.is_pinned and state.version == NO_WEIGHTS]
    await asyncio.gather(*(_restore(pool, weights, state) for state in empty))


async def _restore(pool: ReplicaPool, weights: WeightSync, state: ReplicaState) -> None:
    try:
        if state.pinned_weights is None:
            raise WeightSyncError(
                f"{state.name} slept while it was pinned to weights that were never published, so "
                "it cannot get them back"
            )
        await weights.load(state, state.pinned_weights)
    except LOSSES as error:
        pool.mark_dead(state, error)
