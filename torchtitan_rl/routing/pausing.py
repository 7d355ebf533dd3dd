"""Stops all replicas between two steps, and lets them go on.

Invariants: from the moment a pause is asked for no request is given to a replica; what was on its
way then queues in the replica's inbox; a replica that does not stop, or not go on, is dead.
"""

from __future__ import annotations

import asyncio

from torchtitan_rl.errors import DeadlineError, ReplicaError
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.routing.slots import Slot, Slots

_RESUME_TIMEOUT_S = 60.0


async def pause_replicas(slots: Slots, mode: PauseMode, *, timeout_s: float) -> None:
    """See `GeneratorRouter.pause`; ``timeout_s`` limits a ``wait``, and all others generously."""
    slots.is_paused = True
    slots.notify()
    await asyncio.gather(*(_pause(slots, slot, mode, timeout_s) for slot in slots.live()))


async def resume_replicas(slots: Slots) -> None:
    """See `GeneratorRouter.resume`."""
    if not slots.is_paused:
        return
    # A drained replica that was given nothing back yet swaps its weights first.
    await slots.wait_until(
        lambda: not any(slot.is_emptied and slot.is_swapping for slot in slots.all)
    )
    for slot in slots.all:
        slot.is_emptied = False
    slots.is_paused = False
    await asyncio.gather(*(_resume(slots, slot) for slot in slots.live()))
    slots.notify()


async def _pause(slots: Slots, slot: Slot, mode: PauseMode, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await slot.replica.pause(mode)
    except ReplicaError as error:
        slots.bury(slot, error)
    except (TimeoutError, DeadlineError) as error:
        lost = ReplicaError(f"{slot.name} did not pause by {mode} within {timeout_s:.0f} s")
        lost.__cause__ = error
        slots.bury(slot, lost)
    else:
        # A frozen replica keeps its requests; one that was emptied before stays empty.
        slot.is_emptied = slots.is_paused and (slot.is_emptied or mode != "keep")
        slots.notify()


async def _resume(slots: Slots, slot: Slot) -> None:
    try:
        async with asyncio.timeout(_RESUME_TIMEOUT_S):
            await slot.replica.resume()
    except (ReplicaError, TimeoutError, DeadlineError) as error:
        slots.bury(slot, error)
