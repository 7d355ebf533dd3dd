"""Makes the embedded policy of alphabet sort: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.alphabet_sort.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with ``--threads 1``. With ``--family deepseek_v3`` the policy is a DeepSeek-V3. Training
uses right answers first, then answers with mistakes of three kinds (see `experiments.tiny_policy`).
The problems are from the training split, but reinforcement learning does not use the same ones.

Words of the task are tokens; the chat template is ChatML.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import ChatRenderer, Episode, make_renderer
from torchtitan_rl.experiments import tiny_policy
from torchtitan_rl.experiments.alphabet_sort.env import (
    NAMES,
    NEW_MARK,
    ProblemSizes,
    make_problem,
    right_answer,
    user_message,
)
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.experiments.tiny_policy import (
    CHATML,
    Family,
    ModelSize,
    WarmStart,
    build_word_backend,
    warm_start,
    with_chat_template,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities that a name is left out, that a mark is wrong (not in the first turn), and that
    two neighbours change places. If all are below 0.5, the right answer stays the likeliest."""

    omit: float = 0.0
    mark: float = 0.0
    swap: float = 0.0


def demonstration(
    turns: Sequence[Sequence[str]],
    *,
    mistakes: Mistakes,
    rng: random.Random,
    renderer: ChatRenderer,
    tokenizer: Any,
    name: str,
) -> Episode:
    """Make the conversation of a problem as one episode, with loss on the answers and their
    ends."""
    said = []
    for turn in range(len(turns)):
        message = {"role": "user", "content": user_message(turns, turn)}
        lines = with_mistakes(right_answer(turns, turn), mistakes, rng=rng, marks=turn > 0)
        said.append(([message], "\n".join(lines)))
    return tiny_policy.demonstration(name, said, renderer=renderer, tokenizer=tokenizer)


def with_mistakes(
    lines: Sequence[str], mistakes: Mistakes, *, rng: random.Random, marks: bool
) -> list[str]:
    """Return the lines with mistakes. Each mistake is drawn independently."""
    kept = [line for line in lines if rng.random() >= mistakes.omit]
    if marks:
        kept = [_flip_mark(line) if rng.random() < mistakes.mark else line for line in kept]
    place = 0
    while place + 1 < len(kept):
        if rng.random() < mistakes.swap:
            kept[place], kept[place + 1] = kept[place + 1], kept[place]
            place += 1
        place += 1
    return kept


def _flip_mark(line: str) -> str:
    return line.removesuffix(f" {NEW_MARK}") if line.endswith(NEW_MARK) else f"{line} {NEW_MARK}"


_FIRST_PROBLEM = 1_000_000
_SIZES = ProblemSizes(min_turns=2, max_turns=3, min_names=2, max_names=3)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    threads: int = 2
    family: Family = "qwen3"  # model_type of the policy
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(omit=0.1, mark=0.35, swap=0.35))


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, _SIZES)
        return demonstration(
            problem.data["turns"],
            mistakes=config.mistakes if is_careless else Mistakes(),
            rng=rng,
            renderer=renderer,
            tokenizer=tokenizer,
            name=problem.problem_id,
        )

    size = ModelSize(
        hidden_size=192, intermediate_size=640, num_layers=2, num_heads=4, family=config.family
    )
    warm_start(config, tokenizer, size, demonstrate)


# Line breaks; a word or a run of other signs, each with the space before it; other white space.
_PIECE = r"\n+| ?[A-Za-z]+| ?[^\sA-Za-z]+|\s"


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return with_chat_template(build_backend(), CHATML)


def build_backend() -> Tokenizer:
    return build_word_backend(_covered_text(), piece=_PIECE)


def _covered_text() -> str:
    messages = [user_message([[], []], turn) for turn in range(2)]
    return "\n".join(["system\nuser\nassistant\n", *messages, *NAMES, f" {NEW_MARK}"])


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
