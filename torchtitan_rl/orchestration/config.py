"""Configuration of the schedule, of evaluation on the validation set, and of checkpoints.

`derive_capacity` computes how many groups may be in the buffer so that no token gets too old. With
P groups per step, the staleness cap S, and at most K younger groups that may overtake a slow group
(``schedule.max_overtaking_share`` times P), the buffer holds B groups:

    B = (S + 1) P - K        for S >= 1

**Why that bounds the age.** A group is admitted when the newest trained version is a, and its
tokens are sampled by replicas that hold a or a newer version. Slots are freed when a batch has been
trained, so when the group is admitted, at most B - 1 other groups are not yet trained. All of them
may be trained before the group, and at most K groups that were admitted later may overtake the
group. Batches have P groups, so at most (B - 1 + K) // P whole batches are trained between the
group's admission and its own batch. So the group is trained at a version of at most a + (B - 1 + K)
// P = a + ((S + 1) P - 1) // P = a + S. Discarding a group can only make other groups be trained
earlier.

At S = 0 a group that was overtaken cannot be trained any more. So B = P + K groups start, the first
P to finish are trained, and the others are rolled out again with the new weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from annotated_types import Interval

from torchtitan_rl.bounds import Check, Count, Positive, Seconds
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.generation.engine import MAX_TEMPERATURE, MIN_TEMPERATURE
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig

_VERSIONS = Check(lambda versions: 0 <= versions <= 1024, "give 0 (synchronous) to 1024")
MAY_BE_GREEDY = Check(
    lambda temperature: temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
    f"give 0 (greedy) or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}",
)


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How far generation may run ahead of training.

    The number of groups in flight and the size of the buffer follow from ``staleness`` and
    ``max_overtaking_share``; `orchestration/config.py` says how.
    """

    staleness: Annotated[int, _VERSIONS] = 0
    """Maximum number of policy versions between sampling a token and training on it (S). 0 is
    synchronous training; 1 or 2 overlap generation with training."""
    max_overtaking_share: Annotated[float, Interval(ge=0.0)] = 0.0
    """Share of ``rollout.groups_per_step`` that may overtake a slow group. Raise it if a few long
    rollouts hold up each batch."""
    during_training: Literal["continue", "pause"] = "continue"
    """What unfinished rollouts do during a training step: ``continue``, or ``pause`` and keep their
    tokens until the new weights have arrived. On colocated devices they always pause."""
    max_rollouts: Annotated[int, Interval(ge=1, le=1 << 20)] | Literal["auto", "all"] = "all"
    """Maximum number of rollouts that run at the same time; the others wait, oldest group first.
    ``auto`` follows the free KV cache of the replicas; ``all`` lets requests wait in the engines
    instead. Set a number if environments are scarce. Evaluation is not limited."""
    zero_variance: Literal["train", "skip", "resample"] = "train"
    """What happens to groups whose rewards are all equal: ``train`` on them, ``skip`` them for
    another problem, or ``resample`` them with other seeds."""
    max_resamples: Count = 1
    """Maximum number of times that ``resample`` rolls out one group again."""
    max_empty_batches: Positive = 5
    """Number of consecutive batches without a token to train on after which the run fails. Ten
    times as many skipped batches are allowed if the dataset chooses problems by success."""
    report_wait_s: Seconds = 60.0
    """Seconds without progress after which the run reports what each part waits for."""
    max_wait_s: Seconds = 7200.0
    """Seconds without progress after which the run fails. Raise it if single environment calls or
    requests take longer."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of the policy on the task's validation set: before the first step, every ``every``
    steps, and at the end."""

    every: Count = 10
    """Number of steps between two evaluations; 0 evaluates only before and after the run."""
    num_problems: Annotated[int, Interval(ge=0, le=1 << 20)] = 64
    """Number of problems, the same each time; 0 turns evaluation off."""
    samples_per_problem: Annotated[int, Interval(ge=1, le=1 << 12)] = 1
    """Rollouts of each problem; pass@k is reported for k up to this number."""
    temperature: Annotated[float, MAY_BE_GREEDY] = 1.0
    """Sampling temperature of the evaluation; 0 is greedy."""
    placement: Literal["shared", "reserved"] = "shared"
    """``shared`` keeps a replica on its version while it evaluates and also serves training;
    ``reserved`` uses the last replica for evaluation only."""

    @property
    def reserves_replica(self) -> bool:
        return self.placement == "reserved" and self.num_problems > 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: Count = 10
    """Number of steps between two checkpoints; 0 writes one only at the end, on a signal and on
    failure."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted."""
    max_failures: Positive = 3
    """Number of consecutive failures to write a checkpoint after which the run fails."""
    resume: bool = False
    """Continue from the newest usable checkpoint in the run's folder."""
    export_hf: bool = True
    """Write the final policy as Hugging Face safetensors at the end of the run. Adapters
    (``policy.lora``) are merged into it, and are also written to ``adapter`` in PEFT's format."""


class ControllerConfig(Protocol):
    """The fields of a `RunConfig` that the controller's loops read."""

    @property
    def task(self) -> Task: ...
    @property
    def seed(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def mode(self) -> Literal["both", "generate", "train"]: ...
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
    def teacher(self) -> TeacherConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The numbers derived from a schedule: counts of groups, except for ``staleness``."""

    groups_per_step: int  # P
    staleness: int  # S
    max_overtakers: int  # K: number of younger groups that may overtake a group
    buffer: int  # B: number of groups that are admitted and not yet trained

    def describe(self) -> str:
        if self.staleness == 0:
            excess = self.buffer - self.groups_per_step
            surplus = f", the last {excess} are restarted" if excess else ""
            return (
                f"schedule: synchronous, {self.buffer} groups start a step of "
                f"{self.groups_per_step}{surplus}"
            )
        return (
            f"schedule: tokens at most {self.staleness} versions old, {self.buffer} groups under "
            f"way, {self.groups_per_step} a step, at most {self.max_overtakers} overtake a slow one"
        )


def derive_capacity(*, groups_per_step: int, staleness: int, max_share: float) -> Capacity:
    """Compute the capacity from fields that have been checked; ``max_share`` is
    ``schedule.max_overtaking_share``."""
    overtakers = int(max_share * groups_per_step)
    return Capacity(
        groups_per_step=groups_per_step,
        staleness=staleness,
        max_overtakers=overtakers,
        buffer=(staleness + 1) * groups_per_step + (-overtakers if staleness else overtakers),
    )


def capacity_errors(*, staleness: int, max_share: float) -> list[str]:
    """Return an error if the buffer has no room for a batch and the groups that it overtakes."""
    most = staleness / 2 if staleness > 0 else 1.0
    if 0.0 <= max_share <= most:
        return []
    return [
        f"schedule.max_overtaking_share is {max_share}: give 0 to {most:g} (a share of "
        f"rollout.groups_per_step, at schedule.staleness {staleness})"
    ]
