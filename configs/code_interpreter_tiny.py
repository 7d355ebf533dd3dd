"""A policy learns to use a Python interpreter: the embedded one, on two CPU cores, in minutes.

Programs run in a sandbox, which needs Linux with user namespaces (``--task.sandbox.isolation
landlock`` does without). Two vLLM replicas generate, one torchtitan process trains, synchronously.
"""

from __future__ import annotations

from torchtitan_rl import (
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.code_interpreter.task import POLICY_DIR, CodeInterpreterTask

config = RunConfig(
    name="code_interpreter_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=CodeInterpreterTask(renderer="qwen3", thinking="keep"),
    num_steps=30,
    rollout=RolloutConfig(
        groups_per_step=8,
        group_size=8,
        max_turns=4,
        max_total_tokens=320,  # a right rollout has about 120
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=80),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=320, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=320,
        max_tokens_per_microbatch=10240,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=4e-4, decay_steps=10, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=64, temperature=1.0),
)
