"""Brings published weights to the replicas, each of which follows the newest handle by itself.

Invariants: a replica has at most one puller, and the newest handle wins; versions of a replica that
serves requests never go down; a pinned replica is not pulled; a slow one is reported as lagging and
goes on in the background, and only one that fails, or exceeds the time-out in one fetch or one
swap, is dead. Nothing is swapped while a replica sleeps.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl.aio import deadline
from torchtitan_rl.errors import DeadlineError, ReplicaError, WeightSyncError
from torchtitan_rl.generation.commands import Pull
from torchtitan_rl.routing.replica import Replica, ReplicaState
from torchtitan_rl.routing.slots import NO_WEIGHTS, Slot, Slots
from torchtitan_rl.types import PullReport
from torchtitan_rl.weights.handle import WeightHandle

SyncMode = Literal["hot_swap", "drain"]
SyncOrder = Literal["together", "one_by_one"]

LOSSES = (ReplicaError, WeightSyncError, DeadlineError, TimeoutError)
"""The errors of a fetch or a swap after which the replica is marked dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The result of a weight sync when it returned. ``stage_s`` and ``pull_s`` are the slowest's.

    ``pulls`` may be empty where ``lagging`` or ``held`` is not.
    """

    version: int
    stage_s: float
    pull_s: float
    pulls: tuple[PullReport, ...]
    lost: tuple[str, ...] = field(default=())  # replicas that are dead
    lagging: tuple[str, ...] = ()  # did not hold the version in time, and still follow
    held: tuple[str, ...] = ()  # pinned: they follow when the pin ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    report: PullReport
    stage_s: float
    pull_s: float


class WeightSync:
    """The pullers of all slots. ``timeout_s`` limits one fetch, and one swap, of one replica."""

    def __init__(self, slots: Slots, *, timeout_s: float) -> None:
        self._slots = slots
        self._timeout_s = timeout_s
        self._newest: WeightHandle | None = None
        self._mode: SyncMode = "hot_swap"
        self._order: SyncOrder = "together"
        self._lag_timeout_s: float | None = None
        self._pullers: dict[int, asyncio.Task[None]] = {}  # by slot; those that run
        self._pulls: dict[int, _Pull] = {}  # by slot, its newest
        self._num_syncs = 0  # that wait
        self._begun_s = 0.0  # when `newest` came
        self._spread_by_s = 0.0  # see `has_spread`
        self._is_closed = False
        self._crash: BaseException | None = None  # of a puller, for the next sync to raise

    @property
    def newest(self) -> WeightHandle | None:
        """The newest handle that a sync was called with; replicas may not hold it yet."""
        return self._newest

    async def sync(
        self,
        handle: WeightHandle,
        *,
        mode: SyncMode,
        order: SyncOrder,
        lag_timeout_s: float | None,
    ) -> SyncReport:
        """Let all replicas follow ``handle``; see `GeneratorRouter.sync_weights`."""
        if self._newest is None or handle.version >= self._newest.version:
            self._newest = handle
            self._begun_s = _now()
            self._mode, self._order, self._lag_timeout_s = mode, order, lag_timeout_s
        self._slots.notify()
        self._num_syncs += 1
        try:
            self.follow_all()
            await self._slots.wait_until(
                lambda: self._is_settled(handle.version), timeout_s=lag_timeout_s
            )
        finally:
            self._num_syncs -= 1
        if self._crash is not None:
            raise self._crash
        if self._is_closed:
            raise WeightSyncError(f"version {handle.version}: the router is closed")
        if not self._slots.live_unreserved() and not self._slots.num_expected:
            raise WeightSyncError(
                f"no replica holds version {handle.version}: {self._slots.failure_summary()}"
            )
        return self._report(handle.version)

    def follow_all(self) -> None:
        for slot in self._slots.live_unreserved():
            self.follow(slot)

    def follow(self, slot: Slot) -> None:
        """Start the slot's puller where it has something to pull and none runs."""
        if slot.index in self._pullers or self._wanted(slot) is None:
            return
        task = asyncio.create_task(self._follow(slot), name=f"weights of {slot.name}")
        self._pullers[slot.index] = task
        task.add_done_callback(lambda task: self._on_end(slot, task))

    def join(self, replica: Replica, *, is_reserved: bool) -> Slot:
        """A slot for a replica whose engine has the weights of version 0. It gets requests once it
        holds the newest ones; a reserved one gets them with its first pin."""
        is_behind = self._newest is not None and self._newest.version > 0 and not is_reserved
        state = ReplicaState.STARTING if is_behind else ReplicaState.SERVING
        slot = self._slots.add(replica, is_reserved=is_reserved, state=state)
        slot.is_lagging = is_behind
        self.follow(slot)
        return slot

    async def bring(self, slot: Slot, handle: WeightHandle) -> None:
        """Make a pinned slot hold exactly ``handle.version``.

        Raises:
            WeightSyncError, ReplicaError, DeadlineError, TimeoutError: it could not.
        """
        if slot.version != handle.version:
            stage_s = await self._stage(slot, handle)
            await self._swap(slot, handle, stage_s)

    def has_spread(self, version: int) -> bool:
        """Whether no replica is about to swap to ``version``, or they take more than twice as long
        as the first one did: requests that wait for it then spread over all that hold it."""
        if not self._pullers or _now() >= self._spread_by_s:
            return True
        return not any(
            slot.version < version and slot.index in self._pullers
            for slot in self._slots.live_unreserved()
            if slot.state is not ReplicaState.DRAINING and not slot.is_lagging
        )

    async def close(self) -> None:
        """End all pullers, where they are; a sync that waits fails."""
        self._is_closed = True
        self._slots.notify()
        tasks = list(self._pullers.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _is_settled(self, version: int) -> bool:
        """Whether all slots that are not pinned hold it; where all are pinned, whether one does."""
        if self._is_closed or self._crash is not None:
            return True
        live = self._slots.live_unreserved()
        if any(
            slot.version < version
            for slot in live
            if not slot.is_pinned and slot.state is not ReplicaState.STARTING
        ):
            return False
        is_without_replicas = not live and not self._slots.num_expected
        return is_without_replicas or any(slot.version >= version for slot in live)

    def _report(self, version: int) -> SyncReport:
        live = self._slots.live_unreserved()
        behind = [slot for slot in live if slot.version < version]
        is_waiting_for_pin = len(behind) == len(live) and all(slot.is_pinned for slot in live)
        lagging = [slot for slot in behind if is_waiting_for_pin or not slot.is_pinned]
        for slot in lagging:
            slot.is_lagging = True
        pulls = [
            self._pulls[slot.index]
            for slot in live
            if slot.version >= version and slot.index in self._pulls
        ]
        return SyncReport(
            version=version,
            stage_s=max((pull.stage_s for pull in pulls), default=0.0),
            pull_s=max((pull.pull_s for pull in pulls), default=0.0),
            pulls=tuple(pull.report for pull in pulls),
            lost=tuple(slot.name for slot in self._slots.all if not slot.is_live),
            lagging=tuple(slot.name for slot in lagging),
            held=tuple(slot.name for slot in behind if slot not in lagging),
        )

    def _wanted(self, slot: Slot) -> WeightHandle | None:
        """The weights that the slot has to pull next."""
        handle = self._newest
        if handle is None or slot.is_pinned or slot.is_reserved or not slot.is_live:
            return None
        if slot.is_asleep or (slot.version == NO_WEIGHTS and not self._num_syncs):
            return None  # a sync follows the wake-up, in general with newer weights
        return handle if slot.version < handle.version else None

    async def _follow(self, slot: Slot) -> None:
        while (handle := self._wanted(slot)) is not None:
            try:
                stage_s = await self._stage(slot, handle)
            except WeightSyncError as error:
                if await self._is_superseded(slot, handle):
                    continue
                self._slots.mark_dead(slot, error)
                return
            except LOSSES as error:
                self._slots.mark_dead(slot, error)
                return
            if self._order == "one_by_one":
                await self._turn(slot)
            if slot.is_pinned or slot.is_asleep or not slot.is_live:
                return  # it follows again when the pin ends, or it wakes up
            try:
                await self._swap(slot, handle, stage_s)
            except LOSSES as error:
                self._slots.mark_dead(slot, error)

    async def _stage(self, slot: Slot, handle: WeightHandle) -> float:
        """Fetch alongside decoding; returns the seconds it took."""
        started = _now()
        async with deadline(self._timeout_s):
            await self._slots.answer(slot, slot.replica.stage(handle))
        return _now() - started

    async def _is_superseded(self, slot: Slot, handle: WeightHandle) -> bool:
        """Whether a version that could not be read is gone because there is a newer one.

        The publisher may remove a version that a lagging replica is about to read before the newer
        handle arrives here, so a lagging replica waits for that handle.
        """
        if slot.is_lagging:
            await self._slots.wait_until(
                lambda: self._newest is not handle, timeout_s=self._timeout_s
            )
        return self._newest is not handle

    async def _turn(self, slot: Slot) -> None:
        """Wait until no other replica is swapping, at most for the lag time-out."""
        others = [other for other in self._slots.live_unreserved() if other is not slot]
        await self._slots.wait_until(
            lambda: not any(other.is_swapping for other in others), timeout_s=self._lag_timeout_s
        )

    async def _swap(self, slot: Slot, handle: WeightHandle, stage_s: float) -> None:
        started = _now()
        if self._mode == "drain":
            # No time-out: each request that is waited for has a deadline of its own.
            self._slots.set_state(slot, ReplicaState.DRAINING)
            await self._slots.wait_until(
                lambda: slot.is_emptied or not slot.is_live or slot.outstanding_requests == 0
            )
        await self._slots.wait_until(lambda: not slot.is_asleep or not slot.is_live)
        if not slot.is_live:
            return
        self._slots.set_state(slot, ReplicaState.SYNCING)
        async with deadline(self._timeout_s):
            report = await self._slots.answer(slot, slot.replica.execute(Pull(handle.version)))
        slot.is_lagging = False
        if all(other.version < report.version for other in self._slots.live_unreserved()):
            first_s = _now() - self._begun_s
            self._spread_by_s = _now() + first_s
            asyncio.get_running_loop().call_later(first_s, self._slots.notify)
        self._slots.set_version(slot, report.version)
        self._pulls[slot.index] = _Pull(report=report, stage_s=stage_s, pull_s=_now() - started)
        self._slots.set_state(slot, ReplicaState.SERVING)

    def _on_end(self, slot: Slot, task: asyncio.Task[None]) -> None:
        del self._pullers[slot.index]
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._slots.notify()
        elif not task.cancelled():
            self.follow(slot)  # a newer handle may have come just before the puller ended


def _now() -> float:
    return asyncio.get_running_loop().time()
