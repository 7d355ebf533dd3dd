"""The long-tailed task: the lengths of its answers are drawn once, and are equal in every mode.

P consecutive groups are one batch of a plain synchronous run. Every batch has the same number of
long answers, at random places. A long answer has 10 to 20 times the median length. The
end-of-sequence token is ignored.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.task import Split, Task
from torchtitan_rl.types import (
    Completion,
    GenerateFn,
    GenerationRequest,
    Problem,
    RolloutStatus,
)

LONG = (10, 20)  # multiples of the median length
_SPREAD = 0.3  # standard deviation of the logarithm of ordinary lengths
_VOCABULARY = 256  # number of different tokens in prompts


@dataclass(frozen=True, kw_only=True)
class LongTail:
    """The lengths of the task, in tokens. ``long_share``: share of the answers that are long."""

    groups_per_step: int = 16
    group_size: int = 4
    median: int = 32
    long_share: float = 0.05
    prompt: int = 48
    seed: int = 0

    @property
    def longest(self) -> int:
        return LONG[1] * self.median

    @property
    def num_long(self) -> int:
        """Number of long answers in ``groups_per_step`` groups."""
        return max(1, round(self.long_share * self.groups_per_step * self.group_size))

    def is_long(self, length: int) -> bool:
        return length >= LONG[0] * self.median

    def lengths(self, index: int) -> tuple[int, ...]:
        """The lengths of the answers to problem ``index``."""
        block, place = divmod(index, self.groups_per_step)
        return _draw_block(self, block)[place]

    def length_of(self, rollout_id: str) -> int:
        """The length of the answer of the rollout ``e0/INDEX/rSIBLING``."""
        _, problem_id, sibling = rollout_id.split("/")
        return self.lengths(int(problem_id))[int(sibling.removeprefix("r"))]


@cache
def _draw_block(tail: LongTail, block: int) -> tuple[tuple[int, ...], ...]:
    """Draw the lengths of ``groups_per_step`` groups."""
    chance = random.Random(f"long-tail-{tail.seed}-{block}")
    count = tail.groups_per_step * tail.group_size
    long = set(chance.sample(range(count), tail.num_long))
    lengths = [
        chance.randint(LONG[0] * tail.median, tail.longest)
        if place in long
        # Half to twice the median: an ordinary answer must not look long.
        else round(tail.median * min(2.0, max(0.5, chance.lognormvariate(0.0, _SPREAD))))
        for place in range(count)
    ]
    return tuple(
        tuple(lengths[start : start + tail.group_size])
        for start in range(0, count, tail.group_size)
    )


@dataclass(frozen=True, kw_only=True)
class LongTailTask(Task):
    """Random prompts. The reward is 1 if the last token is even, else 0, so that rewards in a group
    differ."""

    tail: LongTail

    def dataset(self, split: Split, *, seed: int) -> LongTailDataset:
        return LongTailDataset(self.tail)

    def environment(
        self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig
    ) -> LongTailEnv:
        return LongTailEnv(problem)


class LongTailDataset:
    """Problems "0", "1", ... without end, in one epoch."""

    epoch = 0

    def __init__(self, tail: LongTail) -> None:
        self._tail = tail
        self._position = 0

    def next(self) -> Problem:
        index = self._position
        self._position += 1
        chance = random.Random(f"prompt-{self._tail.seed}-{index}")
        prompt = tuple(chance.randrange(_VOCABULARY) for _ in range(self._tail.prompt))
        return Problem(problem_id=str(index), data={"prompt": prompt})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._position = state["position"]


class LongTailEnv:
    """An environment with one turn."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    async def reset(self) -> Observation:
        return Observation(prompt_token_ids=self._problem.data["prompt"])

    async def step(self, completion: Completion) -> Terminal:
        return Terminal(reward=float(completion.token_ids[-1] % 2 == 0))

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...


def with_lengths(generate: GenerateFn, tail: LongTail) -> GenerateFn:
    """Return ``generate`` with the drawn length for each answer. The environment cannot set this
    length, because it does not know the number of its sibling."""

    async def fixed(request: GenerationRequest) -> Completion:
        length = tail.length_of(request.session_id or "")
        sampling = replace(request.sampling, max_tokens=length, ignore_eos=True)
        return await generate(replace(request, sampling=sampling))

    return fixed
