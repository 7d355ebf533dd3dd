import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from torchtitan_rl.observability.asynchrony import (
    Advisor,
    Bottleneck,
    Overlap,
    advice,
    idle_share,
    overlap_of,
)
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.observability.step_metrics import (
    buffer_metrics,
    overtaken_metrics,
    total_metrics,
)
from torchtitan_rl.orchestration.records import BufferStates, LedgerTotals
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


def test_efficiency_is_the_best_possible_step_over_the_real_one() -> None:
    # A step of 10 s with 4 s of training and 7 s of generation could take 7 s.
    assert overlap(0.6, 0.3).efficiency == pytest.approx(7 / 10)


def test_parts_that_share_their_devices_are_not_told_to_overlap_on_them() -> None:
    advisor = warm_advisor(staleness=1, is_colocated=True, every_steps=1)
    assert "has the devices 40% of the time; with placement separate" in str(
        advisor.observe(overlap(0.6, 0.5))
    )


def test_no_advice_promises_an_amount_of_time() -> None:
    """What overlapping gains is less than the time that the parts wait: the controller, and pulls,
    take some of it (`benchmarks/results/async_training.json`: 0.84 of the ideal at S = 1)."""
    for idle in itertools.product((0.0, 0.3, 0.6), repeat=2):
        for staleness, is_colocated in itertools.product((0, 1), (False, True)):
            text = advice(overlap(*idle), staleness=staleness, is_colocated=is_colocated)
            assert "less time" not in text


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


def test_advice_is_about_the_mean_of_the_period() -> None:
    advisor = warm_advisor(staleness=1, every_steps=2)
    advisor.observe(overlap(0.8, 0.0))
    assert "the trainer waits 60% of the time" in str(advisor.observe(overlap(0.4, 0.0)))


def test_short_runs_get_no_advice_at_their_end_and_step_1_never_counts() -> None:
    advisor = Advisor(staleness=1)
    advisor.observe(overlap(0.9, 0.0))
    for _ in range(Advisor.MIN_STEPS):
        assert advisor.conclude() is None
        advisor.observe(overlap(0.0, 0.6))
    assert "replicas have nothing to do 60% of the time" in str(advisor.conclude())


def test_the_overlap_is_known_where_both_parts_were_measured() -> None:
    metrics = {"overlap/trainer_idle_share": 0.2, "overlap/generator_idle_share": 0.1}
    check_names(metrics)
    assert overlap_of(metrics) == overlap(0.2, 0.1)
    assert overlap_of({"overlap/trainer_idle_share": 0.2}) is None


@pytest.mark.parametrize(
    ("wall_s", "busy_s", "share"), [(10, 4, 0.6), (10, 10.1, 0), (0, 0, 0), (10, 0, 1)]
)
def test_idle_shares_stay_between_0_and_1(wall_s: float, busy_s: float, share: float) -> None:
    assert idle_share(wall_s=wall_s, busy_s=busy_s) == pytest.approx(share)


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


def test_where_nobody_was_overtaken_only_that_is_said() -> None:
    metrics = overtaken_metrics([parked_group("a", 2, 1.0)], frozenset({"another"}))
    assert metrics == {"overtaken/groups": 0}


def test_groups_without_any_reward_have_no_mean_reward() -> None:
    metrics = overtaken_metrics([parked_group("a", 2, None)], frozenset({"a"}))
    assert "overtaken/reward_mean" not in metrics
    assert metrics["on_time/groups"] == 0


def test_every_name_of_buffer_and_totals_is_in_the_table() -> None:
    check_names(
        buffer_metrics(BufferStates(waiting=1, running=2, finished=3, batched=4, capacity=12))
    )
    metrics = total_metrics(
        LedgerTotals(
            tokens_generated=10,
            tokens_trained=4,
            tokens_masked={"nonfinite_logprob": 1},
            tokens_discarded={"restarted": 2, "env_error": 1},
            tokens_buffered=2,
            groups_admitted=5,
            groups_trained=3,
            groups_discarded={"zero_variance": 1},
            groups_buffered=1,
        )
    )
    check_names(metrics)
    assert metrics["total/tokens_discarded"] == 3
    assert metrics["total/tokens_discarded/restarted"] == 2
    assert metrics["total/groups_discarded/zero_variance"] == 1
