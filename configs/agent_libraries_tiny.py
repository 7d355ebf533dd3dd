"""Agents of two libraries learn to ask for what they lack: on two CPU cores, in minutes.

Half of the problems are solved by an agent of `openai-agents`, the others by one of `pydantic-ai`,
both as plain clients of the run's own endpoint. Two vLLM replicas generate, one torchtitan process
trains, synchronously.
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
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, AgentLibrariesTask

config = RunConfig(
    name="agent_libraries_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=AgentLibrariesTask(libraries=("openai_agents", "pydantic_ai")),
    num_steps=30,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=6,  # a right rollout has three
        max_total_tokens=320,  # a right rollout has about 130
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=48),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=320, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=320,
        max_tokens_per_microbatch=10240,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=3e-4, decay_steps=15, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
    endpoint=EndpointConfig(enabled=True, tool_call_parser="hermes", max_concurrent_requests=512),
)
