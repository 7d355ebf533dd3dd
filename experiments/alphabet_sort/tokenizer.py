"""The tokenizer of the embedded policy: words of the task are tokens; the template is ChatML."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.alphabet_sort.names import NAMES
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import NEW_MARK
from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

# Line breaks; a word or a run of other signs, each with the space before it; other white space.
_PIECE = r"\n+| ?[A-Za-z]+| ?[^\sA-Za-z]+|\s"

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def build_tokenizer() -> Any:
    """The `transformers` tokenizer that ships with the policy; the same one each time."""
    return with_chat_template(build_backend(), _CHAT_TEMPLATE)


def build_backend() -> Tokenizer:
    return build_word_backend(_covered_text(), piece=_PIECE)


def _covered_text() -> str:
    messages = [user_message([[], []], turn) for turn in range(2)]
    return "\n".join(["system\nuser\nassistant\n", *messages, *NAMES, f" {NEW_MARK}"])
