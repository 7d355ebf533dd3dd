"""Makes the embedded policy: a small Qwen3 that is taught the task, and then to be careless.

    python -m experiments.alphabet_sort.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16), by default over the one that ships. It trains with the
project's own trainer, first on right answers, then on answers with mistakes. Problems are of the
training split, beyond those that reinforcement learning uses. The one that ships was made with
``--threads 1``.
Everything is seeded; on another machine or number of threads rounding may differ.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from experiments.alphabet_sort.dataset import ProblemSizes, make_problem
from experiments.alphabet_sort.demonstrations import Mistakes, demonstration
from experiments.alphabet_sort.task import POLICY_DIR
from experiments.alphabet_sort.tokenizer import build_tokenizer
from torchtitan_rl.config import OptimizerConfig, TrainerConfig
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

_FIRST_PROBLEM = 1_000_000
_ROW_LEN = 256


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    output_dir: Path = POLICY_DIR
    seed: int = 0
    right_steps: int = 700  # on right answers
    careless_steps: int = 150  # on answers with mistakes
    decay_steps: int = 350  # the last steps, in which the learning rate falls to 0
    conversations_per_step: int = 32
    learning_rate: float = 3e-3
    threads: int = 2
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(omit=0.1, mark=0.35, swap=0.35))


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    from torchtitan_rl.adapters.policy_trainer import PolicyTrainer

    tokenizer = build_tokenizer()
    num_steps = config.right_steps + config.careless_steps
    with tempfile.TemporaryDirectory() as folder:
        untrained = Path(folder) / "untrained"
        write_untrained(untrained, tokenizer, seed=config.seed)
        trainer = PolicyTrainer(
            untrained, _trainer_config(config), seed=config.seed, max_steps=num_steps
        )
        for step, episodes in enumerate(_lessons(config, tokenizer)):
            packing = pack_episodes(episodes, row_len=_ROW_LEN, temperature=1.0)
            assert packing.batch is not None
            output = trainer.supervised_step(packing.batch)
            if step % 50 == 0 or step == num_steps - 1:
                print(f"step {step}: loss {output.metrics['loss']:.3f}", flush=True)
        trainer.export_hf(config.output_dir, dtype="bfloat16")
        trainer.close()


def write_untrained(path: Path, tokenizer: Any, *, seed: int) -> None:
    """A Hugging Face directory with random weights and the tokenizer: 1.1 M parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=640,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
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


def _trainer_config(config: WarmStartConfig) -> TrainerConfig:
    return TrainerConfig(
        row_len=_ROW_LEN,
        rows_per_microbatch=32,
        threads=config.threads,
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, warmup_steps=50, decay_steps=config.decay_steps
        ),
    )


def _lessons(config: WarmStartConfig, tokenizer: Any) -> Iterator[list[Episode]]:
    """The conversations of each step."""
    sizes = ProblemSizes(min_turns=2, max_turns=3, min_names=2, max_names=3)
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    rng = random.Random(config.seed)
    index = _FIRST_PROBLEM
    for step in range(config.right_steps + config.careless_steps):
        mistakes = Mistakes() if step < config.right_steps else config.mistakes
        episodes = []
        for _ in range(config.conversations_per_step):
            problem = make_problem("train", index, sizes)
            index += 1
            episodes.append(
                demonstration(
                    problem.data["turns"],
                    mistakes=mistakes,
                    rng=rng,
                    renderer=renderer,
                    tokenizer=tokenizer,
                    name=problem.problem_id,
                )
            )
        yield episodes


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
