"""Makes embedded policies: a small Qwen3 from random weights, taught by demonstrations.

It is trained with the project's own trainer. Everything is seeded; on another machine or number of
threads rounding may differ.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl import ChatRenderer, Episode, OptimizerConfig, TrainerConfig, pack_episodes

ROW_LEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of a Qwen3 with tied embeddings and two query heads for each key-value head."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int = 64
    max_positions: int = 1024


def teach(
    output_dir: Path,
    tokenizer: Any,
    size: ModelSize,
    lessons: Iterator[list[Episode]],
    *,
    num_steps: int,
    optimizer: OptimizerConfig,
    threads: int,
    seed: int,
) -> None:
    """Write the policy that comes of one step for each of the ``num_steps`` lessons (bfloat16)."""
    from torchtitan_rl import PolicyTrainer

    trainer_config = TrainerConfig(
        row_len=ROW_LEN, rows_per_microbatch=32, threads=threads, optimizer=optimizer
    )
    with tempfile.TemporaryDirectory() as folder:
        untrained = Path(folder) / "untrained"
        write_untrained(untrained, tokenizer, size, seed=seed)
        trainer = PolicyTrainer(untrained, trainer_config, seed=seed, max_steps=num_steps)
        for step, episodes in enumerate(lessons):
            packing = pack_episodes(episodes, row_len=ROW_LEN, temperature=1.0)
            assert packing.batch is not None
            output = trainer.supervised_step(packing.batch)
            if step % 50 == 0 or step == num_steps - 1:
                print(f"step {step}: loss {output.metrics['loss']:.3f}", flush=True)
        trainer.export_hf(output_dir, dtype="bfloat16")
        trainer.close()


def write_untrained(path: Path, tokenizer: Any, size: ModelSize, *, seed: int) -> None:
    """A Hugging Face directory with random weights and the tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_heads // 2,
            head_dim=size.head_dim,
            max_position_embeddings=size.max_positions,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            initializer_range=0.06,  # the usual 0.02 is for wide models; this one learns faster
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def conversation(
    exchanges: Iterable[tuple[str, str]], renderer: ChatRenderer, tokenizer: Any, *, name: str
) -> Episode:
    """What the user says and what is to be answered, as an episode with loss on the answers."""
    end = tokenizer.eos_token_id
    prompt: tuple[int, ...] | None = None
    answer: tuple[int, ...] = ()
    mask: list[bool] = []
    for said, answered in exchanges:
        message = {"role": "user", "content": said}
        if prompt is None:
            prompt = renderer.initial_prompt([message])
        else:
            prompt = renderer.extend(prompt, answer, [message])
        if prompt is None:
            raise ValueError(f"{name}: the renderer cannot extend the conversation")
        answer = (*tokenizer.encode(answered, add_special_tokens=False), end)
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(answer)
    zeros = (0.0,) * len(mask)
    return Episode(
        rollout_id=name,
        group_id=name,
        token_ids=(*(prompt or ()), *answer),
        loss_mask=tuple(mask),
        logprobs=zeros,
        advantages=zeros,
        versions=tuple(0 if sampled else -1 for sampled in mask),
    )
