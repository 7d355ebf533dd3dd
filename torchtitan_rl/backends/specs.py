"""The specifications from which processes are built. Specs are pickled, so they contain only plain
values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torchtitan_rl.config.lora import AdapterFolder, LoraConfig, TenantSlots
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.training.config import ProfileConfig, TrainerConfig
from torchtitan_rl.weights.config import WeightSyncConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorSpec:
    model: Path  # a directory in Hugging Face format
    name: str = "replica"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # only on CUDA; a CPU computes in float32
    seed: int = 0  # for requests without a seed; each replica needs its own
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    log_dir: Path = Path()
    trace_dir: Path | None = None
    stream_interval_s: float = 0.05  # time between two reports of a request's new tokens
    sleeps: bool = False  # shares its devices with the trainer, so a sleep must free their memory
    reasoning_parser: str = ""  # for structured outputs that begin after reasoning
    lora: LoraConfig | None = None  # the adapters that are pulled; None: pulls replace all weights
    adapters: tuple[AdapterFolder, ...] = ()  # that requests may name; not with ``lora``
    tenants: TenantSlots | None = None  # each pull then brings an adapter of one run
    records_routing: bool = False  # the experts of each token, if the policy has experts
    profiled_versions: tuple[int, ...] = ()
    profile_dir: Path = Path()

    @property
    def start_timeout_s(self) -> float:
        given = self.generator.start_timeout_s
        return {"cpu": 300.0, "cuda": 900.0}[self.device] if given is None else given


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    checkpoint: Path
    trainer: TrainerConfig
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"]
    seed: int
    num_steps: int
    run_dir: Path
    log_dir: Path
    trace_dir: Path | None
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    lora: LoraConfig | None = None  # adapters that are trained in place of all weights
    teachers: tuple[Path, ...] = ()  # checkpoints of those that the trainer computes
    python_path: tuple[str, ...] = ()  # folders from which `LossConfig.function` may import


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightHostSpec:
    """The specification of the process that fetches weights for all replicas of a host."""

    name: str  # "host 1"
    run_dir: Path
    log_dir: Path
    weight_sync: WeightSyncConfig
    trace_dir: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSpec:
    model: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    generation_config: Literal["auto", "vllm"]  # auto: the model's own sampling defaults
    endpoint: EndpointConfig
    keys: Keys
    log_dir: Path
    adapters: tuple[AdapterFolder, ...] = ()
