"""A replica with a small KV cache, whose work takes a computed time on the event loop's clock.

Requests wait as in an engine loop, until the cache has room for them (`num_fitting`). Then they are
scheduled as vLLM does: they start in the order of their arrival, once their prompt fits. A running
request takes a block of the cache for every 16 tokens. If no block is free, the request that
started last is preempted: its blocks are freed, and when it continues, all its tokens are computed
again. Siblings that run together share the blocks of their common prompt. Nothing else is cached.

A step samples one token for each of ``r`` running requests and takes ``step_s + r * token_s``, and
``prefill_s`` more for each token of a prompt or of a preempted request.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl.generation.commands import EngineCommand, ReadStats
from torchtitan_rl.generation.decision import num_fitting
from torchtitan_rl.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnProgress,
    VersionRun,
)

_BLOCK = 16
_STEP_TOKENS = 8192  # prompt tokens of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSpeeds:
    cache_tokens: int
    step_s: float = 20e-3
    token_s: float = 0.2e-3
    prefill_s: float = 0.1e-3
    max_running: int = 256


@dataclass(slots=True, eq=False)
class _Call:
    request: GenerationRequest
    done: asyncio.Future[None]
    sampled: int = 0
    blocks: int = 0  # its own; those of a shared prompt are counted once for all siblings

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + self.sampled


class KvReplica:
    """The part of `Replica` that requests and statistics need. Requests cannot be aborted."""

    def __init__(self, name: str, speeds: KvSpeeds) -> None:
        self.name = name
        self._speeds = speeds
        self._num_blocks = self._free = speeds.cache_tokens // _BLOCK
        self._running: list[_Call] = []
        self._inbox: deque[_Call] = deque()
        self._waiting: deque[_Call] = deque()
        self._siblings: Counter[tuple[int, ...]] = Counter()  # running requests, by prompt
        self._stepping: asyncio.Task[None] | None = None
        self._preemptions = self._sampled = self._steps = 0

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        call = _Call(request, asyncio.get_running_loop().create_future())
        self._inbox.append(call)
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step_until_idle())
        await call.done
        return Completion(
            request_id=request.request_id,
            token_ids=(0,) * call.sampled,
            logprobs=(0.0,) * call.sampled,
            version_runs=(VersionRun(0, 0),),
            finish_reason=FinishReason.LENGTH,
            replica=self.name,
        )

    async def execute(self, command: EngineCommand[Any], on_answer: Any = None) -> EngineStats:
        assert isinstance(command, ReadStats)
        stats = self._stats()
        return replace(stats, waiting=stats.waiting + len(self._inbox))

    def _stats(self) -> EngineStats:
        return EngineStats(
            version=0,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_use=1.0 - self._free / self._num_blocks,
            kv_tokens=self._num_blocks * _BLOCK,
            preemptions=self._preemptions,
            generated_tokens=self._sampled,
            tokens_per_second=0.0,
            steps=self._steps,
        )

    async def close(self) -> None: ...

    async def _step_until_idle(self) -> None:
        speeds = self._speeds
        while self._running or self._waiting or self._inbox:
            self._admit()
            prefilled = 0 if self._grow() else self._start()
            seconds = speeds.step_s + len(self._running) * speeds.token_s
            await asyncio.sleep(seconds + prefilled * speeds.prefill_s)
            self._steps += 1
            self._sampled += len(self._running)
            for call in list(self._running):
                call.sampled += 1
                if call.sampled == call.request.sampling.max_tokens:
                    self._running.remove(call)
                    self._release(call)
                    call.done.set_result(None)
        self._stepping = None

    def _admit(self) -> None:
        prompts = [len(call.prompt) for call in self._inbox]
        is_idle = not self._running and not self._waiting
        for _ in range(num_fitting(prompts, self._stats(), is_idle=is_idle)):
            self._waiting.append(self._inbox.popleft())

    def _grow(self) -> bool:
        """Give running requests the blocks of their next tokens. Returns whether some request was
        preempted."""
        before = self._preemptions
        for call in list(self._running):
            if call not in self._running or self._needed(call) <= call.blocks:
                continue
            while not self._free and call in self._running:
                last = self._running.pop()
                self._release(last)
                self._waiting.appendleft(last)
                self._preemptions += 1
            if call in self._running:
                call.blocks += 1
                self._free -= 1
        return self._preemptions > before

    def _start(self) -> int:
        """Start waiting requests. Returns how many of their tokens must be computed."""
        prefilled = 0
        while self._waiting and len(self._running) < self._speeds.max_running:
            call = self._waiting[0]
            shared = self._shared(call)
            is_first = not self._siblings[call.prompt]
            needed = self._needed(call) + (shared if is_first else 0)
            if needed > self._free or prefilled >= _STEP_TOKENS:
                break
            self._running.append(self._waiting.popleft())
            self._siblings[call.prompt] += 1
            self._free -= needed
            call.blocks = self._needed(call)
            prefilled += call.num_tokens - (0 if is_first else shared * _BLOCK)
        return prefilled

    def _release(self, call: _Call) -> None:
        self._siblings[call.prompt] -= 1
        is_last = not self._siblings[call.prompt]
        self._free += call.blocks + (self._shared(call) if is_last else 0)
        call.blocks = 0

    @staticmethod
    def _shared(call: _Call) -> int:
        return len(call.prompt) // _BLOCK

    def _needed(self, call: _Call) -> int:
        return -(-(call.num_tokens + 1) // _BLOCK) - self._shared(call)
