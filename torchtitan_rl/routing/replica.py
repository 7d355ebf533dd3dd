"""What the router needs of a replica, and the states it keeps for each."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    GenerationRequest,
    OnProgress,
    OnReading,
    PullReport,
)
from torchtitan_rl.weights.handle import WeightHandle


class ReplicaState(StrEnum):
    """Only a serving or syncing replica is given requests; a dead one never comes back."""

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
        """``on_progress`` is told what has been sampled meanwhile: every few milliseconds where
        it ``streams``, else about every second.

        Raises `InvalidRequestError` for a request that fails alone, `ReplicaError` where the
        replica itself is lost."""
        ...

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """End these calls: each returns what it has. Unknown and ended ids are ignored."""
        ...

    async def stage(self, handle: WeightHandle) -> None:
        """Fetch published weights on every rank while decoding goes on."""
        ...

    async def pull(self, version: int) -> PullReport:
        """Swap the staged weights in, between two steps."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two steps on every rank; see `EngineLoop.pause`. Returns once it has."""
        ...

    async def resume(self) -> None: ...

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        """What the engine has sampled, read at one moment without disturbing it.

        ``on_reading`` is given the same when every call of `generate` that had ended by then has
        returned or raised, and none that ended later has.
        """
        ...

    async def sleep(self) -> None:
        """Pause by abort, then give the device's memory back."""
        ...

    async def wake_up(self) -> None:
        """Take the memory back; still paused, and without weights until the next pull."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """End its processes, by a kill where they do not end by themselves. Again: no effect."""
        ...
