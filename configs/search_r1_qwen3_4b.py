"""Search-R1 (Jin et al. 2025, arXiv:2503.09516) with Qwen3-4B on 8 GPUs of 80 GB: four replicas
generate while four ranks train (FSDP), and a retriever on the CPU answers the searches.

    hf download PeterJinGo/wiki-18-corpus --repo-type dataset --local-dir data/wiki
    gzip -d data/wiki/wiki-18.jsonl.gz
    torchtitan-rl retriever --corpus data/wiki/wiki-18.jsonl --index data/wiki/bm25 &
    torchtitan-rl train search_r1_qwen3_4b

Model and questions are downloaded from the Hugging Face hub at the first start;
``--policy.checkpoint`` and ``--task.train`` name other places, and ``--task.retriever`` another
retriever, also one of Search-R1's own (E5 instead of BM25).

As in the paper: three passages a search, at most 500 tokens a turn (here 512), exact match as the
reward, no loss on passages, GRPO with a KL penalty of 0.001, learning rate 1e-6. A step has 128
questions with 8 answers instead of 512 with 5. Searches are calls of a tool in Qwen3's chat format
instead of tags.

Expected time: 15 hours on 8 H100 for the 300 steps (an estimate; not run on a GPU).

Reference: in the paper RL with search improves Qwen2.5-3B by 20 % and Qwen2.5-7B by 24 % over
retrieval without RL (exact match, mean of seven datasets, E5 as the retriever). No number for
Qwen3-4B or BM25 is known to us.
"""

from __future__ import annotations

from torchtitan_rl import (
    CheckpointConfig,
    EvaluationConfig,
    GeneratorConfig,
    LossConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    TrainerConfig,
)
from torchtitan_rl.experiments.search_r1.task import SearchR1Task

config = RunConfig(
    name="search_r1_qwen3_4b",
    policy=PolicyConfig(checkpoint="Qwen/Qwen3-4B"),
    task=SearchR1Task(renderer="qwen3"),
    num_steps=300,
    rollout=RolloutConfig(
        groups_per_step=128,
        group_size=8,
        max_turns=5,
        max_total_tokens=4096,
        advantage="std",
        sampling=SamplingConfig(max_tokens_per_turn=512),
    ),
    schedule=ScheduleConfig(staleness=1),
    generator=GeneratorConfig(replicas=4, max_model_len=4096, max_running_requests=256),
    trainer=TrainerConfig(
        data_parallel_shard=4,
        max_episode_tokens=4096,
        max_tokens_per_microbatch=8192,
        activation_checkpointing="full",
        loss=LossConfig(kl_coefficient=0.001),
        optimizer=OptimizerConfig(learning_rate=1e-6, warmup_steps=20),
    ),
    evaluation=EvaluationConfig(every=25, num_problems=512, temperature=0.0),
    checkpoint=CheckpointConfig(every=25),
)
