"""Questions answered by searching documents, in several turns: two CPU cores, in minutes.

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
from torchtitan_rl.experiments.search.task import POLICY_DIR, SearchTask

config = RunConfig(
    name="search_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=SearchTask(renderer="qwen3", thinking="keep"),
    num_steps=60,
    rollout=RolloutConfig(
        groups_per_step=16,
        group_size=8,
        max_turns=4,
        max_total_tokens=320,  # two searches take about 260
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=32),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=320, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=1024,
        max_tokens_per_microbatch=8192,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=5),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
)
