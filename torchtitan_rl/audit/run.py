"""``torchtitan-rl audit RUN_DIR``: checks that the files of a run, or of an evaluation, are
consistent. Changes nothing.

Prints one line for each check, and one for each violation. Exit codes: 0 all checks hold; 1 there
are violations; 2 there is no such run, or it cannot be read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.audit.rules import (
    Check,
    MetricsRules,
    Promises,
    check_checkpoint,
    check_journal,
    check_log,
    check_rollout,
    errors_against_row,
)
from torchtitan_rl.config.resume import FIXES, MANIFEST, compare_with_manifest
from torchtitan_rl.config.run import IDENTITY_FILE, SETTINGS_FILE
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.lease import lock_errors
from torchtitan_rl.observability.sinks import read_rows
from torchtitan_rl.orchestration.checkpointing import SavedRun, read_saved_run
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.training.checkpoint_files import check_contents
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

_SavedRuns = Mapping[int, SavedRun]  # by step


def audit(run_dir: Path, *, is_running: bool = False) -> list[Check]:
    """Run all checks of a run or an evaluation, in the order in which they are shown.

    Args:
        is_running: the run is still writing, so its end is not checked.

    Raises:
        OSError: a file cannot be read.
        FileNotFoundError: ``run_dir`` is not the folder of a run or an evaluation.
    """
    rows = run_dir / "metrics.jsonl"
    checkpoints = CheckpointDirectory(run_dir / "checkpoints")
    if (run_dir / SETTINGS_FILE).is_file():
        return [*_audit_evaluation(run_dir), _audit_files(run_dir)]
    if not rows.is_file() and not checkpoints.root.is_dir():
        raise FileNotFoundError(f"{run_dir}: no run (neither metrics.jsonl nor checkpoints)")
    saved, whole = _read_checkpoints(checkpoints)
    promises = Promises.of(_identity(run_dir, saved))
    metrics = MetricsRules(promises)
    with metrics.order.reports_errors(rows.name):
        for line in read_rows(rows):
            metrics.take(line)
    checks = [*metrics.results(), whole]
    for step, one in sorted(saved.items()):
        checks += _audit_checkpoint(checkpoints.path(step).name, step, one, promises, metrics)
    checks += _audit_journal(Journal(run_dir / JOURNAL), saved, promises)
    checks += _audit_rollouts(run_dir / "rollouts.jsonl", promises, metrics)
    checks += [_audit_files(run_dir), _audit_end(run_dir, promises, metrics, saved, is_running)]
    return checks


def _read_checkpoints(directory: CheckpointDirectory) -> tuple[_SavedRuns, Check]:
    """Read all checkpoints; each one that cannot be read is a violation."""
    check = Check(name="checkpoints: whole", what="checkpoints")
    saved: dict[int, SavedRun] = {}
    for path in sorted(directory.root.glob("step-*")):
        if path.suffix or not path.is_dir():
            continue  # rejected, incomplete or being removed
        check.looked_at += 1
        with check.reports_errors(f"checkpoint {path.name}", FIXES["checkpoints/"]):
            check_contents(path)
            saved[step_of(path)] = read_saved_run(path)
    return saved, check


def _identity(run_dir: Path, saved: _SavedRuns) -> Mapping[str, Any]:
    """Read the identity of the run from its file, or without a file from the newest checkpoint.

    The file is written at each start. So if a finished run is resumed with more steps, the file is
    newer than the checkpoint.
    """
    with suppress(FileNotFoundError, ValueError):
        loaded = json.loads((run_dir / IDENTITY_FILE).read_text())
        if isinstance(loaded, dict) and loaded:
            return loaded
    return saved[max(saved)].position.identity if saved else {}


def _audit_checkpoint(
    name: str, step: int, saved: SavedRun, promises: Promises, metrics: MetricsRules
) -> list[Check]:
    where, unreadable = f"checkpoint {name}", Check(name=f"checkpoint {step}: account")
    with unreadable.reports_errors(where):
        of_row = Check(name=f"checkpoint {step}: against its row of the metrics", what="rows")
        number = int(step > 0 and step in metrics.versions)
        of_row.look(where, errors_against_row(step, saved.position, metrics), number)
        return [*check_checkpoint(where, step, saved, promises), of_row]
    return [unreadable]


def _audit_journal(journal: Journal, saved: _SavedRuns, promises: Promises) -> list[Check]:
    turns = Check(name="journal", what="turns")
    with turns.reports_errors(JOURNAL):
        rows = journal.rows()
        for step, one in saved.items():
            place = (step, one.position.journal_mark)
            check_journal(turns, (row for row in rows if row[:2] == place), one, promises)
    restored = Check(name="journal: continues the checkpoints", what="checkpoints")
    restored.require(
        journal.path.is_file() or not saved,
        f"{JOURNAL} is missing: restore it; without it, turns that it held are sampled again",
    )
    for step, one in saved.items():
        restored.looked_at += 1
        with restored.reports_errors(f"checkpoint of step {step}"):
            journal.restore(step, one.rollouts, mark=one.position.journal_mark)
            restored.violations += journal.passed_over
    return [turns, restored]


def _audit_rollouts(path: Path, promises: Promises, metrics: MetricsRules) -> list[Check]:
    unreadable = Check(name="rollouts: ids")
    with unreadable.reports_errors(path.name):
        return check_log(read_rows(path), promises, metrics)
    return [unreadable]


def _audit_evaluation(folder: Path) -> list[Check]:
    """Check the rollouts of ``torchtitan-rl eval``. A failed rollout may have a second row."""
    tokens = Check(name="rollouts: tokens", what="turns")
    endings = Check(name="rollouts: endings", what="rollouts")
    for path in sorted(folder.rglob("rollouts.jsonl")):
        finished: set[str] = set()
        name = path.relative_to(folder).as_posix()
        with endings.reports_errors(name):
            for line in read_rows(path):
                at, row = f"{name}: {line.where}", line.row
                check_rollout(endings, tokens, at, row, Promises(), is_train=False)
                twice = row["rollout_id"] in finished
                endings.require(not twice, f"{at}: {row['rollout_id']} is there twice")
                if row["reward"] is not None:
                    finished.add(row["rollout_id"])
    return [tokens, endings]


def _audit_files(folder: Path) -> Check:
    number, errors = compare_with_manifest(folder)
    return Check(name=f"{MANIFEST}: files as they were left", looked_at=number, violations=errors)


def _audit_end(
    run_dir: Path, promises: Promises, metrics: MetricsRules, saved: _SavedRuns, is_running: bool
) -> Check:
    """Check the files of a run that has taken all its steps."""
    check = Check(name="end of the run", what="finished runs")
    newest = max(saved, default=0)
    check.require(
        newest <= metrics.last_step,
        f"the newest checkpoint is of step {newest}, the last row of step {metrics.last_step}",
    )
    is_evaluated = not metrics.evaluated or newest in metrics.evaluated
    is_stopped = promises.num_steps is None or newest < promises.num_steps or not is_evaluated
    if is_running or is_stopped:
        return check  # the run is still running, or can be resumed
    check.looked_at = 1
    check.require(
        metrics.last_step == newest,
        f"a finished run of {newest} steps has rows up to step {metrics.last_step}",
    )
    policy = run_dir / "policy"
    is_exported = (policy / "config.json").is_file() and any(policy.glob("*.safetensors"))
    check.require(
        not promises.exports or is_exported,
        f"all steps are done, and {policy} holds no policy: resume the run to export it",
    )
    check.require(
        not metrics.logged or (run_dir / MANIFEST).is_file(),
        f"all steps are done, and there is no {MANIFEST}: it was removed, or the run was killed in "
        "its last moment; resume the run to write it again",
    )
    return check


_USAGE = "usage: torchtitan-rl audit RUN_DIR    of a run, or the folder of an evaluation\n"


def main(words: Sequence[str]) -> int:
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("RUN_DIR: give the folder of one run, or of an evaluation")
    run_dir = Path(words[0])
    is_running = bool(lock_errors(run_dir))
    try:
        checks = audit(run_dir, is_running=is_running)
        if is_running:
            _keep_what_lasts(checks, audit(run_dir, is_running=True))
            print("the run goes on: what it has written so far is checked")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for check in checks:
        print(check.summary)
    violations = [violation for check in checks for violation in check.violations]
    for violation in violations:
        print(f"violation: {violation}", file=sys.stderr)
    return 1 if violations else 0


def _keep_what_lasts(checks: Sequence[Check], later: Sequence[Check]) -> None:
    """Drop violations that a second audit does not find: the running run changed its files during
    the first audit."""
    again = {violation for check in later for violation in check.violations}
    for check in checks:
        check.violations = [one for one in check.violations if one in again]
