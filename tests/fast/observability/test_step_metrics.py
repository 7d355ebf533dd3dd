from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from torchtitan_rl.observability.metrics import cost_metrics, evaluation_metrics, step_metrics
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.orchestration.records import (
    EvaluationRecord,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import LossTokens, StepTotals, loss_metrics, policy_loss
from torchtitan_rl.training.preference import preference_metrics
from torchtitan_rl.types import PullReport, VersionRun


def pull(stall_s: float) -> PullReport:
    return PullReport(version=8, stall_s=stall_s, running_requests=2, recomputed=True)


def make_record(trainer: dict[str, float]) -> StepRecord:
    turn = make_turn((1,), (2, 3), versions=(VersionRun(0, 7),))
    return StepRecord(
        step=8,
        version=8,
        groups=(make_group(make_rollout(1.0, turn, metrics={"reward/exact": 1.0})),),
        tokens=TokenCounts(generated=100, trained=70, discarded={"env_error": 20, "masked": 10}),
        trainer=trainer,
        syncs=(SyncReport(version=8, stage_s=0.1, pull_s=0.2, pulls=(pull(0.01), pull(0.03))),),
        publish_s=0.5,
        rollout_s=4.0,
        train_s=3.0,
        wall_s=8.0,
    )


def trainer_metrics() -> dict[str, float]:
    """The loss's own names, under every option and age, and those that `PolicyTrainer` adds."""
    ones_T = torch.ones(4)
    tokens = LossTokens(
        logprobs_T=-ones_T,
        behaviour_T=-ones_T,
        advantages_T=ones_T,
        trained_T=ones_T.bool(),
        ages_T=torch.arange(4),
        sequences_T=torch.arange(4),
        reference_T=-ones_T,
    )
    output = policy_loss(
        tokens,
        totals=StepTotals(num_tokens=4, num_sequences=4),
        config=LossConfig(
            proximal_policy="interpolated",
            importance_weight="token",
            mask="token",
            kl_coefficient=0.1,
        ),
    )
    of_loss = loss_metrics(output.sums, output.maxima, num_trained=4)
    added = (
        "loss entropy grad_norm learning_rate trained_tokens computed_tokens "
        "shared_share padding_share step_s tokens_per_second masked_nonfinite "
        "tokens_per_second_per_rank flops_per_second_per_rank mfu"
    )
    return dict.fromkeys([*of_loss, *added.split()], 0.0)


def test_every_metric_of_a_step_and_of_a_evaluation_is_in_the_table() -> None:
    record = make_record(trainer_metrics())
    check_names(step_metrics(record))
    check_names(
        evaluation_metrics(
            EvaluationRecord(
                step=8, version=8, groups=record.groups, seconds=2.0, success_reward=1.0
            )
        )
    )


def test_sync_and_token_metrics_reduce_as_the_table_says() -> None:
    metrics = step_metrics(make_record({"loss": 0.5}))
    expected = {
        "trainer/loss": 0.5,
        "sync/publish_s": 0.5,
        "sync/pull_stall_ms_mean": 20.0,
        "sync/pull_stall_ms_max": 30.0,
        "sync/running_requests": 4.0,
        "tokens/generated_per_second": 12.5,
        "tokens/discarded/env_error": 20.0,
        "time/step_s": 8.0,
        "policy/staleness_max": 0.0,
        "train/task/reward/exact": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_groups_without_a_pair_are_those_that_dpo_did_not_train_on() -> None:
    pairs = preference_metrics(np.array([[0.2, 0.1], [0.1, 0.2]]))
    group = make_group(make_rollout(1.0))
    metrics = step_metrics(replace(make_record(pairs), groups=(group,) * 5))
    check_names(metrics)
    assert metrics["trainer/preference/groups_without_pair_share"] == pytest.approx(0.6)
    assert metrics["trainer/preference/accuracy"] == 0.5
    without_groups = step_metrics(replace(make_record(pairs), groups=()))
    assert "trainer/preference/groups_without_pair_share" not in without_groups


def test_a_step_costs_its_time_on_all_devices_where_a_price_is_given() -> None:
    record = make_record({})  # 100 tokens in 8 s
    free = cost_metrics(record, num_devices=4, dollars_per_hour=0.0)
    assert free == {"tokens/generated_per_second_per_device": 100 / 8 / 4}
    priced = cost_metrics(record, num_devices=4, dollars_per_hour=45.0)
    check_names(priced)
    assert priced == free | {"cost/dollars": 0.1, "cost/dollars_per_million_tokens": 1000.0}
