"""How many rollouts run at the same time: a given number, or as many as the KV caches hold.

A rollout takes a place before its environment is made, and keeps it until it ends, during tool
calls too: a running rollout never waits for a place, and there can be no deadlock. Places are given
in the order in which rollouts asked: the oldest group first, siblings together. They do not decide
which groups are admitted, so the order of groups and the age of tokens do not depend on them.
Rollouts of evaluations take no place.

`KvLimit` is a state machine without I/O or clock. From readings of the replicas it learns how much
of the caches a rollout uses on average (with the prompts that siblings share, turns and tool
calls), and so how many rollouts fill them. At first all rollouts are young and will use more: three
times as much is assumed, and less as rollouts end.

Rollouts vary in length, so the right number would overflow the caches at times, and leave room at
others. So the limit is higher; what is too much for a moment waits in the engine loops, which start
no request in a nearly full cache (`num_fitting`).

| reading | limit |
|---|---|
| the caches are nearly full | number that fills them x (1 + `_GAIN` x free share) |
| they are not, but requests wait in an engine | at most this number |
| neither, and all places are taken | grows by the share of rollouts that ended since the last one |
| no request runs (a pause, a restart) | unchanged |

Invariants: there is at least one place for each live replica. A lower limit ends no rollout.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager

from torchtitan_rl.types import EngineStats

_NEARLY_FULL = 0.7  # below this use, the limit may exceed what fills the caches
_GAIN = 2.0
_YOUNG = 2.0  # how much more young rollouts will use, as a multiple of what they use
_MEMORY = 3.0  # number of generations of rollouts over which the average use is learned


class KvLimit:
    """The number of rollouts that may run at the same time. ``at_first`` is the limit for each
    replica until something is known about the use of its cache."""

    def __init__(self, at_first: int, *, num_replicas: int) -> None:
        self._each = float(at_first)
        self._num_replicas = num_replicas
        self._generations = 0.0  # of rollouts that have ended
        self._use = self._rollouts = 0.0  # sums over the readings, weighted by their age

    @property
    def limit(self) -> int:
        return int(self._each * self._num_replicas)

    def observe(
        self, serving: Collection[EngineStats], *, num_replicas: int, running: int, ended: int
    ) -> None:
        """Take a reading of the replicas that serve rollouts. ``num_replicas`` also counts those
        that pause or drain, ``running`` the rollouts with a place, and ``ended`` those that have
        ended since the last reading."""
        if not num_replicas:
            return
        is_taken = running >= self.limit
        self._num_replicas = num_replicas
        if not any(stats.running for stats in serving):
            return
        use = sum(stats.kv_use for stats in serving) / len(serving)
        waiting = sum(stats.waiting for stats in serving) / len(serving)
        # Rollouts in an engine's queue have nothing in its cache.
        rollouts = max(0.0, running / num_replicas - waiting)
        generations = ended / max(1, running)
        self._generations += generations
        kept = math.exp(-generations / (min(_MEMORY, self._generations) or _MEMORY))
        self._use = kept * self._use + use
        self._rollouts = kept * self._rollouts + rollouts
        if use > _NEARLY_FULL or (waiting and self._use):
            growth = 1.0 + _YOUNG * math.exp(-self._generations)
            fills = self._rollouts / (self._use * growth)
            follows = fills * (1.0 + _GAIN * (1.0 - use))
            self._each = follows if use > _NEARLY_FULL else min(self._each, follows)
        elif is_taken:
            self._each *= 1.0 + min(generations, 1.0)
        self._each = max(1.0, self._each)


class Places:
    """The places of rollouts on one event loop. With ``fixed``, this is their number; otherwise it
    follows the KV caches: see `KvLimit` for ``at_first``."""

    def __init__(self, fixed: int | None, *, at_first: int, num_replicas: int) -> None:
        self._fixed = fixed
        self._kv = KvLimit(at_first, num_replicas=num_replicas)
        self._num_taken = 0
        self._num_ended = 0  # since the last reading
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        return self._kv.limit if self._fixed is None else self._fixed

    @property
    def are_taken(self) -> bool:
        """Whether a rollout that asks now has to wait."""
        return bool(self._queue) or self._num_taken >= self.limit

    def observe(self, stats: Mapping[str, EngineStats], replicas: Mapping[str, bool]) -> None:
        """Adapt the number of places. ``replicas``: see `GeneratorRouter.unreserved`."""
        self._kv.observe(
            [stats[name] for name, is_serving in replicas.items() if is_serving and name in stats],
            num_replicas=len(replicas),
            running=self._num_taken,
            ended=self._num_ended,
        )
        self._num_ended = 0
        self._give()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a place during the block."""
        mine = asyncio.get_running_loop().create_future()
        self._queue.append(mine)
        self._give()
        try:
            await mine
            yield
        finally:
            if not mine.cancelled():  # otherwise it never had a place
                self._num_taken -= 1
                self._num_ended += 1
                self._give()

    def _give(self) -> None:
        while self._queue and self._num_taken < self.limit:
            first = self._queue.popleft()
            if not first.cancelled():
                first.set_result(None)
                self._num_taken += 1
