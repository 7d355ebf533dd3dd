"""Checks rollouts, those of ``rollouts.jsonl`` and those of checkpoints. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torchtitan_rl.audit.findings import Check, Rules
from torchtitan_rl.observability.jsonl import Row, parse_line
from torchtitan_rl.observability.rollout_log import LOGGED, logged_metrics
from torchtitan_rl.token_sets import kept_error
from torchtitan_rl.types import Completion, RolloutStatus

Logged = Mapping[tuple[int, str], Mapping[str, float]]

_RESTORE = "restore the file from a copy"


def check_log(
    lines: Iterable[tuple[str, bytes]],
    rules: Rules,
    *,
    last_step: int,
    num_problems: int | None,
    logged: Logged,
) -> list[Check]:
    """Check ``rollouts.jsonl``.

    Args:
        lines: (where, line) pairs.
        last_step: the last one in the metrics.
        num_problems: problems of an evaluation, the same ones each time.
        logged: what the rows of the metrics say of the rollouts, by step and split; empty for a run
            of an earlier version.
    """
    ids = Check(name="rollouts: ids", what="rollouts")
    tokens = Check(name="rollouts: tokens", what="turns")
    endings = Check(name="rollouts: endings", what="rollouts")
    written = Check(name="rollouts: as they were written", what="steps and evaluations")
    seen: set[tuple[int, str, str]] = set()
    step, problems, missing = 0, set(), dict(logged)
    first = min((one for one, _ in logged), default=last_step + 1)  # of this version
    for (at, split), batch in groupby(_parsed(lines), key=lambda one: _batch_of(one[2])):
        found, is_train = list(batch), split == "train"
        if is_train:
            ids.require(at >= step, f"{found[0][0]}: step {at} after step {step}")
            step = at
            seen = {one for one in seen if one[0] >= step or one[1] != "train"}
        for where, _, row in found:
            ids.looked_at += 1
            if not is_train:
                problems.add(row["problem_id"])
            key = (at, split, row["rollout_id"])
            ids.require(
                key not in seen, f"{where}: rollout {key[2]} is there twice for step {key[0]}"
            )
            seen.add(key)
            check_rollout(endings, tokens, where, row, rules, is_train=is_train)
        # A kill may come before the row of the next step, or between the rows and the rollouts that
        # a resumed run drops.
        is_known = at <= (last_step + 1 if rules.num_steps is None else rules.num_steps)
        ids.require(is_known, f"{found[0][0]}: step {at} is in no row of the metrics")
        said = missing.pop((at, split), None)
        # The row of an evaluation may be missing: its run was killed before it was written.
        is_due = is_train and first <= at <= last_step
        _check_batch(written, found, at, split, said, is_due=is_due)
    for (at, split), said in missing.items():
        number = said[f"{LOGGED}/{split}/rollouts"]
        written.require(
            not number,
            f"rollouts.jsonl: {number:.0f} {split} rollouts of step {at} are missing; {_RESTORE}",
        )
    ids.require(
        num_problems is None or len(problems) <= num_problems,
        f"{len(problems)} problems were validated, of {num_problems} that are the same each time",
    )
    return [ids, tokens, endings, written]


def check_rollout(
    endings: Check, tokens: Check, where: str, row: Row, rules: Rules, *, is_train: bool
) -> None:
    """Check one line by itself."""
    _check_ending(endings, where, row["rollout_id"], row["status"], row["reward"])
    for number, turn in enumerate(row["turns"]):
        _check_turn(tokens, f"{where}, turn {number}", row, turn, rules, is_train=is_train)


def _parsed(lines: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes, Row]]:
    for where, line in lines:
        yield where, line, parse_line(where, line)


def _batch_of(row: Row) -> tuple[int, str]:
    return row["step"], row["split"]


def _check_batch(
    check: Check,
    found: Sequence[tuple[str, bytes, Row]],
    step: int,
    split: str,
    said: Mapping[str, float] | None,
    *,
    is_due: bool,
) -> None:
    """Compare the rollouts of a step with its row, which says ``said``."""
    what = f"{found[0][0]}: the {split} rollouts of step {step}"
    check.require(said is not None or not is_due, f"{what} are in no row of the metrics")
    if said is None:
        return
    check.looked_at += 1
    now = logged_metrics(split, [row for _, _, row in found], [line for _, line, _ in found])
    differing = {
        name.rpartition("/")[2]: (now[name], said.get(name))
        for name in now
        if now[name] != said.get(name)
    }
    check.require(
        not differing,
        f"{what} are not those that were written, "
        + ", ".join(f"{name} {new:.17g} and not {old}" for name, (new, old) in differing.items())
        + f"; {_RESTORE}",
    )


def completion_errors(completion: Completion, *, newest: int, oldest: int = 0) -> list[str]:
    """Errors of a completion: lengths that differ, versions out of order or range."""
    num_tokens = len(completion.token_ids)
    errors = []
    if len(completion.logprobs) != num_tokens or len(completion.versions) != num_tokens:
        errors.append(
            f"{completion.request_id}: {num_tokens} tokens, {len(completion.logprobs)} logprobs "
            f"and {len(completion.versions)} versions"
        )
    if error := kept_error(completion.kept_tokens, num_tokens):
        errors.append(f"{completion.request_id}: {error}")
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
