"""Whole training runs from the command line, and the figures that they write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """``seconds`` is the whole command, start-up included."""

    rows: tuple[dict[str, Any], ...]
    seconds: float

    def column(self, name: str, *, first_step: int = 1) -> list[float]:
        """A metric of each training step from ``first_step`` on."""
        return [
            row[name]
            for row in self.rows
            if row["step"] >= first_step and "train/reward_mean" in row and name in row
        ]


def train(config: Path, options: Sequence[str], *, run_dir: Path) -> FinishedRun:
    """Run ``torchtitan-rl train`` into ``run_dir``, or read the run that is there.

    Raises:
        SystemExit: the run failed; its output is shown.
    """
    timing = run_dir / "benchmark.json"
    if not timing.exists():
        place = ["--output-dir", str(run_dir.parent), "--name", run_dir.name]
        words = [sys.executable, "-m", "torchtitan_rl.commands.cli", "train", str(config)]
        started = time.monotonic()
        done = subprocess.run(
            [*words, *options, *place, "--metrics.progress", "plain"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{run_dir.name} failed:\n{done.stdout[-3000:]}")
        timing.write_text(json.dumps({"seconds": time.monotonic() - started}))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return FinishedRun(rows=tuple(rows), seconds=json.loads(timing.read_text())["seconds"])
