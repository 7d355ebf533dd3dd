"""How late an asyncio event loop is: something in it blocked for at least so long."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.observability.background import background


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLag:
    """Lateness since the previous reading; both 0 where nothing was sampled."""

    mean_ms: float
    max_ms: float


class LoopLagSampler:
    """Sleeps ``interval_s`` again and again while its ``async with`` is open, and notes how much
    later than asked it wakes. A wait that is still overdue counts in the next reading."""

    def __init__(self, interval_s: float = 0.05) -> None:
        self._interval_s = interval_s
        self._lags_ms: list[float] = []

    async def __aenter__(self) -> LoopLagSampler:
        self._sampling = background(self._sample(), name="loop lag")
        await self._sampling.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._sampling.__aexit__(*error)

    def read(self) -> LoopLag:
        """The lag since the last call, which starts the next period."""
        lags_ms, self._lags_ms = self._lags_ms, []
        if not lags_ms:
            return LoopLag(mean_ms=0.0, max_ms=0.0)
        return LoopLag(mean_ms=sum(lags_ms) / len(lags_ms), max_ms=max(lags_ms))

    async def _sample(self) -> None:
        while True:
            due_s = time.perf_counter() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._lags_ms.append(max(0.0, 1e3 * (time.perf_counter() - due_s)))
