"""What is said of sick and of healthy runs: of recorded ones, and of rows made by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.recorded_runs import RUNS, recorded
from torchtitan_rl.observability.explain import Cause, RunFacts, diagnose, summarize

NUM_STEPS = 30


def row(step: int, **changes: float) -> dict[str, Any]:
    """A step of a run that learns: the reward rises from 0.3 to 0.8, with noise."""
    noise = random.Random(step)
    done = step / NUM_STEPS
    values = {
        "train/reward_mean": 0.3 + 0.5 * done + noise.gauss(0.0, 0.03),
        "train/reward_max": 1.0,
        "train/reward_std": 0.3,
        "train/groups": 16.0,
        "train/response_length_mean": 40.0 + noise.gauss(0.0, 2.0),
        "train/groups_without_variance_share": 0.1,
        "train/rollouts": 64.0,
        "train/ended_completed": 63.0,
        "train/ended_max_tokens": 1.0,
        "train/phase_s/environment_mean": 0.1,
        "train/phase_s/generation_mean": 1.0,
        "trainer/entropy": 1.0 - 0.4 * done,
        "trainer/age_0/logprob_diff_mean": 1e-5,
        "time/step_s": 2.0,
        "time/rollout_s": 1.0,
        "time/train_s": 0.9,
        "overlap/trainer_idle_share": 0.5,
        "overlap/generator_idle_share": 0.5,
    }
    named = {name.replace("__", "/"): value for name, value in changes.items()}
    return {"kind": "step", "step": step, **values, **named}


def facts(change: Callable[[int], dict[str, float]] = lambda step: {}, **more: Any) -> RunFacts:
    steps = [row(step, **change(step)) for step in range(1, NUM_STEPS + 1)]
    return RunFacts(steps=steps, **more)


def causes(run: RunFacts) -> list[Cause]:
    return [found.cause for found in diagnose(run)]


ASYNCHRONOUS = {"schedule.staleness": 2}


def tokens(**seconds: float) -> dict[str, dict[int, float]]:
    """A token takes so long on each replica; every fifth step is slow on all of them."""
    return {
        name: {step: one_s * (1 if step % 5 else 9) for step in range(1, NUM_STEPS + 1)}
        for name, one_s in seconds.items()
    }


TOKENS = tokens(replica0=0.01, replica1=0.011, replica2=0.012)


@pytest.mark.parametrize("name", sorted(path.stem for path in RUNS.glob("*.json")))
def test_of_a_recorded_run_exactly_the_planted_causes_are_named(name: str) -> None:
    run = recorded(name)
    assert [str(found) for found in causes(run.facts)] == run.planted
    assert summarize(run.facts)


@pytest.mark.parametrize(
    ("cause", "change", "more"),
    [
        (
            Cause.LEARNING_RATE,
            lambda step: {
                "train__reward_mean": 0.5 - 0.4 * step / NUM_STEPS,
                "trainer__entropy": 1.0 / step,
            },
            {},
        ),
        (
            Cause.LEARNING_RATE,  # all after the first step
            lambda step: {
                "train__reward_mean": 0.4 if step == 1 else 0.0,
                "train__groups_without_variance_share": 0.0 if step == 1 else 1.0,
                "trainer__entropy": 0.8 if step == 1 else 0.001,
            },
            {},
        ),
        (
            Cause.ZERO_VARIANCE,
            lambda step: {
                "train__groups_without_variance_share": 0.98,
                "train__reward_mean": 0.01,
                "train__reward_max": 0.1,
            },
            {},
        ),
        (
            Cause.TEMPERATURE,
            lambda step: {"train__groups_without_variance_share": 0.95},
            {"fields": {"rollout.sampling.temperature": 0.05}},
        ),
        (
            Cause.SLOW_ENVIRONMENT,
            lambda step: {"train__phase_s__environment_mean": 3.0, "time__rollout_s": 1.5},
            {},
        ),
        (Cause.SLOW_REWARD, lambda step: {"train__phase_s__reward_mean": 3.0}, {}),
        (Cause.SLOW_REPLICA, lambda step: {}, {"token_s": TOKENS | tokens(replica3=0.03)}),
        (
            Cause.STARVING_TRAINER,
            lambda step: {
                "overlap__trainer_idle_share": 0.7,
                "overlap__generator_idle_share": 0.01,
            },
            {"fields": ASYNCHRONOUS},
        ),
        (
            Cause.SLOW_TRAINER,
            lambda step: {
                "overlap__trainer_idle_share": 0.01,
                "overlap__generator_idle_share": 0.7,
            },
            {"fields": ASYNCHRONOUS},
        ),
        (
            Cause.SMALL_BUFFER,
            lambda step: {
                "overlap__trainer_idle_share": 0.5,
                "overlap__generator_idle_share": 0.4,
            },
            {"fields": ASYNCHRONOUS},
        ),
        (
            Cause.LENGTH_COLLAPSE,
            lambda step: {
                "train__response_length_mean": 40.0 - step,
                "train__reward_mean": 0.5 - 0.01 * step,
            },
            {},
        ),
        (Cause.CUT_ANSWERS, lambda step: {"train__ended_max_tokens": 60.0}, {}),
        (Cause.FAILED_ROLLOUTS, lambda step: {"train__ended_env_error": 20.0}, {}),
        (Cause.MISMATCH, lambda step: {"trainer__age_0__logprob_diff_mean": 0.5}, {}),
    ],
)
def test_the_cause_of_a_sick_run_is_named_alone(cause, change, more) -> None:
    assert causes(facts(change, **more)) == [cause]


@pytest.mark.parametrize(
    "more", [{}, {"token_s": TOKENS}, {"fields": {"rollout.sampling.temperature": 1.0}}]
)
def test_nothing_is_found_in_a_healthy_run(more) -> None:
    run = facts(**more)
    assert diagnose(run) == []
    assert any("it rises" in line for line in summarize(run))


def test_a_run_without_enough_steps_or_with_gaps_is_described_as_far_as_it_goes() -> None:
    assert summarize(RunFacts(steps=[])) == ["no step has ended yet"]
    few = RunFacts(steps=[{"step": 1, "time/step_s": 1.0, "time/rollout_s": None}])
    assert diagnose(few) == []
    assert summarize(few)


def test_evaluations_are_compared_by_their_intervals() -> None:
    def evaluation(step: int, low: float, high: float) -> dict[str, Any]:
        values = {"mean": (low + high) / 2, "ci95_low": low, "ci95_high": high}
        named = {f"evaluation/reward_{name}": value for name, value in values.items()}
        return {"kind": "evaluation", "step": step, **named}

    def said(*evaluations: dict[str, Any]) -> str:
        return summarize(facts(evaluations=evaluations))[0]

    assert "it learns" in said(evaluation(0, 0.2, 0.3), evaluation(30, 0.6, 0.7))
    assert "it gets worse" in said(evaluation(0, 0.6, 0.7), evaluation(30, 0.2, 0.3))
    assert "no difference yet" in said(evaluation(0, 0.2, 0.4), evaluation(30, 0.3, 0.5))


@pytest.mark.parametrize(
    ("replicas_at_the_end", "given_up", "is_found"),
    [
        (1.0, "after 2 restarts in a row", True),
        (2.0, "after 2 restarts in a row", False),
        (1.0, None, False),
    ],
)
def test_a_replica_that_was_given_up_is_found_unless_another_was_added(
    replicas_at_the_end: float, given_up: str | None, is_found: bool
) -> None:
    run = facts(
        lambda step: {"engine__replicas": 2.0 if step < 20 else replicas_at_the_end},
        failures=[{"part": "replica", "name": "replica0", "given_up": given_up}],
    )
    assert causes(run) == [Cause.GIVEN_UP] * is_found
    if is_found:
        assert "the run has 1 of 2 replicas" in str(diagnose(run)[0])
