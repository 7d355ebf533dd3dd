"""Stops replicas between two steps, puts them to sleep, and resumes them.

Invariants: from the start of a pause no request is given to a replica that it stops, and only those
of its pin to one that it leaves to a pin; requests in transit to a stopped one queue in the
replica's inbox; a replica that does not stop, or does not resume, is dead. No weights are swapped
while a replica falls asleep or sleeps, and it holds none when it wakes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torchtitan_rl.generation.commands import EngineCommand, Pause, Resume, Sleep, WakeUp
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.slots import NO_WEIGHTS, Slot, Slots

_RESUME_TIMEOUT_S = 60.0
_WAIT_GRACE_S = 60.0

Cut = Callable[[Slot], Awaitable[None]]
"""Takes all requests but those of its pin from a slot; they continue when they can."""


async def pause_replicas(
    slots: Slots, mode: PauseMode, *, pinned: bool, cut: Cut, timeout_s: float
) -> None:
    """See `GeneratorRouter.pause`; ``timeout_s`` limits a ``wait``, and all others generously."""
    if not pinned and mode != "abort":
        raise ValueError(f"a pause by {mode} stops pinned replicas, too: only an abort can not")
    slots.spares_pins = not pinned
    spared = [] if pinned else [slot for slot in slots.live() if slot.is_pinned]
    stopped = [slot for slot in slots.live() if slot not in spared]
    _stop(slots, stopped, stops_clock=mode != "wait")
    grace_s = _WAIT_GRACE_S if mode == "wait" else 0.0  # for those that end by their deadlines
    await asyncio.gather(
        *(_pause(slots, slot, mode, timeout_s + grace_s) for slot in stopped), *map(cut, spared)
    )
    if slots.is_paused:
        _stop(slots, [slot for slot in stopped if slot.is_stopped])


async def resume_replicas(slots: Slots) -> None:
    """See `GeneratorRouter.resume`."""
    if not slots.is_paused:
        return
    # Wait until emptied replicas with a pending swap have swapped.
    await slots.wait_until(
        lambda: (
            not any(
                slot.is_emptied and slot.is_swapping and not slot.is_asleep for slot in slots.all
            )
        )
    )
    for slot in slots.all:
        slot.is_emptied = slot.is_stopped = False
        slot.active_time.resume()
    slots.is_paused = slots.spares_pins = False
    slots.active_time.resume()
    await asyncio.gather(*(_resume(slots, slot) for slot in slots.live()))
    slots.notify()


async def leave_to_pin(slots: Slots, slot: Slot) -> None:
    """If the current pause leaves pinned replicas running, resume this one, which was pinned after
    the pause began. Otherwise its pin, and any sync waiting for it, could never end."""

    def has_stopped() -> bool:
        return slot.is_emptied or not slot.is_stopped or not slot.is_live

    if slots.spares_pins and slot.is_stopped:
        await slots.wait_until(has_stopped)
    if slots.spares_pins and slot.is_stopped and slot.is_live:
        slot.is_stopped = slot.is_emptied = False
        slot.active_time.resume()
        await _resume(slots, slot)


async def put_to_sleep(slots: Slots, *, timeout_s: float) -> None:
    """See `GeneratorRouter.sleep`; ``timeout_s`` is that of one replica."""
    slots.spares_pins = False
    for slot in slots.live():
        slot.is_asleep = True  # from here on it starts no swap
    _stop(slots, slots.live())
    await asyncio.gather(*(_put_to_sleep(slots, slot, timeout_s) for slot in slots.live()))
    # The processes of a dead one may still run, and must not keep its devices.
    await asyncio.gather(*(slot.replica.close() for slot in slots.all if not slot.is_live))


async def wake_up(slots: Slots, *, timeout_s: float) -> None:
    """See `GeneratorRouter.wake_up`; ``timeout_s`` is that of one replica."""
    await asyncio.gather(
        *(_wake_up(slots, slot, timeout_s) for slot in slots.live() if slot.is_asleep)
    )


def _stop(slots: Slots, stopped: list[Slot], *, stops_clock: bool = True) -> None:
    """Give them no more requests. The clock runs on where their running requests may finish."""
    slots.is_paused = True
    for slot in stopped:
        slot.is_stopped = True
    if stops_clock:
        for clock in (slots.active_time, *(slot.active_time for slot in stopped)):
            clock.pause()
    slots.notify()


async def _put_to_sleep(slots: Slots, slot: Slot, timeout_s: float) -> None:
    await slots.wait_until(lambda: slot.state is not ReplicaState.SYNCING)
    await asyncio.sleep(0)  # a waiting sync must see the new version before it is reset
    slots.set_version(slot, NO_WEIGHTS)
    if await _execute(slots, slot, Sleep(), "fall asleep", timeout_s):
        slot.is_emptied = slots.is_paused  # unless `resume` came first
        slots.notify()


async def _wake_up(slots: Slots, slot: Slot, timeout_s: float) -> None:
    if await _execute(slots, slot, WakeUp(), "wake up", timeout_s):
        slot.is_asleep = False
        slots.notify()


async def _execute(
    slots: Slots, slot: Slot, command: EngineCommand[None], required: str, timeout_s: float
) -> bool:
    """False where the slot could not do it, and is dead."""
    await slots.ask(slot, slot.replica.execute(command), timeout_s=timeout_s, required=required)
    return slot.is_live


async def _pause(slots: Slots, slot: Slot, mode: PauseMode, timeout_s: float) -> None:
    if await _execute(slots, slot, Pause(mode), f"pause by {mode}", timeout_s):
        # A frozen replica keeps its requests; one that was emptied before stays empty.
        slot.is_emptied = slots.is_paused and (slot.is_emptied or mode != "keep")
        slots.notify()


async def _resume(slots: Slots, slot: Slot) -> None:
    await _execute(slots, slot, Resume(), "resume", _RESUME_TIMEOUT_S)
