"""Where metrics go: ``metrics.jsonl``, one object per step, and TensorBoard with the same names.

Invariants: only names of the metric table are written; what is recorded twice for one step (a
training step and the evaluation after it) becomes one object, but an evaluation that ended after
later steps has an object of its own; both survive a crash, and a resumed run continues them from
its step. ``metrics.jsonl`` has every row; what the disk does not take of TensorBoard's files is
left out of them, which is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.jsonl import JsonLines
from torchtitan_rl.observability.metric_table import check_names

logger = logging.getLogger(__name__)


class MetricsLog:
    """Writes ``run_dir/metrics.jsonl`` and, where asked, ``run_dir/tensorboard``.

    Args:
        resume_step: None starts anew; a number drops what was recorded for later steps.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, resume_step: int | None = None) -> None:
        self._lines = JsonLines(
            run_dir / "metrics.jsonl", resume_step=resume_step, is_step=is_step_row
        )
        self._tensorboard = _TensorBoard(run_dir, resume_step) if tensorboard else None

    def record(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Write now. An evaluation that a run before this one recorded stays as it was: a resumed
        run may validate a step again.

        Raises:
            ValueError: a name is not in the metric table.
            OutputError: ``metrics.jsonl`` cannot be written.
        """
        check_names(metrics)
        if is_evaluation_row(metrics) and self._lines.lines_of(step, is_evaluation_row):
            return
        row: dict[str, Any] = {"step": step, "wall_time_s": time.time(), "version": version}
        row |= {name: float(value) for name, value in metrics.items()}
        last = self._lines.last
        if last is not None and last["step"] == step:
            self._lines.replace_last(last | row)
        else:
            self._lines.append(row)
        if self._tensorboard is not None:
            self._tensorboard.record(step, metrics)

    def close(self) -> None:
        self._lines.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def is_step_row(row: Mapping[str, Any]) -> bool:
    """Does it tell of a training step, alone or with the evaluation after it?"""
    return "time/step_s" in row or any(name.startswith(("train/", "trainer/")) for name in row)


def is_evaluation_row(row: Mapping[str, Any]) -> bool:
    """Does it tell of an evaluation, alone or with the training step before it?"""
    return any(name.startswith("evaluation/") for name in row)


class _TensorBoard:
    """TensorBoard's files; raises no OSError.

    A `SummaryWriter` that has met an OSError raises it from then on, so it is replaced by one with
    a file of its own at the next row.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._folder = run_dir / "tensorboard"
        self._has_warned = False
        # TensorBoard itself hides what an earlier file has from this step on.
        self._purge_step = None if resume_step is None else resume_step + 1
        self._writer: Any = None
        try:
            if resume_step is None:
                for old in self._folder.glob("events.out.tfevents.*"):
                    old.unlink()
            self._open()
        except OSError as error:
            self._drop(error)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            if self._writer is None:
                self._open()
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(value), step)
            self._writer.flush()
        except OSError as error:
            self._drop(error)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._drop(error)

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        if self._purge_step is not None:
            self._writer.flush()
            self._purge_step = None  # it is written, and must not hide rows of this process

    def _drop(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("TensorBoard's files in %s have gaps: %s", self._folder, error)
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()  # ends its thread
