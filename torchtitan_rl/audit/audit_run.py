"""Reads the files of a run that is not running, and gives them to the checks. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.audit.checkpoint_checks import (
    check_against_metrics,
    check_document,
    check_groups,
    check_journal,
)
from torchtitan_rl.audit.findings import Check, Rules, rules_of
from torchtitan_rl.audit.metrics_checks import MetricsChecks, check_rows
from torchtitan_rl.audit.rollout_checks import check_log
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.observability.jsonl import read_rows
from torchtitan_rl.orchestration.journal import read_lines
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.recovery import SavedGroups, groups_from_bytes
from torchtitan_rl.orchestration.resume_choice import GROUPS, JOURNAL_MARK
from torchtitan_rl.training.checkpoint_files import (
    check_contents,
    load_attachment,
    read_document,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

_MISTAKES = (TorchtitanRLError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def audit(run_dir: Path) -> list[Check]:
    """All checks of a run, in the order in which they are shown.

    Raises:
        OSError: a file cannot be read.
        FileNotFoundError: ``run_dir`` is no directory of a run.
    """
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    if not metrics.is_file() and not checkpoints.is_dir():
        raise FileNotFoundError(f"{run_dir}: no run (neither metrics.jsonl nor checkpoints)")
    saved, checks = _read_checkpoints(run_dir)
    rules = rules_of(_identity(run_dir, saved))
    rows = _audit_metrics(metrics, rules)
    for step in sorted(saved):
        checks += _audit_checkpoint(step, saved[step], rules, rows)
    checks += _audit_journals(run_dir / "journal", saved)
    rollouts = _audit_rollouts(run_dir / "rollouts.jsonl", rules, rows)
    return [*rows.results(), *checks, *rollouts, _audit_end(run_dir, rules, rows, saved)]


class _Saved:
    """One checkpoint, as far as it could be read."""

    def __init__(self, path: Path) -> None:
        marker = read_document(path)
        self.path = path
        self.document: Mapping[str, Any] = marker.get("extra", marker)
        self.groups: SavedGroups = groups_from_bytes(load_attachment(path, GROUPS))

    @property
    def mark(self) -> int:
        """From which line on the journal goes on from it."""
        return int(self.document.get(JOURNAL_MARK, 0))

    @property
    def finished(self) -> frozenset[str]:
        return frozenset(one.group_id for one in self.groups.entries if one.group is not None)


def _read_checkpoints(run_dir: Path) -> tuple[dict[int, _Saved], list[Check]]:
    """By step; what is not whole, or cannot be read, is a violation."""
    directory = CheckpointDirectory(run_dir / "checkpoints")
    check = Check(name="checkpoints: whole", what="checkpoints")
    saved: dict[int, _Saved] = {}
    for path in sorted(directory.root.glob("step-*")) if directory.root.is_dir() else []:
        if path.suffix or not path.is_dir():
            continue  # set aside, in writing or being removed: no checkpoint
        check.looked_at += 1
        try:
            check_contents(path)
            saved[step_of(path)] = _Saved(path)
        except _MISTAKES as error:
            check.violations.append(f"checkpoint {path.name}: {type(error).__name__}: {error}")
    return saved, [check]


def _identity(run_dir: Path, saved: Mapping[int, _Saved]) -> Mapping[str, Any]:
    """Of the newest checkpoint; of a run without one, what it was started as."""
    if saved:
        identity = saved[max(saved)].document.get("identity") or {}
        if identity:
            return dict(identity)
    try:
        loaded = json.loads((run_dir / "identity.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _audit_metrics(path: Path, rules: Rules) -> MetricsChecks:
    checks = MetricsChecks(rules)
    try:
        checks = check_rows(read_rows(path), rules)
    except _MISTAKES as error:
        checks.results()[0].violations.append(f"{path.name}: {type(error).__name__}: {error}")
    return checks


def _audit_checkpoint(step: int, saved: _Saved, rules: Rules, rows: MetricsChecks) -> list[Check]:
    where = f"checkpoint {saved.path.name}"
    try:
        return [
            check_document(where, step, saved.document, saved.groups, rules),
            check_groups(where, step, saved.document, saved.groups, rules),
            check_against_metrics(
                where, step, saved.document, rows.totals.get(step), rows.versions.get(step)
            ),
        ]
    except _MISTAKES as error:
        violation = f"{where}: {type(error).__name__}: {error}"
        return [Check(name=f"checkpoint {step}: account", what="groups", violations=[violation])]


def _audit_journals(folder: Path, saved: Mapping[int, _Saved]) -> list[Check]:
    checks: list[Check] = []
    for path in sorted(folder.glob("step-*.jsonl")) if folder.is_dir() else []:
        step = step_of(path.with_suffix(""))
        of_step = saved.get(step)
        try:
            checks.append(
                check_journal(
                    path.name,
                    read_lines(path),
                    version=None if of_step is None else of_step.document["version"],
                    finished=frozenset() if of_step is None else of_step.finished,
                    is_first=step == 0,
                    mark=0 if of_step is None else of_step.mark,
                )
            )
        except _MISTAKES as error:
            violation = f"journal {path.name}: {type(error).__name__}: {error}"
            checks.append(Check(name=f"journal {path.name}", what="turns", violations=[violation]))
    restored = Check(name="journal: goes on from the checkpoints", what="checkpoints")
    for step, one in saved.items():
        restored.looked_at += 1
        journals = JournalDirectory(folder)
        try:
            journals.restore(step, one.groups.rollouts, mark=one.mark)
            restored.violations += journals.passed_over
        except _MISTAKES as error:
            restored.violations.append(f"{one.path.name}: {type(error).__name__}: {error}")
    return [*checks, restored]


def _audit_rollouts(path: Path, rules: Rules, rows: MetricsChecks) -> list[Check]:
    if not path.exists():
        return []
    try:
        return check_log(
            read_rows(path), rules, last_step=rows.last_step, num_problems=rows.problems
        )
    except _MISTAKES as error:
        violation = f"{path.name}: {type(error).__name__}: {error}"
        return [Check(name="rollouts: ids", what="rollouts", violations=[violation])]


def _audit_end(
    run_dir: Path, rules: Rules, rows: MetricsChecks, saved: Mapping[int, _Saved]
) -> Check:
    """What a run that has taken all of its steps leaves behind."""
    check = Check(name="end of the run", what="finished runs")
    newest = max(saved, default=0)
    check.require(
        newest <= rows.last_step,
        f"the newest checkpoint is of step {newest}, the last row of step {rows.last_step}",
    )
    is_validated = not rows.validated or newest in rows.validated
    if rules.num_steps is None or newest < rules.num_steps or not is_validated:
        return check  # it was stopped or killed, and goes on
    check.looked_at = 1
    check.require(
        rows.last_step == newest,
        f"a finished run of {newest} steps has rows up to step {rows.last_step}",
    )
    policy = run_dir / "policy"
    is_exported = (policy / "config.json").is_file() and any(policy.glob("*.safetensors"))
    check.require(
        not rules.exports or is_exported,
        f"all steps are done, and {policy} holds no policy: resume the run to export it",
    )
    return check
