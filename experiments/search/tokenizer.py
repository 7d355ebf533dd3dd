"""The tokenizer of the embedded policy: words of the worlds are tokens; the template is Qwen3's.

There is no chat template: the ``qwen3`` renderer writes the conversation.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.search.index import NOTHING, SEARCH
from torchtitan_rl.experiments.search.world import (
    FIRST_NAMES,
    JOBS,
    LAST_NAMES,
    PERSON,
    PRODUCTS,
    QUESTIONS,
    RIVERS,
    TOWN,
    TOWNS,
)
from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

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
    """The `transformers` tokenizer that ships with the policy; the same one each time."""
    return with_chat_template(build_backend(), "")


def build_backend() -> Tokenizer:
    return build_word_backend(_covered_text(), piece=_PIECE)


def call_text(query: str) -> str:
    """A search as the policy writes it."""
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
