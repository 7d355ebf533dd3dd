"""What the controller's loops share: where the run is, its groups, and how they wake each other.

All loops run on one event loop, so that between two awaits nothing here changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchtitan_rl.orchestration.capacity import Capacity
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.waits import Waits
from torchtitan_rl.orchestration.work_buffer import WorkBuffer


class RunState:
    """``step`` counts batches that were dealt with, ``version`` those that changed the weights."""

    def __init__(self, capacity: Capacity) -> None:
        self.staleness = capacity.staleness
        self.buffer = WorkBuffer(capacity)
        self.ledger = TokenLedger()
        self.waits = Waits()
        self.step = 0
        self.version = 0
        self.evaluated_step: int | None = None
        self.is_stopping = False
        self.progress = 0  # moves whenever anything does
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Something moved: everybody who waits looks again."""
        self.progress += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(
        self,
        holds: Callable[[], bool],
        what: str,
        *,
        details: Callable[[], str] | None = None,
    ) -> None:
        """Wait until ``holds``; ``what`` says who waits for what, for the watchdog."""
        if holds():
            return
        with self.waits.on(what, details=details):
            while not holds():
                await self._changed.wait()
