"""The demo's configuration with an environment that takes a second for a turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl import (
    Completion,
    Observation,
    Problem,
    RolloutConfig,
    RolloutStatus,
    Terminal,
    TokenEnv,
)
from torchtitan_rl.configs.alphabet_sort_tiny import config as tiny
from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask

STEP_S = 1.0


class SlowEnv:
    """Another environment, of which each step takes `STEP_S` longer."""

    def __init__(self, env: TokenEnv) -> None:
        self._env = env

    async def reset(self) -> Observation:
        return await self._env.reset()

    async def step(self, completion: Completion) -> Observation | Terminal:
        await asyncio.sleep(STEP_S)
        return await self._env.step(completion)

    async def finish(self, status: RolloutStatus) -> Terminal:
        return await self._env.finish(status)

    async def close(self) -> None:
        await self._env.close()


@dataclass(frozen=True, kw_only=True)
class SlowTask(AlphabetSortTask):
    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return SlowEnv(super().environment(problem, tokenizer=tokenizer, limits=limits))


task = {name: getattr(tiny.task, name) for name in tiny.task.__dataclass_fields__}
config = replace(tiny, name="slow_env", task=SlowTask(**task))
