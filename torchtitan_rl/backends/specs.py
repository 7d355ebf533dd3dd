"""What each kind of process is built from. Specs are pickled, so they hold plain values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    """What a replica's ranks need, the same for all of them."""

    model: Path  # a directory in Hugging Face format
    name: str = "replica"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # on CUDA; a CPU computes in float32
    seed: int = 0  # for requests without a seed; each replica needs its own
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    log_dir: Path = Path()
    trace_dir: Path | None = None
    stream_interval_s: float = 0.05  # between two reports of a request's new tokens
    sleeps: bool = False  # it shares its devices: a sleep frees their memory
    reasoning_parser: str = ""  # for structured outputs that begin after reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What the trainer's ranks need."""

    checkpoint: Path
    trainer: TrainerConfig
    dtype: Literal["float32", "bfloat16"]
    seed: int
    num_steps: int
    run_dir: Path
    log_dir: Path
    trace_dir: Path | None
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    python_path: tuple[str, ...] = ()  # where `LossConfig.function` may import from


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHostSpec:
    """What the process needs that fetches weights for all replicas of a host."""

    name: str  # "host 1"
    run_dir: Path
    log_dir: Path
    weight_sync: WeightSyncConfig
    trace_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    """What the endpoint's process needs."""

    model: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    generation_config: Literal["auto", "vllm"]  # auto: defaults of sampling are the model's own
    endpoint: EndpointConfig
    keys: Keys
    log_dir: Path
