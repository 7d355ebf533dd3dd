"""Makes the embedded policy of the code interpreter: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.code_interpreter.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. The problems are from the training split, but reinforcement learning
does not use the same ones.

Training uses right conversations first, then conversations with mistakes of five kinds (see
`experiments.tiny_policy`). A program may leave out the last number, have a wrong digit, or call a
function that does not exist; then the policy reads an error, and tries again or gives up. An answer
may be guessed, or differ from the number that the program printed.

Each word, digit and sign of arithmetic is a token. There is no chat template: the ``qwen3``
renderer writes the conversation.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import Episode, Message, make_renderer
from torchtitan_rl.experiments.code_interpreter.task import KINDS, POLICY_DIR, make_problem
from torchtitan_rl.experiments.tiny_policy import (
    ModelSize,
    WarmStart,
    build_word_backend,
    demonstration,
    warm_start,
    with_chat_template,
)

_MAX_CALLS = 3
_WRONG_NAMES = {"sum": "total", "max": "largest", "str": "text", "range": "numbers"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities. If all are below 0.5, the right conversation stays the likeliest."""

    guess: float = 0.0  # before a program, and after an error
    edge: float = 0.0
    digit: float = 0.0
    name: float = 0.0
    report: float = 0.0


def conversation(
    problem: Mapping[str, Any], mistakes: Mistakes, rng: random.Random
) -> list[tuple[list[Message], str]]:
    """Make the turns of a solution: the messages before an answer, and the answer."""
    turns: list[tuple[list[Message], str]] = []
    messages: list[Message] = [{"role": "user", "content": problem["question"]}]
    while rng.random() >= mistakes.guess and len(turns) < _MAX_CALLS:
        expression = with_mistakes(problem["expression"], mistakes, rng)
        turns.append((messages, call_text(expression)))
        printed = result_of(expression)
        messages = [{"role": "tool", "content": printed}]
        if printed.isdigit():
            if rng.random() < mistakes.report:
                printed = with_other_digit(printed, rng)
            return [*turns, (messages, answer_text(printed))]
    guess = str(rng.randrange(2 * int(problem["answer"]) + 2))
    return [*turns, (messages, answer_text(guess))]


def with_mistakes(expression: str, mistakes: Mistakes, rng: random.Random) -> str:
    """Return the expression with mistakes. Each mistake is drawn independently."""
    if rng.random() < mistakes.edge:
        expression = expression.replace("+1)", ")")
    if rng.random() < mistakes.digit:
        expression = with_other_digit(expression, rng)
    names = [name for name in _WRONG_NAMES if f"{name}(" in expression]
    if names and rng.random() < mistakes.name:
        name = rng.choice(names)
        expression = expression.replace(f"{name}(", f"{_WRONG_NAMES[name]}(", 1)
    return expression


def with_other_digit(text: str, rng: random.Random) -> str:
    """Replace one of the digits by another one; no digit becomes 0."""
    place = rng.choice([found.start() for found in re.finditer(r"\d", text)])
    digit = rng.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


def result_of(expression: str) -> str:
    """Return the tool's answer to a program that prints ``expression``."""
    try:
        return str(eval(expression))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def call_text(expression: str) -> str:
    """Return a call of the tool in the form in which the policy writes it."""
    call = json.dumps({"name": "python", "arguments": {"code": f"print({expression})"}})
    return f"<tool_call>\n{call}\n</tool_call>"


def answer_text(number: str) -> str:
    return f"The answer is {number}."


_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 200
    careless_steps: int = 100
    decay_steps: int = 150
    row_len: int = 320
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.3, edge=0.4, digit=0.2, name=0.35, report=0.2)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, max_number=99)
        mistakes = config.mistakes if is_careless else Mistakes()
        return demonstration(
            problem.problem_id,
            conversation(problem.data, mistakes, rng),
            renderer=renderer,
            tokenizer=tokenizer,
        )

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


# Line breaks; a word, or a run of other signs, each with the space before it; a digit or a sign of
# arithmetic, each alone; other white space.
_PIECE = r"\n+| ?[A-Za-z]+|[0-9()+*/-]| ?[^\sA-Za-z0-9()+*/-]+|\s"

_ERRORS = (
    "NameError: name 'total' 'largest' 'text' 'numbers' is not defined\n"
    "ZeroDivisionError: integer modulo by zero\n"
    "total(largest(text(numbers("
)


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return with_chat_template(build_backend(), "")


def build_backend() -> Tokenizer:
    numbers = {"a": 0, "b": 0, "c": 0}
    texts = [kind.question.format(**numbers) for kind in KINDS]
    texts += [call_text(kind.expression.format(**numbers)) for kind in KINDS]
    covered = "\n".join(["user\nassistant\n", *texts, answer_text("0123456789"), _ERRORS])
    return build_word_backend(covered, piece=_PIECE)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
