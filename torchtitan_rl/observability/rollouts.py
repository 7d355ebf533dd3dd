"""Writes ``rollouts.jsonl``: whole rollouts of each step, for a person to read and for replays.

Each row is one rollout, with text, tokens, logprobs, versions, advantages and masks of each turn.
The best, the worst and random rollouts are chosen. The random choice depends only on seed and step.

With ``metrics.rollouts_per_step all`` the rows of a step are all its rollouts, in the order of the
batch. From these rows `groups_from_rows` makes the same groups again. Floats are read exactly as
they were written, except that NaN and infinite ones become NaN.
"""

from __future__ import annotations

import base64
import math
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan_rl.images import PromptImage, described
from torchtitan_rl.observability.sinks import Row, RowLog, Split, read_rows
from torchtitan_rl.rollout.episodes import turns_by_episode
from torchtitan_rl.token_sets import kept_of_each, num_kept
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    Episode,
    FinishReason,
    Grammar,
    KeptRun,
    KeptTokens,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    RoutedExperts,
    TokenScores,
    Turn,
    VersionRun,
)

LOGGED = "logged"
"""The first part of the names of the metrics that describe ``rollouts.jsonl``."""

Decode = Callable[[Sequence[int]], str]
PerStep = int | Literal["all"]
Logprobs = npt.NDArray[np.float32] | None
"""The trainer's logprobs of an episode's tokens."""

_NUM_EXAMPLES = 3  # rows of a step for the console and trackers, where all are written


class RolloutLog:
    """Appends ``per_step`` rollouts of each step to ``path``. ``resume_step``: the step after which
    the run continues; None for a new run.

    If an environment does not work in text, ``decode`` converts the tokens of its turns to text;
    without ``decode`` these turns have no text.
    """

    def __init__(
        self, path: Path, *, per_step: PerStep, seed: int, resume_step: int | None = None
    ) -> None:
        self._rows = RowLog.of_run(path, resume_step=resume_step)
        self._per_step = per_step
        self._seed = seed
        self._last: tuple[int, Split, dict[str, float]] | None = None
        self.last_rows: dict[Split, list[Row]] = {}  # examples: last training step, evaluation
        self.decode: Decode | None = None
        self.vocab_size = 0

    def record(
        self,
        step: int,
        version: int,
        groups: Sequence[RolloutGroup],
        split: Split,
        episodes: Sequence[Episode] | None = None,
        trainer_logprobs: Sequence[Logprobs] = (),
    ) -> dict[str, float]:
        """Write up to ``per_step`` rollouts of these groups, and return their `logged_metrics` for
        the step's row in ``metrics.jsonl``. Raises OutputError.

        If the same step is recorded twice in a row, because writing the step's row failed, the
        second call writes nothing and returns the same metrics. ``episodes`` are the groups' as
        trained, None if the groups were not trained on; ``trainer_logprobs`` are the trainer's of
        each episode, empty without a training step.
        """
        if self._last is None or self._last[:2] != (step, split):
            rng = random.Random(f"{self._seed}/{split.value}/{step}")
            head = {"step": step, "version": version, "split": split.value}
            trained = _by_rollout(episodes, trainer_logprobs)
            rows = [
                head | {"chosen": why} | self._row(group, rollout, trained)
                for why, group, rollout in self._choose(groups, rng)
            ]
            self.last_rows[split] = [row for row in rows if row["chosen"] != "all"]
            self._last = step, split, logged_metrics(split, rows, self._rows.append(*rows))
        return self._last[2]

    def close(self) -> None:
        self._rows.close()

    def _choose(
        self, groups: Sequence[RolloutGroup], rng: random.Random
    ) -> list[tuple[str, RolloutGroup, Rollout]]:
        if self._per_step != "all":
            return choose_rollouts(groups, self._per_step, rng)
        examples = choose_rollouts(groups, _NUM_EXAMPLES, rng)
        reasons = {id(rollout): why for why, _, rollout in examples}
        return [
            (reasons.get(id(rollout), "all"), group, rollout)
            for group in groups
            for rollout in group.rollouts
        ]

    def _row(self, group: RolloutGroup, rollout: Rollout, trained: _Trained | None) -> Row:
        is_whole = self._per_step == "all"
        row = rollout_to_json(group, rollout, decode=self.decode, is_whole=is_whole)
        if trained is not None:
            of_turns = _trained(rollout, trained[rollout.rollout_id], self.vocab_size)
            row["turns"] = [turn | one for turn, one in zip(row["turns"], of_turns, strict=True)]
        return {"vocab_size": self.vocab_size} | row


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
    group: RolloutGroup, rollout: Rollout, *, decode: Decode | None = None, is_whole: bool = False
) -> dict[str, Any]:
    """Convert a rollout to JSON types; ``decode`` as in `RolloutLog`. With ``is_whole``, the sets
    of tokens that the sampler kept are included, and each image once."""
    turns = [_turn_to_json(turn, decode) for turn in rollout.turns]
    if is_whole:
        written: set[str] = set()
        for turn, of_turn in zip(rollout.turns, turns, strict=True):
            of_turn["kept_sets"] = [_kept_to_json(run) for run in turn.completion.kept_tokens]
            for image, one in zip(turn.images, of_turn["images"], strict=True):
                if one["sha256"] not in written:
                    written.add(one["sha256"])
                    one["png"] = _to_text(image.data)
            if (routed := turn.completion.routed_experts) is not None:
                sizes = (routed.num_layers, routed.per_token)
                of_turn["routed_experts"] = [_to_text(routed.data), *sizes]
            if turn.teacher is not None and turn.teacher.top_ids:
                top = (turn.teacher.top_ids, turn.teacher.top_logprobs)
                of_turn["teacher_top"] = [*map(_to_text, top)]
    return {
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "problem_id": rollout.problem_id,
        "task": group.problem.task,
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
        "request_key": turn.request_key,
        "prompt_token_ids": list(turn.prompt_token_ids),
        "images": [described(one) for one in turn.images],
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "versions": list(completion.versions),
        "teacher_logprobs": None if turn.teacher is None else list(turn.teacher.logprobs),
        "finish_reason": completion.finish_reason.value,
        "stop_reason": completion.stop_reason,
        "replica": completion.replica,
        "metrics": None if completion.metrics is None else asdict(completion.metrics),
    }


def _kept_to_json(run: KeptRun) -> list[Any]:
    match run.kept:
        case Grammar(data=data, stop_token_ids=stop_token_ids):
            kept: Any = {"grammar": _to_text(data), "stop_token_ids": list(stop_token_ids)}
        case packed:
            kept = None if packed is None else _to_text(packed)
    return [run.start, kept]


def _kept_from_json(start: int, kept: Any) -> KeptRun:
    found: KeptTokens = None
    if isinstance(kept, dict):
        stop_token_ids = tuple(kept["stop_token_ids"])
        found = Grammar(data=base64.b64decode(kept["grammar"]), stop_token_ids=stop_token_ids)
    elif kept is not None:
        found = base64.b64decode(kept)
    return KeptRun(start, found)


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


_Trained = defaultdict[str, list[tuple[Episode, Logprobs]]]


def _by_rollout(
    episodes: Sequence[Episode] | None, logprobs: Sequence[Logprobs]
) -> _Trained | None:
    if episodes is None:
        return None
    found: _Trained = defaultdict(list)
    for episode, of_episode in zip_longest(episodes, logprobs):
        found[episode.rollout_id].append((episode, of_episode))
    return found


def _trained(
    rollout: Rollout, own: Sequence[tuple[Episode, Logprobs]], vocab_size: int
) -> list[dict[str, Any]]:
    """What each turn became in the batch. A turn that is not trained on has None and zeros."""
    episode_of = {
        id(turn): one
        for turns, one in zip(turns_by_episode(rollout) if own else (), own, strict=True)
        for turn in turns
    }
    return [_trained_of(turn, episode_of.get(id(turn)), vocab_size) for turn in rollout.turns]


def _trained_of(
    turn: Turn, found: tuple[Episode, Logprobs] | None, vocab_size: int
) -> dict[str, Any]:
    start, size = len(turn.prompt_token_ids), len(turn.completion.token_ids)
    if found is None:
        unknown = ("advantage", "advantages", "trainer_logprobs", "num_kept")
        return {**dict.fromkeys(unknown), "loss_mask": [0] * size}
    episode, logprobs = found
    own = slice(start, start + size)
    tokens = zip(episode.loss_mask[own], episode.logprobs[own], strict=True)
    mask = [int(has_loss and math.isfinite(logprob)) for has_loss, logprob in tokens]
    kept = kept_of_each(episode.kept_tokens, len(episode.token_ids))[own]
    is_cut = bool(turn.completion.kept_tokens)
    return {
        "advantage": episode.advantages[start + mask.index(1)] if any(mask) else None,
        "advantages": None if turn.teacher is None else list(episode.advantages[own]),
        "loss_mask": mask,
        "trainer_logprobs": None if logprobs is None else logprobs[own].tolist(),
        "num_kept": [num_kept(one, vocab_size) if isinstance(one, bytes) else None for one in kept]
        if is_cut
        else None,
    }


def read_rollouts(path: Path) -> Iterator[tuple[Row, Rollout]]:
    """Yield the rows of ``path`` that count, each with its rollout. Raises OSError, or ValueError
    that says which line is not a rollout."""
    for line in read_rows(path):
        try:
            rollout = rollout_from_json(line.row)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ValueError(f"{line.where}: not a rollout ({error!r})") from error
        yield line.row, rollout


def rollout_from_json(row: Mapping[str, Any]) -> Rollout:
    """Read what `rollout_to_json` wrote. Only a whole rollout has its sets of kept tokens. Raises
    KeyError, TypeError, ValueError or OverflowError if the object is not a rollout."""
    name = row["rollout_id"]
    if not isinstance(name, str):
        raise TypeError(f"rollout_id = {name!r}")
    pngs: dict[str, bytes] = {}
    return Rollout(
        rollout_id=name,
        group_id=row["group_id"],
        problem_id=row["problem_id"],
        turns=tuple(
            _turn_from_json(f"{name}/t{n}", turn, pngs) for n, turn in enumerate(row["turns"])
        ),
        status=RolloutStatus(row["status"]),
        reward=None if row["reward"] is None else float(row["reward"]),
        cause=row["cause"],
        messages=tuple(row["messages"]),
        metrics=row["metrics"],
        phase_s=row["phase_s"],
    )


def _turn_from_json(request_id: str, turn: Mapping[str, Any], pngs: dict[str, bytes]) -> Turn:
    """``pngs``: the images of earlier turns, by digest; those of this turn are added."""
    versions, metrics, scores = turn["versions"], turn["metrics"], turn.get("teacher_logprobs")
    top, routed = turn.get("teacher_top", ("", "")), turn.get("routed_experts")
    if routed is not None:
        data, num_layers, per_token = routed
        data = base64.b64decode(data)
        routed = RoutedExperts(data=data, num_layers=num_layers, per_token=per_token)
    runs = [(i, v) for i, v in enumerate(versions) if i == 0 or v != versions[i - 1]]
    completion = Completion(
        request_id=request_id,
        token_ids=tuple(turn["token_ids"]),
        logprobs=tuple(math.nan if one is None else one for one in turn["logprobs"]),
        version_runs=tuple(VersionRun(*run) for run in runs),
        finish_reason=FinishReason(turn["finish_reason"]),
        replica=turn["replica"],
        stop_reason=turn["stop_reason"],
        metrics=None if metrics is None else CompletionMetrics(**metrics),
        kept_tokens=tuple(_kept_from_json(*run) for run in turn.get("kept_sets") or ()),
        routed_experts=routed,
    )
    return Turn(
        prompt_token_ids=tuple(turn["prompt_token_ids"]),
        completion=completion,
        reward=turn["reward"],
        text=turn["text"],
        is_seen=turn["is_seen"],
        branch_reward=turn["branch_reward"],
        request_key=turn["request_key"],
        images=tuple(_image_from_json(pngs, **one) for one in turn.get("images", ())),
        teacher=None
        if scores is None
        else TokenScores(
            logprobs=tuple(scores),
            top_ids=base64.b64decode(top[0]),
            top_logprobs=base64.b64decode(top[1]),
        ),
    )


def _image_from_json(
    pngs: dict[str, bytes], start: int, rows: int, columns: int, sha256: str, png: str = ""
) -> PromptImage:
    """Only a whole rollout has its images' data."""
    if png:
        pngs[sha256] = base64.b64decode(png)
    data = pngs.get(sha256, b"")
    image = PromptImage(start=start, rows=rows, columns=columns, data=data)
    if data and image.digest != sha256:
        raise ValueError(f"an image has not the recorded SHA-256 {sha256}")
    return image


def groups_from_rows(rows: Sequence[Row]) -> tuple[RolloutGroup, ...]:
    """The groups of a step from all of its rows. Raises KeyError, TypeError, ValueError or
    OverflowError if a row is not a whole rollout."""
    by_group: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row["group_id"]].append(row)
    return tuple(
        RolloutGroup(
            group_id=group_id,
            problem=Problem(
                problem_id=of_group[0]["problem_id"],
                data=of_group[0]["problem"],
                task=of_group[0]["task"],
            ),
            rollouts=tuple(map(rollout_from_json, of_group)),
        )
        for group_id, of_group in by_group.items()
    )
