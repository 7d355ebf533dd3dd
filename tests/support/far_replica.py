"""A replica in another process, on the virtual clock: a scripted engine behind a connection whose
messages take time, with an engine loop that can be killed, can hang, and can freeze with its
process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.channel import CallId, End
from torchtitan_rl.errors import ReplicaError, StepFailedError
from torchtitan_rl.generation.commands import (
    AbortRequests,
    EngineCommand,
    Pause,
    Pull,
    ReadStats,
    ReadTokens,
    Resume,
    Sleep,
    WakeUp,
)
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.remote import ConnectedReplica
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    GenerationRequest,
    PullReport,
    VersionRun,
    add_run,
    runs_before,
)
from torchtitan_rl.weights.distribution import WeightHandle


def connected(replicas: Iterable[FarReplica]) -> list[ConnectedReplica[FarReplica]]:
    """As a router takes them."""
    return [replica.link for replica in replicas]


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
        self._runs_of: dict[str, tuple[VersionRun, ...]] = {}
        self._sent: asyncio.Queue[tuple[float, tuple[ToReplica, ...]]] = asyncio.Queue()
        self._inbox: list[GenerationRequest] = []
        self._listening: dict[str, int] = {}  # tokens told
        self._news: list[FromReplica] = []
        self._has_news = asyncio.Event()
        self._runs = asyncio.Event()  # not paused
        self._runs.set()
        self._moves = asyncio.Event()  # neither hung nor frozen
        self._moves.set()
        self._answers = asyncio.Event()  # not frozen
        self._answers.set()
        self._tasks: list[asyncio.Task[None]] = []  # steps, and commands
        self._loss: ReplicaError | None = None
        self._losing: EngineCommand[Any] | None = None
        self.dropped_ends = 0  # so many ends that come next are lost on the way
        self.resumed: list[bool] = []  # of each request it was given: it has tokens already
        self.is_closed = False
        self.link = ConnectedReplica(self)  # the router's end

    @property
    def name(self) -> str:
        return self._name

    def kill(self, loss: ReplicaError | None = None) -> None:
        self._loss = loss or ReplicaError(f"{self.name} was killed")
        self._moves.set()
        self._answers.set()
        self._has_news.set()

    def loses(self, command: EngineCommand[Any]) -> None:
        """Its answer to this command is the loss of it."""
        self._losing = command

    def hang(self) -> None:
        """The engine makes no progress, and its process answers; no stall is noticed."""
        self._moves.clear()

    def freeze(self) -> None:
        """Nothing of it makes progress or answers."""
        self._moves.clear()
        self._answers.clear()

    async def stage(self, handle: WeightHandle) -> None:
        await self._travel()

    async def close_loop(self, *, is_lost: bool) -> None:
        self.is_closed = True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _travel(self) -> None:
        await asyncio.sleep(self.latency_s)
        await self._answers.wait()
        if self._loss is not None:
            raise self._loss

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        if not self._tasks:
            self._begin(self._step_all())
            self._begin(self._take_all())
        self._sent.put_nowait((asyncio.get_running_loop().time() + self.latency_s, messages))

    async def _take_all(self) -> None:
        while True:
            arrival_s, messages = await self._sent.get()
            await asyncio.sleep(arrival_s - asyncio.get_running_loop().time())
            await self._answers.wait()
            if self._loss is not None:
                return
            for message in messages:
                match message.payload:
                    case GenerationRequest() as request:
                        self._inbox.append(request)
                        self._admit()
                    case command:
                        self._begin(self._answer(message.call_id, command))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"work of {self.name}"))

    async def _answer(self, number: CallId, command: EngineCommand[Any]) -> None:
        if command == self._losing:
            error = ReplicaError(f"the process of {self.name} is gone")
            self._tell_of(End(call_id=number, error=error))
        else:
            self._tell_of(End(call_id=number, result=await self._execute(command)))

    async def _execute(self, command: EngineCommand[Any]) -> Any:
        match command:
            case AbortRequests(request_ids):
                self._admit(request_ids)
                self._end(self.engine.abort(request_ids))
                return None
            case ReadTokens():
                self._tell()
                return EngineReading(
                    sampled_tokens=self.engine.stats().generated_tokens,
                    running_tokens=sum(self.engine.generated_lengths().values()),
                )
            case ReadStats():
                return self.engine.stats()
            case Resume():
                self._runs.set()
                self._admit()
                return None
        await self._moves.wait()
        match command:
            case Pull(version):
                for name, length in self.engine.generated_lengths().items():
                    runs = self._runs_of[name]
                    self._runs_of[name] = add_run(runs, length=length, version=version)
                self.engine.swap_weights(version)
                self._admit()
                return PullReport(
                    version=version, stall_s=0.0, running_requests=0, recomputed=False
                )
            case Pause(mode):
                while mode == "wait" and self.engine.num_unfinished():
                    await asyncio.sleep(self.step_s)
                self._runs.clear()
                if mode == "abort":
                    self._abort_all()
            case Sleep():
                self._runs.clear()
                self._abort_all()
                self.engine.sleep()
            case WakeUp():
                self.engine.wake_up()
        return None

    def _abort_all(self) -> None:
        self._end(self.engine.abort(tuple(self.engine.generated_lengths())))

    def _admit(self, also: tuple[str, ...] = ()) -> None:
        """What came, where the engine is not stopped; those in ``also`` in any case."""
        engine = self.engine
        is_held = not self._runs.is_set() or engine.is_asleep or not engine.has_weights
        kept = []
        for request in self._inbox:
            if is_held and request.request_id not in also:
                kept.append(request)
                continue
            self._runs_of[request.request_id] = (VersionRun(0, engine.version),)
            self.resumed.append(request.num_resumed > 0)
            self._listening[request.request_id] = 0
            engine.add_request(request, arrival_s=0.0)
        self._inbox = kept

    async def receive(self) -> tuple[FromReplica, ...]:
        while not self._news:
            if self._loss is not None:
                raise self._loss
            self._has_news.clear()
            await self._has_news.wait()
        news, self._news = self._news, []
        await self._travel()
        return tuple(news)

    def _tell_of(self, message: FromReplica) -> None:
        self._news.append(message)
        self._has_news.set()

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
                self._loss = StepFailedError(f"{self.name} failed: {error}")
                self._has_news.set()
                return
            self._tell()
            self._end(ended)

    def _tell(self) -> None:
        for output in self.engine.sampled_since(self._listening):
            name = output.request_id
            self._listening[name] = end = output.start + len(output.token_ids)
            self._tell_of(replace(output, version_runs=runs_before(self._runs_of[name], end)))

    def _end(self, outputs: list[Completion]) -> None:
        for output in outputs:
            self._listening.pop(output.request_id, None)
            completion = self._completion(output)
            if self.dropped_ends:
                self.dropped_ends -= 1
            else:
                self._tell_of(End(call_id=output.request_id, result=completion))

    def _completion(self, output: Completion) -> Completion:
        runs = self._runs_of.pop(output.request_id)
        before = runs_before(runs, len(output.token_ids))
        return replace(output, version_runs=before, metrics=None, replica=self.name)
