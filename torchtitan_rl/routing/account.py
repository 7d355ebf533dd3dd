"""What replicas say they sampled, against what the router got from them.

Invariant: for a live replica that answered, ``unaccounted`` is exact: all three numbers that it is
made of belong to one moment, whatever is on its way between replica and router.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from torchtitan_rl.deadlines import deadline
from torchtitan_rl.errors import DeadlineError, ReplicaError
from torchtitan_rl.generation.commands import ReadTokens
from torchtitan_rl.routing.slots import Slot, Slots
from torchtitan_rl.types import EngineReading, OnReading

_READING_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAccount:
    """Tokens of one replica since it started, at one moment.

    ``sampled`` is the engine's own count: of a replica that is dead, or did not answer in time, the
    last that was heard. ``received``: of pieces that came back, and what is known of those that
    were lost with a dead replica. ``running``: of pieces that the engine has not ended.
    ``unaccounted`` is ``sampled - received - running``, which must be 0; None where the replica is
    dead or did not answer. ``lost_tokens``, of a dead one: it is known to have sampled them, and
    nobody has them.
    """

    is_live: bool
    sampled: int
    received: int
    running: int
    unaccounted: int | None
    lost_tokens: int


async def account_of(slots: Slots) -> dict[str, ReplicaAccount]:
    """See `GeneratorRouter.account`."""
    accounts = await asyncio.gather(*(_account_of(slots, slot) for slot in slots.all))
    return {slot.name: account for slot, account in zip(slots.all, accounts, strict=True)}


async def read_slot(slots: Slots, slot: Slot, on_reading: OnReading) -> None:
    """Have the replica read, for ``on_reading``, as in `Replica.execute`.

    Nothing is heard of one that does not answer in time, or is lost and hence dead.
    """
    try:
        async with deadline(_READING_TIMEOUT_S):
            await slots.answer(slot, slot.replica.execute(ReadTokens(), on_reading))
    except ReplicaError as error:
        slots.mark_dead(slot, error)
    except (TimeoutError, DeadlineError):
        pass  # busy with something long; less is known, and nothing is wrong


async def _account_of(slots: Slots, slot: Slot) -> ReplicaAccount:
    account: ReplicaAccount | None = None

    def on_reading(reading: EngineReading) -> None:
        nonlocal account
        slot.hear_of_sampled(reading.sampled_tokens)
        sampled, received = reading.sampled_tokens, slot.received_tokens
        running = sum(len(partial.token_ids) for partial in reading.partials.values())
        account = ReplicaAccount(
            is_live=True,
            sampled=sampled,
            received=received,
            running=running,
            unaccounted=sampled - received - running,
            lost_tokens=0,
        )

    if slot.is_live:
        await read_slot(slots, slot, on_reading)
    if account is not None and slot.is_live:
        return account
    sampled, received = slot.sampled_tokens, slot.received_tokens
    return ReplicaAccount(
        is_live=slot.is_live,
        sampled=sampled,
        received=received,
        running=0,
        unaccounted=None,
        lost_tokens=0 if slot.is_live else max(0, sampled - received),
    )
