"""Rollouts as a generator sees them: prompts, lengths and waits, drawn once for all sides.

Output lengths are fixed (end-of-sequence is ignored), so that every side samples the same number of
tokens in the same number of turns. Siblings of a group share their first prompt.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.types import GenerationRequest, SamplingParams

Distribution = Literal["pareto", "lognormal", "uniform"]

MAX_OUTPUT = 640
_FIRST_PROMPT, _LATER_PROMPT = 48, 12  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """One turn: ``new_token_ids`` are appended to the history, ``num_tokens`` tokens are sampled,
    and then the environment takes ``delay_s``."""

    new_token_ids: tuple[int, ...]
    num_tokens: int
    delay_s: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    rollout_id: str
    turns: tuple[PlannedTurn, ...]

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    distribution: Distribution
    rollouts: tuple[PlannedRollout, ...]

    @property
    def num_sampled(self) -> int:
        return sum(rollout.num_sampled for rollout in self.rollouts)

    @property
    def longest_rollout(self) -> int:
        """Number of tokens of the longest rollout, which can only be sampled one after another."""
        return max(rollout.num_sampled for rollout in self.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one run of a workload. ``latencies_s``: the time of each request from its
    submission to its whole completion. ``waiting_s``: the part of ``seconds`` in which no request
    ran, because all rollouts were in their environments."""

    seconds: float
    num_tokens: int
    latencies_s: tuple[float, ...]
    waiting_s: float = 0.0


Complete = Callable[[GenerationRequest], Awaitable[Sequence[int]]]
"""A function that completes one request and returns its tokens."""


def draw_workload(
    distribution: Distribution,
    *,
    rollouts: int,
    turns: int,
    group_size: int = 8,
    delay_s: float = 0.0,
    vocab_size: int = 256,
    seed: int = 0,
) -> Workload:
    """Draw a workload. ``delay_s`` is the mean of the environment's exponential delays; the lengths
    do not depend on it."""
    chance = random.Random(f"{distribution}-{seed}")
    delays = random.Random(f"{distribution}-{seed}-delays")

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(vocab_size) for _ in range(count))

    planned = []
    first: tuple[int, ...] = ()
    for index in range(rollouts):
        if index % group_size == 0:
            first = tokens(_FIRST_PROMPT)
        planned.append(
            PlannedRollout(
                rollout_id=f"{distribution}-{index}",
                turns=tuple(
                    PlannedTurn(
                        new_token_ids=tokens(_LATER_PROMPT) if number else first,
                        num_tokens=draw_length(distribution, chance),
                        delay_s=delays.expovariate(1 / delay_s) if delay_s else 0.0,
                        seed=chance.getrandbits(31),
                    )
                    for number in range(turns)
                ),
            )
        )
    return Workload(distribution=distribution, rollouts=tuple(planned))


def draw_length(distribution: Distribution, chance: random.Random) -> int:
    """Draw a length: the median is 41, the maximum `MAX_OUTPUT`."""
    match distribution:
        case "uniform":
            return chance.randint(2, 80)
        case "lognormal":
            length = math.exp(chance.gauss(math.log(41), 1.0))
        case "pareto":  # of exponent 1
            length = 20.5 / (1 - chance.random())
    return max(1, min(MAX_OUTPUT, round(length)))


async def one_after_another(workload: Workload, complete: Complete) -> Timing:
    """Run one request after another."""
    requests = _Requests(complete)
    for rollout in workload.rollouts:
        history: tuple[int, ...] = ()
        for number in range(len(rollout.turns)):
            history = await _turn(rollout, number, history, requests)
            await asyncio.sleep(rollout.turns[number].delay_s)
    return requests.timing(workload)


async def in_rounds(workload: Workload, complete: Complete, *, batch: int) -> Timing:
    """Run with synchronous batching: ``batch`` rollouts take each turn together. All of them wait
    for the slowest answer, and then for the slowest environment."""
    requests = _Requests(complete)
    for start in range(0, len(workload.rollouts), batch):
        rollouts = workload.rollouts[start : start + batch]
        histories: list[tuple[int, ...]] = [()] * len(rollouts)
        for number in range(max(len(rollout.turns) for rollout in rollouts)):
            histories = list(
                await asyncio.gather(
                    *(
                        _turn(rollout, number, history, requests)
                        for rollout, history in zip(rollouts, histories, strict=True)
                    )
                )
            )
            await asyncio.sleep(max(rollout.turns[number].delay_s for rollout in rollouts))
    return requests.timing(workload)


async def all_at_once(workload: Workload, complete: Complete) -> Timing:
    """Run all rollouts at once, each independent of the others. The engine limits the number of
    running requests."""
    requests = _Requests(complete)

    async def run(rollout: PlannedRollout) -> None:
        history: tuple[int, ...] = ()
        for number, turn in enumerate(rollout.turns):
            history = await _turn(rollout, number, history, requests)
            await asyncio.sleep(turn.delay_s)

    async with asyncio.TaskGroup() as rollouts:
        for rollout in workload.rollouts:
            rollouts.create_task(run(rollout))
    return requests.timing(workload)


def request_of(rollout: PlannedRollout, number: int, history: tuple[int, ...]) -> GenerationRequest:
    turn = rollout.turns[number]
    return GenerationRequest(
        request_id=f"{rollout.rollout_id}/t{number}",
        prompt_token_ids=history + turn.new_token_ids,
        sampling=SamplingParams(max_tokens=turn.num_tokens, ignore_eos=True, seed=turn.seed),
        session_id=rollout.rollout_id,
    )


class _Requests:
    """Completes requests and measures times, from the creation of this object on."""

    def __init__(self, complete: Complete) -> None:
        self._complete = complete
        self._now_s = asyncio.get_running_loop().time
        self._started_s = self._empty_since_s = self._now_s()
        self._running = 0
        self._waiting_s = 0.0
        self._latencies_s: list[float] = []

    async def complete(self, request: GenerationRequest) -> tuple[int, ...]:
        """Complete a request. Raises RuntimeError if the answer does not have the requested
        length."""
        began_s = self._now_s()
        if self._running == 0:
            self._waiting_s += began_s - self._empty_since_s
        self._running += 1
        tokens = tuple(await self._complete(request))
        self._running -= 1
        self._empty_since_s = self._now_s()
        self._latencies_s.append(self._empty_since_s - began_s)
        if len(tokens) != request.sampling.max_tokens:
            raise RuntimeError(
                f"{request.request_id}: {len(tokens)} tokens, not {request.sampling.max_tokens}"
            )
        return tokens

    def timing(self, workload: Workload) -> Timing:
        """Return the times of the whole workload. Call this when all requests have ended."""
        ended_s = self._now_s()
        return Timing(
            seconds=ended_s - self._started_s,
            num_tokens=workload.num_sampled,
            latencies_s=tuple(self._latencies_s),
            waiting_s=self._waiting_s + ended_s - self._empty_since_s,
        )


async def _turn(
    rollout: PlannedRollout, number: int, history: tuple[int, ...], requests: _Requests
) -> tuple[int, ...]:
    request = request_of(rollout, number, history)
    return request.prompt_token_ids + await requests.complete(request)
