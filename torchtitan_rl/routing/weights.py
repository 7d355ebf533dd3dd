"""Loads published weights into the replicas. Each replica has a task, its puller, that loads the
weights of the newest handle.

Invariants
- A replica has at most one puller. If several handles wait, only the newest is pulled. The version
  of a replica that serves requests never decreases.
- No weights are pulled into a pinned replica, or swapped while a replica sleeps.
- A slow replica is reported as lagging and continues in the background. A replica is marked dead
  only if it fails, or exceeds the time-out in one fetch or one swap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.aio import cancel_all, in_parts, loop_s
from torchtitan_rl.errors import DeadlineError, ReplicaError, WeightSyncError
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.routing.replicas import (
    NO_WEIGHTS,
    Halt,
    Phase,
    Replica,
    ReplicaPool,
    ReplicaState,
)
from torchtitan_rl.types import PullReport
from torchtitan_rl.weights.distribution import SourceLostError, WeightHandle

SyncMode = Literal["hot_swap", "drain"]
SyncOrder = Literal["together", "one_by_one"]

PULL_FAILURES = (ReplicaError, WeightSyncError, DeadlineError, TimeoutError)
"""The errors of a fetch or a swap after which the replica is marked dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The state at the end of a weight sync. ``stage_s`` and ``pull_s`` are those of the slowest
    replica. ``pulls`` is empty if all replicas are lost, lag behind or are held."""

    version: int
    stage_s: float
    pull_s: float
    pulls: tuple[PullReport, ...]
    lost: tuple[str, ...] = ()  # replicas that have died since the start of the router
    lagging: tuple[str, ...] = ()  # did not load the version in time, and continue to do so
    held: tuple[str, ...] = ()  # pinned replicas: they load the version when the pin ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    report: PullReport
    stage_s: float
    pull_s: float


class WeightSync:
    """The pullers of all replicas. ``timeout_s`` limits each fetch and each swap of a replica."""

    def __init__(self, pool: ReplicaPool, *, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self.newest: WeightHandle | None = None  # `sync` was called with; replicas may lack it
        self._mode: SyncMode = "hot_swap"
        self._order: SyncOrder = "together"
        self._lag_timeout_s: float | None = None
        self._pullers: dict[int, asyncio.Task[None]] = {}  # the running ones, by replica
        self._pulls: dict[int, _Pull] = {}  # the newest of each replica
        # Replicas that joined or that a sync reported as lagging, until their next swap, for which
        # requests do not wait. If the version is removed before, the replica is not lost.
        self._lagging: set[ReplicaState] = set()
        self._num_syncs = 0  # number of running `sync` calls
        self._begun_s = 0.0  # when `newest` was set
        self._spread = NO_WEIGHTS  # the newest version that a replica swapped to
        self._spread_by_s = 0.0  # see `may_start_on`
        self._is_closed = False
        self._crash: BaseException | None = None  # a puller's error, which the next sync raises

    async def sync(
        self,
        handle: WeightHandle,
        *,
        mode: SyncMode,
        order: SyncOrder,
        lag_timeout_s: float | None,
    ) -> SyncReport:
        """Make all replicas pull ``handle``; see `GeneratorRouter.sync_weights`."""
        if self.newest is None or handle.version >= self.newest.version:
            self.newest = handle
            self._begun_s = loop_s()
            self._mode, self._order, self._lag_timeout_s = mode, order, lag_timeout_s
        self._pool.notify()
        self._num_syncs += 1
        try:
            await self.follow_all()
            await self._pool.wait_until(
                lambda: self._is_settled(handle.version), timeout_s=lag_timeout_s
            )
        finally:
            self._num_syncs -= 1
        if self._crash is not None:
            raise self._crash
        if self._is_closed:
            raise WeightSyncError(f"version {handle.version}: the router is closed")
        if not self._pool.has_unreserved():
            raise WeightSyncError(
                f"no replica holds version {handle.version}: {self._pool.failure_summary()}"
            )
        return self._report(handle.version)

    async def follow_all(self) -> None:
        async for state in in_parts(self._pool.live_unreserved()):
            self.follow(state)

    def follow(self, state: ReplicaState) -> None:
        """Start the replica's puller, unless it runs or has nothing to pull."""
        if state.index in self._pullers or self._wanted(state) is None:
            return
        task = asyncio.create_task(self._follow(state), name=f"weights of {state.name}")
        self._pullers[state.index] = task
        task.add_done_callback(lambda task: self._on_end(state, task))

    def join(self, replica: Replica, *, is_reserved: bool) -> ReplicaState:
        """Add a replica whose engine has the weights of version 0. It gets requests once it holds
        the newest weights and is proven; a reserved one loads them at its first pin."""
        is_behind = self.newest is not None and self.newest.version > 0 and not is_reserved
        phase = Phase.STARTING if is_behind else Phase.SERVING
        state = self._pool.add(replica, is_reserved=is_reserved, phase=phase)
        if is_behind:
            self._lagging.add(state)
        self.follow(state)
        return state

    async def load(self, state: ReplicaState, handle: WeightHandle) -> None:
        """Make a pinned replica hold exactly ``handle.version``; raises `PULL_FAILURES`."""
        if state.version != handle.version:
            stage_s = await self._stage(state, handle)
            await self._swap(state, handle, stage_s)

    def may_start_on(self, version: int) -> bool:
        """Whether a request that needs ``version`` may start on a replica that holds it: once no
        other replica is about to swap to this version, but at the latest after twice the time that
        the first replica took to pull it. So requests that wait for a version spread over all
        replicas that hold it."""
        if not self._pullers or version < self._spread or loop_s() >= self._spread_by_s:
            return True
        return not any(
            state.version < version
            for state in self._pulling()
            if state.phase is not Phase.DRAINING and state not in self._lagging
        )

    async def close(self) -> None:
        """Cancel all pullers. Running `sync` calls fail."""
        self._is_closed = True
        self._pool.notify()
        await cancel_all(self._pullers.values())

    def _is_settled(self, version: int) -> bool:
        """Whether all replicas that are not pinned hold ``version``. If all are pinned, whether one
        holds it. If all are lost during a pause, those that replace them join after it."""
        if self._is_closed or self._crash is not None:
            return True

        def is_behind(state: ReplicaState) -> bool:
            is_awaited = not state.is_pinned and state.phase is not Phase.STARTING
            return is_awaited and state.version < version

        # Thousands of replicas are only looked at once no running puller is behind.
        if any(map(is_behind, self._pulling())):
            return False
        live = self._pool.live_unreserved()
        if any(map(is_behind, live)):
            return False
        if not live:
            return self._pool.is_paused or not self._pool.has_unreserved()
        return any(state.version >= version for state in live)

    def _pulling(self) -> Iterator[ReplicaState]:
        """The live replicas whose puller runs, those that began first at first."""
        states = map(self._pool.all.__getitem__, self._pullers)
        return (state for state in states if state.is_live and not state.is_reserved)

    def _report(self, version: int) -> SyncReport:
        live = self._pool.live_unreserved()
        behind = [state for state in live if state.version < version]
        is_waiting_for_pin = len(behind) == len(live) and all(state.is_pinned for state in live)
        lagging = [state for state in behind if is_waiting_for_pin or not state.is_pinned]
        self._lagging.update(lagging)
        pulls = [
            self._pulls[state.index]
            for state in live
            if state.version >= version and state.index in self._pulls
        ]
        return SyncReport(
            version=version,
            stage_s=max((pull.stage_s for pull in pulls), default=0.0),
            pull_s=max((pull.pull_s for pull in pulls), default=0.0),
            pulls=tuple(pull.report for pull in pulls),
            lost=tuple(one.name for one in self._pool.all if one.phase is Phase.DEAD),
            lagging=tuple(state.name for state in lagging),
            held=() if is_waiting_for_pin else tuple(one.name for one in behind if one.is_pinned),
        )

    def _wanted(self, state: ReplicaState) -> WeightHandle | None:
        """Return the weights that the replica has to pull next; None if there are none."""
        handle = self.newest
        if handle is None or self._is_closed or not state.is_live:
            return None
        if state.is_pinned or state.is_reserved:
            return None
        if state.is_asleep or (state.version == NO_WEIGHTS and not self._num_syncs):
            return None  # a sync follows the wake-up, in general with newer weights
        return handle if state.version < handle.version else None

    async def _follow(self, state: ReplicaState) -> None:
        while (handle := self._wanted(state)) is not None:
            try:
                stage_s = await self._stage(state, handle)
            except WeightSyncError as error:
                if await self._is_superseded(state, handle):
                    continue
                self._pool.mark_dead(state, error)
                return
            except PULL_FAILURES as error:
                self._pool.mark_dead(state, error)
                return
            if self._order == "one_by_one":
                await self._turn(state)
            if state.is_pinned or state.is_asleep or not state.is_live:
                return  # a new puller starts at the end of the pin, or after the wake-up
            try:
                await self._swap(state, handle, stage_s)
            except PULL_FAILURES as error:
                self._pool.mark_dead(state, error)

    async def _stage(self, state: ReplicaState, handle: WeightHandle) -> float:
        """Fetch the weights alongside decoding. Returns the duration in seconds. A trainer that is
        lost meanwhile is waited for."""
        while True:
            started = loop_s()
            try:
                work = state.replica.stage(handle)
                await self._pool.answer(state, work, timeout_s=self._timeout_s)
                return loop_s() - started
            except SourceLostError as error:
                await error.renewed.wait()

    async def _is_superseded(self, state: ReplicaState, handle: WeightHandle) -> bool:
        """Whether a version could not be read because a newer one has replaced it. For a lagging
        replica, the publisher may have removed it before the newer handle arrives here."""
        if state in self._lagging:
            await self._pool.wait_until(
                lambda: self.newest is not handle, timeout_s=self._timeout_s
            )
        return self.newest is not handle

    async def _turn(self, state: ReplicaState) -> None:
        """Wait until no other replica is swapping, at most for the lag time-out."""
        others = [other for other in self._pool.live_unreserved() if other is not state]
        await self._pool.wait_until(
            lambda: not any(other.is_swapping for other in others), timeout_s=self._lag_timeout_s
        )

    async def _swap(self, state: ReplicaState, handle: WeightHandle, stage_s: float) -> None:
        started = loop_s()
        if self._mode == "drain":
            # No time-out: each running request has its own deadline.
            self._pool.set_phase(state, Phase.DRAINING)
            await self._pool.wait_until(
                lambda: (
                    state.halt is Halt.EMPTIED
                    or not state.is_live
                    or state.outstanding_requests == 0
                )
            )
        await self._pool.wait_until(lambda: not state.is_asleep or not state.is_live)
        if not state.is_live:
            return
        self._pool.set_phase(state, Phase.SYNCING)
        pull = state.replica.execute(Pull(handle.version))
        report = await self._pool.answer(state, pull, timeout_s=self._timeout_s)
        self._lagging.discard(state)
        if self._pool.index.least(report.version) is None:  # no other replica holds it
            first_s, self._spread = loop_s() - self._begun_s, report.version
            self._spread_by_s = loop_s() + first_s
            asyncio.get_running_loop().call_later(first_s, self._pool.notify)
        self._pool.set_version(state, report.version)
        self._pulls[state.index] = _Pull(report=report, stage_s=stage_s, pull_s=loop_s() - started)
        self._pool.set_phase(state, Phase.SERVING)

    def _on_end(self, state: ReplicaState, task: asyncio.Task[None]) -> None:
        del self._pullers[state.index]
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._pool.notify()
        elif not task.cancelled():
            self.follow(state)  # a newer handle may have come just before the puller ended
