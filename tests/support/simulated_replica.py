"""A replica as the router sees it: tokens one by one, progress, partial answers, and every way in
which one may fail.

Sampling goes on in tasks named ``machine: ...``, which stand for another process: a caller that is
cancelled leaves its request running until an abort reaches the replica, as with a real one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.scripted_engine import scripted_experts, scripted_token
from tests.support.simulated_faults import Fate, Undisturbed
from torchtitan_rl.errors import DeadlineError, InvalidRequestError, ReplicaError, WeightSyncError
from torchtitan_rl.generation.commands import (
    AbortRequests,
    EngineCommand,
    Pause,
    PauseMode,
    Pull,
    ReadStats,
    ReadTokens,
    Resume,
    Sleep,
    WakeUp,
)
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    KeptRun,
    OnProgress,
    Progress,
    PullReport,
    RoutedExperts,
    VersionRun,
)
from torchtitan_rl.weights.distribution import (
    SharedMemoryHandle,
    WeightDistribution,
    WeightHandle,
)

if TYPE_CHECKING:
    from tests.support.simulated_trainer import SimTrainer

VOCAB = 50
_NOT_OF_GROUPS = ("validation/", "probe/")  # requests whose tokens are not in the ledger
PROGRESS_S = 1.0  # between two reports of a request's progress
_QUICK_CALL_S = 60.0  # after it a call that only asks gives up
_NEWS_TIMEOUT_S = 130.0  # after it a silent process is known to be gone


@dataclass(slots=True, eq=False)
class SimCall:
    request: GenerationRequest
    future: asyncio.Future[Completion]
    on_progress: OnProgress | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[VersionRun] = field(default_factory=list)
    experts: bytearray = field(default_factory=bytearray)  # `scripted_experts`
    num_told: int = 0
    told_s: float = 0.0
    is_aborted: bool = False
    is_abandoned: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def has_completed(self) -> bool:
        future = self.future
        return future.done() and not future.cancelled() and future.exception() is None

    @property
    def num_unheard(self) -> int:
        if self.request.request_id.startswith(_NOT_OF_GROUPS):
            return 0
        return len(self.tokens) - self.num_told

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            version_runs=tuple(self.runs),
            finish_reason=reason,
            kept_tokens=self.kept_tokens(),
            routed_experts=self.routed_experts(),
        )

    def routed_experts(self, start: int = 0) -> RoutedExperts | None:
        if not self.experts:
            return None
        routed = RoutedExperts(data=bytes(self.experts), num_layers=1, per_token=3)
        num_prompt = len(self.request.prompt_token_ids)
        return routed.part(num_prompt + start - 1 if start else self.request.routed_from)

    def kept_tokens(self, start: int = 0) -> tuple[KeptRun, ...]:
        """The token and the one after it, if the request cuts any."""
        if not self.request.sampling.truncates:
            return ()
        return kept_runs(pack_pair(token) for token in self.tokens[start:])


def pack_pair(token: int) -> bytes:
    """A set of two tokens, packed."""
    return np.array([token, token + 1], dtype="<i4").tobytes()


class SimReplica:
    """Samples `scripted_token`; each takes ``token_s`` times a random factor.

    ``sampled`` counts every token, evaluation's included.
    """

    def __init__(
        self,
        name: str,
        *,
        chance: random.Random,
        trainer: SimTrainer,
        token_s: float = 0.1,
        cache_tokens: int = 1 << 20,
        fate: Fate | None = None,
        weights: WeightDistribution | None = None,
    ) -> None:
        self._name = name
        self._first_trainer = trainer
        self._weights = weights or WeightDistribution({}, fan_out=0)
        self._chance = chance
        self._token_s = token_s
        self._cache_tokens = cache_tokens
        self._fate = fate or Undisturbed()
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._calls: dict[str, SimCall] = {}
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_frozen = False  # SIGSTOP: nothing is answered
        self._is_wedged = False  # the engine stands still, the process answers
        self._slowness = 1.0
        self._steps = 0
        self.version = 0
        self.pull_s = 0.05
        self.sampled = 0
        self.sampled_aside = 0
        self._num_lost = 0
        self._abandoned: list[SimCall] = []
        self.requested: list[str] = []
        self.has_weights = True
        trainer.awake.append(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def _trainer(self) -> SimTrainer:
        """The one that runs now."""
        trainer = self._first_trainer
        while trainer.successor is not None:
            trainer = trainer.successor
        return trainer

    @property
    def is_dead(self) -> bool:
        return self._death.done()

    @is_dead.setter
    def is_dead(self, value: bool) -> None:
        if value:
            self.die()

    @property
    def lost(self) -> int:
        """Tokens that were never reported and are no longer asked for: those of a dead replica, or
        of one that its callers have left."""
        unheard = [*self._abandoned, *self._calls.values()]
        return self._num_lost + sum(call.num_unheard for call in dict.fromkeys(unheard))

    @property
    def is_sound(self) -> bool:
        """Neither dead nor about to be found dead."""
        return not (self.is_dead or self._is_frozen or self._is_wedged)

    def die(self) -> None:
        """The process is gone: every call fails at once."""
        if self._death.done():
            return
        self._death.set_result(None)
        for call in list(self._calls.values()):
            if not call.is_abandoned:
                self._num_lost += call.num_unheard
            self._end(call, ReplicaError(f"{self._name} is dead"))
            if call.task is not None:
                call.task.cancel()

    def freeze(self) -> None:
        self._is_frozen = True
        asyncio.get_running_loop().call_later(_NEWS_TIMEOUT_S, self.die)

    def wedge(self) -> None:
        self._is_wedged = True

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        self._strike("generate")
        self._require_life()
        name = request.request_id
        while (earlier := self._calls.get(name)) is not None:
            if not earlier.is_abandoned:
                raise InvalidRequestError(f"request {name!r} is still outstanding on {self._name}")
            await asyncio.wait({earlier.future})
            self._require_life()
        loop = asyncio.get_running_loop()
        call = SimCall(request, loop.create_future(), on_progress, told_s=loop.time())
        self.requested.append(name)
        self._calls[name] = call
        call.task = loop.create_task(self._sample(call), name=f"machine: {self._name} {name}")
        try:
            return await call.future
        except asyncio.CancelledError:
            call.is_abandoned = True
            self._abandoned.append(call)
            raise

    async def _sample(self, call: SimCall) -> None:
        reason = FinishReason.LENGTH
        sampling, prompt = call.request.sampling, call.request.prompt_token_ids
        while len(call.tokens) < sampling.max_tokens:
            factor = self._chance.uniform(0.1, 2.0)
            await asyncio.sleep(self._token_s * self._slowness * factor)
            while not (self._is_open.is_set() or call.is_aborted):
                await self._is_open.wait()
            if self._is_frozen or self._is_wedged:
                await self._death
                return
            if call.is_aborted:
                reason = FinishReason.ABORT
                break
            self._sample_one(call, (*prompt, *call.tokens), sampling.seed)
            if call.tokens[-1] < VOCAB // 8:
                reason = FinishReason.STOP
                break
        self._end(call, call.completion(reason))

    def _sample_one(self, call: SimCall, before: tuple[int, ...], seed: int | None) -> None:
        self._uses_the_devices("samples a token")
        token, logprob = self._draw(call, before, seed)
        if not call.runs or call.runs[-1].version != self.version:
            call.runs.append(VersionRun(len(call.tokens), self.version))
        call.tokens.append(token)
        call.logprobs.append(logprob)
        self._steps += 1
        self.sampled += 1
        if call.request.request_id.startswith(_NOT_OF_GROUPS):
            self.sampled_aside += 1
        elif self._trainer.is_alone:
            self._trainer.complaints.append(f"{self._name} samples while the trainer is alone")
        now = asyncio.get_running_loop().time()
        if call.on_progress is not None and now - call.told_s >= PROGRESS_S:
            self._tell(call, now)

    def _draw(self, call: SimCall, before: tuple[int, ...], seed: int | None) -> tuple[int, float]:
        first = len(before) - 1 if call.tokens else 0
        for position, one in enumerate(before[first:], start=first):
            call.experts += scripted_experts(one, position, self.version)
        return scripted_token(before, seed=seed, version=self.version, vocab_size=VOCAB)

    def _tell(self, call: SimCall, now: float) -> None:
        if call.is_abandoned:
            return
        start, call.num_told, call.told_s = call.num_told, len(call.tokens), now
        if call.on_progress is not None:
            call.on_progress(
                Progress(
                    request_id=call.request.request_id,
                    start=start,
                    token_ids=tuple(call.tokens[start:]),
                    logprobs=tuple(call.logprobs[start:]),
                    version_runs=tuple(call.runs),
                    kept_tokens=call.kept_tokens(start),
                    routed_experts=call.routed_experts(start),
                )
            )

    def _end(self, call: SimCall, outcome: Completion | ReplicaError) -> None:
        if self._calls.get(call.request.request_id) is call:
            del self._calls[call.request.request_id]
        if call.future.done():
            return
        if isinstance(outcome, ReplicaError):
            call.future.set_exception(outcome)
            call.future.exception()  # where its caller has left
        else:
            call.future.set_result(outcome)

    async def execute(
        self, command: EngineCommand[Any], on_answer: Callable[[Any], None] | None = None
    ) -> Any:
        match command:
            case AbortRequests(request_ids):
                await self._abort(request_ids)
            case ReadTokens():
                return await self._read(on_answer)
            case Pause(mode):
                await self._pause(mode)
            case Resume():
                await self._reach("resume", quick=True)
                self._is_open.set()
            case Pull(version):
                return await self._pull(version)
            case Sleep():
                await self._sleep()
            case WakeUp():
                await self._wake_up()
            case ReadStats():
                return await self._stats()
        return None

    async def _read(self, on_reading: Callable[[EngineReading], None] | None) -> EngineReading:
        await self._reach("read")
        now, running = asyncio.get_running_loop().time(), self._calls.values()
        for call in running:
            if call.num_told < len(call.tokens) and not call.is_abandoned:
                self._tell(call, now)
        reading = EngineReading(
            sampled_tokens=self.sampled, running_tokens=sum(len(call.tokens) for call in running)
        )

        def hear() -> None:
            if on_reading is not None and not self.is_dead:
                on_reading(reading)

        # After the ends of calls that had ended by now, before those of later ones.
        asyncio.get_running_loop().call_soon(hear)
        await self._pass(0.3)  # the answer travels, and sampling goes on
        return reading

    async def _abort(self, request_ids: tuple[str, ...]) -> None:
        self._strike("abort")
        await self._unfrozen()
        for name in request_ids:
            if name in self._calls:
                self._calls[name].is_aborted = True
        self._wake_paused()

    async def _pause(self, mode: PauseMode) -> None:
        await self._reach("pause")
        if mode == "abort":
            for call in self._calls.values():
                call.is_aborted = True
            self._wake_paused()
        if mode == "keep":
            self._is_open.clear()
            return
        while self._calls:
            await self._pass(0.01)
        self._is_open.clear()

    async def stage(self, handle: WeightHandle) -> None:
        await self._reach("stage")
        await self._weights.read(handle, 0, self._map)

    async def _map(self, handle: SharedMemoryHandle) -> None:
        await self._pass(self.pull_s)
        trainer = self._trainer
        if trainer.is_lost or handle.version not in trainer.readable:
            raise WeightSyncError(f"version {handle.version} is gone")

    async def _pull(self, version: int) -> PullReport:
        await self._reach("pull")
        self.has_weights = True
        self._uses_the_devices("begins to swap weights")
        await self._pass(self.pull_s)
        self._uses_the_devices("swaps weights")
        self.version = version
        return PullReport(
            version=version, stall_s=0.0, running_requests=len(self._calls), recomputed=False
        )

    async def _sleep(self) -> None:
        await self._reach("sleep")
        for call in self._calls.values():
            call.is_aborted = True
        self._wake_paused()
        while self._calls:
            await self._pass(0.01)
        self._is_open.clear()
        await self._pass(0.02)
        self.has_weights = False
        if self in self._trainer.awake:
            self._trainer.awake.remove(self)

    async def _wake_up(self) -> None:
        await self._reach("wake_up")
        self._trainer.awake.append(self)
        self._uses_the_devices("wakes up", without_weights=True)
        await self._pass(0.02)

    async def _stats(self) -> EngineStats:
        self._strike("stats")
        await self._unfrozen(quick=True)
        return EngineStats(
            version=self.version,
            running=len(self._calls),
            waiting=0,
            kv_use=min(1.0, self._num_held / self._cache_tokens),
            preemptions=0,
            generated_tokens=self.sampled,
            tokens_per_second=0.0,
            steps=self._steps,
        )

    @property
    def _num_held(self) -> int:
        return sum(
            len(call.request.prompt_token_ids) + len(call.tokens) for call in self._calls.values()
        )

    async def close(self) -> None:
        self.die()
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        for call in list(self._calls.values()):
            self._end(call, ReplicaError(f"{self._name} was closed"))
        for task in tasks:
            task.cancel()

    def _wake_paused(self) -> None:
        """Those that were aborted end, paused or not; the others look and wait again."""
        if not self._is_open.is_set():
            self._is_open.set()
            self._is_open.clear()

    async def _reach(self, method: str, *, quick: bool = False) -> None:
        """Until the engine loop has heard of a call; never, where it stands still."""
        delay_s = self._strike(method)
        await self._unfrozen(quick=quick)
        if self._is_wedged and not quick:
            await asyncio.shield(self._death)
        if delay_s:
            await self._pass(delay_s)
        self._require_life()

    def _strike(self, method: str) -> float:
        """Let happen what is to happen at this call; returns by how much it is late."""
        strike = self._fate.at(f"{self._name}.{method}")
        match strike.action if strike is not None else None:
            case "die":
                self.die()
            case "freeze":
                self.freeze()
            case "wedge":
                self.wedge()
            case "slow":
                self._slowness = 20.0
            case "recover":
                self._slowness = 1.0
            case "late" if strike is not None:
                return strike.seconds
            case "die_soon" if strike is not None:
                asyncio.get_running_loop().call_later(strike.seconds, self.die)
        return 0.0

    async def _unfrozen(self, *, quick: bool = False) -> None:
        self._require_life()
        if self._is_frozen:
            await asyncio.wait({self._death}, timeout=_QUICK_CALL_S if quick else None)
            self._require_life()
            raise DeadlineError(f"{self._name} did not answer within {_QUICK_CALL_S:.0f} s")

    async def _pass(self, seconds: float) -> None:
        """Time goes by, unless the replica dies."""
        await asyncio.sleep(seconds)
        self._require_life()

    def _require_life(self) -> None:
        if self.is_dead:
            raise ReplicaError(f"{self._name} is dead")

    def _uses_the_devices(self, what: str, *, without_weights: bool = False) -> None:
        if self._trainer.has_devices:
            self._trainer.complaints.append(f"{self.name} {what} on the trainer's devices")
        if not (self.has_weights or without_weights):
            self._trainer.complaints.append(f"{self.name} {what} without weights")
