"""Reads the files of a run that is not running and runs all checks on them. Changes nothing."""

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
from torchtitan_rl.audit.metrics_checks import MetricsChecks
from torchtitan_rl.audit.rollout_checks import check_log
from torchtitan_rl.observability.jsonl import read_rows
from torchtitan_rl.orchestration.journal import read_lines
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.saved_run import SavedRun, read_saved_run
from torchtitan_rl.training.checkpoint_files import check_contents
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

_SavedRuns = Mapping[int, SavedRun]  # by step


def audit(run_dir: Path) -> list[Check]:
    """All checks of a run, in the order in which they are shown.

    Raises:
        OSError: a file cannot be read.
        FileNotFoundError: ``run_dir`` is not the folder of a run.
    """
    metrics = run_dir / "metrics.jsonl"
    checkpoints = CheckpointDirectory(run_dir / "checkpoints")
    if not metrics.is_file() and not checkpoints.root.is_dir():
        raise FileNotFoundError(f"{run_dir}: no run (neither metrics.jsonl nor checkpoints)")
    saved, whole = _read_checkpoints(checkpoints)
    rules = rules_of(_identity(run_dir, saved))
    rows = MetricsChecks(rules)
    with rows.order.reports_errors(metrics.name):
        for where, row in read_rows(metrics):
            rows.take(where, row)
    checks = [*rows.results(), whole]
    for step, one in sorted(saved.items()):
        checks += _audit_checkpoint(checkpoints.path(step).name, step, one, rules, rows)
    checks += _audit_journals(run_dir / "journal", saved)
    checks += _audit_rollouts(run_dir / "rollouts.jsonl", rules, rows)
    return [*checks, _audit_end(run_dir, rules, rows, saved)]


def _read_checkpoints(directory: CheckpointDirectory) -> tuple[_SavedRuns, Check]:
    """The checkpoints that can be read; any other one is a violation."""
    check = Check(name="checkpoints: whole", what="checkpoints")
    saved: dict[int, SavedRun] = {}
    for path in sorted(directory.root.glob("step-*")):
        if path.suffix or not path.is_dir():
            continue  # set aside, half written or being removed
        check.looked_at += 1
        with check.reports_errors(f"checkpoint {path.name}"):
            check_contents(path)
            saved[step_of(path)] = read_saved_run(path)
    return saved, check


def _identity(run_dir: Path, saved: _SavedRuns) -> Mapping[str, Any]:
    """That of the newest checkpoint; without one, that of the file written at the start."""
    if saved and (identity := saved[max(saved)].document.get("identity")):
        return dict(identity)
    try:
        loaded = json.loads((run_dir / "identity.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _audit_checkpoint(
    name: str, step: int, saved: SavedRun, rules: Rules, rows: MetricsChecks
) -> list[Check]:
    where, unreadable = f"checkpoint {name}", Check(name=f"checkpoint {step}: account")
    with unreadable.reports_errors(where):
        return [
            check_document(where, step, saved, rules),
            check_groups(where, step, saved, rules),
            check_against_metrics(
                where,
                step,
                saved.document,
                rows.totals.get(step),
                rows.versions.get(step),
                rows.evaluated,
            ),
        ]
    return [unreadable]


def _audit_journals(folder: Path, saved: _SavedRuns) -> list[Check]:
    checks: list[Check] = []
    for path in sorted(folder.glob("step-*.jsonl")):
        step, check = step_of(path), Check(name=f"journal {path.name}", what="turns")
        with check.reports_errors(check.name):
            check_journal(check, read_lines(path), saved.get(step), is_first=step == 0)
        checks.append(check)
    restored = Check(name="journal: continues the checkpoints", what="checkpoints")
    for step, one in saved.items():
        restored.looked_at += 1
        journals = JournalDirectory(folder)
        with restored.reports_errors(f"checkpoint of step {step}"):
            journals.restore(step, one.groups.rollouts, mark=one.journal_mark)
            restored.violations += journals.passed_over
    return [*checks, restored]


def _audit_rollouts(path: Path, rules: Rules, rows: MetricsChecks) -> list[Check]:
    if not path.exists():
        return []
    unreadable = Check(name="rollouts: ids")
    with unreadable.reports_errors(path.name):
        return check_log(
            read_rows(path), rules, last_step=rows.last_step, num_problems=rows.num_problems
        )
    return [unreadable]


def _audit_end(run_dir: Path, rules: Rules, rows: MetricsChecks, saved: _SavedRuns) -> Check:
    """What a run that has taken all of its steps leaves on disk."""
    check = Check(name="end of the run", what="finished runs")
    newest = max(saved, default=0)
    check.require(
        newest <= rows.last_step,
        f"the newest checkpoint is of step {newest}, the last row of step {rows.last_step}",
    )
    is_evaluated = not rows.evaluated or newest in rows.evaluated
    if rules.num_steps is None or newest < rules.num_steps or not is_evaluated:
        return check  # the run was stopped or killed and can be resumed
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
