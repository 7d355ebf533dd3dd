"""The decision that rank 0 makes and every rank of a replica applies, one per loop iteration.

It carries all that must be equal on all ranks. Its bytes travel only between the ranks of one
replica, which trust each other.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from torchtitan_rl.errors import ConfigError, WeightSyncError
from torchtitan_rl.generation.engine import Engine
from torchtitan_rl.types import GenerationRequest

PauseMode = Literal["keep", "abort", "wait"]
"""The treatment of running requests by a pause: they freeze with their KV, end with the tokens they
have, or finish first. New ones queue in each case."""


class Power(StrEnum):
    """Whether an engine can step. A sleep loses the weights, so only a pull makes it AWAKE."""

    AWAKE = "awake"
    ASLEEP = "asleep"
    EMPTY = "empty"  # woken up, without weights


class Action(StrEnum):
    """The action of a decision."""

    STEP = "step"  # admit, abort, then run engine steps
    PULL = "pull"  # swap the weights, then deal with the KV cache, then step
    PAUSE = "pause"  # abort all requests if so decided, then wait for the other ranks
    SLEEP = "sleep"  # the same, and release the device's memory
    WAKE_UP = "wake_up"  # allocate it again; the next pull brings the weights
    CLOSE = "close"  # leave the loop


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPolicy:
    """The treatment of KV that older weights computed, at a pull.

    ``reset_prefix_cache``: no request admitted later reads such KV. ``recompute_running``: running
    requests prefill again under the new weights; else they keep what they have.
    """

    reset_prefix_cache: bool = True
    recompute_running: bool = True

    def __post_init__(self) -> None:
        if errors := kv_policy_errors(
            resets=self.reset_prefix_cache, recomputes=self.recompute_running
        ):
            raise ConfigError(errors)

    def apply(self, engine: Engine, *, running: int, what: str) -> bool:
        """Apply it while ``running`` requests are unfinished; True where those recompute.

        Raises:
            WeightSyncError: ``what`` (replica and version) left old prefixes in the cache.
        """
        if not self.reset_prefix_cache:
            return False
        was_reset = engine.reset_prefix_cache(recompute_running=self.recompute_running)
        # While running requests keep their KV a refusal is expected; the engine itself keeps later
        # requests from reading old blocks (see `Engine.swap_weights`).
        if not was_reset and (self.recompute_running or running == 0):
            raise WeightSyncError(
                f"{what}: the prefix cache was not reset ({running} requests unfinished)"
            )
        return self.recompute_running and running > 0


def kv_policy_errors(*, resets: bool, recomputes: bool, drains: bool = False) -> list[str]:
    """Contradictory combinations, one message each; ``drains``: weight_sync.mode."""
    if resets:
        return []
    needs_reset = {
        "weight_sync.recompute_running_on_pull = True": recomputes,
        'weight_sync.mode = "drain"': drains,
    }
    return [
        f"weight_sync.reset_prefix_cache_on_pull = False contradicts {what}: set it to True"
        for what, is_wanted in needs_reset.items()
        if is_wanted
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopDecision:
    """One iteration of the engine loop. A STEP of nothing keeps idle ranks' connections alive.

    STEP admits ``admissions`` in order, which arrive at ``arrival_s`` (rank 0's time.time()), ends
    ``aborts``, then runs up to ``num_steps`` engine steps. PULL reads ``version`` and
    ``kv_policy``, and ``num_steps``, so that decoding continues without a further decision. PAUSE
    and SLEEP read ``aborts_all``.
    """

    action: Action
    admissions: tuple[GenerationRequest, ...] = ()
    arrival_s: float = 0.0
    aborts: tuple[str, ...] = ()
    num_steps: int = 0
    version: int = 0
    kv_policy: KvPolicy | None = None
    aborts_all: bool = False

    def to_bytes(self) -> bytes:
        return pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def from_bytes(data: bytes) -> LoopDecision:
        decision = pickle.loads(data)
        if not isinstance(decision, LoopDecision):
            raise TypeError(f"expected a LoopDecision from rank 0, got {type(decision).__name__}")
        return decision
