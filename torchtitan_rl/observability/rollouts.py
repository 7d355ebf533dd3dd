"""Writes ``rollouts.jsonl``: a few whole rollouts of each step for a person to read.

Each row is one rollout, with text, tokens, logprobs, versions, advantages and masks of each turn.
The best, the worst and random rollouts are chosen. The random choice depends only on seed and step.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.sinks import Row, RowLog, Split, read_rows
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
"""The first part of the names of the metrics that describe ``rollouts.jsonl``."""

Decode = Callable[[Sequence[int]], str]


class RolloutLog:
    """Appends rollouts to ``path``.

    Args:
        resume_step: the step after which the run continues; None for a new run.

    If an environment does not work in text, ``decode`` converts the tokens of its turns to text;
    without ``decode`` these turns have no text.
    """

    def __init__(
        self, path: Path, *, per_step: int, seed: int, resume_step: int | None = None
    ) -> None:
        self._rows = RowLog.of_run(path, resume_step=resume_step)
        self._per_step = per_step
        self._seed = seed
        self._last: tuple[int, Split, dict[str, float]] | None = None
        self.last_rows: dict[Split, list[Row]] = {}  # rows of the last training step, evaluation
        self.decode: Decode | None = None

    def record(
        self,
        step: int,
        version: int,
        groups: Sequence[RolloutGroup],
        split: Split,
        episodes: Sequence[Episode] | None = None,
    ) -> dict[str, float]:
        """Write up to ``per_step`` rollouts of these groups, and return their `logged_metrics` for
        the step's row in ``metrics.jsonl``.

        If the same step is recorded twice in a row, because writing the step's row failed, the
        second call writes nothing and returns the same metrics.

        Args:
            episodes: the groups' episodes as trained; None if the groups were not trained on.

        Raises:
            OutputError: the rollouts cannot be written.
        """
        if self._last is None or self._last[:2] != (step, split):
            rng = random.Random(f"{self._seed}/{split.value}/{step}")
            head = {"step": step, "version": version, "split": split.value}
            rows = [
                head
                | {"chosen": chosen}
                | rollout_to_json(group, rollout, episodes, decode=self.decode)
                for chosen, group, rollout in choose_rollouts(groups, self._per_step, rng)
            ]
            self.last_rows[split] = rows
            self._last = step, split, logged_metrics(split, rows, self._rows.append(*rows))
        return self._last[2]

    def close(self) -> None:
        self._rows.close()


def logged_metrics(split: str, rows: Sequence[Row], lines: Sequence[bytes]) -> dict[str, float]:
    """Compute the metrics that describe a step's rollouts in ``rollouts.jsonl``; `audit` compares
    them with the file. ``rows`` are the parsed ``lines``.
    """
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
    """Choose up to ``count`` different rollouts, each with the reason: ``best``, ``worst`` or
    ``random``.

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


def rollout_to_json(
    group: RolloutGroup,
    rollout: Rollout,
    episodes: Sequence[Episode] | None = None,
    *,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """Convert a whole rollout to JSON types; ``episodes`` and ``decode`` as in `RolloutLog`."""
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
        "phase_s": dict(rollout.phase_s),
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
    """The advantage and the mask of each turn; None and zeros if the turn is not trained on."""
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


def read_rollouts(path: Path) -> Iterator[tuple[Row, Rollout]]:
    """Yield the rows of ``path`` that count, each with its rollout.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is not a rollout; the message says which.
    """
    for line in read_rows(path):
        try:
            rollout = rollout_from_json(line.row)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"{line.where}: not a rollout ({error!r})") from error
        yield line.row, rollout


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """Read a rollout that `rollout_to_json` wrote. The turns of the result lack the fields that
    `rollout_to_json` does not write.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: the object is not a rollout.
    """
    name = row["rollout_id"]
    if not isinstance(name, str):
        raise TypeError(f"rollout_id = {name!r}")
    return Rollout(
        rollout_id=name,
        group_id=row["group_id"],
        problem_id=row["problem_id"],
        turns=tuple(_turn_from_json(f"{name}/t{n}", turn) for n, turn in enumerate(row["turns"])),
        status=RolloutStatus(row["status"]),
        reward=None if row["reward"] is None else float(row["reward"]),
        cause=row["cause"],
        messages=tuple(row["messages"]),
        metrics=row["metrics"],
        phase_s=row.get("phase_s", {}),  # earlier versions did not write it
    )


def _turn_from_json(request_id: str, turn: Mapping[str, Any]) -> Turn:
    versions = turn["versions"]
    metrics = turn.get("metrics")  # earlier versions did not write them
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
