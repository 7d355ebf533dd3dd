"""Makes the embedded policy of search: a small Qwen3, trained on demonstrations.

    python -m torchtitan_rl.experiments.search.warm_start [--output-dir DIR]

writes a Hugging Face directory (bfloat16). By default it replaces the policy in this package, which
was made with these defaults. Training uses right solutions first, then solutions with mistakes (see
`experiments.tiny_policy`). Worlds of the validation set are left out.

Words of the worlds are tokens. There is no chat template: the ``qwen3`` renderer writes the
conversation.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro
from tokenizers import Tokenizer

from torchtitan_rl import Episode, Message, make_renderer
from torchtitan_rl.experiments.search.env import (
    FIRST_NAMES,
    JOBS,
    LAST_NAMES,
    NOTHING,
    PERSON,
    PRODUCTS,
    QUESTIONS,
    RIVERS,
    SEARCH,
    TOWN,
    TOWNS,
    index_of,
    make_problem,
    make_world,
)
from torchtitan_rl.experiments.search.task import POLICY_DIR
from torchtitan_rl.experiments.tiny_policy import (
    ModelSize,
    WarmStart,
    build_word_backend,
    demonstration,
    warm_start,
    with_chat_template,
)

_FIRST_PROBLEM = 1_000_000
_NUM_WORLDS = 512
_MAX_SEARCHES = 3
_VALUES = {"town": TOWNS, "job": JOBS, "river": RIVERS, "product": PRODUCTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Probabilities to leave a word of a query out, and to invent the answer instead of another
    search. If both are below 0.5, the right solution stays the likeliest."""

    omit: float = 0.0
    guess: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(WarmStart):
    output_dir: Path = POLICY_DIR
    right_steps: int = 250
    careless_steps: int = 80
    decay_steps: int = 120
    row_len: int = 1024
    mistakes: Mistakes = field(default_factory=lambda: Mistakes(omit=0.35, guess=0.3))


def main(config: WarmStartConfig) -> None:
    """Train from random weights and write the policy."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")

    def demonstrate(number: int, is_careless: bool, rng: random.Random) -> Episode:
        problem = make_problem(
            "train", _FIRST_PROBLEM + number, num_worlds=_NUM_WORLDS, two_searches=0.6
        )
        mistakes = config.mistakes if is_careless else Mistakes()
        return demonstration(
            problem.problem_id,
            conversation(problem.data, mistakes, rng),
            renderer=renderer,
            tokenizer=tokenizer,
            tools=[SEARCH],
        )

    size = ModelSize(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, head_dim=32)
    warm_start(config, tokenizer, size, demonstrate)


def conversation(
    problem: Mapping[str, Any], mistakes: Mistakes, rng: random.Random
) -> list[tuple[list[Message], str]]:
    """The turns of a solution, with the documents that the tool really finds. Each mistake is drawn
    independently.

    If a query finds the wrong document, the solution goes on with the facts of that document.
    """
    world, asked = problem["world"], problem["asked"]
    index, documents = index_of(world), make_world(world).documents
    turns: list[tuple[list[Message], str]] = []
    messages: list[Message] = [{"role": "user", "content": problem["question"]}]
    query = problem["person"]
    known: Mapping[str, str] = {}
    while asked not in known:
        if rng.random() < mistakes.guess or len(turns) == _MAX_SEARCHES:
            known = {asked: rng.choice(_VALUES[asked])}
            break
        if rng.random() < mistakes.omit:
            query = rng.choice(query.split())
        turns.append((messages, call_text(query)))
        (found,) = index.find(query, 1)
        messages = [{"role": "tool", "content": found}]
        known = documents[found]
        query = f"town {known['town']}"
    return [*turns, (messages, answer_text(known[asked]))]


def answer_text(answer: str) -> str:
    return f"The answer is {answer}."


# Line breaks; a word or a run of other signs, each with the space before it; other white space.
_PIECE = r"\n+| ?[A-Za-z]+| ?[^\sA-Za-z]+|\s"

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def build_tokenizer() -> Any:
    """Build the `transformers` tokenizer of the policy; the result is always the same."""
    return with_chat_template(build_backend(), "")


def build_backend() -> Tokenizer:
    return build_word_backend(_covered_text(), piece=_PIECE)


def call_text(query: str) -> str:
    """Return a search in the form in which the policy writes it."""
    call = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>\n{call}\n</tool_call>"


def _covered_text() -> str:
    values = (*FIRST_NAMES, *LAST_NAMES, *TOWNS, *RIVERS, *PRODUCTS, *JOBS)
    texts = (PERSON, TOWN, *QUESTIONS.values())
    fields = {"person": "", "town": "", "river": "", "product": "", "job": ""}
    # The signs that follow a value, and the values with and without the space before them.
    texts = (*(text.format(**fields) for text in texts), "a? a.", "The answer is")
    words = [word for value in values for word in (value, f" {value}")]
    tools = (_TOOLS, json.dumps(SEARCH), call_text("town"), NOTHING)
    return "\n".join(["system\nuser\nassistant\n", *tools, *texts, *words])


if __name__ == "__main__":
    main(tyro.cli(WarmStartConfig, description=__doc__))
