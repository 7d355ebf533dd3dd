"""DAPO (Yu et al. 2025, arXiv:2503.14476) with Qwen3-30B-A3B on 8 GPUs of 80 GB, which replicas and
trainer use in turn. Each layer of the model has 128 experts.

    torchtitan-rl train dapo_math_qwen3_30b_a3b

Task, losses and batch are those of ``dapo_math_qwen3_8b``. Each replica has two GPUs. The trainer
distributes the experts over all 8 (``trainer.expert_parallel``); the other layers are split in two
and sharded over 4.

Besides the GPUs it takes about 630 GiB of the host's memory (an estimate, of which 454 GiB are the
trainer's state while engines work). Not run on a GPU; docs/moe.md says what was tested.
"""

from __future__ import annotations

from torchtitan_rl import (
    CheckpointConfig,
    DataTask,
    EvaluationConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    OverlongConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainerConfig,
)

config = RunConfig(
    name="dapo_math_qwen3_30b_a3b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-30B-A3B"),
    task=DataTask(
        train=("hf:BytedTsinghua-SIA/DAPO-Math-17k",),
        validation=("hf:BytedTsinghua-SIA/AIME-2024",),
        messages="prompt",
        answer="{reward_model[ground_truth]}",
        answer_pattern=r"(?i)Answer\s*:\s*([^\n]+)",
        compare="math",
        renderer="qwen3",
        thinking="keep",
    ),
    num_steps=100,
    placement="colocated",
    rollout=RolloutConfig(
        groups_per_step=128,
        group_size=16,
        max_turns=1,
        max_total_tokens=12288,
        advantage="std",
        overlong=OverlongConfig(buffer_tokens=2048, penalty=0.5),
        sampling=SamplingConfig(max_tokens_per_turn=10240),
        rollout_timeout_s=7200.0,
    ),
    schedule=ScheduleConfig(zero_variance="skip", max_wait_s=14400.0),
    generator=GeneratorConfig(
        replicas=4, tensor_parallel=2, max_model_len=12288, max_running_requests=128
    ),
    trainer=TrainerConfig(
        data_parallel_shard=4,
        tensor_parallel=2,
        expert_parallel=8,
        max_episode_tokens=12288,
        max_tokens_per_microbatch=12288,
        activation_checkpointing="full",
        updates_per_batch=4,
        step_timeout_s=7200.0,
        loss=LossConfig(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=20, weight_decay=0.1),
    ),
    evaluation=EvaluationConfig(every=10, num_problems=960, temperature=1.0),
    checkpoint=CheckpointConfig(every=10),
)
