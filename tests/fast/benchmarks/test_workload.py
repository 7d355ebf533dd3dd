"""The rollouts that benchmarks share, and the ways to run them, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.workload import (
    all_at_once,
    draw_workload,
    in_rounds,
    one_after_another,
)
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.types import GenerationRequest

WAYS: dict[str, Callable[..., Any]] = {
    "one": one_after_another,
    "rounds": partial(in_rounds, batch=3),
    "all": all_at_once,
}


class TokenASecond:
    """Completes requests side by side, each of its tokens in a second."""

    def __init__(self) -> None:
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.spans: dict[str, tuple[float, float]] = {}

    async def __call__(self, request: GenerationRequest) -> tuple[int, ...]:
        loop = asyncio.get_running_loop()
        began_s, new = loop.time(), request.sampling.max_tokens
        await asyncio.sleep(new)
        self.prompts[request.request_id] = request.prompt_token_ids
        self.spans[request.request_id] = (began_s, loop.time())
        return (7,) * new


def test_every_way_asks_for_the_same_prompts_and_tokens():
    workload = draw_workload("pareto", rollouts=7, turns=3, delay_s=2.0)
    asked = {}
    for name, way in WAYS.items():
        engine = TokenASecond()
        timing = run_virtually(way(workload, engine))
        assert timing.num_tokens == workload.num_sampled
        assert len(timing.latencies_s) == 21
        asked[name] = engine.prompts
    assert asked["one"] == asked["rounds"] == asked["all"]
    rollout = workload.rollouts[0]
    first, second = rollout.turns[:2]
    assert asked["all"][f"{rollout.rollout_id}/t1"] == (
        first.new_token_ids + (7,) * first.num_tokens + second.new_token_ids
    )
