"""The model of an engine step, and the bound that follows from it, against known answers."""

from __future__ import annotations

import random

import pytest

from benchmarks.generation_sides import StepSample
from benchmarks.step_model import fit, least_seconds
from benchmarks.workload import PlannedRollout, PlannedTurn, Workload


def step(*, tokens: int, prompt_tokens: int, kv_use: float, seconds: float) -> StepSample:
    return StepSample(
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        kv_use=kv_use,
        seconds=seconds,
        adding_s=0.0,
    )


def samples(base: float, per_token: float, per_prompt: float, per_kv: float) -> list[StepSample]:
    chance = random.Random(0)
    drawn = []
    for _ in range(200):
        tokens, prompt = chance.randint(1, 64), chance.choice([0, 0, 48, 300])
        kv_use = chance.random()
        seconds = base + per_token * tokens + per_prompt * prompt + per_kv * kv_use
        drawn.append(step(tokens=tokens, prompt_tokens=prompt, kv_use=kv_use, seconds=seconds))
    return drawn


def workload(*lengths: int) -> Workload:
    """A rollout of one turn for each length."""
    return Workload(
        distribution="uniform",
        rollouts=tuple(
            PlannedRollout(
                rollout_id=f"r{i}",
                turns=(PlannedTurn(new_token_ids=(1,), num_tokens=n, delay_s=0.0, seed=i),),
            )
            for i, n in enumerate(lengths)
        ),
    )


def test_exact_steps_give_their_coefficients_back():
    model = fit(samples(4e-3, 2e-4, 3e-5, 1e-3))
    assert model.base == pytest.approx(4e-3)
    assert model.per_token == pytest.approx(2e-4)
    assert model.per_prompt_token == pytest.approx(3e-5)
    assert model.per_kv_use == pytest.approx(1e-3)
    assert model.error == pytest.approx(0.0, abs=1e-9)


def test_a_term_that_would_be_negative_is_left_out():
    model = fit(samples(4e-3, 2e-4, 3e-5, -1e-3))
    assert model.per_kv_use == 0.0
    assert min(model.base, model.per_token, model.per_prompt_token) > 0
    assert model.error > 0


def test_the_bound_of_a_run_that_wastes_no_step_is_its_own_time():
    """Two rollouts of 10 tokens, always together: as few steps as there can be."""
    steps = [
        step(tokens=2, prompt_tokens=2 * (i == 0), kv_use=i / 10, seconds=1e-3 + 2e-4 * 2)
        for i in range(10)
    ]
    model = fit(samples(1e-3, 2e-4, 0.0, 0.0))
    spent_s = sum(one.seconds for one in steps)
    assert least_seconds(workload(10, 10), model, steps, max_running=2) == pytest.approx(spent_s)


@pytest.mark.parametrize(
    ("lengths", "max_running", "steps"),
    [((90, 5, 5), 4, 90), ((30, 30, 30, 30), 2, 60), ((30, 30, 31), 2, 46)],
)
def test_the_bound_has_the_steps_of_the_longest_rollout_or_of_full_batches(
    lengths, max_running, steps
):
    model = fit(samples(1e-3, 2e-4, 0.0, 0.0))
    tokens = sum(lengths)
    run = [step(tokens=1, prompt_tokens=0, kv_use=0.0, seconds=1.0)] * tokens
    assert least_seconds(workload(*lengths), model, run, max_running=max_running) == pytest.approx(
        steps * 1e-3 + tokens * 2e-4
    )
