"""Tokenizers of embedded policies: the words of a task are one token each, all else is bytes.

Byte-level BPE without merges: a piece of text that is in the vocabulary is its own token, any
other falls apart into UTF-8 bytes, so every text can be encoded and comes back unchanged. The
special tokens are Qwen3's, as `renderers` and vLLM's parsers of tool calls want them.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT_TOKENS = (  # part of a text, kept when special tokens are skipped
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def build_word_backend(covered_text: str, *, piece: str) -> Tokenizer:
    """What turns text into ids: bytes first, then words, then special tokens.

    ``piece`` is a regular expression that any text is cut into; every piece of ``covered_text``
    becomes a token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # one character for each byte
    words = [_in_byte_alphabet(text) for text in sorted(set(re.findall(piece, covered_text)))]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*alphabet, *words]))}
    backend = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(piece), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False) for token in _TEXT_TOKENS])
    return backend


def with_chat_template(backend: Tokenizer, chat_template: str) -> Any:
    """The `transformers` tokenizer of a policy."""
    from transformers import PreTrainedTokenizerFast  # takes seconds to import

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def _in_byte_alphabet(piece: str) -> str:
    """The piece as byte-level BPE writes it, each byte as one printable character."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(piece))
