"""Makes the embedded policy of the calculator agent: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.calculator_agent.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses right conversations first, then conversations with
mistakes of four kinds (see `experiments.tiny_policy`). The problems are from the training split,
but reinforcement learning does not use the same ones.

Each word, digit and sign of arithmetic is a token. The chat template is a short form of Qwen3's:
the system message has one line for each tool, and calls and responses have Qwen3's marks. vLLM's
hermes parser reads a call that the model wrote, and the template writes the call again in the next
prompt. If the model writes JSON as `json.dumps` does, the tokens of the call are then exactly those
that the model sampled. So each prompt of a conversation extends the previous one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import Episode
from torchtitan_rl.experiments import tiny_policy
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR, SYSTEM_PROMPT
from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)
from torchtitan_rl.experiments.calculator_agent.dataset import (
    NAMES,
    ONE_OPERATION,
    THINGS,
    TWO_OPERATIONS,
    ProblemSizes,
    make_problem,
)
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR
from torchtitan_rl.experiments.tiny_policy import (
    ModelSize,
    WarmStart,
    build_word_backend,
    warm_start,
    with_chat_template,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities to guess the answer without a call, to change an operation or a digit of the
    expression, and to change a digit of the result in the answer. If all are below 0.5, the right
    conversation stays the likeliest."""

    guess: float = 0.0
    operation: float = 0.0
    digit: float = 0.0
    report: float = 0.0


def demonstration(
    problem: Mapping[str, Any],
    *,
    mistakes: Mistakes,
    rng: random.Random,
    tokenizer: Any,
    name: str,
) -> Episode:
    """Make a conversation about the problem as one episode; see `imitated`."""
    return imitated(conversation(problem, mistakes, rng=rng), tokenizer=tokenizer, name=name)


def imitated(
    messages: list[dict[str, Any]],
    *,
    tokenizer: Any,
    name: str,
    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,),
) -> Episode:
    """Make one episode of a conversation, with loss on the assistant's messages and their ends."""
    token_ids: tuple[int, ...] = ()
    mask: list[bool] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, spoken = rendered(messages[: place + 1], tokenizer, tools)
        if prompt[: len(token_ids)] != token_ids:
            raise ValueError(f"{name}: message {place} does not extend the conversation")
        token_ids = prompt + spoken
        mask += [False] * (len(prompt) - len(mask)) + [True] * len(spoken)
    return tiny_policy.imitated(name, token_ids, mask)


def rendered(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] = (CALCULATOR,),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens before the last message (the assistant's), and those of that message."""
    prompt = tokenizer.apply_chat_template(
        messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    spoken = whole.removeprefix(prompt).removesuffix("\n")

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    return encode(prompt), encode(spoken)


def conversation(
    problem: Mapping[str, Any], mistakes: Mistakes, *, rng: random.Random
) -> list[dict[str, Any]]:
    """The messages of a solution; each mistake is drawn independently."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem["text"]},
    ]
    if rng.random() < mistakes.guess:
        return [*messages, _answer(str(rng.randrange(2, 2 * problem["answer"] + 2)))]
    expression = with_mistakes(problem["expression"], mistakes, rng=rng)
    result = shown_result(expression)
    call = {"name": "calculator", "arguments": {"expression": expression}}
    messages += [
        {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
    ]
    if rng.random() < mistakes.report:
        result = with_other_digit(result, rng=rng)
    return [*messages, _answer(result)]


def with_mistakes(expression: str, mistakes: Mistakes, *, rng: random.Random) -> str:
    """The expression with mistakes; it may have no value."""
    if rng.random() < mistakes.operation:
        expression = _with_other_sign(expression, "+-*/", rng)
    if rng.random() < mistakes.digit:
        expression = _with_other_sign(expression, "123456789", rng)
    return expression


def with_other_digit(number: str, *, rng: random.Random) -> str:
    return _with_other_sign(number, "0123456789", rng)


def _answer(number: str) -> dict[str, Any]:
    return {"role": "assistant", "content": answer_text(number)}


def shown_result(expression: str) -> str:
    """What the calculator replies."""
    try:
        return as_text(calculate(expression))
    except CalculatorError as error:
        return f"error: {error}"


def _with_other_sign(text: str, signs: str, rng: random.Random) -> str:
    """The text with one of its ``signs`` replaced by another of them."""
    places = [place for place, sign in enumerate(text) if sign in signs]
    if not places:
        return text
    place = rng.choice(places)
    other = rng.choice([sign for sign in signs if sign != text[place]])
    return text[:place] + other + text[place + 1 :]


_FIRST_PROBLEM = 1_000_000
_SIZES = ProblemSizes(two_operations=0.5, max_number=99)


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    mistakes: Mistakes = field(
        default_factory=lambda: Mistakes(guess=0.3, operation=0.25, digit=0.25, report=0.25)
    )


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem("train", _FIRST_PROBLEM + number, _SIZES)
        return demonstration(
            problem.data,
            mistakes=config.mistakes if is_careless else Mistakes(),
            rng=rng,
            tokenizer=tokenizer,
            name=problem.problem_id,
        )

    size = ModelSize(hidden_size=160, intermediate_size=480, num_layers=2, num_heads=4)
    warm_start(config, tokenizer, size, demonstrate)


# Line breaks; a word, or a run of other signs, each with the space before it; a digit or a sign of
# arithmetic, each alone; other white space.
_PIECE = r"\n+| ?[A-Za-z]+|[0-9()+*/-]| ?[^\sA-Za-z0-9()+*/-]+|\s"

CHAT_TEMPLATE = """\
{%- macro listed(tools) -%}
  {%- for tool in tools -%}
    {%- set parameters = tool.function.parameters.properties | join(', ') -%}
    {{ tool.function.name + '(' + parameters + '): ' + tool.function.description }}
    {{- '' if loop.last else '\\n' }}
  {%- endfor -%}
{%- endmacro -%}
{%- if tools and messages[0].role != 'system' -%}
  {{ '<|im_start|>system\\n' + listed(tools) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
  {%- set before = loop.previtem.role if loop.previtem else '' -%}
  {%- set after = loop.nextitem.role if loop.nextitem else '' -%}
  {%- if message.role != 'tool' -%}
    {{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content -%}
      {{ message.content }}
    {%- endif -%}
    {%- if loop.first and tools and message.role == 'system' -%}
      {{ '\\n' + listed(tools) }}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{ '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
      {{- call.function.arguments | tojson + '}</tool_call>' }}
    {%- endfor -%}
    {{ '<|im_end|>\\n' }}
  {%- else -%}
    {%- if before != 'tool' -%}
      {{ '<|im_start|>user\\n' }}
    {%- endif -%}
    {{ '<tool_response>' + message.content + '</tool_response>' }}
    {%- if after != 'tool' -%}
      {{ '<|im_end|>\\n' }}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def build_tokenizer(more_text: str = "") -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same.

    The words of ``more_text`` are tokens, too.
    """
    return with_chat_template(build_backend(more_text), CHAT_TEMPLATE)


def build_backend(more_text: str = "") -> Tokenizer:
    return build_word_backend(_covered_text() + more_text, piece=_PIECE)


def answer_text(number: object) -> str:
    """Return the agent's answer in the form of the demonstrations."""
    return f"The answer is {number}."


def _covered_text() -> str:
    """Return a text with all words that conversations usually contain."""
    function = CALCULATOR["function"]
    parameters = ", ".join(function["parameters"]["properties"])
    tool = f"{function['name']}({parameters}): {function['description']}"
    call = '{"name": "calculator", "arguments": {"expression": "1+1"}}\n"(1+1)"'
    errors = "error: too long not an expression division by zero only numbers and brackets"
    stories = (story.text.format_map(_Letters()) for story in (*ONE_OPERATION, *TWO_OPERATIONS))
    words = [word for name in (*NAMES, *THINGS) for word in (name, f" {name}")]
    roles = "system\nuser\nassistant\n"
    texts = (roles, SYSTEM_PROMPT, tool, call, errors, answer_text(0), "0123456789()+*/-")
    return "\n".join([*texts, *stories, *words])


class _Letters(dict[str, str]):
    """Makes `str.format_map` leave a story's fields empty."""

    def __missing__(self, key: str) -> str:
        return ""


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
