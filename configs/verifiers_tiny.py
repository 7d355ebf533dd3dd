"""An environment of verifiers with a tool: the embedded policy, on two CPU cores, in minutes.

Needs verifiers: ``make setup`` installs it, see docs/tasks.md. One vLLM replica generates, one
torchtitan process trains, synchronously.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan_rl import (
    EndpointConfig,
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    VerifiersTask,
)
from torchtitan_rl.experiments import verifiers_calculator
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR

config = RunConfig(
    name="verifiers_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=VerifiersTask(
        env="calculator-v1",
        folders=(str(Path(verifiers_calculator.__file__).parent),),
    ),
    num_steps=30,
    rollout=RolloutConfig(
        groups_per_step=8,
        group_size=8,
        max_turns=4,
        max_total_tokens=256,  # a right rollout has about 100
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=48),
    ),
    generator=GeneratorConfig(replicas=1, max_model_len=256, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=256,
        max_tokens_per_microbatch=8192,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=5e-4, decay_steps=15, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=64, temperature=1.0),
    endpoint=EndpointConfig(enabled=True, tool_call_parser="hermes", max_concurrent_requests=256),
)
