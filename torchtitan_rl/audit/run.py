"""``torchtitan-rl audit RUN_DIR``: checks that the files of a run, or of an evaluation, are
consistent. Changes nothing.

Prints one line for each check, and one for each violation. Exit codes: 0 all checks hold; 1 there
are violations; 2 there is no such run, or it cannot be read.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtitan_rl.audit.rules import (
    RESTORE,
    Check,
    Errors,
    MetricsRules,
    Promises,
    check_checkpoint,
    check_journal,
    ending_errors,
    errors_against_row,
)
from torchtitan_rl.config.lora import ADAPTER_CONFIG, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from torchtitan_rl.config.resume import FIXES, MANIFEST, compare_with_manifest
from torchtitan_rl.config.run import IDENTITY_FILE, SETTINGS_FILE
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.files import parse_object
from torchtitan_rl.images import PromptImage, recorded_images_error
from torchtitan_rl.launch.lease import lock_errors
from torchtitan_rl.observability.failures import FAILURES, failure_errors, number_in, read_failures
from torchtitan_rl.observability.rollouts import LOGGED, logged_metrics
from torchtitan_rl.observability.sinks import Line, Row, read_rows
from torchtitan_rl.orchestration.checkpointing import SavedRun, read_saved_run
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.training.checkpoint_files import check_contents
from torchtitan_rl.training.checkpoints import CheckpointDirectory, step_of

_SavedRuns = Mapping[int, SavedRun]  # by step


def audit(run_dir: Path, *, is_running: bool = False) -> list[Check]:
    """Run all checks of a run or an evaluation, in the order in which they are shown. The end of a
    run that ``is_running`` is not checked. Raises OSError: a file cannot be read, or ``run_dir`` is
    not such a folder (FileNotFoundError)."""
    rows = run_dir / "metrics.jsonl"
    checkpoints = CheckpointDirectory(run_dir / "checkpoints")
    if (run_dir / SETTINGS_FILE).is_file():
        return [*_audit_evaluation(run_dir), _audit_files(run_dir)]
    if not rows.is_file() and not checkpoints.root.is_dir():
        raise FileNotFoundError(f"{run_dir}: no run (neither metrics.jsonl nor checkpoints)")
    saved, whole = _read_checkpoints(checkpoints)
    promises = Promises.of(_identity(run_dir, saved))
    metrics = MetricsRules(promises)
    num_failures = 0
    with metrics.order.reports_errors(rows.name):
        for line in read_rows(rows):
            metrics.take(line)
            num_failures = max(num_failures, number_in(line.row))
    checks = [*metrics.results(), whole]
    for step, one in sorted(saved.items()):
        checks += _audit_checkpoint(checkpoints.path(step).name, step, one, promises, metrics)
    checks += _audit_journal(Journal(run_dir / JOURNAL), saved, promises)
    checks += _audit_rollouts(run_dir / "rollouts.jsonl", promises, metrics)
    checks.append(_audit_failures(run_dir, num_failures))
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
    """Read the identity of the run from its file, which each start writes: it may be newer than the
    checkpoints, whose newest has it if there is no file."""
    with suppress(FileNotFoundError, ValueError):
        loaded = parse_object(IDENTITY_FILE, (run_dir / IDENTITY_FILE).read_bytes())
        if loaded:
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
    if saved and not journal.path.is_file():
        why = "restore it; without it, turns that it held are sampled again"
        restored.violations.append(f"{JOURNAL} is missing: {why}")
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


def _audit_failures(run_dir: Path, at_least: int) -> Check:
    """Check the reports of failures; the metrics count ``at_least`` so many."""
    check = Check(name="failures", what="failures")
    with check.reports_errors(FAILURES):
        for number, row in enumerate(read_failures(run_dir), start=1):
            check.look(f"{FAILURES}, row {number}", failure_errors(row))
        if (number := check.looked_at) < at_least:
            why = f"has {number} rows, and the metrics count {at_least}"
            check.violations.append(f"{FAILURES} {why}; {RESTORE}")
    return check


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
    last = metrics.last_step
    check.require(
        newest <= last, f"the newest checkpoint is of step {newest}, the last row of step {last}"
    )
    is_evaluated = not metrics.evaluated or newest in metrics.evaluated
    is_stopped = promises.num_steps is None or newest < promises.num_steps or not is_evaluated
    if is_running or is_stopped:
        return check  # the run is still running, or can be resumed
    check.looked_at = 1
    check.require(last == newest, f"a finished run of {newest} steps has rows up to step {last}")
    policy, adapter = run_dir / "policy", run_dir / ADAPTER_FOLDER
    is_exported = (policy / "config.json").is_file() and any(policy.glob("*.safetensors"))
    is_written = all((adapter / one).is_file() for one in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    missing = []
    if promises.exports and not is_exported:
        missing.append(f"{policy} holds no policy: resume the run to export it")
    if promises.exports and promises.has_adapters and not is_written:
        fix = f"remove {policy} and resume the run, which exports both"
        missing.append(f"{adapter} holds no adapter: {fix}")
    if metrics.logged and not (run_dir / MANIFEST).is_file():
        fix = "it was removed, or the run was killed in its last moment; resume the run to write it"
        missing.append(f"there is no {MANIFEST}: {fix}")
    check.violations += [f"all steps are done, and {one}" for one in missing]
    return check


def check_log(lines: Iterable[Line], promises: Promises, metrics: MetricsRules) -> list[Check]:
    """Check ``rollouts.jsonl``, by itself and against the rows of ``metrics.jsonl``."""
    ids = Check(name="rollouts: ids", what="rollouts")
    tokens = Check(name="rollouts: tokens", what="turns")
    endings = Check(name="rollouts: endings", what="rollouts")
    written = Check(name="rollouts: as they were written", what="steps and evaluations")
    last_step, problems, step = metrics.last_step, set[str](), 0
    seen: set[tuple[int, int, str]] = set()  # rollouts of evaluations and of this step
    missing: dict[tuple[int, str], str] = {}
    for (at, split), numbers in metrics.logged.items():
        if number := numbers[f"{LOGGED}/{split}/rollouts"]:
            what = f"{number:.0f} {split} rollouts of step {at}"
            missing[at, split] = f"rollouts.jsonl: {what} are missing"
    # Rollouts may be of later steps than the last row: those of a step are logged before its row is
    # written, and rows are dropped before their rollouts.
    newest = last_step + 1 if promises.num_steps is None else promises.num_steps
    for (at, split, _), grouped in groupby(lines, key=_batch_of):
        batch, is_train = list(grouped), split == "train"
        where = batch[0].where
        if is_train:
            ids.require(at >= step, f"{where}: step {at} after step {step}")
            step = at
            seen = {one for one in seen if one[0] >= step}
        else:
            problems |= {line.row["problem_id"] for line in batch}
        ids.require(at <= newest, f"{where}: step {at} is in no row of the metrics")
        ids.look(where, _repeated(batch, seen), len(batch))
        for line in batch:
            check_rollout(endings, tokens, line.where, line.row, promises, is_train=is_train)
        what, said = f"{where}: the {split} rollouts of step {at}", metrics.logged.get((at, split))
        if said is None:
            # The row of an evaluation may be missing, if the run was killed before writing it.
            is_due = is_train and at <= last_step
            written.require(not is_due, f"{what} are in no row of the metrics")
        elif differing := _differing(batch, split, said):
            # If an evaluation was repeated, one of its batches must match the row.
            if (at, split) in missing:
                missing[at, split] = f"{what} are not those that were written, {differing}"
        else:
            written.looked_at += 1
            missing.pop((at, split), None)
    written.violations += [f"{text}; {RESTORE}" for text in missing.values()]
    if (most := metrics.num_problems) is not None and len(problems) > most:
        what = f"{len(problems)} problems were validated"
        ids.violations.append(f"{what}, of {most} that are the same each time")
    return [ids, tokens, endings, written]


def _batch_of(line: Line) -> tuple[int, str, int]:
    return line.row["step"], line.row["split"], line.life


def _repeated(batch: Sequence[Line], seen: set[tuple[int, int, str]]) -> Errors:
    for line in batch:
        key = line.row["step"], line.life, f"{line.row['split']} {line.row['rollout_id']}"
        if key in seen:
            yield f"rollout {line.row['rollout_id']} is there twice for step {key[0]}"
        seen.add(key)


def _differing(batch: Sequence[Line], split: str, said: Mapping[str, float]) -> str:
    """Describe how rollouts differ from ``said``, the `logged_metrics` in the row of their step."""
    now = logged_metrics(split, [line.row for line in batch], [line.data for line in batch])
    return ", ".join(
        f"{name.rpartition('/')[2]} {now[name]:.17g} and not {said.get(name)}"
        for name in now
        if now[name] != said.get(name)
    )


def check_rollout(
    endings: Check, tokens: Check, where: str, row: Row, promises: Promises, *, is_train: bool
) -> None:
    """Check one row of ``rollouts.jsonl`` by itself."""
    endings.look(where, ending_errors(row["rollout_id"], row["status"], row["reward"]))
    for number, turn in enumerate(row["turns"]):
        errors = _turn_errors(row["version"], turn, promises.staleness, is_train)
        tokens.look(f"{where}, turn {number}", errors)
        tokens.look(f"{where}, turn {number}", _image_errors(turn))


def _turn_errors(version: int, turn: Row, staleness: int | None, is_train: bool) -> Errors:
    """Check a turn's lengths and versions against the ``version`` after the row's step."""
    lengths = [len(turn[name]) for name in ("token_ids", "logprobs", "versions")]
    if len(set(lengths)) > 1:
        yield f"{lengths[0]} tokens, {lengths[1]} logprobs and {lengths[2]} versions"
    found = set(turn["versions"])
    if not found:
        return
    if not is_train:
        if found != {version}:
            yield f"validated under {sorted(found)}, not {version} alone"
        return
    if max(found) > version:
        yield f"tokens of version {max(found)} at {version}"
    if staleness is not None and version - 1 - min(found) > staleness:
        what = f"tokens of version {min(found)} trained at {version - 1}"
        yield f"{what}; schedule.staleness is {staleness}"


def _image_errors(turn: Row) -> Errors:
    """Check the places of a turn's images, and their digests if they are recorded."""
    images = []
    for one in turn.get("images", ()):
        sizes = {name: one[name] for name in ("start", "rows", "columns")}
        images.append(PromptImage(**sizes, data=base64.b64decode(one.get("png", ""))))
        if "png" in one and images[-1].digest != one["sha256"]:
            yield f"an image is not the one of SHA-256 {one['sha256']}"
    if error := recorded_images_error(images, turn["prompt_token_ids"]):
        yield error


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
    """Drop violations that a second audit does not find, because the running run changed files."""
    again = {violation for check in later for violation in check.violations}
    for check in checks:
        check.violations = [one for one in check.violations if one in again]
