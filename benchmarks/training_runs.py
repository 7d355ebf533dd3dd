"""Whole training runs from the command line, and the figures that they write."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu_seconds import CpuSeconds
from torchtitan_rl.observability.sinks import read_rows

ROOT = Path(__file__).resolve().parents[1]
_LOOK_S = 0.05  # between two looks at a run


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run. ``seconds`` is the duration of the whole command, start-up included.
    ``cpu_after``: the CPU seconds that each process had used after each step, if they were read
    (`cpu_seconds`)."""

    rows: tuple[dict[str, Any], ...]
    seconds: float
    cpu_after: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def column(self, name: str, *, first_step: int = 1) -> list[float]:
        """The metric ``name`` of each training step from ``first_step`` on."""
        return [
            row[name]
            for row in self.rows
            if row["step"] >= first_step and "train/reward_mean" in row and name in row
        ]


def train(
    config: Path,
    options: Sequence[str],
    *,
    run_dir: Path,
    module: str = "torchtitan_rl.commands.cli",
) -> FinishedRun:
    """Run ``torchtitan-rl train`` into ``run_dir``, or read the run that is there. ``module`` is
    run in place of ``torchtitan-rl``.

    Raises:
        SystemExit: the run failed; its output is shown.
    """
    timing = run_dir / "benchmark.json"
    if not timing.exists():
        place = ["--output-dir", str(run_dir.parent), "--name", run_dir.name]
        words = [sys.executable, "-m", module, "train", str(config)]
        started = time.monotonic()
        log = run_dir.with_name(f"{run_dir.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                [*words, *options, *place, "--metrics.progress", "plain"],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        cpu = CpuSeconds(process.pid, run_dir / "metrics.jsonl")
        try:
            while process.poll() is None:
                cpu.look()
                time.sleep(_LOOK_S)
        finally:
            process.kill()  # if this process was interrupted
        if process.returncode:
            raise SystemExit(f"{run_dir.name} failed:\n{log.read_text()[-3000:]}")
        seconds = time.monotonic() - started
        timing.write_text(json.dumps({"seconds": seconds, "cpu_after": cpu.after}))
    measured = json.loads(timing.read_text())
    after = {int(step): of_step for step, of_step in measured.get("cpu_after", {}).items()}
    return FinishedRun(
        rows=tuple(line.row for line in read_rows(run_dir / "metrics.jsonl")),
        seconds=measured["seconds"],
        cpu_after=after,
    )
