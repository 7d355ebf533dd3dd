"""The default run: the embedded policy learns alphabet sort on two CPU cores in minutes.

Two vLLM replicas generate, one torchtitan process trains, synchronously.
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
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR, AlphabetSortTask

config = RunConfig(
    name="alphabet_sort_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=AlphabetSortTask(
        min_turns=2, max_turns=3, min_names=2, max_names=2, renderer="qwen3", thinking="keep"
    ),
    num_steps=140,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=3,
        max_total_tokens=256,  # a right rollout has at most 110
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=36),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=256, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=256,
        max_tokens_per_microbatch=8192,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=1e-3, decay_steps=60, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=20, num_problems=128, temperature=1.0),
)
