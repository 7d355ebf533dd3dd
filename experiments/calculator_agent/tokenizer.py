"""The tokenizer and the chat template of the embedded policy.

Words are tokens; digits and the signs of arithmetic are one token each. The template is Qwen3's in
short: tools are one line each in the system message, calls and responses have Qwen3's marks. What
it writes for a call that vLLM's hermes parser has read is what the model sampled, token for token,
if the model writes its JSON as `json.dumps` does; so a conversation's prompts extend each other.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR, SYSTEM_PROMPT
from torchtitan_rl.experiments.calculator_agent.stories import (
    NAMES,
    ONE_OPERATION,
    THINGS,
    TWO_OPERATIONS,
)
from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

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
    """The `transformers` tokenizer that ships with the policy; the same one each time.

    The words of ``more_text`` are tokens, too.
    """
    return with_chat_template(build_backend(more_text), CHAT_TEMPLATE)


def build_backend(more_text: str = "") -> Tokenizer:
    return build_word_backend(_covered_text() + more_text, piece=_PIECE)


def answer_text(number: object) -> str:
    """The agent's answer as demonstrations give it."""
    return f"The answer is {number}."


def _covered_text() -> str:
    """Text with everything that conversations usually have."""
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
    """Leaves a story's fields empty."""

    def __missing__(self, key: str) -> str:
        return ""
