"""An agent learns to use its calculator: the embedded policy, on two CPU cores, in minutes.

The agent is a plain client of the run's own OpenAI endpoint. Two vLLM replicas generate, one
torchtitan process trains, synchronously.
"""

from __future__ import annotations

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
)
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR, CalculatorAgentTask

config = RunConfig(
    name="calculator_agent_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=CalculatorAgentTask(),
    num_steps=80,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=4,
        max_total_tokens=256,  # a right rollout has about 100
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=48),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=256, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=256,
        max_tokens_per_microbatch=8192,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=3e-4, decay_steps=40, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
    endpoint=EndpointConfig(enabled=True, tool_call_parser="hermes", max_concurrent_requests=512),
)
