"""The configurations of ``torchtitan-rl sft`` and ``torchtitan-rl dpo``. Both become a `RunConfig`
without rollouts: the processes, the trainer and the files of the run are those of any run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Interval

from torchtitan_rl.bounds import Name, Positive, PositiveFloat, Seed, check_fields
from torchtitan_rl.config.run import (
    File,
    LaunchConfig,
    MetricsConfig,
    MonarchConfig,
    PolicyConfig,
    RunConfig,
)
from torchtitan_rl.data.conversations import (
    ConversationsConfig,
    ExamplesConfig,
    PairsConfig,
    rows_of,
)
from torchtitan_rl.environments.supervised import HeldOutConfig, SupervisedTask
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.orchestration.config import CheckpointConfig, EvaluationConfig
from torchtitan_rl.training.config import ProfileConfig, TrainerConfig


@dataclass(frozen=True, kw_only=True)
class _SupervisedConfig:
    policy: PolicyConfig
    name: Name = "run"
    """Name of the run; its folder is ``output_dir/name``."""
    output_dir: File = Path("outputs")
    """Parent of the run's folder."""
    seed: Seed = 0
    """Seed of the order of the rows, and of the trainer."""
    epochs: Annotated[float, Interval(gt=0.0, le=1e6)] = 1.0
    """How often the run uses each row, without ``num_steps``."""
    num_steps: Positive | None = None
    """Number of training steps in the whole run, instead of ``epochs``."""
    pin_cores: bool = False
    """Give the trainer cores of its own. Only on a CPU of this machine."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    monarch: MonarchConfig = field(default_factory=MonarchConfig)

    def _run(self, data: ExamplesConfig | PairsConfig, beta: float | None = None) -> RunConfig:
        check_fields(self)
        return RunConfig(
            policy=self.policy,
            task=SupervisedTask(data=data, held_out=self.held_out, beta=beta),
            name=self.name,
            output_dir=self.output_dir,
            seed=self.seed,
            num_steps=self.num_steps or _steps(data, self.epochs),
            mode="train",
            pin_cores=self.pin_cores,
            trainer=self.trainer,
            evaluation=EvaluationConfig(num_problems=0),
            checkpoint=self.checkpoint,
            metrics=self.metrics,
            profile=self.profile,
            launch=self.launch,
            monarch=self.monarch,
        )


@dataclass(frozen=True, kw_only=True)
class SftConfig(_SupervisedConfig):
    """The configuration of supervised fine-tuning (``torchtitan-rl sft``)::

    config = SftConfig(
        policy=PolicyConfig(checkpoint="Qwen/Qwen3-0.6B"),
        examples=ExamplesConfig(train=("data/conversations.jsonl",)),
        epochs=2,
    )
    """

    examples: ExamplesConfig = field(default_factory=ExamplesConfig)

    def run(self) -> RunConfig:
        """Raises ConfigError if a field is not allowed."""
        return self._run(self.examples)


@dataclass(frozen=True, kw_only=True)
class DpoConfig(_SupervisedConfig):
    """The configuration of direct preference optimization (``torchtitan-rl dpo``)::

    config = DpoConfig(
        policy=PolicyConfig(checkpoint="outputs/sft/policy"),
        pairs=PairsConfig(train=("data/pairs.jsonl",)),
        beta=0.1,
    )
    """

    pairs: PairsConfig = field(default_factory=PairsConfig)
    beta: PositiveFloat = 0.1
    """Weight of the distance from the initial policy (Rafailov et al. 2023): a smaller one allows
    larger changes."""

    def run(self) -> RunConfig:
        """As `SftConfig.run`."""
        return self._run(self.pairs, self.beta)


def _steps(data: ConversationsConfig, epochs: float) -> int:
    """Return the number of steps that ``epochs`` take; 1 if the files cannot be read, which a check
    of the run reports."""
    try:
        num_rows = rows_of(data.train, seed=0, shuffle=False).num_rows
    except ConfigError:
        return 1
    return max(1, -int(-num_rows * epochs // data.per_step))
