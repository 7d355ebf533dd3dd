"""The recorder of a campaign: that of a run, with all rollouts in its files and no display."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign.plan import CampaignPlan
from tests.support.simulation import run_config
from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.run import IDENTITY_FILE, MetricsConfig
from torchtitan_rl.observability.recorder import RunRecorder
from torchtitan_rl.orchestration.records import AccountRecord, EvaluationRecord, StepRecord

_METRICS = MetricsConfig(trackers=(), trace=False, progress="none", rollouts_per_step=100)


class Rows(RunRecorder):
    """Writes the files of a run; keeps what it has written in memory, too."""

    def __init__(self, plan: CampaignPlan, root: Path, *, resume_step: int | None) -> None:
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.accounts: list[AccountRecord] = []
        self.said: list[str] = []
        config = replace(run_config(plan), output_dir=root.parent, name=root.name, metrics=_METRICS)
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


def write_identity(plan: CampaignPlan, root: Path) -> None:
    """What an audit reads of the configuration."""
    root.mkdir(parents=True, exist_ok=True)
    identity = {
        "schedule.staleness": plan.staleness,
        "rollout.groups_per_step": plan.groups_per_step,
        "rollout.group_size": plan.group_size,
        "num_steps": plan.num_steps,
    }
    (root / IDENTITY_FILE).write_text(json.dumps(identity))
