"""A replica that takes as long as its work does, on whatever clock the event loop has.

Prompt tokens that are not cached take ``prefill_s`` each; a step that samples a token for each of
``r`` running requests takes ``step_s + r * token_s``. The cache holds whole sessions,
``cache_tokens`` in all, and forgets those that were not used for the longest time.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from torchtitan_rl.types import Completion, FinishReason, GenerationRequest, OnProgress, VersionRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    prefill_s: float = 50e-6
    step_s: float = 5e-3
    token_s: float = 0.1e-3
    max_running: int = 64
    cache_tokens: int = 200_000


class SimulatedReplica:
    """The part of `Replica` that requests need."""

    def __init__(self, name: str, speeds: Speeds) -> None:
        self._name = name
        self._speeds = speeds
        self._places = asyncio.Semaphore(speeds.max_running)
        self._running = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()  # tokens of each that is cached
        self._num_cached = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
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
            self._running += 1
            cached = min(prompt - 1, self._sessions.get(session, 0))
            self.prompt_tokens += prompt
            self.cached_tokens += cached
            speeds = self._speeds
            step_s = speeds.step_s + self._running * speeds.token_s
            await asyncio.sleep((prompt - cached) * speeds.prefill_s + new * step_s)
            self._running -= 1
        self._remember(session, prompt + new)
        self.busy_until_s = asyncio.get_running_loop().time()
        return Completion(
            request_id=request.request_id,
            token_ids=(0,) * new,
            logprobs=(0.0,) * new,
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.LENGTH,
            replica=self._name,
        )

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        raise NotImplementedError

    def _remember(self, session: str, num_tokens: int) -> None:
        self._num_cached += num_tokens - self._sessions.pop(session, 0)
        self._sessions[session] = num_tokens
        while self._num_cached > self._speeds.cache_tokens:
            self._num_cached -= self._sessions.popitem(last=False)[1]
