"""The configuration of a run; its checks and its plan, made before the first process starts."""

from torchtitan_rl.config.run import LaunchConfig, MetricsConfig, PolicyConfig, RunConfig
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.orchestration.config import CheckpointConfig, EvaluationConfig, ScheduleConfig
from torchtitan_rl.rollout.config import OverlongConfig, RolloutConfig, SamplingConfig
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.training.config import LossConfig, OptimizerConfig, TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig

__all__ = [
    "CheckpointConfig",
    "EndpointConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "LaunchConfig",
    "LossConfig",
    "MetricsConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PolicyConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "TrainerConfig",
    "WeightSyncConfig",
]
