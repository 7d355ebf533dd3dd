"""Where metrics go: ``metrics.jsonl``, one object per step, and TensorBoard with the same names.

Invariants: only names of the metric table are written; what is recorded twice for one step (a
training step and the validation after it) becomes one object, but for a validation that ended after
later steps, which is an object of its own; both survive a crash, and a resumed
run continues them from its step as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.jsonl import JsonLines
from torchtitan_rl.observability.metric_table import check_names


class MetricsLog:
    """Writes ``run_dir/metrics.jsonl`` and, where asked, ``run_dir/tensorboard``.

    Args:
        resume_step: None starts anew; a number drops what was recorded for later steps.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, resume_step: int | None = None) -> None:
        self._lines = JsonLines(run_dir / "metrics.jsonl", resume_step=resume_step)
        self._writer = _open_tensorboard(run_dir, resume_step) if tensorboard else None

    def record(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        """Write now.

        Raises:
            ValueError: a name is not in the metric table.
        """
        check_names(metrics)
        row: dict[str, Any] = {"step": step, "wall_time_s": time.time(), "version": version}
        row |= {name: float(value) for name, value in metrics.items()}
        last = self._lines.last
        if last is not None and last["step"] == step:
            self._lines.replace_last(last | row)
        else:
            self._lines.append(row)
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(value), step)
            self._writer.flush()

    def close(self) -> None:
        self._lines.close()
        if self._writer is not None:
            self._writer.close()


def _open_tensorboard(run_dir: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    folder = run_dir / "tensorboard"
    if resume_step is None:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        return SummaryWriter(str(folder))
    # TensorBoard itself hides what an earlier file has from this step on.
    return SummaryWriter(str(folder), purge_step=resume_step + 1)
