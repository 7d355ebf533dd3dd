"""The tokenizer of the embedded policy: words of the questions, digits and letters are tokens."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

# Line breaks; a word or a run of signs, each with the space before it; a digit; other white space.
# A word that is not in a question falls apart into its letters.
_PIECE = r"\n+| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s"

_QUESTIONS = (
    "State the final answer to the following arithmetic problem: 0123456789 + 1 - 1 =\n"
    "Spell this word backward (example: sun -> nus): "
)

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
    return build_word_backend(f"system\nuser\nassistant\n{_QUESTIONS}", piece=_PIECE)
