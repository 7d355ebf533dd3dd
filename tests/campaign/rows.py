"""A recorder that writes one row a step, as a run writes its metrics: the same file, cut back by
the same rule where a run resumes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.simulated_parts import Memory
from torchtitan_rl.observability.jsonl import JsonLines
from torchtitan_rl.orchestration.records import AccountRecord, EvaluationRecord, StepRecord

_NAME = "rows.jsonl"


class Rows(Memory):
    """``resume_step`` as `RunRecorder` is given it."""

    def __init__(self, root: Path, *, resume_step: int | None) -> None:
        super().__init__()
        self._lines = JsonLines(
            root / _NAME, resume_step=resume_step, is_step=lambda row: row["kind"] == "step"
        )

    def record_step(self, record: StepRecord) -> None:
        super().record_step(record)
        self._lines.append(
            {
                "kind": "step",
                "step": record.step,
                "version": record.version,
                "trained": record.tokens.trained,
                "generated": record.tokens.generated,
                "groups": [group.group_id for group in record.groups],
                "statuses": sorted(
                    {r.status.value for group in record.groups for r in group.rollouts}
                ),
                "totals": None if record.totals is None else asdict(record.totals),
            }
        )

    def record_evaluation(self, record: EvaluationRecord) -> None:
        super().record_evaluation(record)
        self._lines.append({"kind": "evaluation", "step": record.step, "version": record.version})

    def record_account(self, record: AccountRecord) -> None:
        super().record_account(record)
        self._lines.append({"kind": "account", "step": record.step, "wrong": record.unaccounted})

    def close(self) -> None:
        self._lines.close()


def read_rows(root: Path, kind: str = "step") -> list[dict[str, Any]]:
    """The whole lines of this kind."""
    rows = [row for line in _lines(root) if (row := _row(line)) is not None]
    return [row for row in rows if row["kind"] == kind]


def damaged_rows(root: Path) -> list[bytes]:
    """Those that are not whole, but for the last one."""
    return [line for line in _lines(root)[:-1] if _row(line) is None]


def _lines(root: Path) -> list[bytes]:
    path = root / _NAME
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row if line.endswith(b"\n") else None
