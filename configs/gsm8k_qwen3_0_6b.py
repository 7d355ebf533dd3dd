"""GSM8K with Qwen3-0.6B on one GPU of 24 GB: the engine and the trainer take turns on it.

    torchtitan-rl train gsm8k_qwen3_0_6b

Model and data are downloaded from the Hugging Face hub at the first start; ``--policy.checkpoint``
and ``--task.train`` name other places.

Expected time: 2 hours on an RTX 4090 for the 200 steps (an estimate; not run on a GPU).

Reference: verl's baselines (https://verl.readthedocs.io/en/latest/algo/baseline.html) have 49.6 %
of the test set for Qwen2.5-0.5B-Instruct before and 56.7 % after PPO, with 256 prompts a step and
answers of at most 512 tokens. Qwen3-0.6B-Base solves 59.6 % with four examples in its prompt (Qwen3
Technical Report, arXiv:2505.09388). No number for Qwen3-0.6B after RL is known to us.
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
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

config = RunConfig(
    name="gsm8k_qwen3_0_6b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-0.6B"),
    task=Gsm8kTask(
        train=("hf:openai/gsm8k:main:train",),
        validation=("hf:openai/gsm8k:main:test",),
        renderer="qwen3",
    ),
    num_steps=200,
    placement="colocated",
    rollout=RolloutConfig(
        groups_per_step=32,
        group_size=8,
        max_turns=1,
        max_total_tokens=1024,
        sampling=SamplingConfig(max_tokens_per_turn=512),
    ),
    generator=GeneratorConfig(
        replicas=1, max_model_len=1024, max_running_requests=256, gpu_memory_utilization=0.8
    ),
    trainer=TrainerConfig(
        max_episode_tokens=1024,
        max_tokens_per_microbatch=4096,
        activation_checkpointing="full",
        optimizer=OptimizerConfig(learning_rate=2e-6, warmup_steps=5),
    ),
    evaluation=EvaluationConfig(every=25, num_problems=1319, temperature=0.0),
    checkpoint=CheckpointConfig(every=50),
)
