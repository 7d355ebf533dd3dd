from dataclasses import replace

import pytest
import torch

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from torchtitan_rl.observability.metrics import evaluation_metrics, fetch_metrics, step_metrics
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.orchestration.ledger import TokenLedger
from torchtitan_rl.orchestration.records import (
    BufferStates,
    EvaluationRecord,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.training.losses import LossTokens, StepTotals, loss_metrics, policy_loss
from torchtitan_rl.types import PullReport, VersionRun
from torchtitan_rl.weights.handle import Fetched, SharedMemoryHandle


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
        "shared_share padding_share step_s tokens_per_second masked_nonfinite"
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


def test_what_only_an_asynchronous_run_knows_is_in_the_table_and_adds_up() -> None:
    ledger = TokenLedger()
    ledger.admit("g")
    ledger.generate("g", 2)
    record = replace(
        make_record({"loss": 0.5}),
        wall_s=10.0,
        trainer_busy_s=4.0,
        buffer=BufferStates(waiting=1, running=2, finished=3, batched=4, capacity=12),
        overtaken=frozenset({"g"}),
        totals=ledger.totals(),
    )
    metrics = step_metrics(record)
    check_names(metrics)
    expected = {
        "time/step_s": 10.0,
        "tokens/generated_per_second": 10.0,
        "overlap/trainer_idle_share": 0.6,
        "buffer/capacity": 12.0,
        "overtaken/groups": 1.0,
        "total/tokens_buffered": 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_an_evaluation_of_a_mixture_has_the_same_of_each_part() -> None:
    sums, words = (
        [
            replace(group, problem=replace(group.problem, task=part))
            for group in (make_group(make_rollout(first)), make_group(make_rollout(second)))
        ]
        for part, first, second in (("sums", 1.0, 1.0), ("gym/words", 1.0, 0.0))
    )
    record = EvaluationRecord(
        step=8, version=8, groups=(*sums, *words), seconds=2.0, success_reward=1.0
    )
    metrics = evaluation_metrics(record)
    check_names(metrics)
    assert metrics["evaluation/pass_at_k/1"] == 0.75
    assert metrics["evaluation/of_task/sums/pass_at_k/1"] == 1.0
    assert metrics["evaluation/of_task/gym/words/pass_at_k/1"] == 0.5
    assert metrics["evaluation/of_task/gym/words/reward_ci95_high"] > 0.5


def test_a_step_has_the_metrics_of_its_dataset() -> None:
    metrics = step_metrics(replace(make_record({}), dataset={"words/resting/easy": 3.0}))
    check_names(metrics)
    assert metrics["dataset/words/resting/easy"] == 3.0


def test_all_syncs_since_the_previous_row_are_in_a_steps_metrics():
    syncs = (
        SyncReport(version=7, stage_s=0.4, pull_s=0.1, pulls=(pull(0.01),), lost=("r0",)),
        SyncReport(version=8, stage_s=0.1, pull_s=0.2, pulls=(pull(0.03),), lost=("r0",)),
    )
    metrics = step_metrics(replace(make_record({}), syncs=syncs))
    expected = {
        "sync/stage_s": 0.4,
        "sync/pull_s": 0.2,
        "sync/pull_stall_ms_mean": 20.0,
        "sync/running_requests": 4.0,
        "sync/lost_replicas": 1.0,
        "time/sync_s": 0.5 + 0.4 + 0.1 + 0.1 + 0.2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_fetches_of_hosts_are_added_up() -> None:
    shared = SharedMemoryHandle(version=1, path="/v1", num_bytes=9)
    fetches = [Fetched(handle=shared, num_bytes=100, seconds=seconds) for seconds in (0.2, 0.5)]
    assert fetch_metrics([]) == {}
    metrics = fetch_metrics(fetches)
    check_names(metrics)
    assert metrics == {
        "sync/host_fetches": 2.0,
        "sync/host_fetch_bytes": 200.0,
        "sync/host_fetch_s": 0.5,
    }
