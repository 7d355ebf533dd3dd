"""Every rollout of an evaluation, in the format of a run's ``rollouts.jsonl``.

Invariants: a rollout is in the file when `write` returns; one that has a reward is not run again by
the evaluation that continues. One that failed is, and its later line counts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.jsonl import JsonLines, read_rows
from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.observability.rollout_log import Decode, rollout_from_json, rollout_to_json
from torchtitan_rl.types import Problem, Rollout, RolloutGroup


class EvaluationLog:
    """Appends to ``path``, after the lines that it has. ``step`` is that of the checkpoint,
    ``decode`` as in `RolloutLog`."""

    def __init__(self, path: Path, *, step: int, decode: Decode | None = None) -> None:
        self._lines = JsonLines(path, resume_step=sys.maxsize)
        self._step = step
        self._decode = decode

    def write(self, problem: Problem, rollout: Rollout, *, version: int) -> None:
        """
        Raises:
            OutputError: it cannot be written.
        """
        head = {"step": self._step, "version": version, "split": Split.EVALUATION.value}
        group = RolloutGroup(group_id=rollout.group_id, problem=problem, rollouts=(rollout,))
        row = rollout_to_json(group, rollout, decode=self._decode)
        self._lines.append(head | {"chosen": "all"} | row)

    def close(self) -> None:
        self._lines.close()


def read_finished(path: Path) -> Mapping[str, Rollout]:
    """The rollouts in the file that have a reward, by id; none where it does not exist.

    Raises:
        OutputError: it has lines that are not ours.
    """
    finished: dict[str, Rollout] = {}
    try:
        for where, row in read_rows(path):
            try:
                rollout = rollout_from_json(row)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{where}: not a rollout ({error!r})") from error
            if not rollout.status.is_failure:
                finished[rollout.rollout_id] = rollout
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: {error}; repair or remove the line") from error
    return finished
