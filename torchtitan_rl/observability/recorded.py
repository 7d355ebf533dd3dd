"""Reads what a run has recorded: its configuration, the rows of its steps, and the groups of
rollouts of each step, from which ``replay`` and ``train --mode train`` compute updates again.

Nothing in the run's folder is changed. Whatever is missing or damaged is one `ConfigError`, before
any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from torchtitan_rl.config.model import find_policy
from torchtitan_rl.config.resume import POLICY, policy_fingerprint, read_run_identity
from torchtitan_rl.config.run import IDENTITY_FILE, RunConfig
from torchtitan_rl.errors import ConfigError, one_line
from torchtitan_rl.files import parse_object
from torchtitan_rl.observability.page_files import LAUNCH_FILE
from torchtitan_rl.observability.rollouts import LOGGED, groups_from_rows, logged_metrics
from torchtitan_rl.observability.sinks import Row, RowKind, Split, read_rows, step_in
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.training.checkpoints import CheckpointDirectory
from torchtitan_rl.types import RolloutGroup

DIGEST = "trainer/weights_digest"
_ROLLOUTS = "rollouts.jsonl"
_WRITTEN = f"{LOGGED}/{Split.TRAIN}/rollouts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The folder of a run whose rollouts are all recorded. ``option`` names it in errors.

    ``identity`` are the fields of its configuration by name; ``rows`` are the rows of its steps, by
    step.
    """

    run_dir: Path
    option: str
    identity: Mapping[str, Any]
    rows: Mapping[int, Row]

    @property
    def num_steps(self) -> int:
        return max(self.rows)

    def digest(self, step: int) -> float | None:
        """The digest of the weights after a step; None if the step did not train."""
        return value_in(self.rows[step], DIGEST)

    def checkpoint_before(self, step: int) -> tuple[int, Path | None]:
        """The newest complete checkpoint before ``step``, with its own step; (0, None) without one:
        then the initial policy is the start."""
        checkpoints = CheckpointDirectory(self.run_dir / "checkpoints")
        found = [one for one in checkpoints.steps() if one < step and one in self.rows]
        return (found[-1], checkpoints.path(found[-1])) if found else (0, None)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, tuple[RolloutGroup, ...]]]:
        """Yield each step with the groups of its batch. One step is in memory at a time. Raises
        ConfigError if a step is missing, or is not as it was written."""
        following = first
        try:
            lines = (
                line
                for line in read_rows(self.run_dir / _ROLLOUTS)
                if line.row.get("split") == Split.TRAIN
                and first <= step_in(line.where, line.row) <= last
            )
            for step, of_step in groupby(lines, key=lambda line: line.row["step"]):
                found = list(of_step)
                rows = [line.row for line in found]
                if step != following:
                    break
                self._check(step, logged_metrics(Split.TRAIN, rows, [one.data for one in found]))
                yield step, groups_from_rows(rows)
                following += 1
        except (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self._error(f"{_ROLLOUTS} cannot be read ({one_line(error)})") from error
        if following <= last:
            raise self._error(f"{_ROLLOUTS} has no rollouts of step {following}")

    def check(self, first: int, last: int) -> None:
        """Read these steps once, to find errors before processes start. Raises as `steps`."""
        for step in range(first, last + 1):
            row = self.rows.get(step)
            if row is None:
                raise self._error(f"metrics.jsonl has no row of step {step}")
            written, taken = (value_in(row, name) for name in (_WRITTEN, "train/rollouts"))
            if written is None or written != taken:
                raise ConfigError(
                    f"{self.option} is {self.run_dir}: of step {step} {written or 0:.0f} of "
                    f"{taken or 0:.0f} rollouts are recorded; give a run that was started with "
                    "--metrics.rollouts-per-step all"
                )
        for _ in self.steps(first, last):
            pass

    def _check(self, step: int, found: Mapping[str, float]) -> None:
        row = self.rows[step]
        if any(row.get(name) != value for name, value in found.items()):
            raise self._error(f"the rollouts of step {step} are not as they were written")

    def _error(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self.option} is {self.run_dir}: {what}; restore the file from a copy, or give "
            "another run"
        )


def value_in(row: Row, name: str) -> float | None:
    """A metric of a row; None if it is missing or no number."""
    value = row.get(name)
    return value if isinstance(value, float) else None


def read_recorded(run_dir: Path, *, option: str = "RUN_DIR") -> RecordedRun:
    """Raises ConfigError if there is no run, or its files are damaged."""
    identity = read_run_identity(run_dir)
    if identity is None:
        raise ConfigError(
            f"{option} is {run_dir}: it has no readable {IDENTITY_FILE}; give the folder of a run, "
            "such as outputs/NAME"
        )
    try:
        rows = {
            step_in(line.where, line.row): line.row
            for line in read_rows(run_dir / "metrics.jsonl")
            if line.row.get("kind") == RowKind.STEP
        }
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} is {run_dir}: {error}; restore the file") from error
    if not rows:
        raise ConfigError(f"{option} is {run_dir}: the run has not taken a step yet")
    return RecordedRun(run_dir=run_dir, option=option, identity=identity, rows=rows)


def recorded_config(recorded: RecordedRun, *, policy: str = "") -> tuple[RunConfig, Path]:
    """The configuration of a recorded run and the folder of its initial policy. The task is a
    placeholder, because a replay does not need it. ``policy``: where the policy is now; empty:
    where it was. Raises ConfigError if a field has a wrong value, or the policy is missing or
    another one."""
    from pydantic import TypeAdapter, ValidationError  # slow to import

    nested, checkpoint = _nested(recorded.identity), policy
    if not policy:
        with suppress(OSError, ValueError):
            launch = parse_object(LAUNCH_FILE, (recorded.run_dir / LAUNCH_FILE).read_bytes())
            checkpoint = str(launch.get("policy_dir", ""))
    if not checkpoint:
        raise ConfigError(
            f"policy.checkpoint is missing: {recorded.run_dir} does not say where its policy is; "
            "give it by --policy.checkpoint"
        )
    nested["policy"]["checkpoint"] = checkpoint
    values: dict[str, Any] = {"task": Task()}
    hints = get_type_hints(RunConfig, include_extras=True)
    for field in fields(RunConfig):
        if field.name in nested and field.name != "task":
            try:
                values[field.name] = TypeAdapter(hints[field.name]).validate_python(
                    nested[field.name]
                )
            except ValidationError as error:
                first = error.errors()[0]
                name = ".".join(map(str, (field.name, *first["loc"])))
                raise ConfigError(
                    f"{recorded.option} is {recorded.run_dir}: {name} in {IDENTITY_FILE}: "
                    f"{first['msg']}; restore the file from a copy"
                ) from error
    config = RunConfig(**values)
    policy_dir, _ = find_policy(checkpoint, is_trained=True)
    require_policy(recorded, policy_dir, checkpoint)
    return config, policy_dir


def require_policy(recorded: RecordedRun, policy_dir: Path, given: str) -> None:
    """Raises ConfigError if the recorded run began with another policy or tokenizer."""
    if policy_fingerprint(policy_dir) != recorded.identity.get(POLICY):
        raise ConfigError(
            f"policy.checkpoint is {given}: the run in {recorded.run_dir} began with another model "
            "or tokenizer; give that one"
        )


def _nested(identity: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {"policy": {}}
    for name, value in identity.items():
        *parents, last = name.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):  # the task, whose own fields follow its name
                break
        else:
            inner[last] = value
    return nested
