"""How a run went: the paragraph at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from torchtitan_rl.observability.jsonl import read_rows
from torchtitan_rl.observability.progress import format_seconds

_REWARD = "evaluation/reward_mean"
_IN_TURN = {
    "start": "start",
    "restore": "restoring",
    "rollout": "waiting for rollouts",
    "train": "training",
    "publish": "publishing weights",
    "switch": "switching devices",
    "checkpoint": "checkpoints",
    "export": "export",
}
_ALONGSIDE = {"evaluation": "evaluation", "sync": "weight syncs"}
_USUAL_STEPS = 10
_MIN_S = 0.5  # shorter phases are left out


def describe_run(
    run_dir: Path,
    *,
    headline: str,
    warnings: Sequence[str],
    seconds: Mapping[str, float],
    outputs: Mapping[str, Path],
    next_commands: Sequence[str],
) -> list[str]:
    """``seconds`` are by phase. Of the outputs those that exist are named."""
    lines = [headline, *warnings]
    if rewards := _evaluations(run_dir):
        lines.append(f"evaluation: {rewards}")
    if times := _times(seconds):
        lines.append(f"time: {times}")
    lines += [f"{name}: {path}" for name, path in outputs.items() if path.exists()]
    return [*lines, *(f"next: {command}" for command in next_commands)]


def usual_step_s(run_dir: Path) -> float | None:
    """Seconds of the run's last steps, their median; None before the first one."""
    steps: deque[float] = deque(maxlen=_USUAL_STEPS)
    with suppress(OSError, ValueError):
        for _, row in read_rows(run_dir / "metrics.jsonl"):
            if (step_s := row.get("time/step_s")) is not None:
                steps.append(step_s)
    return median(steps) if steps else None


def _evaluations(run_dir: Path) -> str:
    """Of the first and the last one of the whole run, earlier lives included."""
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):
        for _, row in read_rows(run_dir / "metrics.jsonl"):
            if row.get(_REWARD) is not None:
                found[row["step"]] = row[_REWARD]
    steps = sorted(found)
    return ", then ".join(
        f"reward {found[step]:.3f} {f'after step {step}' if step else 'before the first step'}"
        for step in dict.fromkeys((steps[0], steps[-1]) if steps else ())
    )


def _times(seconds: Mapping[str, float]) -> str:
    parts = [
        ", ".join(
            f"{label} {format_seconds(seconds[phase])}"
            for phase, label in labels.items()
            if seconds.get(phase, 0.0) >= _MIN_S
        )
        for labels in (_IN_TURN, _ALONGSIDE)
    ]
    return "; alongside: ".join(part for part in parts if part)
