"""Programming problems of TACO with Qwen3-4B-Base on 8 GPUs of 80 GB: four replicas generate while
four ranks train (FSDP). Programs run in the sandbox, on the CPU cores of the controller's machine.

    torchtitan-rl train code_qwen3_4b

Model and data are downloaded from the Hugging Face hub at the first start; ``--policy.checkpoint``
and ``--task.train`` name other places. The sandbox needs Linux with user namespaces
(``--task.sandbox.isolation landlock`` does without).

Expected time: 30 hours on 8 H100 for the 174 steps (an estimate; not run on a GPU).

Reference: https://huggingface.co/shrango/qwen3-4b-base-taco-grpo-lorem reports for the same model,
data, steps, problems and answers a step, and lengths, with GRPO on 8 A100: HumanEval from 76.8 % to
84.2 %, MBPP from 49.0 % to 60.6 %. The tests are chosen as in DeepCoder
(https://www.together.ai/blog/deepcoder): the 15 with the longest inputs, all of which must pass.
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
    ScheduleConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.code_tests.task import CodeTestsTask

config = RunConfig(
    name="code_qwen3_4b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-4B-Base"),
    task=CodeTestsTask(renderer="qwen3", thinking="keep", validation_share=0.04),
    num_steps=174,
    rollout=RolloutConfig(
        groups_per_step=128,
        group_size=8,
        max_turns=1,
        max_total_tokens=10240,
        advantage="std",
        step_timeout_s=600.0,  # programs of many rollouts wait for a core
        sampling=SamplingConfig(max_tokens_per_turn=8192),
    ),
    schedule=ScheduleConfig(staleness=1),
    generator=GeneratorConfig(replicas=4, max_model_len=10240, max_running_requests=128),
    trainer=TrainerConfig(
        data_parallel_shard=4,
        max_episode_tokens=10240,
        max_tokens_per_microbatch=10240,
        activation_checkpointing="full",
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=10),
    ),
    evaluation=EvaluationConfig(every=25, num_problems=256, temperature=0.0),
    checkpoint=CheckpointConfig(every=25),
)
