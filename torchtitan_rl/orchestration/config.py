"""Configuration of the schedule, of evaluation and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How far generation may run ahead of training. The number of groups in flight and the size of
    the buffer follow from ``staleness`` and ``window``: see `orchestration/capacity.py`."""

    staleness: int = 0
    """Hard limit on the policy versions between the sampling of a token and its training (S).
    0 is synchronous training."""
    window: float = 0.0
    """Share of ``rollout.groups_per_step`` that may overtake a slow group."""
    in_flight: Literal["running", "aborted"] = "running"
    """What groups do that still run when a batch is full: continue, or stop with their tokens kept
    until the new weights have arrived (as they always do on colocated devices)."""
    zero_variance: Literal["train", "skip", "resample"] = "train"
    """Groups whose rewards are all equal are trained on, skipped (another problem takes their
    place), or rolled out again with other seeds."""
    max_resamples: int = 1
    """How often ``resample`` rolls out one group again."""
    max_empty_batches: int = 5
    """The run ends with a message after so many batches in a row without anything to train on."""
    report_wait_s: float = 60.0
    """After so many seconds without progress the run reports which part waits for which."""
    max_wait_s: float = 7200.0
    """After so many seconds without progress the run ends with an error."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Evaluation of the policy on the same problems: before the first step, every ``every`` steps,
    and at the end."""

    every: int = 10
    """Steps between two evaluations; 0 evaluates only before and after the run."""
    num_problems: int = 64
    """Problems of the task's validation set; 0 turns evaluation off."""
    samples_per_problem: int = 1
    """Rollouts of each problem; pass@k is reported for k up to this number."""
    temperature: float = 1.0
    """Sampling temperature of the evaluation."""
    placement: Literal["shared", "reserved"] = "shared"
    """``shared`` holds a replica back from weight pulls while it evaluates; ``reserved`` keeps the
    last replica for evaluation alone."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 10
    """Steps between two checkpoints; 0 writes one only at the end and on a signal."""
    keep: int = 2
    """Number of the newest checkpoints that are kept."""
    max_failures: int = 3
    """The run ends after so many checkpoints in a row could not be written."""
    resume: bool = False
    """Continue from the newest checkpoint in the run's folder."""
    export_hf: bool = True
    """Write the final policy as Hugging Face safetensors."""
