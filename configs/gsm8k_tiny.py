"""GSM8K in a simplified form: the embedded policy, on two CPU cores, in minutes.

Needs ``pip install 'torchtitan-rl[tasks]'``. Two vLLM replicas generate, one torchtitan process
trains, synchronously.
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
from torchtitan_rl.experiments.gsm8k.task import POLICY_DIR, TASK

config = RunConfig(
    name="gsm8k_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=TASK,
    num_steps=60,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=1,
        max_total_tokens=96,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=40),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=96, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=96,
        max_tokens_per_microbatch=12288,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
)
