"""GSM8K with adapters (LoRA) of Qwen3-8B on one GPU of 24 GiB, which one replica and one trainer
rank share.

    torchtitan-rl train gsm8k_qwen3_8b_lora

Model and data are downloaded from the Hugging Face hub at the first start; ``--policy.checkpoint``
and ``--task.train`` name other places. Cards that are sold as 24 GB have 24 GiB (RTX 3090, 4090) or
22.5 GiB (A10, L4), where this does not fit.

Not run on a GPU; by `torchtitan-rl fit` a trainer rank has 21.6 GiB.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan_rl import GeneratorConfig, LoraConfig, OptimizerConfig, PolicyConfig
from torchtitan_rl.configs import gsm8k_qwen3_0_6b

config = replace(
    gsm8k_qwen3_0_6b.config,
    name="gsm8k_qwen3_8b_lora",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-8B", lora=LoraConfig(rank=16)),
    placement="colocated",
    generator=GeneratorConfig(replicas=1, max_model_len=1024, max_running_requests=64),
    trainer=replace(
        gsm8k_qwen3_0_6b.config.trainer,
        data_parallel_shard=1,
        max_tokens_per_microbatch=1024,
        optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=5),
    ),
)
