"""The work that `benchmarks.peers` gives to each framework: prompts, lengths, reward and policy.

Everything is derived from a `Workload`, so both sides derive the same work by themselves. The
policy is a small Qwen3 with random weights and one token for each byte. Answers end in one of two
ways:

- sampled (``median`` 0): at the end token, which the policy samples about once in 265 tokens, or
  after ``max_tokens``;
- fixed (``median`` above 0): after a length that was drawn for this answer. Our side requests that
  many tokens from a policy without an end token. TRL's side suppresses the end token before this
  length, and forces it there.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from benchmarks.long_tail_work import LONG, LongTail


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts and answers of each optimizer step. Lengths are in tokens."""

    prompt_tokens: int = 205
    max_tokens: int = 64
    """Longest answer whose end is sampled."""
    median: int = 0
    """Median of the fixed lengths; a twentieth of them have 10 to 20 times the median. 0: answers
    end by sampling."""
    groups: int = 8
    group_size: int = 8

    @property
    def longest(self) -> int:
        """Tokens of the longest possible answer."""
        return LONG[1] * self.median if self.median else self.max_tokens

    @property
    def answers(self) -> int:
        """Number of answers in one optimizer step."""
        return self.groups * self.group_size

    def prompt(self, index: int) -> str:
        """Return the prompt: letters, each of which is a token."""
        return "".join(
            random.Random(f"peers-{index}").choices(ascii_lowercase, k=self.prompt_tokens)
        )

    def group_lengths(self, index: int) -> tuple[int, ...]:
        """Fixed lengths of the answers to prompt ``index``."""
        tail = LongTail(groups_per_step=self.groups, group_size=self.group_size, median=self.median)
        return tail.lengths(index)

    def step_lengths(self, step: int) -> tuple[int, ...]:
        """Fixed lengths of all answers of a step (from 0), one group after another."""
        first = step * self.groups
        return tuple(
            length
            for index in range(first, first + self.groups)
            for length in self.group_lengths(index)
        )


WORKLOADS = {
    "long prompt": Workload(prompt_tokens=205),
    "short prompt": Workload(prompt_tokens=16),
    "heavy tail": Workload(prompt_tokens=48, median=32),
}


def even_share(token_ids: Sequence[int]) -> float:
    """Return the reward, which takes little time, and is almost never equal for two answers of a
    group."""
    return sum(token % 2 == 0 for token in token_ids) / max(1, len(token_ids))


def write_policies(folder: Path) -> tuple[Path, Path]:
    """Write two policies in Hugging Face format with the same 0.6 M parameters. The second policy
    has no end token, so that its answers end only at their maximum length."""
    from torchtitan_rl.experiments.tiny_policy import (
        ModelSize,
        build_word_backend,
        with_chat_template,
        write_untrained,
    )

    ends, endless = folder / "policy", folder / "policy-without-end"
    if not endless.exists():
        size = ModelSize(
            hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32
        )
        tokenizer = with_chat_template(build_word_backend("", piece="."), "{{ messages }}")
        write_untrained(ends, tokenizer, size, seed=0)
        temporary = folder / "policy-without-end-temporary"
        shutil.copytree(ends, temporary, dirs_exist_ok=True)
        _drop_end_token(temporary)
        temporary.rename(endless)
    return ends, endless


def _drop_end_token(policy: Path) -> None:
    for path in policy.glob("*config.json"):
        settings: dict[str, Any] = json.loads(path.read_text())
        for name in ("eos_token_id", "eos_token"):
            settings.pop(name, None)
        path.write_text(json.dumps(settings, indent=1))
