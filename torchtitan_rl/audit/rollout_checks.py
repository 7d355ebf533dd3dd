"""Checks rollouts, those of ``rollouts.jsonl`` and those of checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchtitan_rl.audit.findings import Check, Rules
from torchtitan_rl.types import Completion, RolloutStatus

Row = Mapping[str, Any]


def check_log(
    rows: Iterable[tuple[str, Row]], rules: Rules, *, last_step: int, num_problems: int | None
) -> list[Check]:
    """Check ``rollouts.jsonl``.

    Args:
        rows: (where, row) pairs.
        last_step: the last one in the metrics; rollouts are logged after them.
        num_problems: problems of an evaluation, the same ones each time.
    """
    ids = Check(name="rollouts: ids", what="rollouts")
    tokens = Check(name="rollouts: tokens", what="turns")
    endings = Check(name="rollouts: endings", what="rollouts")
    seen: set[tuple[int, str, str]] = set()
    step, problems = 0, set()
    for where, row in rows:
        is_train = row["split"] == "train"
        ids.looked_at += 1
        if is_train:
            ids.require(row["step"] >= step, f"{where}: step {row['step']} after step {step}")
            step = row["step"]
            seen = {one for one in seen if one[0] >= step or one[1] != "train"}
        else:
            problems.add(row["problem_id"])
        key = (row["step"], row["split"], row["rollout_id"])
        ids.require(key not in seen, f"{where}: rollout {key[2]} is there twice for step {key[0]}")
        seen.add(key)
        ids.require(
            row["step"] <= last_step, f"{where}: step {row['step']} is in no row of the metrics"
        )
        _check_ending(endings, where, row["rollout_id"], row["status"], row["reward"])
        for number, turn in enumerate(row["turns"]):
            _check_turn(tokens, f"{where}, turn {number}", row, turn, rules, is_train=is_train)
    ids.require(
        num_problems is None or len(problems) <= num_problems,
        f"{len(problems)} problems were validated, of {num_problems} that are the same each time",
    )
    return [ids, tokens, endings]


def completion_errors(completion: Completion, *, newest: int, oldest: int = 0) -> list[str]:
    """Errors of a completion: lengths that differ, versions out of order or range."""
    num_tokens = len(completion.token_ids)
    errors = []
    if len(completion.logprobs) != num_tokens or len(completion.versions) != num_tokens:
        errors.append(
            f"{completion.request_id}: {num_tokens} tokens, {len(completion.logprobs)} logprobs "
            f"and {len(completion.versions)} versions"
        )
    if len(completion.kept_tokens) not in (0, num_tokens):
        errors.append(
            f"{completion.request_id}: {num_tokens} tokens, and what was kept of "
            f"{len(completion.kept_tokens)}"
        )
    starts = [run.start for run in completion.version_runs]
    if starts != sorted(starts) or (num_tokens and (not starts or starts[0] != 0)):
        errors.append(f"{completion.request_id}: runs of versions start at {starts}")
    wrong = sorted({v for v in completion.versions if not oldest <= v <= newest})
    if wrong:
        errors.append(
            f"{completion.request_id}: tokens of versions {wrong}, not from {oldest} to {newest}"
        )
    return errors


def ending_error(status: RolloutStatus, reward: float | None) -> str | None:
    """A rollout has a reward exactly if it did not fail."""
    if status.is_failure == (reward is None):
        return None
    return f"status {status.value} with reward {reward}"


def _check_ending(check: Check, where: str, name: str, status: str, reward: Any) -> None:
    check.looked_at += 1
    try:
        error = ending_error(RolloutStatus(status), reward)
    except ValueError:
        error = f"status {status}"
    check.require(error is None, f"{where}: rollout {name}: {error}")


def _check_turn(
    check: Check, where: str, row: Row, turn: Row, rules: Rules, *, is_train: bool
) -> None:
    check.looked_at += 1
    lengths = [len(turn[name]) for name in ("token_ids", "logprobs", "versions")]
    check.require(
        len(set(lengths)) == 1,
        f"{where}: {lengths[0]} tokens, {lengths[1]} logprobs and {lengths[2]} versions",
    )
    version, found = row["version"], set(turn["versions"])
    if not found:
        return
    if not is_train:
        check.require(
            found == {version}, f"{where}: validated under {sorted(found)}, not {version} alone"
        )
        return
    # A row has the version after its step.
    check.require(max(found) <= version, f"{where}: tokens of version {max(found)} at {version}")
    if rules.staleness is not None:
        check.require(
            version - 1 - min(found) <= rules.staleness,
            f"{where}: tokens of version {min(found)} trained at {version - 1}; "
            f"schedule.staleness is {rules.staleness}",
        )
