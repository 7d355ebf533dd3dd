"""What `explain` reads of real runs, kept for tests that start none: `record`, `recorded`.

Each file of ``tests/golden/runs`` is one run of `tests/real/test_explain.py`, which writes it with
UPDATE_GOLDEN=1. Values have six digits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.support.golden import GOLDEN
from torchtitan_rl.observability.explain import RunFacts

RUNS = GOLDEN / "runs"
_COLUMNS = (
    *("step", "train/reward", "train/response_length_mean", "train/groups", "train/rollouts"),
    *("train/ended_", "train/phase_s/", "trainer/entropy", "trainer/age_0/logprob_diff_mean"),
    *("engine/running_mean", "engine/waiting_mean", "time/", "overlap/", "policy/staleness_mean"),
    "evaluation/reward",
)
_FIELDS = ("schedule.", "rollout.sampling.temperature", "trainer.optimizer.learning_rate")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run, and the causes that were planted in it."""

    planted: list[str]
    facts: RunFacts


def record(name: str, planted: list[str], facts: RunFacts) -> None:
    run = {
        "planted": planted,
        "fields": {key: value for key, value in facts.fields.items() if key.startswith(_FIELDS)},
        "token_s": {
            name: {step: _short(seconds) for step, seconds in by_step.items()}
            for name, by_step in facts.token_s.items()
        },
        "evaluations": _by_column(facts.evaluations),
        "steps": _by_column(facts.steps),
    }
    RUNS.mkdir(exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.items()]
    (RUNS / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def recorded(name: str) -> RecordedRun:
    run = json.loads((RUNS / f"{name}.json").read_text())
    rows = {key: _by_row(run.pop(key)) for key in ("steps", "evaluations")}
    token_s = {
        name: {int(step): seconds for step, seconds in by_step.items()}
        for name, by_step in run.pop("token_s").items()
    }
    return RecordedRun(
        planted=run["planted"], facts=RunFacts(**rows, fields=run["fields"], token_s=token_s)
    )


def _by_column(rows: Any) -> dict[str, list[Any]]:
    names = sorted({name for row in rows for name in row if name.startswith(_COLUMNS)})
    return {name: [_short(row.get(name)) for row in rows] for name in names}


def _by_row(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
