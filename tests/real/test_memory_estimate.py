"""The estimate of a trainer's memory against the peak of PyTorch's allocator."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile

from tests.real.models import DEEPSEEK, EXPERTS
from tests.real.trainer_helpers import CONFIG
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.memory import trainer_memory
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

SHAPES = {  # model dimension, layers, vocabulary, tokens of a microbatch, checkpointing
    "many layers": (256, 8, 1024, 512, "none"),
    "a large vocabulary": (256, 4, 8192, 512, "selective"),
    "few tokens": (384, 4, 4096, 128, "full"),
    "experts": (256, 4, 1024, 512, "none"),
    "experts computed again": (256, 6, 1024, 512, "full"),
    "latent attention": (256, 4, 1024, 512, "none"),
    "latent attention computed again": (256, 6, 1024, 512, "selective"),
}
IN_CI = ("a large vocabulary", "few tokens", "experts")  # between them, they have all terms
FAMILIES = {"experts": "qwen3_moe", "latent": "deepseek_v3"}  # of shapes by their first word


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.soak) for name in SHAPES],
)
def test_a_trainer_takes_the_memory_that_was_estimated_up_to_15_percent(
    name: str, tmp_path: Path
) -> None:
    dim, num_layers, vocab_size, tokens, checkpointing = SHAPES[name]
    family = FAMILIES.get(name.split()[0], "qwen3")
    policy = made_policy(tmp_path / "policy", dim, num_layers, vocab_size, family)
    config = replace(
        CONFIG,
        max_episode_tokens=64,
        max_tokens_per_microbatch=tokens,
        activation_checkpointing=checkpointing,
    )
    batch = trained_batch(vocab_size, num_episodes=2 * tokens // 64)
    # One shape with adapters, which the other shapes' terms are common to.
    lora = LoraConfig(rank=16 if name == "a large vocabulary" else 0)
    for one in {LoraConfig(), lora}:
        measured = peak_bytes(policy, config, batch, tmp_path / "trace.json", one)
        parts = trainer_memory(
            config, read_architecture(policy), device="cpu", dtype="float32", lora=one
        )
        assert sum(parts.values()) == pytest.approx(measured, rel=0.15), one


def peak_bytes(
    policy: Path, config: TrainerConfig, batch: TrainingBatch, trace: Path, lora: LoraConfig
) -> int:
    """The largest number of bytes that PyTorch's allocator holds from the start of a trainer to the
    end of its second step, when AdamW's moments exist."""
    from torchtitan_rl.backends.titan.trainer import PolicyTrainer

    gc.collect()  # a trainer of another test would be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer = PolicyTrainer(policy, config, seed=0, max_steps=2, lora=lora)
        for _ in range(2):
            trainer.train_step(batch)
    trainer.close()
    recorded.export_chrome_trace(str(trace))
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if "ts" in one]
    found = [one["args"] for one in sorted(events, key=lambda one: one["ts"]) if is_memory(one)]
    before = found[0]["Total Allocated"] - found[0]["Bytes"]
    return max(one["Total Allocated"] for one in found) - before


def is_memory(event: dict[str, object]) -> bool:
    return event["name"] == "[memory]"


def made_policy(path: Path, dim: int, num_layers: int, vocab_size: int, family: str) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    more: dict[str, object] = {
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": True,
    }
    if family == "qwen3_moe":
        more |= EXPERTS | {"moe_intermediate_size": dim}
    elif family == "deepseek_v3":
        sizes = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "num_key_value_heads": dim // 64}
        more = DEEPSEEK | sizes | {"moe_intermediate_size": dim, "q_lora_rank": dim // 2}
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=3 * dim,
        num_hidden_layers=num_layers,
        num_attention_heads=dim // 64,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def trained_batch(vocab_size: int, *, num_episodes: int, length: int = 64) -> TrainingBatch:
    """Without common prefixes, and every token is trained but the first of each episode: the case
    for which the estimate is made."""
    rng = np.random.default_rng(0)
    mask = (False, *[True] * (length - 1))
    episodes = [
        Episode(
            rollout_id=f"rollout-{number}",
            group_id=f"group-{number % 4}",
            token_ids=tuple(rng.integers(0, vocab_size, length).tolist()),
            loss_mask=mask,
            logprobs=tuple(-5.0 if on else 0.0 for on in mask),
            advantages=tuple(float(rng.normal()) if on else 0.0 for on in mask),
            versions=tuple(0 if on else -1 for on in mask),
        )
        for number in range(num_episodes)
    ]
    batch = pack_episodes(episodes, row_len=length, temperature=1.0).batch
    assert batch is not None
    return batch
