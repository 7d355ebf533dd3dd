from __future__ import annotations

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_rl.experiments.alphabet_sort.names import NAMES
from torchtitan_rl.experiments.alphabet_sort.prompts import user_message
from torchtitan_rl.experiments.alphabet_sort.scoring import right_answer
from torchtitan_rl.experiments.alphabet_sort.tokenizer import build_backend


@cache
def backend() -> Tokenizer:
    return build_backend()


def encode(text: str) -> list[int]:
    return backend().encode(text).ids


def decode(ids: list[int]) -> str:
    return backend().decode(ids, skip_special_tokens=False)


def test_each_name_is_one_token() -> None:
    assert all(len(encode(name)) == 1 for name in NAMES)


def test_an_answer_needs_two_tokens_a_name_and_two_a_mark() -> None:
    turns = [["Zachary", "Abigail"], ["Karen"]]
    assert len(encode("\n".join(right_answer(turns, 0)))) == 3
    assert len(encode("\n".join(right_answer(turns, 1)))) == 5 + 2


def test_the_words_of_every_message_are_tokens() -> None:
    for turn in range(2):
        message = user_message([["Abigail"], ["Zachary"]], turn)
        assert len(encode(message)) <= len(message.split()) * 2


def test_qwen3_special_tokens_are_one_token_each() -> None:
    for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert len(encode(token)) == 1
    assert len(encode("<tool_call></tool_call><tool_response></tool_response>")) == 4


def test_a_text_is_encoded_piece_by_piece_so_that_turns_can_be_appended() -> None:
    parts = ["<|im_start|>", "user\n", "Adam\nZoe", "<|im_end|>", "\n"]
    assert encode("".join(parts)) == [token for part in parts for token in encode(part)]


@given(st.text())
def test_any_text_can_be_encoded_and_comes_back_unchanged(text: str) -> None:
    assert decode(encode(text)) == text
