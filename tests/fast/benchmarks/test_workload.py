"""The rollouts that benchmarks share, and the ways to run them, without an engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import pytest

from benchmarks.workload import (
    MAX_OUTPUT,
    all_at_once,
    draw_length,
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


@pytest.mark.parametrize("name", ["pareto", "lognormal", "uniform"])
def test_lengths_have_a_median_of_41_and_an_end(name):
    chance = random.Random(0)
    lengths = [draw_length(name, chance) for _ in range(4000)]
    assert 38 <= median(lengths) <= 44
    assert min(lengths) >= 1
    assert max(lengths) == (80 if name == "uniform" else MAX_OUTPUT)


def test_the_same_seed_draws_the_same_rollouts_and_another_one_others():
    drawn = [draw_workload("pareto", rollouts=9, turns=2, seed=seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1]
    assert drawn[0].num_sampled != drawn[2].num_sampled


def test_delays_have_their_mean_and_leave_the_rest_as_it_is():
    without, with_delays = (
        draw_workload("pareto", rollouts=500, turns=2, delay_s=mean_s) for mean_s in (0.0, 0.05)
    )
    delays = [turn.delay_s for rollout in with_delays.rollouts for turn in rollout.turns]
    assert fmean(delays) == pytest.approx(0.05, rel=0.1)
    assert not any(turn.delay_s for rollout in without.rollouts for turn in rollout.turns)
    for one, other in zip(without.rollouts, with_delays.rollouts, strict=True):
        for turn, delayed in zip(one.turns, other.turns, strict=True):
            assert replace(delayed, delay_s=0.0) == turn


def test_siblings_share_their_first_prompt_alone():
    rollouts = draw_workload("uniform", rollouts=5, turns=2, group_size=4).rollouts
    assert rollouts[0].turns[0].new_token_ids == rollouts[3].turns[0].new_token_ids
    assert rollouts[0].turns[0].new_token_ids != rollouts[4].turns[0].new_token_ids
    assert rollouts[0].turns[1].new_token_ids != rollouts[1].turns[1].new_token_ids
    assert len({turn.seed for rollout in rollouts for turn in rollout.turns}) == 10


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


def test_one_after_another_runs_one_request_at_a_time():
    workload = draw_workload("uniform", rollouts=4, turns=2)
    engine = TokenASecond()
    run_virtually(one_after_another(workload, engine))
    assert max(end for _, end in engine.spans.values()) == workload.num_sampled


def test_a_round_waits_for_the_slowest_of_the_one_before():
    workload = draw_workload("pareto", rollouts=6, turns=2, delay_s=5.0)
    engine = TokenASecond()
    run_virtually(in_rounds(workload, engine, batch=3))
    for start in (0, 3):
        batch = workload.rollouts[start : start + 3]
        ended_s = max(engine.spans[f"{rollout.rollout_id}/t0"][1] for rollout in batch)
        delay_s = max(rollout.turns[0].delay_s for rollout in batch)
        for rollout in batch:
            began_s = engine.spans[f"{rollout.rollout_id}/t1"][0]
            assert began_s == pytest.approx(ended_s + delay_s)


def test_all_at_once_is_as_long_as_its_longest_rollout():
    workload = draw_workload("pareto", rollouts=6, turns=3)
    engine = TokenASecond()
    run_virtually(all_at_once(workload, engine))
    assert max(end for _, end in engine.spans.values()) == workload.longest_rollout


def test_time_without_a_request_is_waiting():
    workload = draw_workload("pareto", rollouts=6, turns=2, delay_s=5.0)
    rounds = run_virtually(in_rounds(workload, TokenASecond(), batch=3))
    slowest_s = [
        max(rollout.turns[number].delay_s for rollout in workload.rollouts[start : start + 3])
        for start in (0, 3)
        for number in (0, 1)
    ]
    assert rounds.waiting_s == pytest.approx(sum(slowest_s))
    alone = run_virtually(one_after_another(workload, TokenASecond()))
    assert alone.seconds - alone.waiting_s == pytest.approx(workload.num_sampled)
    together = run_virtually(all_at_once(workload, TokenASecond()))
    assert 0.0 < together.waiting_s < rounds.waiting_s


def test_an_answer_of_another_length_ends_the_measurement():
    async def short(request: GenerationRequest) -> tuple[int, ...]:
        return (7,) * (request.sampling.max_tokens - 1)

    workload = draw_workload("uniform", rollouts=1, turns=1)
    with pytest.raises(RuntimeError, match="not"):
        run_virtually(one_after_another(workload, short))
