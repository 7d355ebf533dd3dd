"""Stops replicas between two steps, puts them to sleep, and resumes them.

Invariants
- From the start of a pause a replica that it stops gets no request, and one that it leaves to a pin
  gets only those of its pin. Requests in transit to a stopped one queue in the replica's inbox.
- A replica that does not stop, or does not resume, is dead.
- No weights are swapped while a replica falls asleep or sleeps, and it holds none when it wakes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torchtitan_rl.generation.commands import EngineCommand, Pause, PauseMode, Resume, Sleep, WakeUp
from torchtitan_rl.routing.replicas import NO_WEIGHTS, Phase, ReplicaPool, ReplicaState

_RESUME_TIMEOUT_S = 60.0
_WAIT_GRACE_S = 60.0

Cut = Callable[[ReplicaState], Awaitable[None]]
"""Takes all requests but those of its pin from a replica; they continue when they can."""


async def pause_replicas(
    pool: ReplicaPool, mode: PauseMode, *, pinned: bool, cut: Cut, timeout_s: float
) -> None:
    """See `GeneratorRouter.pause`; ``timeout_s`` limits a ``wait``, and all others generously."""
    if not pinned and mode != "abort":
        raise ValueError(f"a pause by {mode} stops pinned replicas, too: only an abort can not")
    pool.spares_pins = not pinned
    spared = [] if pinned else [state for state in pool.live() if state.is_pinned]
    stopped = [state for state in pool.live() if state not in spared]
    _stop(pool, stopped, stops_clock=mode != "wait")
    grace_s = _WAIT_GRACE_S if mode == "wait" else 0.0  # for those that end by their deadlines
    await asyncio.gather(
        *(_pause(pool, state, mode, timeout_s + grace_s) for state in stopped), *map(cut, spared)
    )
    if pool.is_paused:
        _stop(pool, [state for state in stopped if state.is_stopped])


async def resume_replicas(pool: ReplicaPool) -> None:
    """See `GeneratorRouter.resume`."""
    if not pool.is_paused:
        return
    # Wait until emptied replicas with a pending swap have swapped.
    await pool.wait_until(
        lambda: (
            not any(
                state.is_emptied and state.is_swapping and not state.is_asleep for state in pool.all
            )
        )
    )
    for state in pool.all:
        state.is_emptied = state.is_stopped = False
        state.active_time.resume()
    pool.is_paused = pool.spares_pins = False
    pool.active_time.resume()
    await asyncio.gather(*(_resume(pool, state) for state in pool.live()))
    pool.notify()


async def leave_to_pin(pool: ReplicaPool, state: ReplicaState) -> None:
    """If the current pause leaves pinned replicas running, resume this one, which was pinned after
    the pause began. Otherwise its pin, and any sync waiting for it, could never end."""

    def has_stopped() -> bool:
        return state.is_emptied or not state.is_stopped or not state.is_live

    if pool.spares_pins and state.is_stopped:
        await pool.wait_until(has_stopped)
    if pool.spares_pins and state.is_stopped and state.is_live:
        state.is_stopped = state.is_emptied = False
        state.active_time.resume()
        await _resume(pool, state)


async def put_to_sleep(pool: ReplicaPool, *, timeout_s: float) -> None:
    """See `GeneratorRouter.sleep`; ``timeout_s`` is that of one replica."""
    pool.spares_pins = False
    for state in pool.live():
        state.is_asleep = True  # from here on it starts no swap
    _stop(pool, pool.live())
    await asyncio.gather(*(_put_to_sleep(pool, state, timeout_s) for state in pool.live()))
    # The processes of a dead one may still run, and must not keep its devices.
    await asyncio.gather(*(state.replica.close() for state in pool.all if not state.is_live))


async def wake_up(pool: ReplicaPool, *, timeout_s: float) -> None:
    """See `GeneratorRouter.wake_up`; ``timeout_s`` is that of one replica."""
    await asyncio.gather(
        *(_wake_up(pool, state, timeout_s) for state in pool.live() if state.is_asleep)
    )


def _stop(pool: ReplicaPool, stopped: list[ReplicaState], *, stops_clock: bool = True) -> None:
    """Give them no more requests. The clock runs on where their running requests may finish."""
    pool.is_paused = True
    for state in stopped:
        state.is_stopped = True
    if stops_clock:
        for clock in (pool.active_time, *(state.active_time for state in stopped)):
            clock.pause()
    pool.notify()


async def _put_to_sleep(pool: ReplicaPool, state: ReplicaState, timeout_s: float) -> None:
    await pool.wait_until(lambda: state.phase is not Phase.SYNCING)
    await asyncio.sleep(0)  # a waiting sync must see the new version before it is reset
    pool.set_version(state, NO_WEIGHTS)
    if await _execute(pool, state, Sleep(), "fall asleep", timeout_s):
        state.is_emptied = pool.is_paused  # unless `resume` came first
        pool.notify()


async def _wake_up(pool: ReplicaPool, state: ReplicaState, timeout_s: float) -> None:
    if await _execute(pool, state, WakeUp(), "wake up", timeout_s):
        state.is_asleep = False
        pool.notify()


async def _execute(
    pool: ReplicaPool,
    state: ReplicaState,
    command: EngineCommand[None],
    required: str,
    timeout_s: float,
) -> bool:
    """False if the replica could not do it, and is dead."""
    await pool.ask(state, state.replica.execute(command), timeout_s=timeout_s, required=required)
    return state.is_live


async def _pause(pool: ReplicaPool, state: ReplicaState, mode: PauseMode, timeout_s: float) -> None:
    if await _execute(pool, state, Pause(mode), f"pause by {mode}", timeout_s):
        # A frozen replica keeps its requests; one that was emptied before stays empty.
        state.is_emptied = pool.is_paused and (state.is_emptied or mode != "keep")
        pool.notify()


async def _resume(pool: ReplicaPool, state: ReplicaState) -> None:
    await _execute(pool, state, Resume(), "resume", _RESUME_TIMEOUT_S)
