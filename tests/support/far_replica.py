"""A replica in another process, on the virtual clock: a scripted engine behind an `Exchange` whose
messages take time, with an engine loop that can be killed, can hang, and can freeze with its
process."""

from __future__ import annotations

import asyncio
from collections import deque

from torchtitan_rl.errors import LoopFailedError, ReplicaError
from torchtitan_rl.generation.decision import PauseMode
from torchtitan_rl.generation.engine import Admission, EngineOutput
from torchtitan_rl.generation.mailbox import Batch, End, News, Read, Submission
from torchtitan_rl.generation.scripted import ScriptedEngine
from torchtitan_rl.generation.versions import VersionLedger
from torchtitan_rl.routing.exchange import Exchange
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnProgress,
    OnReading,
    Progress,
    PullReport,
)
from torchtitan_rl.weights.handle import WeightHandle


class FarReplica:
    """``latency_s``: of a message, one way; ``step_s``: of an engine step."""

    def __init__(
        self,
        name: str,
        *,
        engine: ScriptedEngine | None = None,
        latency_s: float = 0.05,
        step_s: float = 0.1,
    ) -> None:
        self._name = name
        self.engine = engine or ScriptedEngine(eos_token_id=7, vocab_size=40)
        self.latency_s, self.step_s = latency_s, step_s
        self._versions = VersionLedger(self.engine.version)
        self._inbox: list[Submission] = []
        self._listening: dict[str, int] = {}  # tokens told
        self._progress: list[Progress] = []
        self._ends: deque[End | Read] = deque()
        self._news = asyncio.Event()
        self._runs = asyncio.Event()  # not paused
        self._runs.set()
        self._moves = asyncio.Event()  # neither hung nor frozen
        self._moves.set()
        self._answers = asyncio.Event()  # not frozen
        self._answers.set()
        self._steps: asyncio.Task[None] | None = None
        self._loss: ReplicaError | None = None
        self.dropped_ends = 0  # so many ends that come next are lost on the way
        self.resumed: list[bool] = []  # of each request it was given: it has tokens already
        self.is_closed = False
        self._exchange = Exchange(name, submit=self._submit, collect=self._collect)

    @property
    def name(self) -> str:
        return self._name

    def kill(self, loss: ReplicaError | None = None) -> None:
        self._loss = loss or ReplicaError(f"{self.name} was killed")
        self._moves.set()
        self._answers.set()
        self._news.set()

    def hang(self) -> None:
        """The engine makes no progress, and its process answers; no stall is noticed."""
        self._moves.clear()

    def freeze(self) -> None:
        """Nothing of it makes progress or answers."""
        self._moves.clear()
        self._answers.clear()

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        return await self._exchange.generate(request, on_progress, streams=streams)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        await self._exchange.abort(request_ids)

    async def read(self, on_reading: OnReading | None = None) -> EngineReading:
        return await self._exchange.read(on_reading)

    async def stage(self, handle: WeightHandle) -> None:
        await self._travel()

    async def pull(self, version: int) -> PullReport:
        await self._travel()
        await self._moves.wait()
        self._versions.pull(version, self.engine.generated_lengths())
        self.engine.swap_weights(version)
        self._admit()
        await self._travel()
        return PullReport(version=version, stall_s=0.0, running_requests=0, recomputed=False)

    async def pause(self, mode: PauseMode) -> None:
        await self._travel()
        await self._moves.wait()
        while mode == "wait" and self.engine.num_unfinished():
            await asyncio.sleep(self.step_s)
        self._runs.clear()
        if mode == "abort":
            self._end(self.engine.abort(tuple(self.engine.generated_lengths())))
        await self._travel()

    async def resume(self) -> None:
        await self._travel()
        self._runs.set()
        self._admit()
        await self._travel()

    async def sleep(self) -> None:
        await self._travel()
        await self._moves.wait()
        self._runs.clear()
        self._end(self.engine.abort(tuple(self.engine.generated_lengths())))
        self.engine.sleep()
        await self._travel()

    async def wake_up(self) -> None:
        await self._travel()
        await self._moves.wait()
        self.engine.wake_up()

    async def stats(self) -> EngineStats:
        await self._travel()
        return self.engine.stats()

    async def close(self) -> None:
        self.is_closed = True
        await self._exchange.close()
        if self._steps is not None:
            self._steps.cancel()

    async def _travel(self) -> None:
        await asyncio.sleep(self.latency_s)
        await self._answers.wait()
        if self._loss is not None:
            raise self._loss

    async def _submit(self, batch: Batch) -> None:
        await self._travel()
        self._inbox += batch.requests
        self._admit(batch.aborts)
        self._end(self.engine.abort(batch.aborts))
        if batch.reads:
            outputs = self.engine.partial_outputs()
            partials = {
                output.request_id: self._completion(output, is_over=False) for output in outputs
            }
            sampled = self.engine.stats().generated_tokens
            self._ends.append(
                Read(reading=EngineReading(partials=partials, sampled_tokens=sampled))
            )
            self._news.set()
        if self._steps is None:
            self._steps = asyncio.create_task(self._step_all(), name=f"steps of {self.name}")
        await asyncio.sleep(self.latency_s)

    def _admit(self, also: tuple[str, ...] = ()) -> None:
        """What came, where the engine is not stopped; those in ``also`` in any case."""
        engine = self.engine
        is_held = not self._runs.is_set() or engine.is_asleep or not engine.has_weights
        kept = []
        for submission in self._inbox:
            request = submission.request
            if is_held and request.request_id not in also:
                kept.append(submission)
                continue
            self._versions.admit(request.request_id)
            self.resumed.append(request.num_resumed > 0)
            if submission.hears:
                self._listening[request.request_id] = 0
            engine.add_request(Admission(request=request, arrival_s=0.0))
        self._inbox = kept

    async def _collect(self) -> News:
        while not (self._progress or self._ends):
            if self._loss is not None:
                raise self._loss
            self._news.clear()
            await self._news.wait()
        progress, self._progress = tuple(self._progress), []
        ends: list[End] = []
        read: Read | None = None
        while self._ends and read is None:
            item = self._ends.popleft()
            if isinstance(item, Read):
                read = item
            elif self.dropped_ends:
                self.dropped_ends -= 1
            else:
                ends.append(item)
        await self._travel()
        return News(progress=progress, ends=tuple(ends), read=read)

    async def _step_all(self) -> None:
        while self._loss is None:
            await asyncio.sleep(self.step_s)
            await self._runs.wait()
            await self._moves.wait()
            if self._loss is not None or not self.engine.num_unfinished():
                continue
            if self.engine.is_asleep or not self.engine.has_weights or not self._runs.is_set():
                continue
            try:
                ended = self.engine.step()
            except RuntimeError as error:
                self._loss = LoopFailedError(f"{self.name} failed: {error}")
                self._news.set()
                return
            self._tell()
            self._end(ended)

    def _tell(self) -> None:
        for output in self.engine.sampled_since(self._listening):
            name = output.request_id
            start = self._listening[name]
            self._listening[name] = end = start + len(output.token_ids)
            self._progress.append(
                Progress(
                    request_id=name,
                    start=start,
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    version_runs=self._versions.so_far(name, end),
                )
            )
            self._news.set()

    def _end(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self._listening.pop(output.request_id, None)
            completion = self._completion(output, is_over=True)
            self._ends.append(End(request_id=output.request_id, completion=completion))
            self._news.set()

    def _completion(self, output: EngineOutput, *, is_over: bool) -> Completion:
        runs = self._versions.finish if is_over else self._versions.so_far
        return Completion(
            request_id=output.request_id,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            version_runs=runs(output.request_id, len(output.token_ids)),
            finish_reason=output.finish_reason if is_over else FinishReason.ABORT,
            replica=self.name,
            stop_reason=output.stop_reason,
        )
