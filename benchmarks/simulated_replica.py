"""A replica whose work takes a computed time on the event loop's clock, real or virtual.

A step samples one token for each of ``r`` running requests and takes ``step_s + r * token_s``.
Each prompt token that is not cached takes ``prefill_s``; nothing is sampled in this time. The cache
holds whole sessions, ``cache_tokens`` in all, and evicts the least recently used ones.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass

from torchtitan_rl.types import Completion, FinishReason, GenerationRequest, OnProgress, VersionRun

_PART_OF_STEP = 1e-3  # tolerance for rounding of clocks; requests end with whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    prefill_s: float = 50e-6
    step_s: float = 5e-3
    token_s: float = 0.1e-3
    max_running: int = 64
    cache_tokens: int = 200_000


class SimulatedReplica:
    """The part of `Replica` that requests need. Requests cannot be aborted.

    ``busy_s``: seconds in which the replica worked; ``busy_until_s``: when its last request ended.
    """

    def __init__(self, name: str, speeds: Speeds) -> None:
        self._name = name
        self._speeds = speeds
        self._places = asyncio.Semaphore(speeds.max_running)
        # A heap, ordered by the last step of each request.
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._steps = 0.0  # steps done by `_at_s`, which is ahead of the clock during a prefill
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sessions: OrderedDict[str, int] = OrderedDict()  # tokens of each cached session
        self._num_cached = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0
        self.busy_s = 0.0
        self.busy_until_s = 0.0

    @property
    def name(self) -> str:
        return self._name

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        prompt, new = len(request.prompt_token_ids), request.sampling.max_tokens
        session = request.session_id or request.request_id
        async with self._places:
            self._advance()
            cached = min(prompt - 1, self._sessions.get(session, 0))
            prefill_s = (prompt - cached) * self._speeds.prefill_s
            self._at_s += prefill_s
            self.busy_s += prefill_s
            done = asyncio.get_running_loop().create_future()
            heapq.heappush(self._ends, (self._steps + new, next(self._order), done))
            self._plan()
            await done
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.sampled_tokens += new
        self._remember(session, prompt + new)
        return Completion(
            request_id=request.request_id,
            token_ids=(0,) * new,
            logprobs=(0.0,) * new,
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.LENGTH,
            replica=self._name,
        )

    def _step_s(self) -> float:
        return self._speeds.step_s + len(self._ends) * self._speeds.token_s

    def _advance(self) -> None:
        """Do the steps that fit into the time until now."""
        now_s = asyncio.get_running_loop().time()
        if now_s <= self._at_s:
            return
        if self._ends:
            self._steps += (now_s - self._at_s) / self._step_s()
            self.busy_s += now_s - self._at_s
        self._at_s = now_s

    def _plan(self) -> None:
        """Set the timer for the end of the next request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            missing = max(0.0, self._ends[0][0] - self._steps)
            due_s = self._at_s + missing * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(due_s, self._end_requests)

    def _end_requests(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + _PART_OF_STEP:
            heapq.heappop(self._ends)[2].set_result(None)
        self.busy_until_s = self._at_s
        self._plan()

    def _remember(self, session: str, num_tokens: int) -> None:
        self._num_cached += num_tokens - self._sessions.pop(session, 0)
        self._sessions[session] = num_tokens
        while self._num_cached > self._speeds.cache_tokens:
            self._num_cached -= self._sessions.popitem(last=False)[1]
