"""The tokenizer of the embedded policy: words of the task are one token each, all else is bytes.

Byte-level BPE without merges: a piece of text that is in the vocabulary is its own token, any
other falls apart into UTF-8 bytes, so every text can be encoded and comes back unchanged. The
special tokens are Qwen3's, as `renderers` wants them, and the chat template is plain ChatML.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from experiments.alphabet_sort.names import NAMES
from experiments.alphabet_sort.prompts import user_message
from experiments.alphabet_sort.scoring import NEW_MARK

# Line breaks; a word or a run of other signs, each with the space before it; other white space.
_PIECE = r"\n+| ?[A-Za-z]+| ?[^\sA-Za-z]+|\s"

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT_TOKENS = (  # part of a text, kept when special tokens are skipped
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def build_tokenizer() -> Any:
    """The `transformers` tokenizer that ships with the policy; the same one each time."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    return PreTrainedTokenizerFast(
        tokenizer_object=build_backend(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_backend() -> Tokenizer:
    """What turns text into ids: bytes first, then words, then special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character for each byte
    words = [_in_byte_alphabet(piece) for piece in sorted(set(re.findall(_PIECE, _covered_text())))]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in _TEXT_TOKENS])
    return backend


def _covered_text() -> str:
    """Every piece of this text becomes a token."""
    messages = [user_message([[], []], turn) for turn in range(2)]
    return "\n".join(["system\nuser\nassistant\n", *messages, *NAMES, f" {NEW_MARK}"])


def _in_byte_alphabet(piece: str) -> str:
    """The piece as byte-level BPE writes it, each byte as one printable character."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(piece))
