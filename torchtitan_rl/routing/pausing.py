"""Pauses, resumes and pins replicas, and puts them to sleep. A paused replica stops between two
steps. A pinned replica is kept at one version, so that evaluation can run alongside training.

Invariants
- From the start of a pause, a stopped replica gets no request, and a pinned replica that the pause
  leaves running gets only the requests of its pin. Requests that are already on the way to a
  stopped replica queue in its inbox.
- A replica that does not stop or resume in time is marked dead.
- No weights are swapped while a replica falls asleep or sleeps. After the wake-up it has no
  weights.
- During a pin, the replica holds exactly the pin's ``version``. When the pin ends, normally or not,
  the replica pulls the newest weights at once. A replica has at most one pin at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchtitan_rl.errors import DeadlineError, GenerationError, WeightSyncError
from torchtitan_rl.generation.commands import EngineCommand, Pause, PauseMode, Resume, Sleep, WakeUp
from torchtitan_rl.routing.clock import ActiveTime
from torchtitan_rl.routing.replicas import NO_WEIGHTS, Halt, Phase, ReplicaPool, ReplicaState
from torchtitan_rl.routing.requests import RequestTracker
from torchtitan_rl.routing.weights import PULL_FAILURES, WeightSync
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress

_RESUME_TIMEOUT_S = 60.0
_WAIT_GRACE_S = 60.0


async def pause_replicas(
    pool: ReplicaPool, requests: RequestTracker, mode: PauseMode, *, pinned: bool, timeout_s: float
) -> None:
    """See `GeneratorRouter.pause`. ``timeout_s`` limits the pause of each replica; with ``wait``, a
    minute is added."""
    if not pinned and mode != "abort":
        raise ValueError(f"a pause by {mode} stops pinned replicas, too: only an abort can not")
    pool.spares_pins = not pinned
    spared = [] if pinned else [state for state in pool.live() if state.is_pinned]
    stopped = [state for state in pool.live() if state not in spared]
    _stop(pool, stopped, stops_clock=mode != "wait")
    grace_s = _WAIT_GRACE_S if mode == "wait" else 0.0  # for requests that end by their deadlines
    await asyncio.gather(
        *(_pause(pool, state, mode, timeout_s + grace_s) for state in stopped),
        *map(requests.cut, spared),
    )
    if pool.is_paused:
        _stop_clocks(pool, [state for state in stopped if state.halt is not Halt.RUNNING])


async def resume_replicas(pool: ReplicaPool) -> None:
    """See `GeneratorRouter.resume`."""
    if not pool.is_paused:
        return
    # Wait until emptied replicas with a pending swap have swapped.
    await pool.wait_until(lambda: not any(map(_must_swap, pool.all)))
    for state in pool.all:
        state.halt = Halt.RUNNING
        state.active_time.resume()
    pool.is_paused = pool.spares_pins = False
    pool.active_time.resume()
    await asyncio.gather(*(_resume(pool, state) for state in pool.live()))
    pool.notify()


def _must_swap(state: ReplicaState) -> bool:
    return state.halt is Halt.EMPTIED and state.is_swapping and not state.is_asleep


async def leave_to_pin(pool: ReplicaPool, state: ReplicaState) -> None:
    """Resume a replica that was pinned after the pause began, if the pause leaves pinned replicas
    running. Otherwise the pin, and any sync that waits for it, could never end."""
    if pool.spares_pins:
        await pool.wait_until(lambda: state.halt is not Halt.STOPPED or not state.is_live)
    if pool.spares_pins and state.halt is Halt.EMPTIED and state.is_live:
        state.halt = Halt.RUNNING
        state.active_time.resume()
        await _resume(pool, state)


async def put_to_sleep(pool: ReplicaPool, *, timeout_s: float) -> None:
    """See `GeneratorRouter.sleep`. ``timeout_s`` limits each replica."""
    pool.spares_pins = False
    for state in pool.live():
        state.is_asleep = True  # from here on it starts no swap
    _stop(pool, pool.live(), stops_clock=True)
    await asyncio.gather(*(_put_to_sleep(pool, state, timeout_s) for state in pool.live()))
    # The processes of a dead replica may still run, and must not keep their devices.
    await asyncio.gather(*(state.replica.close() for state in pool.all if not state.is_live))


async def wake_up(pool: ReplicaPool, *, timeout_s: float) -> None:
    """See `GeneratorRouter.wake_up`. ``timeout_s`` limits each replica."""
    asleep = [state for state in pool.live() if state.is_asleep]
    await asyncio.gather(*(_wake_up(pool, state, timeout_s) for state in asleep))


def _stop(pool: ReplicaPool, stopped: list[ReplicaState], *, stops_clock: bool) -> None:
    """Send no more requests to these replicas. With ``stops_clock`` False, the clocks continue,
    because running requests may finish."""
    pool.is_paused = True
    for state in stopped:
        if state.halt is Halt.RUNNING:
            state.halt = Halt.STOPPED
    if stops_clock:
        _stop_clocks(pool, stopped)
    pool.notify()


def _stop_clocks(pool: ReplicaPool, stopped: list[ReplicaState]) -> None:
    for clock in (pool.active_time, *(state.active_time for state in stopped)):
        clock.pause()


async def _put_to_sleep(pool: ReplicaPool, state: ReplicaState, timeout_s: float) -> None:
    await pool.wait_until(lambda: state.phase is not Phase.SYNCING)
    await asyncio.sleep(0)  # a waiting sync must see the new version before this resets it
    pool.set_version(state, NO_WEIGHTS)
    if await _execute(pool, state, Sleep(), "fall asleep", timeout_s):
        _set_emptied(pool, state)


async def _wake_up(pool: ReplicaPool, state: ReplicaState, timeout_s: float) -> None:
    if await _execute(pool, state, WakeUp(), "wake up", timeout_s):
        state.is_asleep = False
        pool.notify()


async def _execute(
    pool: ReplicaPool, state: ReplicaState, command: EngineCommand[None], verb: str, limit_s: float
) -> bool:
    """Have a replica execute a command. Returns False if it failed; the replica is then dead."""
    await pool.ask(state, state.replica.execute(command), timeout_s=limit_s, required=verb)
    return state.is_live


async def _pause(pool: ReplicaPool, state: ReplicaState, mode: PauseMode, timeout_s: float) -> None:
    is_paused = await _execute(pool, state, Pause(mode), f"pause by {mode}", timeout_s)
    if is_paused and mode != "keep":  # a frozen replica keeps its requests
        _set_emptied(pool, state)


def _set_emptied(pool: ReplicaPool, state: ReplicaState) -> None:
    if state.halt is Halt.STOPPED:  # unless `resume` came first
        state.halt = Halt.EMPTIED
    pool.notify()


async def _resume(pool: ReplicaPool, state: ReplicaState) -> None:
    await _execute(pool, state, Resume(), "resume", _RESUME_TIMEOUT_S)


class PinnedReplica:
    """A pinned replica, which `pin_replica` yields. Every token is sampled under ``version``."""

    def __init__(self, state: ReplicaState, requests: RequestTracker) -> None:
        self._state = state
        self._requests = requests
        self.version = state.version
        self.has_ended = False

    @property
    def replica(self) -> str:
        return self._state.name

    @property
    def active_time(self) -> ActiveTime:
        """The clock for its requests' deadlines. It is stopped while the replica is stopped."""
        return self._state.active_time

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        """Complete a request on this replica only. All calls must end before the pin ends. Raises
        GenerationError: the replica is lost, the pin has ended, or the request needs a newer
        version. See also `GeneratorRouter.generate`."""
        name = request.request_id
        if self.has_ended:
            raise GenerationError(f"request {name}: the pin of {self.replica} has ended")
        if request.min_version > self.version:
            wanted = f"request {name} wants version {request.min_version} or newer"
            raise GenerationError(f"{wanted}; the pin of {self.replica} stays at {self.version}")
        return await self._requests.complete(request, on_progress, pinned=self._state)


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
            pin.has_ended = True
        state.is_pinned, state.pinned_weights = False, None
        pool.notify()
        weights.follow(state)


async def _take(pool: ReplicaPool, version: int | None, timeout_s: float) -> ReplicaState:
    """Wait for a free replica and pin it."""
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
    """Find a replica to pin; None if none is free.

    If a reserved replica is alive, only reserved ones are considered. Otherwise the result is the
    least loaded replica that holds ``version`` or the next newer version, or without ``version``
    the newest one.
    """
    free = [
        state
        for state in pool.reserved() or pool.live_unreserved()
        if not state.is_pinned
        and state.phase is Phase.SERVING
        and state.takes_requests
        and (state.is_reserved or state.version != NO_WEIGHTS)
    ]
    if version is None:
        return min(free, key=lambda s: (-s.version, s.outstanding_tokens, s.index), default=None)
    free = [state for state in free if state.is_reserved or state.version >= version]
    return min(free, key=lambda s: (s.version, s.outstanding_tokens, s.index), default=None)


async def _prepare(pool: ReplicaPool, weights: WeightSync, state: ReplicaState) -> None:
    """Load the newest weights into a reserved replica, and record the handle to load them again."""
    newest = weights.newest
    if newest is None or not (state.is_reserved or state.version == newest.version):
        state.pinned_weights = None
        return
    state.pinned_weights = newest
    try:
        await weights.load(state, newest)
    except PULL_FAILURES as error:
        pool.mark_dead(state, error)
        raise WeightSyncError(
            f"{state.name} could not be brought to version {newest.version} for a pin: {error}"
        ) from error


async def restore_pinned(pool: ReplicaPool, weights: WeightSync) -> None:
    """Load the weights of pinned replicas again after a sleep, because no sync does this."""
    empty = [state for state in pool.live() if state.is_pinned and state.version == NO_WEIGHTS]
    await asyncio.gather(*(_restore(pool, weights, state) for state in empty))


async def _restore(pool: ReplicaPool, weights: WeightSync, state: ReplicaState) -> None:
    try:
        if state.pinned_weights is None:
            why = "slept while it was pinned to weights that were not the newest published ones"
            raise WeightSyncError(f"{state.name} {why}, and cannot be fetched again")
        await weights.load(state, state.pinned_weights)
    except PULL_FAILURES as error:
        pool.mark_dead(state, error)
