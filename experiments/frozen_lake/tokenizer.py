"""The tokenizer of the embedded policy: each place of a map and each move is one token."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.experiments.word_tokenizer import build_word_backend, with_chat_template

# Line breaks; a word with the space before it; a place of the map, in brackets where the player is;
# other signs; other white space.
_PIECE = r"\n+| ?[a-z]+|\[[SFHG]\]|[SFHG]| ?[^\sa-zSFHG]+|\s"

_COVERED = "system\nuser\nassistant\n" + "left down right up".replace(" ", "\n") + "\nSFHG[S][F][G]"

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
    return build_word_backend(_COVERED, piece=_PIECE)
