"""Computes a run's metrics from its records, without I/O. `docs/metrics.md` explains each name; a
metric without data is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from math import expm1, fsum, isfinite
from statistics import fmean, pstdev

from torchtitan_rl.observability.engine import TRAINER_IDLE, idle_share
from torchtitan_rl.observability.evaluation import evaluation_statistics
from torchtitan_rl.observability.sinks import Split
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    HeldOutRecord,
    LedgerTotals,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.routing.router import SyncReport
from torchtitan_rl.types import Rollout, RolloutGroup, RolloutStatus, Turn, spans
from torchtitan_rl.weights.distribution import Fetched

_MAX_LOG_RATIO = 20.0  # as `trainer.loss.max_log_ratio`, so that one token cannot overflow a mean


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Compute all metrics of one step from its record."""
    metrics = rollout_metrics(record.groups, Split.TRAIN, flat=record.flat)
    metrics |= {f"trainer/{name}": value for name, value in record.trainer.items()}
    pairs = record.trainer.get("preference/pairs")
    if pairs is not None and record.groups:
        metrics["trainer/preference/groups_without_pair_share"] = 1.0 - pairs / len(record.groups)
    metrics |= _token_metrics(record.tokens, record.wall_s)
    metrics |= teacher_metrics(record.groups)
    if record.trainer:
        metrics |= staleness_metrics(record.groups, trained_version=record.version - 1)
    if record.publish_s:
        metrics["sync/publish_s"] = record.publish_s
    metrics |= _sync_metrics(record.syncs)
    sync_s = record.publish_s + sum(sync.stage_s + sync.pull_s for sync in record.syncs)
    if record.trainer_busy_s is not None:
        metrics[TRAINER_IDLE] = idle_share(wall_s=record.wall_s, busy_s=record.trainer_busy_s)
    if (buffer := record.buffer) is not None:
        metrics |= {f"buffer/{name}": float(size) for name, size in asdict(buffer).items()}
        metrics |= overtaken_metrics(record.groups, record.overtaken)
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
    return metrics | {"time/evaluation_s": record.seconds, "policy/version": float(record.version)}


def held_out_metrics(record: HeldOutRecord) -> dict[str, float]:
    return {f"{Split.EVALUATION.value}/{name}": value for name, value in record.metrics.items()} | {
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


def overtaken_metrics(
    groups: Sequence[RolloutGroup], overtaken: frozenset[str]
) -> dict[str, float]:
    """Length and reward of the groups that were overtaken by younger groups (``overtaken``) and of
    the others (``on_time``). These metrics show whether training without slow groups would favour
    short answers."""
    late = [group for group in groups if group.group_id in overtaken]
    if not late:
        return {"overtaken/groups": 0.0}
    on_time = [group for group in groups if group.group_id not in overtaken]
    return _part_metrics("overtaken", late) | _part_metrics("on_time", on_time)


def total_metrics(totals: LedgerTotals) -> dict[str, float]:
    """The run's totals. A total that is counted by cause is also given as the sum of its causes."""
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


def teacher_metrics(groups: Iterable[RolloutGroup]) -> dict[str, float]:
    """Estimates of KL(policy that sampled || teacher), as means over all sampled tokens with a
    teacher's score; empty without scores. With d = logprob - teacher's logprob: k1 = d, k3 =
    exp(-d) - 1 + d (see `reference_kl` in `training/losses/policy.py`)."""
    differences = [
        own - of_teacher
        for group in groups
        for rollout in group.rollouts
        for turn in rollout.turns
        if turn.teacher is not None
        for own, of_teacher in zip(turn.completion.logprobs, turn.teacher.logprobs, strict=True)
        if isfinite(own)
    ]
    if not differences:
        return {}
    return {
        "teacher/kl_k1": fmean(differences),
        "teacher/kl_k3": fmean(expm1(min(-d, _MAX_LOG_RATIO)) + d for d in differences),
        "teacher/scored_tokens": float(len(differences)),
    }


def cost_metrics(
    record: StepRecord, *, num_devices: int, dollars_per_hour: float
) -> dict[str, float]:
    """What the sampled tokens of a step cost in devices, and in dollars if a price is given."""
    if not record.tokens.generated or record.wall_s <= 0:
        return {}
    per_second = record.tokens.generated / record.wall_s
    metrics = {"tokens/generated_per_second_per_device": per_second / max(1, num_devices)}
    if dollars_per_hour:
        dollars = record.wall_s / 3600 * dollars_per_hour
        metrics["cost/dollars"] = dollars
        metrics["cost/dollars_per_million_tokens"] = dollars / record.tokens.generated * 1e6
    return metrics


def _sync_metrics(syncs: Sequence[SyncReport]) -> dict[str, float]:
    if not syncs:
        return {}
    pulls = [pull for sync in syncs for pull in sync.pulls]
    stalls_ms = [1000 * pull.stall_s for pull in pulls]
    metrics: dict[str, float] = {}
    if stalls_ms:  # empty if every replica lagged behind
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
    """Metrics of the weights that hosts fetched; empty without a fetch."""
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


def rollout_metrics(
    groups: Sequence[RolloutGroup], split: Split, *, flat: Collection[str] | None = None
) -> dict[str, float]:
    """All metrics of the rollouts of one step (under ``train/``) or one evaluation (under
    ``evaluation/``). ``flat``: ids of the groups without variance; None: groups with equal
    rewards."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics: dict[str, float] = {"groups": len(groups), "rollouts": len(rollouts)}
    metrics |= _reward_metrics(groups, flat)
    metrics |= _shape_metrics(rollouts)
    endings = Counter(rollout.status for rollout in rollouts)
    metrics |= {f"ended_{status.value}": endings[status] for status in RolloutStatus}
    metrics |= _generation_metrics([turn for rollout in rollouts for turn in rollout.turns])
    first_turns = [rollout.turns[0] for rollout in rollouts if rollout.turns]
    metrics |= _cached_share("generation/first_turn_cached_share", first_turns)
    metrics |= _phase_metrics(rollouts)
    metrics |= _task_metrics(rollouts)
    metrics |= _rollout_part_metrics(groups, flat)
    return {f"{split.value}/{name}": float(value) for name, value in metrics.items()}


def staleness_metrics(groups: Iterable[RolloutGroup], *, trained_version: int) -> dict[str, float]:
    """Ages of the sampled tokens when the policy at ``trained_version`` was trained on them. Failed
    rollouts are left out, because they are not trained on."""
    tokens_of_age: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            if not rollout.status.is_failure:
                for completion in (turn.completion for turn in rollout.turns):
                    size = len(completion.token_ids)
                    for start, end, version in spans(completion.version_runs, size):
                        tokens_of_age[trained_version - version] += end - start
    tokens_of_age = +tokens_of_age
    total = tokens_of_age.total()
    if not total:
        return {}
    metrics = {
        "policy/staleness_mean": sum(age * n for age, n in tokens_of_age.items()) / total,
        "policy/staleness_max": float(max(tokens_of_age)),
    }
    shares = {f"policy/age_share/{age}": n / total for age, n in sorted(tokens_of_age.items())}
    return metrics | shares


def _reward_metrics(
    groups: Sequence[RolloutGroup], flat_ids: Collection[str] | None
) -> dict[str, float]:
    rewards_by_group = [[r.reward for r in g.rollouts if r.reward is not None] for g in groups]
    rewards = [reward for of_group in rewards_by_group for reward in of_group]
    metrics: dict[str, float] = {}
    if rewards:
        metrics = {
            "reward_sum": fsum(rewards),
            "reward_mean": fmean(rewards),
            "reward_max": max(rewards),
            "reward_min": min(rewards),
            "reward_std": pstdev(rewards),
        }
    flat = [
        len(set(of_group)) < 2 if flat_ids is None else group.group_id in flat_ids
        for group, of_group in zip(groups, rewards_by_group, strict=True)
        if len(group.rollouts) > 1
    ]
    if flat:
        metrics["groups_without_variance_share"] = fmean(flat)
    return metrics


def _shape_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    turns = [len(rollout.turns) for rollout in rollouts]
    lengths = [rollout.num_sampled_tokens for rollout in rollouts]
    return {
        "turns_mean": fmean(turns),
        "turns_max": max(turns),
        "episodes_mean": fmean(len(turns_by_episode(rollout)) for rollout in rollouts),
        "response_length_mean": fmean(lengths),
        "response_length_max": max(lengths),
    }


def _generation_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    metrics: dict[str, float] = {"generation/requests": len(turns)}
    timed = [turn.completion.metrics for turn in turns if turn.completion.metrics is not None]
    if not timed:
        return metrics
    columns = {
        "queue_s": [m.queue_s for m in timed],
        "time_to_first_token_s": [m.time_to_first_token_s for m in timed],
        "decode_s": [m.decode_s for m in timed],
        "inter_token_latency_s": [m.inter_token_latency_s for m in timed],
        "requests_in_flight": [float(m.requests_in_flight) for m in timed],
    }
    for name, values in columns.items():
        metrics[f"generation/{name}_mean"] = fmean(values)
        metrics[f"generation/{name}_max"] = max(values)
    cached = [m.cached_tokens for m in timed]
    metrics["generation/cached_tokens_mean"] = fmean(cached)
    return metrics | _cached_share("generation/cached_share", turns)


def _phase_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The time that rollouts spent in each phase. A rollout that was not in a phase counts as 0."""
    phases = sorted({phase for rollout in rollouts for phase in rollout.phase_s})
    values = {phase: [one.phase_s.get(phase, 0.0) for one in rollouts] for phase in phases}
    means = {f"phase_s/{phase}_mean": fmean(seconds) for phase, seconds in values.items()}
    return means | {f"phase_s/{phase}_max": max(seconds) for phase, seconds in values.items()}


def _cached_share(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    """The share of the turns' prompt tokens that were found in the prefix cache."""
    timed = [
        (turn.completion.metrics.cached_tokens, len(turn.prompt_token_ids))
        for turn in turns
        if turn.completion.metrics is not None
    ]
    num_tokens = sum(length for _, length in timed)
    return {name: sum(cached for cached, _ in timed) / num_tokens} if num_tokens else {}


def groups_by_part(groups: Iterable[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    """The groups of each part of a mixture, sorted by the part's name; empty for other tasks."""
    by_part: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        if group.problem.task:
            by_part[group.problem.task].append(group)
    return dict(sorted(by_part.items()))


def _rollout_part_metrics(
    groups: Sequence[RolloutGroup], flat: Collection[str] | None
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for part, of_part in groups_by_part(groups).items():
        metrics |= _part_metrics(f"of_task/{part}", of_part)
        share = _reward_metrics(of_part, flat).get("groups_without_variance_share")
        if share is not None:
            metrics[f"of_task/{part}/groups_without_variance_share"] = share
    return metrics


def _task_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            values[name].append(value)
    return {f"task/{name}": fmean(of_name) for name, of_name in sorted(values.items())}
