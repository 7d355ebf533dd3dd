"""A replica whose work takes a computed time on the event loop's clock, real or virtual.

A step samples one token for each of ``r`` running requests and takes ``step_s + r * token_s``. Each
prompt token that is not cached takes ``prefill_s``; nothing is sampled in this time. A request
waits ``r * first_token_s`` more for its first token, alongside the others, whose prompts are
computed too. The cache holds whole sessions and the prompts that siblings share, ``cache_tokens``
in all, and evicts the least recently used ones. A request samples ``max_tokens`` tokens, all 0.

A replica that dies has reported the tokens of each whole interval of ``report_s`` since the request
began, as real replicas do. These reports are only made at the death, or with ``reports`` at their
time: then the controller has the same work with them as in a run.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.generation.commands import (
    AbortRequests,
    EngineCommand,
    Pause,
    Pull,
    ReadStats,
    ReadTokens,
    Resume,
)
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    FinishReason,
    GenerationRequest,
    OnProgress,
    Progress,
    PullReport,
    VersionRun,
)
from torchtitan_rl.weights.distribution import WeightHandle

_PART_OF_STEP = 1e-3  # tolerance for rounding of clocks; requests end with whole steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    prefill_s: float = 50e-6
    first_token_s: float = 0.0
    step_s: float = 5e-3
    token_s: float = 0.1e-3
    max_running: int = 64
    cache_tokens: int = 200_000
    stage_s: float = 0.0  # to fetch a version of the weights
    pull_s: float = 0.0  # from asking for the swap until it is done
    stall_s: float = 0.0  # the part of it in which nothing is sampled
    report_s: float = 1.0


@functools.lru_cache(maxsize=65_536)
def zeros(count: int) -> tuple[int, ...]:
    """So many tokens; equal numbers share one tuple."""
    return (0,) * count


@functools.lru_cache(maxsize=65_536)
def _no_logprobs(count: int) -> tuple[float, ...]:
    return (0.0,) * count


@dataclass(slots=True, eq=False)
class _Call:
    """``start_steps``: the replica's steps when it began; ``swap``: index of the version it began
    with."""

    request: GenerationRequest
    future: asyncio.Future[Completion]
    on_progress: OnProgress | None
    start_steps: float = 0.0
    start_s: float = 0.0
    swap: int = 0
    num_told: int = 0
    is_running: bool = False


class SimulatedReplica:
    """A `Replica` in the controller's process.

    ``busy_s``: seconds in which the replica worked; ``busy_until_s``: when its last request ended;
    ``lost_tokens``: sampled, and not reported before its death.
    """

    def __init__(self, name: str, speeds: Speeds, *, reports: bool = False) -> None:
        self.name = name
        self._speeds = speeds
        self._reports = reports
        self._calls: dict[str, _Call] = {}
        self._waiting: deque[_Call] = deque()
        # A heap, ordered by the last step of each request; ended requests stay in it.
        self._ends: list[tuple[float, int, _Call]] = []
        self._order = itertools.count()
        self._num_running = 0
        self._held_starts = self._held_prompts = 0.0  # sums over the running requests
        self._steps = 0.0  # steps done by `_at_s`, which is ahead of the clock during a prefill
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reporter: asyncio.TimerHandle | None = None
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]  # steps and version
        self._cached: OrderedDict[str, int] = OrderedDict()  # tokens by session or prompt
        self._num_cached = 0
        self._is_paused = False
        self._is_dying = False
        self._failure: ReplicaError | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.sampled_tokens = 0  # of requests that have ended
        self.lost_tokens = 0
        self.busy_s = 0.0
        self.busy_until_s = 0.0

    async def generate(
        self,
        request: GenerationRequest,
        on_progress: OnProgress | None = None,
        *,
        streams: bool = False,
    ) -> Completion:
        self._require_life()
        loop = asyncio.get_running_loop()
        call = _Call(request, loop.create_future(), on_progress)
        self._calls[request.request_id] = call
        self._waiting.append(call)
        self._start_waiting()
        if self._reports and self._reporter is None and not self._is_dying:
            self._reporter = loop.call_later(self._speeds.report_s, self._report)
        return await call.future

    async def stage(self, handle: WeightHandle) -> None:
        """Fetch published weights."""
        self._require_life()
        await asyncio.sleep(self._speeds.stage_s)

    async def execute(
        self, command: EngineCommand[Any], on_answer: Callable[[Any], None] | None = None
    ) -> Any:
        """Execute a command; a sleep is not simulated."""
        self._require_life()
        match command:
            case AbortRequests(request_ids):
                self._abort(request_ids)
            case Pull(version):
                return await self._pull(version)
            case Pause(mode):
                self._abort(tuple(self._calls) if mode == "abort" else ())
                self._is_paused = True
                self._plan()
            case Resume():
                self._advance()
                self._is_paused = False
                self._start_waiting()
            case ReadStats():
                return self._stats()
            case ReadTokens():
                return self._read(on_answer)
            case _:
                raise NotImplementedError(f"{command} is not simulated")
        return None

    def die(self, detect_s: float = 0.0) -> None:
        """Sample nothing more. All requests fail ``detect_s`` seconds later, those that come until
        then too; after that, every call."""
        if self._is_dying:
            return
        self._advance()
        self._is_dying = True
        for timer in (self._timer, self._reporter):
            if timer is not None:
                timer.cancel()
        for call in self._calls.values():
            seconds = self._at_s - call.start_s
            if call.is_running and not self._reports and seconds > 0:
                whole_s = seconds - seconds % self._speeds.report_s
                steps = (self._steps - call.start_steps) * whole_s / seconds
                self._tell(call, int(steps + _PART_OF_STEP))
            self.lost_tokens += self._sampled(call) - call.num_told
        if detect_s:
            asyncio.get_running_loop().call_later(detect_s, self._fail)
        else:
            self._fail()

    def _fail(self) -> None:
        self._failure = ReplicaError(f"{self.name} is dead")
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.future.set_exception(ReplicaError(f"{self.name} is dead"))
            call.future.exception()  # retrieved: its caller may be gone
        self._num_running = 0

    async def close(self) -> None:
        self.die()

    def _require_life(self) -> None:
        if self._failure is not None:
            raise ReplicaError(f"{self.name} is dead")

    def _step_s(self) -> float:
        return self._speeds.step_s + self._num_running * self._speeds.token_s

    def _advance(self) -> None:
        """Do the steps that fit into the time until now."""
        now_s = asyncio.get_running_loop().time()
        if now_s <= self._at_s:
            return
        if self._num_running and not (self._is_paused or self._is_dying):
            self._steps += (now_s - self._at_s) / self._step_s()
            self.busy_s += now_s - self._at_s
        self._at_s = now_s

    def _start_waiting(self) -> None:
        self._advance()
        while self._waiting and self._num_running < self._speeds.max_running:
            if self._is_paused or self._is_dying:
                return
            call = self._waiting.popleft()
            if not call.future.done():
                self._start(call)
        self._plan()

    def _start(self, call: _Call) -> None:
        request = call.request
        prompt = len(request.prompt_token_ids)
        known = [self._cached.get(key, 0) for key in (_key(request), request.prompt_id or "")]
        cached = max(0, min(prompt - 1, max(known)))
        prefill_s = (prompt - cached) * self._speeds.prefill_s
        self._at_s += prefill_s
        self.busy_s += prefill_s
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        if request.prompt_id is not None and not known[0]:
            self._remember(request.prompt_id, prompt)
        self._num_running += 1
        waits_s = self._num_running * self._speeds.first_token_s
        call.start_steps = self._steps + waits_s / self._step_s()
        call.start_s = self._at_s + waits_s
        call.swap, call.is_running = len(self._swaps) - 1, True
        self._held_starts += call.start_steps
        self._held_prompts += prompt
        last = call.start_steps + request.sampling.max_tokens
        heapq.heappush(self._ends, (last, next(self._order), call))

    def _plan(self) -> None:
        """Set the timer for the end of the next request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._ends and not self._ends[0][2].is_running:
            heapq.heappop(self._ends)
        if self._ends and not (self._is_paused or self._is_dying):
            missing = max(0.0, self._ends[0][0] - self._steps)
            due_s = self._at_s + missing * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(due_s, self._end_requests)

    def _end_requests(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + _PART_OF_STEP:
            call = heapq.heappop(self._ends)[2]
            if call.is_running:
                self._end(call, call.request.sampling.max_tokens, FinishReason.LENGTH)
        self.busy_until_s = self._at_s
        self._start_waiting()

    def _end(self, call: _Call, count: int, reason: FinishReason) -> None:
        request = call.request
        del self._calls[request.request_id]
        if call.is_running:
            self._num_running -= 1
            self._held_starts -= call.start_steps
            self._held_prompts -= len(request.prompt_token_ids)
            call.is_running = False
        self.sampled_tokens += count
        self._remember(_key(request), len(request.prompt_token_ids) + count)
        if call.future.done():  # its caller is gone
            return
        completion = Completion(
            request_id=request.request_id,
            token_ids=zeros(count),
            logprobs=_no_logprobs(count),
            version_runs=self._runs(call, count),
            finish_reason=reason,
            replica=self.name,
        )
        call.future.set_result(completion)

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        self._advance()
        for name in request_ids:
            if (call := self._calls.get(name)) is not None:
                self._end(call, self._sampled(call), FinishReason.ABORT)
        self._start_waiting()

    def _sampled(self, call: _Call) -> int:
        """Tokens by now; the steps are up to date."""
        if not call.is_running:
            return 0
        done = int(self._steps - call.start_steps + _PART_OF_STEP)
        return min(max(0, done), call.request.sampling.max_tokens)

    def _runs(self, call: _Call, count: int) -> tuple[VersionRun, ...]:
        if not count:
            return ()
        runs = [VersionRun(0, self._swaps[call.swap][1])]
        for steps, version in self._swaps[call.swap + 1 :]:
            start = int(max(0.0, steps - call.start_steps) + _PART_OF_STEP)
            if start >= count:
                break
            if start == 0:
                runs = []
            runs.append(VersionRun(start, version))
        return tuple(runs)

    def _report(self) -> None:
        self._advance()
        for call in self._calls.values():
            self._tell(call, self._sampled(call))
        self._reporter = None
        if self._calls:
            loop = asyncio.get_running_loop()
            self._reporter = loop.call_later(self._speeds.report_s, self._report)

    def _tell(self, call: _Call, count: int) -> None:
        start, new = call.num_told, count - call.num_told
        if call.on_progress is None or new <= 0:
            return
        call.num_told = count
        progress = Progress(
            request_id=call.request.request_id,
            start=start,
            token_ids=zeros(new),
            logprobs=_no_logprobs(new),
            version_runs=self._runs(call, count),
        )
        call.on_progress(progress)

    async def _pull(self, version: int) -> PullReport:
        speeds = self._speeds
        await asyncio.sleep(max(0.0, speeds.pull_s - speeds.stall_s))
        self._require_life()
        self._advance()
        self._swaps.append((self._steps, version))
        self._at_s += speeds.stall_s
        self._plan()
        running = self._num_running
        await asyncio.sleep(speeds.stall_s)
        self._require_life()
        return PullReport(
            version=version, stall_s=speeds.stall_s, running_requests=running, recomputed=False
        )

    def _stats(self) -> EngineStats:
        self._advance()
        held = self._num_running * self._steps - self._held_starts
        return EngineStats(
            version=self._swaps[-1][1],
            running=self._num_running,
            waiting=len(self._waiting),
            kv_use=min(1.0, max(0.0, held + self._held_prompts) / self._speeds.cache_tokens),
            kv_tokens=self._speeds.cache_tokens,
            preemptions=0,
            generated_tokens=self.sampled_tokens + max(0, int(held)),
            tokens_per_second=self._num_running / self._step_s() if self._num_running else 0.0,
            steps=int(self._steps),
        )

    def _read(self, on_answer: Callable[[EngineReading], None] | None) -> EngineReading:
        self._advance()
        running = 0
        for call in self._calls.values():
            self._tell(call, self._sampled(call))
            running += self._sampled(call)
        reading = EngineReading(
            sampled_tokens=self.sampled_tokens + running, running_tokens=running
        )
        if on_answer is not None:
            # After the callers of requests that have ended, before those of later ones.
            asyncio.get_running_loop().call_soon(on_answer, reading)
        return reading

    def _remember(self, key: str, num_tokens: int) -> None:
        self._num_cached += num_tokens - self._cached.pop(key, 0)
        self._cached[key] = num_tokens
        while self._num_cached > self._speeds.cache_tokens:
            self._num_cached -= self._cached.popitem(last=False)[1]


def _key(request: GenerationRequest) -> str:
    return request.session_id or request.request_id
