"""Compares the tokens that replicas count as sampled with those that the router received.

Invariant: for a live replica that answered, ``unaccounted`` is exact: the three numbers that it is
computed from belong to one moment, whatever is in transit between replica and router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from torchtitan_rl.generation.commands import ReadTokens
from torchtitan_rl.routing.replicas import ReplicaPool, ReplicaState
from torchtitan_rl.types import EngineReading

_READING_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAccount:
    """Tokens of one replica since it started, at one moment.

    ``sampled`` is the engine's own count: the newest one of a replica that is dead or did not
    answer in time. ``received``: of pieces that came back, and the reported tokens of those that
    were lost with a dead replica. ``running``: of pieces that the engine has not ended.
    ``unaccounted`` is ``sampled - received - running``, which must be 0; None where the replica is
    dead or did not answer. ``lost_tokens``: tokens that a dead replica is known to have sampled,
    and that were never received.
    """

    is_live: bool
    sampled: int
    received: int
    running: int
    unaccounted: int | None
    lost_tokens: int


async def account_of(pool: ReplicaPool) -> dict[str, ReplicaAccount]:
    """See `GeneratorRouter.account`."""
    counted = tuple(pool.all)  # others may join meanwhile
    accounts = await asyncio.gather(*(_account_of(pool, state) for state in counted))
    return {state.name: account for state, account in zip(counted, accounts, strict=True)}


async def read_replica(
    pool: ReplicaPool,
    state: ReplicaState,
    on_reading: Callable[[EngineReading], None] | None = None,
) -> None:
    """Have the replica report all progress, and its counts to ``on_reading``, which must not raise.

    ``on_reading`` is called in the order of `Replica.execute`; it is not called for a replica that
    does not answer in time, or is lost and hence dead.
    """

    def note(reading: EngineReading) -> None:
        state.note_sampled(reading.sampled_tokens)
        if on_reading is not None:
            on_reading(reading)

    # One that does not answer is busy with something long, which has a deadline of its own.
    await pool.ask(state, state.replica.execute(ReadTokens(), note), timeout_s=_READING_TIMEOUT_S)


async def _account_of(pool: ReplicaPool, state: ReplicaState) -> ReplicaAccount:
    account: ReplicaAccount | None = None

    def on_reading(reading: EngineReading) -> None:
        nonlocal account
        sampled, received = reading.sampled_tokens, state.received_tokens
        account = ReplicaAccount(
            is_live=True,
            sampled=sampled,
            received=received,
            running=reading.running_tokens,
            unaccounted=sampled - received - reading.running_tokens,
            lost_tokens=0,
        )

    if state.is_live:
        await read_replica(pool, state, on_reading)
    if account is not None and state.is_live:
        return account
    sampled, received = state.sampled_tokens, state.received_tokens
    return ReplicaAccount(
        is_live=state.is_live,
        sampled=sampled,
        received=received,
        running=0,
        unaccounted=None,
        lost_tokens=0 if state.is_live else max(0, sampled - received),
    )
