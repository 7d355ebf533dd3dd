"""Configuration of the schedule, of evaluation on the validation set, and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torchtitan_rl.orchestration.capacity import Capacity
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How far generation may run ahead of training.

    The number of groups in flight and the size of the buffer follow from ``staleness`` and
    ``window``; `orchestration/capacity.py` says how.
    """

    staleness: int = 0
    """Hard limit on the number of policy versions between sampling a token and training on it (S).
    0 is synchronous training; 1 or 2 overlap generation with training."""
    window: float = 0.0
    """Share of ``rollout.groups_per_step`` that may overtake a slow group. Raise it when a few long
    rollouts hold up each batch."""
    in_flight: Literal["running", "aborted"] = "running"
    """What happens during a step to groups that still run: ``running`` lets them continue,
    ``aborted`` stops them and keeps their tokens until the new weights have arrived (always so on
    colocated devices)."""
    zero_variance: Literal["train", "skip", "resample"] = "train"
    """What happens to groups whose rewards are all equal: ``train`` on them, ``skip`` them for
    another problem, or ``resample`` them with other seeds."""
    max_resamples: int = 1
    """How many times ``resample`` rolls out one group again."""
    max_empty_batches: int = 5
    """Number of consecutive batches without a token to train on after which the run fails; of
    skipped batches ten times as many, where the dataset chooses by success."""
    report_wait_s: float = 60.0
    """Seconds without any change after which the run reports what each part waits for."""
    max_wait_s: float = 7200.0
    """Seconds without any change after which the run fails. Raise it when single environment calls
    or requests take longer."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of the policy on the task's validation set: before the first step, every ``every``
    steps, and at the end."""

    every: int = 10
    """Steps between two evaluations; 0 evaluates only before and after the run."""
    num_problems: int = 64
    """Number of problems, the same each time; 0 turns evaluation off."""
    samples_per_problem: int = 1
    """Rollouts per problem; pass@k is reported for k up to this number."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation."""
    placement: Literal["shared", "reserved"] = "shared"
    """``shared`` keeps a replica on its version while it evaluates and also serves training;
    ``reserved`` uses the last replica for evaluation only."""

    @property
    def reserves_replica(self) -> bool:
        return self.placement == "reserved" and self.num_problems > 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 10
    """Steps between two checkpoints; 0 writes one only at the end, on a signal and on failure."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are deleted."""
    max_failures: int = 3
    """Number of consecutive checkpoints that could not be written after which the run fails."""
    resume: bool = False
    """Continue from the newest usable checkpoint in the run's folder."""
    export_hf: bool = True
    """Write the final policy as Hugging Face safetensors at the end of the run."""


class ControllerConfig(Protocol):
    """What the controller's loops read of a `RunConfig`."""

    @property
    def task(self) -> Task: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def placement(self) -> Literal["separate", "colocated"]: ...
    @property
    def capacity(self) -> Capacity: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def schedule(self) -> ScheduleConfig: ...
    @property
    def weight_sync(self) -> WeightSyncConfig: ...
    @property
    def trainer(self) -> TrainerConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
