"""Where metrics go: ``metrics.jsonl``, one object per step, and TensorBoard with the same names.

Invariants: only names of the metric table are written; what is recorded twice for one step (a
training step and the evaluation after it) becomes one object, but an evaluation that ended after
later steps has an object of its own; both survive a crash, and a resumed run continues them from
its step. ``metrics.jsonl`` has every row; what the disk does not take of TensorBoard's files is
left out of them, which is logged once.

The names of all metrics, read from `docs/metrics.md`, which is linked into the package.

A name without a row on that page cannot be recorded. A name with braces stands for several. One
that ends in ``/*`` is a family: its members depend on a task or a cause.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.jsonl import JsonLines

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


_TABLE = Path(__file__).with_name("metrics.md")
_ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)


class Split(StrEnum):
    """Whose rollouts a metric describes; part of the name."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@cache
def metric_names() -> frozenset[str]:
    """Every name and family of the table."""
    rows = _ROW.findall(_TABLE.read_text(encoding="utf-8"))
    return frozenset(name for row in rows for name in _expand(row))


def is_known(name: str) -> bool:
    """Whether ``name`` is in the table, or of one of its families."""
    if name in metric_names():
        return not name.endswith("/*")
    families = (one.removesuffix("*") for one in metric_names() if one.endswith("/*"))
    return any(name.startswith(family) and name != family for family in families)


def check_names(names: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a name is not in the table.
    """
    unknown = sorted(name for name in names if not is_known(name))
    if unknown:
        raise ValueError(f"unknown metrics {unknown}: add them to docs/metrics.md")


def _expand(row: str) -> Iterable[str]:
    """
    >>> list(_expand("{train,evaluation}/reward_{mean,max}"))
    ['train/reward_mean', 'train/reward_max', 'evaluation/reward_mean', 'evaluation/reward_max']
    """
    parts = re.split(r"\{(.+?)\}", row)  # every second one was in braces
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, product(*choices))
