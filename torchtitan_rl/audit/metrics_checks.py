"""Checks that the rows of ``metrics.jsonl`` add up, alone and from one to the next. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchtitan_rl.audit.findings import Check, Rules
from torchtitan_rl.observability.rollout_log import LOGGED
from torchtitan_rl.observability.sinks import Split, is_evaluation_row, is_step_row
from torchtitan_rl.orchestration.ledger import LedgerError, require_sums
from torchtitan_rl.orchestration.records import LedgerTotals
from torchtitan_rl.orchestration.work_buffer import GroupState

Row = Mapping[str, Any]

_UNACCOUNTED = "account/unaccounted_tokens"
_TOTALS = "total/tokens_generated"
_COUNTS_BY_CAUSE = ("tokens_masked", "tokens_discarded", "groups_discarded")
_COUNTS = tuple(one.name for one in fields(LedgerTotals) if one.name not in _COUNTS_BY_CAUSE)


class MetricsChecks:
    """Takes one row after another; `results` are complete after the last.

    ``totals`` and ``versions`` are by step, ``evaluated`` are steps, ``logged`` is what rows say of
    their rollouts in ``rollouts.jsonl``, by step and split, and ``num_problems`` is that of the
    largest evaluation.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.order = Check(name="metrics: steps", what="steps")
        self._sums = Check(name="metrics: totals", what="rows with totals")
        self._growth = Check(name="metrics: growth of totals", what="pairs of rows")
        self._steps = Check(name="metrics: tokens and groups of a step", what="steps")
        self._ages = Check(name="metrics: ages", what="rows with ages")
        self._account = Check(name="metrics: account against replicas", what="rows with it")
        self._evaluations = Check(name="metrics: evaluations", what="evaluations")
        self.evaluated: set[int] = set()
        self.totals: dict[int, LedgerTotals] = {}
        self.versions: dict[int, int] = {0: 0}
        self.logged: dict[tuple[int, str], dict[str, float]] = {}
        self.last_step = 0
        self.num_problems: int | None = None

    def take(self, where: str, row: Row) -> None:
        if not isinstance(row.get("step"), int) or not isinstance(row.get("version"), int):
            self.order.violations.append(f"{where}: no step, or no version")
            return
        if _UNACCOUNTED in row:
            self._account.looked_at += 1
            self._account.require(
                row[_UNACCOUNTED] == 0,
                f"{where}: {row[_UNACCOUNTED]} tokens were sampled and are in no account",
            )
        for split in Split:
            of_split = {n: row[n] for n in row if n.startswith(f"{LOGGED}/{split}/")}
            if of_split:
                self.logged[row["step"], split.value] = of_split
        if is_evaluation_row(row):
            self._take_evaluation(where, row)
        if is_step_row(row):
            self._take_step(where, row)

    def results(self) -> list[Check]:
        return [
            self.order,
            self._sums,
            self._growth,
            self._steps,
            self._ages,
            self._account,
            self._evaluations,
        ]

    def _take_evaluation(self, where: str, row: Row) -> None:
        check, step = self._evaluations, row["step"]
        check.looked_at += 1
        check.require(step not in self.evaluated, f"{where}: step {step} is validated again")
        check.require(
            step <= self.last_step + is_step_row(row),
            f"{where}: an evaluation of step {step} before that step",
        )
        self.evaluated.add(step)
        groups = row.get("evaluation/groups")
        if groups is not None:
            self.num_problems = max(self.num_problems or 0, int(groups))

    def _take_step(self, where: str, row: Row) -> None:
        step, version = row["step"], row["version"]
        self.order.looked_at += 1
        self.order.require(
            step == self.last_step + 1, f"{where}: step {step} comes after step {self.last_step}"
        )
        before = self.versions[self.last_step]
        self.order.require(
            before <= version <= before + 1 or step != self.last_step + 1,
            f"{where}: version {version} comes after version {before}",
        )
        self.order.require(version <= step, f"{where}: version {version} at step {step}")
        self._check_ages(where, row)
        self._check_step(where, row)
        totals = totals_of(row)
        if totals is not None:
            self._check_totals(where, row, totals)
            self.totals[step] = totals
        self.versions[step] = version
        self.last_step = step

    def _check_totals(self, where: str, row: Row, totals: LedgerTotals) -> None:
        self._sums.looked_at += 1
        try:
            require_sums(totals)
        except LedgerError as error:
            self._sums.violations.append(f"{where}: {error}")
        last = _NOTHING if row["step"] == 1 else self.totals.get(row["step"] - 1)
        if last is None:
            return
        self._growth.looked_at += 1
        for name, now, then in _growing(totals, last):
            self._growth.require(now >= then, f"{where}: {name} falls from {then} to {now}")
        masked = totals.tokens_masked.get("loss_mask", 0) - last.tokens_masked.get("loss_mask", 0)
        pairs = (
            ("tokens/trained", totals.tokens_trained - last.tokens_trained + masked),
            ("train/groups", totals.groups_trained - last.groups_trained),
        )
        for name, growth in pairs:
            self._growth.require(
                row.get(name, growth) == growth,
                f"{where}: {name} is {row.get(name)}, but the total grows by {growth}",
            )

    def _check_step(self, where: str, row: Row) -> None:
        check, rules = self._steps, self._rules
        check.looked_at += 1
        if "tokens/generated" in row:
            parts = row["tokens/trained"] + row["tokens/discarded"]
            check.require(
                row["tokens/generated"] == parts,
                f"{where}: a batch of {row['tokens/generated']} tokens, of which {parts} are "
                "trained or discarded",
            )
        groups, rollouts = row.get("train/groups"), row.get("train/rollouts")
        if groups is not None and rules.groups_per_step is not None:
            check.require(
                groups == rules.groups_per_step,
                f"{where}: a batch of {groups} groups; rollout.groups_per_step is "
                f"{rules.groups_per_step}",
            )
        if groups is not None and rules.group_size is not None:
            check.require(
                rollouts == groups * rules.group_size,
                f"{where}: {rollouts} rollouts of {groups} groups of {rules.group_size}",
            )
        if rollouts is not None and row.get(f"{LOGGED}/train/rollouts") == rollouts:  # all
            sampled, rewards = row["tokens/generated"], row.get("train/reward_sum", 0.0)
            logged = [row[f"{LOGGED}/train/{name}"] for name in ("tokens", "reward_sum")]
            check.require(
                logged == [sampled, rewards],
                f"{where}: rollouts of {sampled} tokens and rewards of {rewards}; "
                f"rollouts.jsonl has all of them, with {logged[0]} and {logged[1]}",
            )
        if "buffer/capacity" in row:
            held = sum(row[f"buffer/{state}"] for state in GroupState)
            check.require(
                held <= row["buffer/capacity"],
                f"{where}: {held} groups in a buffer of {row['buffer/capacity']}",
            )

    def _check_ages(self, where: str, row: Row) -> None:
        age, limit = row.get("policy/staleness_max"), self._rules.staleness
        if age is None:
            return
        self._ages.looked_at += 1
        self._ages.require(age >= 0, f"{where}: tokens of a later version than the step's")
        self._ages.require(
            limit is None or age <= limit,
            f"{where}: tokens {age} versions old; schedule.staleness is {limit}",
        )


def totals_of(row: Row) -> LedgerTotals | None:
    """The totals in a row; None where it has none."""
    if _TOTALS not in row:
        return None
    counts: dict[str, Any] = {name: int(row[f"total/{name}"]) for name in _COUNTS}
    counts |= {name: _by_cause(row, f"total/{name}") for name in _COUNTS_BY_CAUSE}
    return LedgerTotals(**counts)


def _by_cause(row: Row, name: str) -> dict[str, int]:
    """Numbers by cause; what is missing to their sum has a cause of its own."""
    causes = {
        key.removeprefix(f"{name}/"): int(value)
        for key, value in row.items()
        if key.startswith(f"{name}/")
    }
    rest = int(row[name]) - sum(causes.values())
    return causes | ({"cause not named": rest} if rest else {})


def _growing(now: LedgerTotals, then: LedgerTotals) -> list[tuple[str, int, int]]:
    """Without tokens_generated: a killed run loses tokens of groups that it had not finished."""
    pairs = [
        (name, getattr(now, name), getattr(then, name))
        for name in ("tokens_trained", "groups_admitted", "groups_trained")
    ]
    for name in _COUNTS_BY_CAUSE:
        later, earlier = getattr(now, name), getattr(then, name)
        pairs += [(f"{name}/{one}", later.get(one, 0), earlier[one]) for one in earlier]
    return pairs


_NOTHING = totals_of({f"total/{one.name}": 0 for one in fields(LedgerTotals)})
