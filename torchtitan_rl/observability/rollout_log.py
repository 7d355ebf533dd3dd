"""``rollouts.jsonl``: a few whole rollouts of each step for a person to read.

One object a rollout: the best, the worst and random ones, with text, tokens, logprobs and versions
of each turn. Which random ones are shown depends on seed and step only.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.jsonl import JsonLines
from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)


class RolloutLog:
    """Appends to ``path``; ``resume_step`` as in `JsonLines`."""

    def __init__(
        self, path: Path, *, per_step: int, seed: int, resume_step: int | None = None
    ) -> None:
        self._lines = JsonLines(path, resume_step=resume_step, is_step=_is_trained)
        self._per_step = per_step
        self._seed = seed

    def record(self, step: int, version: int, groups: Sequence[RolloutGroup], split: Split) -> None:
        """Write up to ``per_step`` rollouts of these groups; of an evaluation that a run before
        this one recorded, none.

        Raises:
            OutputError: they cannot be written.
        """
        if split is Split.EVALUATION and self._lines.has(step, lambda row: not _is_trained(row)):
            return
        rng = random.Random(f"{self._seed}/{split.value}/{step}")
        head = {"step": step, "version": version, "split": split.value}
        self._lines.append(
            *(
                head | {"chosen": chosen} | rollout_to_json(group, rollout)
                for chosen, group, rollout in choose_rollouts(groups, self._per_step, rng)
            )
        )

    def close(self) -> None:
        self._lines.close()


def choose_rollouts(
    groups: Sequence[RolloutGroup], count: int, rng: random.Random
) -> list[tuple[str, RolloutGroup, Rollout]]:
    """Up to ``count`` different rollouts, each with why: ``best``, ``worst``, ``random``.

    Failed rollouts have no reward and can only be chosen at random.
    """
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    by_reward = sorted(
        (index for index, (_, rollout) in enumerate(pairs) if rollout.reward is not None),
        key=lambda index: pairs[index][1].reward or 0.0,
    )
    chosen: dict[int, str] = {}
    if by_reward:
        chosen[by_reward[-1]] = "best"
        chosen.setdefault(by_reward[0], "worst")
    others = [index for index in range(len(pairs)) if index not in chosen]
    for index in rng.sample(others, min(len(others), max(0, count - len(chosen)))):
        chosen[index] = "random"
    return [(why, *pairs[index]) for index, why in list(chosen.items())[:count]]


def _is_trained(row: Mapping[str, Any]) -> bool:
    return bool(row["split"] == Split.TRAIN.value)


def rollout_to_json(group: RolloutGroup, rollout: Rollout) -> dict[str, Any]:
    """The whole rollout in JSON's types."""
    return {
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "problem": dict(group.problem.data),
        "status": rollout.status.value,
        "cause": rollout.cause,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "messages": [dict(message) for message in rollout.messages],
        "turns": [_turn_to_json(turn) for turn in rollout.turns],
    }


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "text": turn.text,
        "reward": turn.reward,
        "branch_reward": turn.branch_reward,
        "is_seen": turn.is_seen,
        "prompt_token_ids": list(turn.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "versions": list(completion.versions),
        "finish_reason": completion.finish_reason.value,
        "replica": completion.replica,
    }


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """What `rollout_to_json` was given, without the timings of its completions.

    Raises:
        KeyError, TypeError, ValueError: it is another object.
    """
    name = row["rollout_id"]
    return Rollout(
        rollout_id=name,
        group_id=row["group_id"],
        problem_id=row["problem_id"],
        turns=tuple(_turn_from_json(f"{name}/t{n}", turn) for n, turn in enumerate(row["turns"])),
        status=RolloutStatus(row["status"]),
        reward=row["reward"],
        cause=row["cause"],
        messages=tuple(row["messages"]),
        metrics=row["metrics"],
    )


def _turn_from_json(request_id: str, turn: Mapping[str, Any]) -> Turn:
    versions = turn["versions"]
    runs = [(i, v) for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    completion = Completion(
        request_id=request_id,
        token_ids=tuple(turn["token_ids"]),
        logprobs=tuple(turn["logprobs"]),
        version_runs=tuple(VersionRun(*run) for run in runs),
        finish_reason=FinishReason(turn["finish_reason"]),
        replica=turn["replica"],
    )
    return Turn(
        prompt_token_ids=tuple(turn["prompt_token_ids"]),
        completion=completion,
        reward=turn["reward"],
        text=turn["text"],
    )
