"""``rollouts.jsonl``: a few whole rollouts of each step for a person to read.

One object a rollout: the best, the worst and random ones, with text, tokens, logprobs, versions,
advantages and masks of each turn. Which random ones are shown depends on seed and step only.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.jsonl import JsonLines, Row
from torchtitan_rl.observability.sinks import Split
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    Episode,
    FinishReason,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)

LOGGED = "logged"
"""What the names begin with of metrics that tell of this file."""

Decode = Callable[[Sequence[int]], str]


class RolloutLog:
    """Appends to ``path``; ``resume_step`` as in `JsonLines`. ``decode`` gives turns a text whose
    environment does not work in text; without it they have none."""

    def __init__(
        self, path: Path, *, per_step: int, seed: int, resume_step: int | None = None
    ) -> None:
        self._lines = JsonLines(path, resume_step=resume_step, is_step=_is_trained)
        self._per_step = per_step
        self._seed = seed
        self.decode: Decode | None = None

    def record(
        self,
        step: int,
        version: int,
        groups: Sequence[RolloutGroup],
        split: Split,
        episodes: Sequence[Episode] | None = None,
    ) -> dict[str, float]:
        """Write up to ``per_step`` rollouts of these groups, unless those of this step are there;
        returns what the row of the step says of them (`logged_metrics`).

        Args:
            episodes: of the groups, as they were trained on; None where they were not.

        Raises:
            OutputError: they cannot be written.
        """
        if lines := self._written(step, split):
            rows: list[Row] = [json.loads(line) for line in lines]
        else:
            rng = random.Random(f"{self._seed}/{split.value}/{step}")
            head = {"step": step, "version": version, "split": split.value}
            rows = [
                head
                | {"chosen": chosen}
                | rollout_to_json(group, rollout, episodes, decode=self.decode)
                for chosen, group, rollout in choose_rollouts(groups, self._per_step, rng)
            ]
            lines = self._lines.append(*rows)
        return logged_metrics(split, rows, lines)

    def _written(self, step: int, split: Split) -> list[bytes]:
        """Of a step whose row could not be written, or of an evaluation that a run before this one
        recorded, maybe without its row."""
        last = self._lines.last
        if split is Split.TRAIN and (last is None or last["step"] != step or not _is_trained(last)):
            return []
        return self._lines.lines_of(step, lambda row: row["split"] == split.value)

    def close(self) -> None:
        self._lines.close()


def logged_metrics(split: str, rows: Sequence[Row], lines: Sequence[bytes]) -> dict[str, float]:
    """What the row of a step says of its rollouts in ``rollouts.jsonl``; ``rows`` are parsed
    ``lines``."""
    numbers = {
        "rollouts": len(rows),
        "tokens": sum(len(turn["token_ids"]) for row in rows for turn in row["turns"]),
        "reward_sum": math.fsum(row["reward"] for row in rows if row["reward"] is not None),
        "crc32": zlib.crc32(b"".join(lines)),
    }
    return {f"{LOGGED}/{split}/{name}": float(number) for name, number in numbers.items()}


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


def rollout_to_json(
    group: RolloutGroup,
    rollout: Rollout,
    episodes: Sequence[Episode] | None = None,
    *,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """The whole rollout in JSON's types; ``episodes`` and ``decode`` as in `RolloutLog`."""
    turns = [_turn_to_json(turn, decode) for turn in rollout.turns]
    if episodes is not None:
        trained = _trained(rollout, episodes)
        turns = [turn | trained[n] for n, turn in enumerate(turns)]
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
        "turns": turns,
    }


def _turn_to_json(turn: Turn, decode: Decode | None) -> dict[str, Any]:
    completion, text = turn.completion, turn.text
    if text is None and decode is not None:
        text = decode(list(completion.token_ids))
    return {
        "text": text,
        "reward": turn.reward,
        "branch_reward": turn.branch_reward,
        "is_seen": turn.is_seen,
        "prompt_token_ids": list(turn.prompt_token_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "versions": list(completion.versions),
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "replica": completion.replica,
        "metrics": None if completion.metrics is None else asdict(completion.metrics),
    }


def _trained(rollout: Rollout, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """Advantage and mask of each turn; None and zeros where nothing of it is trained on."""
    own = [episode for episode in episodes if episode.rollout_id == rollout.rollout_id]
    episode_of = {
        id(turn): episode
        for turns, episode in zip(turns_by_episode(rollout) if own else (), own, strict=True)
        for turn in turns
    }
    return [_trained_of(turn, episode_of.get(id(turn))) for turn in rollout.turns]


def _trained_of(turn: Turn, episode: Episode | None) -> dict[str, Any]:
    start, size = len(turn.prompt_token_ids), len(turn.completion.token_ids)
    if episode is None:
        return {"advantage": None, "loss_mask": [0] * size}
    own = slice(start, start + size)
    tokens = zip(episode.loss_mask[own], episode.logprobs[own], strict=True)
    mask = [int(has_loss and math.isfinite(logprob)) for has_loss, logprob in tokens]
    advantage = episode.advantages[start + mask.index(1)] if any(mask) else None
    return {"advantage": advantage, "loss_mask": mask}


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """What `rollout_to_json` was given.

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
    metrics = turn.get("metrics")  # earlier versions wrote none
    runs = [(i, v) for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    completion = Completion(
        request_id=request_id,
        token_ids=tuple(turn["token_ids"]),
        logprobs=tuple(turn["logprobs"]),
        version_runs=tuple(VersionRun(*run) for run in runs),
        finish_reason=FinishReason(turn["finish_reason"]),
        replica=turn["replica"],
        stop_reason=turn.get("stop_reason"),
        metrics=None if metrics is None else CompletionMetrics(**metrics),
    )
    return Turn(
        prompt_token_ids=tuple(turn["prompt_token_ids"]),
        completion=completion,
        reward=turn["reward"],
        text=turn["text"],
    )
