"""A replica as the router sees it, and its states."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, TypeVar

from torchtitan_rl.generation.commands import EngineCommand
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress
from torchtitan_rl.weights.handle import WeightHandle

T = TypeVar("T")


class ReplicaState(StrEnum):
    """Only a serving or syncing replica is given requests; a dead one never comes back, another
    takes its place."""

    STARTING = "starting"  # joined while others serve, and fetches the newest weights
    SERVING = "serving"
    SYNCING = "syncing"  # swapping weights between steps; requests queue in its inbox
    DRAINING = "draining"  # finishing what it has before a swap
    DEAD = "dead"


class Replica(Protocol):
    """One engine, wherever it runs."""

    @property
    def name(self) -> str: ...

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        """``on_progress`` gets the tokens sampled since its last call: every few milliseconds where
        it ``streams``, else about every second.

        Raises `InvalidRequestError` for a request that fails alone, `ReplicaError` where the
        replica itself is lost."""
        ...

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End these calls: each returns what it has. Unknown and ended ids are ignored."""
        ...

    async def stage(self, handle: WeightHandle) -> None:
        """Fetch published weights on every rank, alongside decoding."""
        ...

    async def execute(
        self, command: EngineCommand[T], on_answer: Callable[[T], None] | None = None
    ) -> T:
        """Have the engine loop execute a command; returns its answer.

        ``on_answer`` gets the answer after all calls of `generate` that ended earlier have returned
        or raised, and before any that ends later does; it must not raise.
        """
        ...

    async def close(self) -> None:
        """End its processes, by a kill where they do not end by themselves. Again: no effect."""
        ...
