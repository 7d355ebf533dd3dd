"""FrozenLake of gymnasium on random maps: the embedded policy, on two CPU cores, in minutes.

Needs ``pip install 'torchtitan-rl[tasks]'``. Two vLLM replicas generate, one torchtitan process
trains, synchronously. A rollout is a game of up to 10 moves, each a turn.
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
from torchtitan_rl.experiments.frozen_lake.task import POLICY_DIR, TASK

config = RunConfig(
    name="frozen_lake_tiny",
    policy=PolicyConfig(checkpoint=str(POLICY_DIR)),
    task=TASK,
    num_steps=30,
    rollout=RolloutConfig(
        groups_per_step=8,
        group_size=8,
        max_turns=10,
        max_total_tokens=320,
        sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=4),
    ),
    generator=GeneratorConfig(replicas=2, max_model_len=320, max_running_requests=64),
    trainer=TrainerConfig(
        max_episode_tokens=320,
        max_tokens_per_microbatch=10240,
        threads=2,
        optimizer=OptimizerConfig(learning_rate=3e-4, decay_steps=15, min_lr_factor=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=128, temperature=1.0),
)
