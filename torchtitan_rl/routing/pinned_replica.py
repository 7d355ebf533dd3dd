"""Pins: a replica is kept at one version, so that evaluation can run alongside training.

Invariants: while a pin lasts its replica holds exactly ``version``; at its end, normal or not, the
replica follows the newest weights at once. A replica has at most one pin at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from torchtitan_rl.errors import DeadlineError, GenerationError, WeightSyncError
from torchtitan_rl.routing.active_time import ActiveTime
from torchtitan_rl.routing.pausing import leave_to_pin
from torchtitan_rl.routing.replica import ReplicaState
from torchtitan_rl.routing.slots import NO_WEIGHTS, Slot, Slots
from torchtitan_rl.routing.weight_sync import LOSSES, WeightSync
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress

CompleteOn = Callable[[GenerationRequest, Slot, OnProgress | None], Awaitable[Completion]]
"""Complete a request on this slot or not at all."""


class PinnedReplica:
    """One pinned replica; what `pin_replica` yields."""

    def __init__(self, slot: Slot, complete_on: CompleteOn) -> None:
        self._slot = slot
        self._complete_on = complete_on
        self._version = slot.version
        self._has_ended = False

    @property
    def replica(self) -> str:
        return self._slot.name

    @property
    def version(self) -> int:
        """The version that every token is sampled under."""
        return self._version

    @property
    def active_time(self) -> ActiveTime:
        """The clock of its requests' deadlines: it stands still while the replica is stopped."""
        return self._slot.active_time

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
        return await self._complete_on(request, self._slot, on_progress)

    def end(self) -> None:
        self._has_ended = True


@asynccontextmanager
async def pin_replica(
    slots: Slots,
    weights: WeightSync,
    complete_on: CompleteOn,
    *,
    version: int | None,
    timeout_s: float,
) -> AsyncIterator[PinnedReplica]:
    """See `GeneratorRouter.pin`."""
    slot = await _take(slots, version, timeout_s)
    pin: PinnedReplica | None = None
    try:
        await leave_to_pin(slots, slot)
        await _prepare(slots, weights, slot)
        pin = PinnedReplica(slot, complete_on)
        yield pin
    finally:
        if pin is not None:
            pin.end()
        slot.is_pinned, slot.pinned_weights = False, None
        slots.notify()
        weights.follow(slot)


async def _take(slots: Slots, version: int | None, timeout_s: float) -> Slot:
    """Mark a free slot as pinned, once there is one."""
    free: Slot | None = None

    def find() -> bool:
        nonlocal free
        slots.require_unreserved()
        free = _free_slot(slots, version)
        return free is not None

    if not await slots.wait_until(find, timeout_s=timeout_s) or free is None:
        states = {slot.name: (slot.state.value, slot.is_pinned) for slot in slots.all}
        raise DeadlineError(
            f"no replica could be pinned within {timeout_s:.0f} s; (state, is pinned): {states}"
        )
    free.is_pinned = True
    return free


def _free_slot(slots: Slots, version: int | None) -> Slot | None:
    """The reserved replica while one lives; else, of those with ``version`` or the next newer one
    (None: with the newest), the least loaded."""
    free = [
        slot
        for slot in slots.reserved() or slots.live_unreserved()
        if not slot.is_pinned
        and slot.state is ReplicaState.SERVING
        and (slot.is_reserved or slot.version != NO_WEIGHTS)
    ]
    if version is None:
        return min(free, key=lambda s: (-s.version, s.outstanding_tokens, s.index), default=None)
    free = [slot for slot in free if slot.is_reserved or slot.version >= version]
    return min(free, key=lambda s: (s.version, s.outstanding_tokens, s.index), default=None)


async def _prepare(slots: Slots, weights: WeightSync, slot: Slot) -> None:
    """Bring a reserved replica to the newest weights, and note where to fetch a pin's again."""
    newest = weights.newest
    if newest is None or not (slot.is_reserved or slot.version == newest.version):
        slot.pinned_weights = None
        return
    slot.pinned_weights = newest
    try:
        await weights.bring(slot, newest)
    except LOSSES as error:
        slots.mark_dead(slot, error)
        raise WeightSyncError(
            f"{slot.name} could not be brought to version {newest.version} for a pin: {error}"
        ) from error


async def restore_pinned(slots: Slots, weights: WeightSync) -> None:
    """Fetch the weights of pinned replicas again, which a sleep released and no sync restores."""
    empty = [slot for slot in slots.live() if slot.is_pinned and slot.version == NO_WEIGHTS]
    await asyncio.gather(*(_restore(slots, weights, slot) for slot in empty))


async def _restore(slots: Slots, weights: WeightSync, slot: Slot) -> None:
    try:
        if slot.pinned_weights is None:
            raise WeightSyncError(
                f"{slot.name} slept while it was pinned to weights that were never published, so "
                "it cannot get them back"
            )
        await weights.bring(slot, slot.pinned_weights)
    except LOSSES as error:
        slots.mark_dead(slot, error)
