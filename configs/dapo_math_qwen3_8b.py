"""DAPO (Yu et al. 2025, arXiv:2503.14476) with Qwen3-8B-Base on 8 GPUs of 80 GB, which replicas and
trainer (FSDP) use in turn.

    torchtitan-rl train dapo_math_qwen3_8b

Model and data are downloaded from the Hugging Face hub at the first start; ``--policy.checkpoint``
and ``--task.train`` name other places.

As in the paper: groups whose rewards are equal are replaced by other problems, the clip is 0.2 and
0.28, the loss is a mean over tokens without KL, long answers are punished over the last tokens
before the limit, advantages are divided by the group's standard deviation; 16 answers of a problem,
512 for an update, learning rate 1e-6 after a warm-up of 20 steps, weight decay 0.1.

For 8 GPUs: a step has a quarter of the paper's 512 problems (4 updates instead of 16), and the
limit of an answer is half of its 20,480 tokens. Rewards are 0 and 1 instead of -1 and 1, so the
penalty is half of the paper's, too.

Besides the GPUs it takes about 170 GiB of the host's memory (an estimate, of which 122 GiB are the
trainer's state while engines work).

Expected time: 20 to 40 minutes a step on 8 H100, 3 days for the 100 steps (an estimate; not run on
a GPU).

Reference: AIME 2024, mean of 32 answers: 50 % in the paper (Qwen2.5-32B), 52 % in verl's
reproduction on 128 H800 (https://verl.readthedocs.io/en/latest/algo/dapo.html); verl's baselines
have 36.3 % for Qwen2.5-Math-7B. No number for Qwen3-8B-Base is known to us.
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
    name="dapo_math_qwen3_8b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-8B-Base"),
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
    generator=GeneratorConfig(replicas=8, max_model_len=12288, max_running_requests=128),
    trainer=TrainerConfig(
        data_parallel_shard=8,
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
