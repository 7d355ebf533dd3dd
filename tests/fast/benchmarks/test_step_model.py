"""The model of an engine step, and the bound that follows from it, against known answers."""

from __future__ import annotations

import random

import pytest

from benchmarks.generation_sides import StepSample
from benchmarks.step_model import fit
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
