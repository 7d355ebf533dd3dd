"""GSM8K with Qwen3-4B on 8 GPUs of 80 GB: four replicas generate while four ranks train (FSDP).

    torchtitan-rl train gsm8k_qwen3_4b

Model and data are downloaded from the Hugging Face hub at the first start; ``--policy.checkpoint``
and ``--task.train`` name other places.

Expected time: 2 hours on 8 H100 for the 200 steps (an estimate; not run on a GPU).

Reference: verl's baselines (https://verl.readthedocs.io/en/latest/algo/baseline.html) have 86.1 %
of the test set for Qwen2.5-3B-Instruct and 93.4 % for Qwen2.5-7B-Instruct after GRPO with LoRA.
Qwen3-4B-Base solves 87.8 % with four examples in its prompt (Qwen3 Technical Report,
arXiv:2505.09388). No number for Qwen3-4B after RL is known to us.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import GeneratorConfig, OptimizerConfig, PolicyConfig, ScheduleConfig
from torchtitan_rl.configs import gsm8k_qwen3_0_6b

config = replace(
    gsm8k_qwen3_0_6b.config,
    name="gsm8k_qwen3_4b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-4B"),
    placement="separate",
    rollout=replace(gsm8k_qwen3_0_6b.config.rollout, groups_per_step=128),
    schedule=ScheduleConfig(staleness=1),
    generator=GeneratorConfig(replicas=4, max_model_len=1024, max_running_requests=256),
    trainer=replace(
        gsm8k_qwen3_0_6b.config.trainer,
        data_parallel_shard=4,
        max_tokens_per_microbatch=8192,
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=5),
    ),
)
