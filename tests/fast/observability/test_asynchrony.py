from dataclasses import replace
from typing import Any

import pytest

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from torchtitan_rl.observability.engine import (
    Advisor,
    Bottleneck,
    Overlap,
    advice,
)
from torchtitan_rl.observability.metrics import overtaken_metrics
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.types import RolloutGroup, RolloutStatus


def overlap(trainer_idle: float, generator_idle: float) -> Overlap:
    return Overlap(trainer_idle_share=trainer_idle, generator_idle_share=generator_idle)


def warm_advisor(**settings: Any) -> Advisor:
    """One that has seen the first step."""
    advisor = Advisor(**settings)
    assert advisor.observe(overlap(0.0, 0.0)) is None
    return advisor


@pytest.mark.parametrize(
    ("trainer_idle", "generator_idle", "verdict"),
    [
        (0.6, 0.02, Bottleneck.GENERATOR),
        (0.02, 0.6, Bottleneck.TRAINER),
        (0.05, 0.1, Bottleneck.BALANCED),
        (0.6, 0.4, Bottleneck.WAITING),
        (0.3, 0.3, Bottleneck.WAITING),
        (0.0, 0.0, Bottleneck.BALANCED),
    ],
)
def test_the_part_that_is_always_busy_while_the_other_waits_is_the_bottleneck(
    trainer_idle: float, generator_idle: float, verdict: Bottleneck
) -> None:
    assert overlap(trainer_idle, generator_idle).bottleneck is verdict


@pytest.mark.parametrize(
    ("trainer_idle", "generator_idle", "staleness", "words"),
    [
        (0.62, 0.02, 2, "the trainer waits 62% of the time; give generation more devices"),
        (0.02, 0.5, 2, "nothing to do 50% of the time; give the trainer more devices"),
        (0.6, 0.4, 0, "with schedule.staleness 1 they overlap"),
        (0.3, 0.2, 1, "where answers differ in length, a larger schedule.staleness or"),
        (0.02, 0.03, 1, "balanced"),
    ],
)
def test_advice_names_the_knob_that_helps(
    trainer_idle: float, generator_idle: float, staleness: int, words: str
) -> None:
    assert words in advice(overlap(trainer_idle, generator_idle), staleness=staleness)


def test_advice_is_given_once_per_period_where_the_verdict_changed() -> None:
    advisor = warm_advisor(staleness=1, every_steps=3)
    waiting, busy = overlap(0.6, 0.0), overlap(0.0, 0.6)
    said = [advisor.observe(one) for one in [waiting] * 6 + [busy] * 4]
    assert [number for number, text in enumerate(said, start=1) if text] == [3, 9]
    assert "generation is the bottleneck" in str(said[2])
    assert "the trainer is the bottleneck" in str(said[8])


def parked_group(group_id: str, length: int, *rewards: float | None) -> RolloutGroup:
    rollouts = [
        make_rollout(
            reward,
            make_turn((1,), (2,) * length),
            status=RolloutStatus.ENV_ERROR if reward is None else RolloutStatus.COMPLETED,
        )
        for reward in rewards
    ]
    return replace(make_group(*rollouts), group_id=group_id)


def test_groups_that_were_overtaken_are_described_beside_the_others() -> None:
    groups = [parked_group("a", 2, 1.0, 1.0), parked_group("b", 8, 0.5, None)]
    metrics = overtaken_metrics(groups, frozenset({"b"}))
    check_names(metrics)
    assert metrics == {
        "overtaken/groups": 1,
        "overtaken/reward_mean": 0.5,
        "overtaken/response_length_mean": 8,
        "on_time/groups": 1,
        "on_time/reward_mean": 1.0,
        "on_time/response_length_mean": 2,
    }
