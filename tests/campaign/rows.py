"""The recorder of a campaign: that of a run, with all rollouts in its files and no display."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.run import IDENTITY_FILE, MetricsConfig, RunConfig
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.records import AccountRecord, EvaluationRecord, StepRecord

_METRICS = MetricsConfig(trackers=(), trace=False, progress="none", rollouts_per_step=100)


class Rows(RunRecorder):
    """Writes the files of a run; keeps what it has written in memory, too."""

    def __init__(self, config: RunConfig, *, resume_step: int | None) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.accounts: list[AccountRecord] = []
        self.said: list[str] = []
        config = replace(config, metrics=_METRICS)
        plan_of_processes = ProcessPlan(device="cpu", replicas=())
        super().__init__(config, plan_of_processes, resume_step=resume_step)

    def record_step(self, record: StepRecord) -> None:
        super().record_step(record)
        self.steps.append(record)

    def record_evaluation(self, record: EvaluationRecord) -> None:
        super().record_evaluation(record)
        self.evaluations.append(record)

    def record_account(self, record: AccountRecord) -> None:
        super().record_account(record)
        self.accounts.append(record)

    def phase(self, name: str) -> Any:
        return nullcontext()

    def say(self, message: str) -> None:
        self.said.append(message)

    def close(self) -> None:
        self._metrics.close()
        self._rollouts.close()


def write_identity(config: RunConfig, root: Path) -> None:
    """What an audit reads of the configuration."""
    root.mkdir(parents=True, exist_ok=True)
    identity: dict[str, Any] = {"mode": config.mode, "num_steps": config.num_steps}
    if config.mode != "train":  # there are rollouts
        identity |= {
            "schedule.staleness": config.schedule.staleness,
            "rollout.groups_per_step": config.rollout.groups_per_step,
            "rollout.group_size": config.rollout.group_size,
        }
    (root / IDENTITY_FILE).write_text(json.dumps(identity))
