"""Qwen3-0.6B on six GPUs: four vLLM replicas generate, two ranks train (FSDP).

Download the model first, or give another place with ``--policy.checkpoint``:

    hf download Qwen/Qwen3-0.6B --local-dir checkpoints/Qwen3-0.6B
"""

from __future__ import annotations

from torchtitan_rl import (
    CheckpointConfig,
    EvaluationConfig,
    GeneratorConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask

config = RunConfig(
    name="alphabet_sort_qwen3_0_6b",
    policy=PolicyConfig(checkpoint="checkpoints/Qwen3-0.6B", dtype="bfloat16"),
    task=AlphabetSortTask(
        min_turns=1, max_turns=3, min_names=2, max_names=6, power=4.0, renderer="qwen3"
    ),
    num_steps=100,
    rollout=RolloutConfig(
        groups_per_step=32,
        group_size=16,
        max_turns=3,
        max_total_tokens=1024,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=192),
    ),
    generator=GeneratorConfig(replicas=4, max_model_len=1024, max_running_requests=256),
    trainer=TrainerConfig(
        data_parallel_shard=2,
        max_episode_tokens=4096,
        max_tokens_per_microbatch=8192,
        activation_checkpointing="selective",
        optimizer=OptimizerConfig(learning_rate=2e-6, warmup_steps=5),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
    checkpoint=CheckpointConfig(every=25),
)
