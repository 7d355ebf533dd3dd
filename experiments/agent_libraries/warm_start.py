"""Makes the embedded policy of the agent libraries: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.agent_libraries.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses right conversations first, then conversations with
mistakes (see `experiments.tiny_policy`). The problems are from the training split, but
reinforcement learning does not use the same ones.

Conversations have two forms: the agents of most libraries end with a message, those of
`pydantic-ai` with a call of ``final_result``. The mistakes are those of `calculator_agent`; a guess
invents the missing number instead of asking for it.

The tokenizer is that of `calculator_agent` with more words. The chat template is the same: it shows
a tool's name, parameters and description, so the policy sees no difference between the libraries.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from torchtitan_rl import Episode
from torchtitan_rl.experiments.agent_libraries.exercise import (
    INSTRUCTIONS,
    make_problem,
    reply_text,
)
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, SIZES
from torchtitan_rl.experiments.calculator_agent import warm_start as calculator_agent
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR
from torchtitan_rl.experiments.calculator_agent.warm_start import (
    Mistakes,
    answer_text,
    imitated,
    shown_result,
    with_mistakes,
    with_other_digit,
)
from torchtitan_rl.experiments.tiny_policy import ModelSize, WarmStart, warm_start

QUESTION = "Which number is missing?"
FINAL_RESULT: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "final_result",
        "description": "the answer",
        "parameters": {"type": "object", "properties": {"number": {"type": "number"}}},
    },
}
MESSAGE_FORM = (CALCULATOR,)  # the tools of each form
STRUCTURED_FORM = (CALCULATOR, FINAL_RESULT)


def conversation(
    problem: Mapping[str, Any],
    mistakes: Mistakes,
    *,
    tools: tuple[Mapping[str, Any], ...],
    rng: random.Random,
) -> list[dict[str, Any]]:
    """Make the messages of a solution. Each mistake is drawn independently."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": problem["text"]},
    ]
    expression = problem["expression"]
    if rng.random() < mistakes.guess:
        guess = str(rng.randint(2, 99))
        expression = re.sub(rf"\b{problem['missing']}\b", guess, expression, count=1)
    else:
        messages += [
            {"role": "assistant", "content": QUESTION},
            {"role": "user", "content": reply_text(problem["missing"])},
        ]
    expression = with_mistakes(expression, mistakes, rng=rng)
    result = shown_result(expression)
    messages += [
        _call("calculator", expression=expression),
        {"role": "tool", "content": result},
    ]
    if rng.random() < mistakes.report:
        result = with_other_digit(result, rng=rng)
    return [*messages, _last_message(result, tools)]


def _last_message(result: str, tools: tuple[Mapping[str, Any], ...]) -> dict[str, Any]:
    """Make the last message. After an error it is a plain message in both forms."""
    if FINAL_RESULT in tools and re.fullmatch(r"-?\d+(\.\d+)?", result):
        return _call("final_result", number=float(result) if "." in result else int(result))
    return {"role": "assistant", "content": answer_text(result)}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


_FIRST_PROBLEM = 1_000_000


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 800
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.35, operation=0.2, digit=0.2, report=0.2)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, SIZES)
        tools = (MESSAGE_FORM, STRUCTURED_FORM)[number % 2]
        mistakes = config.mistakes if is_careless else Mistakes()
        messages = conversation(problem.data, mistakes, tools=tools, rng=rng)
        return imitated(messages, tools=tools, tokenizer=tokenizer, name=problem.problem_id)

    size = ModelSize(
        hidden_size=160,
        intermediate_size=480,
        num_layers=2,
        num_heads=4,
        max_positions=4096,  # some libraries write many words that are not in the vocabulary
    )
    warm_start(config, tokenizer, size, demonstrate)


_WORDS = f"""
Some some
{QUESTION}
{reply_text(0)}
final_result(number): the answer
"final_result", "arguments": {{"number": 42}}}}
final_answer(answer): Provides a final answer to the given problem.
"final_answer", "arguments": {{"answer": "The answer is 42."}}}}
New task:
Calling tools:
[{{'id': 'call_0', 'type': 'function', 'function': {{'name': 'calculator', 'arguments':
{{'expression': '1+1'}}}}}}]
Observation:
"""


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return calculator_agent.build_tokenizer(_WORDS)


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
