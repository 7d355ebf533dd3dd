"""Groups of rollouts in, metrics of `metric_table` out. Pure; a name without data is left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import fsum
from statistics import fmean, pstdev

from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, RolloutStatus, Turn


def rollout_metrics(
    groups: Sequence[RolloutGroup], split: Split, *, flat: Collection[str] | None = None
) -> dict[str, float]:
    """All metrics of one step's (or one evaluation's) rollouts, under ``train/`` or
    ``evaluation/``. ``flat``: ids of the groups without variance; None: whose rewards are equal."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    metrics: dict[str, float] = {"groups": len(groups), "rollouts": len(rollouts)}
    metrics |= _reward_metrics(groups, flat)
    metrics |= _shape_metrics(rollouts)
    endings = Counter(rollout.status for rollout in rollouts)
    metrics |= {f"ended_{status.value}": endings[status] for status in RolloutStatus}
    metrics |= _generation_metrics([turn for rollout in rollouts for turn in rollout.turns])
    first_turns = [rollout.turns[0] for rollout in rollouts if rollout.turns]
    metrics |= _cached_share("generation/first_turn_cached_share", first_turns)
    metrics |= _task_metrics(rollouts)
    metrics |= _part_metrics(groups, flat)
    return {f"{split.value}/{name}": float(value) for name, value in metrics.items()}


def staleness_metrics(groups: Iterable[RolloutGroup], *, trained_version: int) -> dict[str, float]:
    """Age of the sampled tokens when the policy at ``trained_version`` was trained on them; failed
    rollouts are not trained on."""
    tokens_of_age: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            if not rollout.status.is_failure:
                for turn in rollout.turns:
                    for version, number in _tokens_by_version(turn.completion):
                        tokens_of_age[trained_version - version] += number
    total = tokens_of_age.total()
    if not total:
        return {}
    metrics = {
        "policy/staleness_mean": sum(age * n for age, n in tokens_of_age.items()) / total,
        "policy/staleness_max": float(max(tokens_of_age)),
    }
    shares = {f"policy/age_share/{age}": n / total for age, n in sorted(tokens_of_age.items())}
    return metrics | shares


def _tokens_by_version(completion: Completion) -> Iterator[tuple[int, int]]:
    """(version, number of tokens) of each run that has a token."""
    ends = [run.start for run in completion.version_runs[1:]] + [len(completion.token_ids)]
    for run, end in zip(completion.version_runs, ends, strict=False):
        if end > run.start:
            yield run.version, end - run.start


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


def _cached_share(name: str, turns: Sequence[Turn]) -> dict[str, float]:
    """The share of the turns' prompt tokens that was found in the prefix cache."""
    timed = [
        (turn.completion.metrics.cached_tokens, len(turn.prompt_token_ids))
        for turn in turns
        if turn.completion.metrics is not None
    ]
    num_tokens = sum(length for _, length in timed)
    return {name: sum(cached for cached, _ in timed) / num_tokens} if num_tokens else {}


def groups_by_part(groups: Iterable[RolloutGroup]) -> dict[str, list[RolloutGroup]]:
    """The groups of each part of a mixture, sorted by its name; nothing of other tasks."""
    by_part: defaultdict[str, list[RolloutGroup]] = defaultdict(list)
    for group in groups:
        if group.problem.task:
            by_part[group.problem.task].append(group)
    return dict(sorted(by_part.items()))


def _part_metrics(groups: Sequence[RolloutGroup], flat: Collection[str] | None) -> dict[str, float]:
    """Of each part of a mixture: its share, rewards and lengths."""
    metrics: dict[str, float] = {}
    for part, of_part in groups_by_part(groups).items():
        rollouts = [rollout for group in of_part for rollout in group.rollouts]
        values = {
            "groups": float(len(of_part)),
            "response_length_mean": fmean(one.num_sampled_tokens for one in rollouts),
        }
        rewards = _reward_metrics(of_part, flat)
        for name in ("reward_mean", "groups_without_variance_share"):
            if name in rewards:
                values[name] = rewards[name]
        metrics |= {f"of_task/{part}/{name}": value for name, value in values.items()}
    return metrics


def _task_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            values[name].append(value)
    return {f"task/{name}": fmean(of_name) for name, of_name in sorted(values.items())}
