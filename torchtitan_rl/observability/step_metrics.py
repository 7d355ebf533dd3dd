"""Records of the controller in, metrics of `metric_table` out. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import fmean

from torchtitan_rl.observability.asynchrony import TRAINER_IDLE, idle_share
from torchtitan_rl.observability.evaluation import evaluation_statistics
from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.observability.rollout_metrics import (
    groups_by_part,
    rollout_metrics,
    staleness_metrics,
)
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    BufferStates,
    EvaluationRecord,
    LedgerTotals,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.weights.handle import Fetched


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Everything that its record tells of one step."""
    metrics = rollout_metrics(record.groups, Split.TRAIN, flat=record.flat)
    metrics |= {f"trainer/{name}": value for name, value in record.trainer.items()}
    metrics |= _token_metrics(record.tokens, record.wall_s)
    if record.trainer:
        metrics |= staleness_metrics(record.groups, trained_version=record.version - 1)
    if record.publish_s:
        metrics["sync/publish_s"] = record.publish_s
    metrics |= _sync_metrics(record.syncs)
    sync_s = record.publish_s + sum(sync.stage_s + sync.pull_s for sync in record.syncs)
    if record.trainer_busy_s is not None:
        metrics[TRAINER_IDLE] = idle_share(wall_s=record.wall_s, busy_s=record.trainer_busy_s)
    if record.buffer is not None:
        metrics |= buffer_metrics(record.buffer) | overtaken_metrics(
            record.groups, record.overtaken
        )
    metrics |= {f"dataset/{name}": value for name, value in record.dataset.items()}
    if record.totals is not None:
        metrics |= total_metrics(record.totals)
    return metrics | {
        "policy/version": float(record.version),
        "time/rollout_s": record.rollout_s,
        "time/train_s": record.train_s,
        "time/sync_s": sync_s,
        "time/switch_s": record.switch_s,
        "time/step_s": record.wall_s,
    }


def evaluation_metrics(record: EvaluationRecord) -> dict[str, float]:
    metrics = rollout_metrics(record.groups, Split.EVALUATION)
    parts = {f"of_task/{part}/": of_part for part, of_part in groups_by_part(record.groups).items()}
    for prefix, groups in {"": record.groups, **parts}.items():
        statistics = evaluation_statistics(groups, success_reward=record.success_reward)
        metrics |= {
            f"{Split.EVALUATION.value}/{prefix}{name}": value for name, value in statistics.items()
        }
    return metrics | {
        "time/evaluation_s": record.seconds,
        "policy/version": float(record.version),
    }


def account_metrics(record: AccountRecord) -> dict[str, float]:
    return {
        "account/sampled_tokens": float(record.sampled),
        "account/lost_tokens": float(record.lost),
        "account/unaccounted_tokens": float(record.unaccounted),
        "policy/version": float(record.version),
    }


def buffer_metrics(states: BufferStates) -> dict[str, float]:
    return {f"buffer/{one.name}": float(getattr(states, one.name)) for one in fields(states)}


def overtaken_metrics(
    groups: Iterable[RolloutGroup], overtaken: frozenset[str]
) -> dict[str, float]:
    """Length and reward of the groups that younger ones overtook (``overtaken``) and of the
    others (``on_time``): whether training without the slow groups would favour short answers.
    """
    groups = list(groups)
    late = [group for group in groups if group.group_id in overtaken]
    if not late:
        return {"overtaken/groups": 0.0}
    on_time = [group for group in groups if group.group_id not in overtaken]
    return _part_metrics("overtaken", late) | _part_metrics("on_time", on_time)


def total_metrics(totals: LedgerTotals) -> dict[str, float]:
    """The run's account; what is counted by cause is given in all and by cause."""
    metrics: dict[str, float] = {}
    for field in fields(totals):
        name, value = f"total/{field.name}", getattr(totals, field.name)
        if isinstance(value, Mapping):
            metrics |= {f"{name}/{cause}": float(number) for cause, number in value.items()}
            value = sum(value.values())
        metrics[name] = float(value)
    return metrics


def _token_metrics(tokens: TokenCounts, wall_s: float) -> dict[str, float]:
    metrics = {
        "tokens/generated": float(tokens.generated),
        "tokens/trained": float(tokens.trained),
        "tokens/discarded": float(sum(tokens.discarded.values())),
        "tokens/generated_per_second": tokens.generated / wall_s if wall_s > 0 else 0.0,
    }
    return metrics | {f"tokens/discarded/{c}": float(n) for c, n in tokens.discarded.items()}


def _sync_metrics(syncs: Sequence[SyncReport]) -> dict[str, float]:
    """Of all syncs since the previous row; nothing where there was none."""
    if not syncs:
        return {}
    pulls = [pull for sync in syncs for pull in sync.pulls]
    stalls_ms = [1000 * pull.stall_s for pull in pulls]
    metrics: dict[str, float] = {}
    if stalls_ms:  # else every replica lagged behind
        metrics |= {
            "sync/stage_s": max(sync.stage_s for sync in syncs),
            "sync/pull_s": max(sync.pull_s for sync in syncs),
            "sync/pull_stall_ms_mean": fmean(stalls_ms),
            "sync/pull_stall_ms_max": max(stalls_ms),
        }
    newest = syncs[-1]
    return metrics | {
        "sync/running_requests": float(sum(pull.running_requests for pull in pulls)),
        "sync/lost_replicas": float(len(newest.lost)),
        "sync/lagging_replicas": float(len(newest.lagging)),
        "sync/held_replicas": float(len(newest.held)),
    }


def fetch_metrics(fetches: Sequence[Fetched]) -> dict[str, float]:
    """Of the weights that hosts fetched; nothing where there was no fetch."""
    if not fetches:
        return {}
    return {
        "sync/host_fetches": float(len(fetches)),
        "sync/host_fetch_bytes": float(sum(fetched.num_bytes for fetched in fetches)),
        "sync/host_fetch_s": max(fetched.seconds for fetched in fetches),
    }


def _part_metrics(part: str, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    metrics = {f"{part}/groups": float(len(groups))}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if rewards:
        metrics[f"{part}/reward_mean"] = fmean(rewards)
    if rollouts:
        metrics[f"{part}/response_length_mean"] = fmean(r.num_sampled_tokens for r in rollouts)
    return metrics
