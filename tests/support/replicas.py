"""Small real implementations of what the router talks to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from torchtitan_rl.errors import ReplicaError, WeightSyncError
from torchtitan_rl.generation.commands import (
    AbortRequests,
    EngineCommand,
    Pull,
    ReadStats,
    ReadTokens,
)
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnProgress,
    PullReport,
    SamplingParams,
    VersionRun,
)
from torchtitan_rl.weights.distribution import SharedMemoryHandle, WeightHandle


def request(
    request_id: str,
    *,
    session: str | None = None,
    prompt: str | None = None,
    prompt_len: int = 4,
    max_tokens: int = 4,
    min_version: int = 0,
    resume_from: Completion | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(1, prompt_len + 1)),
        sampling=SamplingParams(max_tokens=max_tokens),
        session_id=session,
        prompt_id=prompt,
        min_version=min_version,
        resume_from=resume_from,
    )


def handle(version: int) -> SharedMemoryHandle:
    return SharedMemoryHandle(version=version, path="/nowhere", num_bytes=0)


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(50):
        await asyncio.sleep(0)


async def _first(*events: asyncio.Event) -> None:
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


class GatedReplica:
    """Completes a request when its gate is open, or without a token when it is aborted before; can
    be told to be dead or to refuse weights.

    It fetches and swaps weights while ``stage_gate`` and ``pull_gate`` are open.
    """

    def __init__(self, name: str, *, is_open: bool = True) -> None:
        self._name = name
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.stage_gate, self.pull_gate = asyncio.Event(), asyncio.Event()
        self.stage_gate.set()
        self.pull_gate.set()
        self.staged: list[int] = []
        self.pulled: list[int] = []
        self.unreadable: set[int] = set()
        self.token = self.token_in_batch = 7  # sampled alone, and along with other requests
        self.lets_probes_pass = False
        self.is_dead = False
        self.refuses_weights = False
        self.version = 0
        self.served: list[str] = []
        self.aborted: list[str] = []
        self.sampled = 0
        self._cuts: dict[str, asyncio.Event] = {}
        self.stops: list[EngineCommand[None]] = []  # pauses, sleeps and their ends
        self.running = 0
        self.places: int | None = None  # requests beyond them count as waiting
        self.running_at_pull: list[int] = []
        self.is_closed = False

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
        if self.is_dead:
            raise ReplicaError(f"{self.name} is dead")
        self.served.append(request.request_id)
        self.running += 1
        cut = self._cuts[request.request_id] = asyncio.Event()
        passes = self.lets_probes_pass and request.request_id.startswith("probe/")
        try:
            if not passes:
                await _first(self.gate, cut)
        finally:
            self.running -= 1
            del self._cuts[request.request_id]
        if self.is_dead:
            raise ReplicaError(f"{self.name} died")
        is_whole = self.gate.is_set() or passes
        token = self.token_in_batch if self.running else self.token
        count = request.sampling.max_tokens if is_whole else 0
        self.sampled += count
        return Completion(
            request_id=request.request_id,
            token_ids=(token,) * count,
            logprobs=(-1.0,) * count,
            version_runs=(VersionRun(0, self.version),) if count else (),
            finish_reason=FinishReason.LENGTH if is_whole else FinishReason.ABORT,
            replica=self.name,
        )

    async def stage(self, handle: WeightHandle) -> None:
        self.staged.append(handle.version)
        await self.stage_gate.wait()
        if self.refuses_weights or handle.version in self.unreadable:
            raise WeightSyncError(f"{self.name} cannot read version {handle.version}")

    async def execute(
        self, command: EngineCommand[Any], on_answer: Callable[[Any], None] | None = None
    ) -> Any:
        answer = await self.answer(command)
        if on_answer is not None:
            on_answer(answer)
        return answer

    async def answer(self, command: EngineCommand[Any]) -> Any:
        match command:
            case Pull(version):
                return await self._pull(version)
            case AbortRequests(request_ids):
                self.aborted.extend(request_ids)
                for name in request_ids:
                    if name in self._cuts:
                        self._cuts[name].set()
            case ReadTokens():
                return EngineReading(sampled_tokens=self.sampled, running_tokens=0)
            case ReadStats():
                return self._stats()
            case _:
                self.stops.append(command)
        return None

    async def _pull(self, version: int) -> PullReport:
        self.running_at_pull.append(self.running)
        self.pulled.append(version)
        await self.pull_gate.wait()
        self.version = version
        return PullReport(
            version=version, stall_s=0.0, running_requests=self.running, recomputed=False
        )

    def _stats(self) -> EngineStats:
        if self.is_dead:
            raise ReplicaError(f"{self.name} is dead")
        running = self.running if self.places is None else min(self.running, self.places)
        return EngineStats(
            version=self.version,
            running=running,
            waiting=self.running - running,
            kv_use=0.0,
            preemptions=0,
            generated_tokens=self.sampled,
            tokens_per_second=0.0,
            steps=0,
        )

    async def close(self) -> None:
        self.is_closed = True
