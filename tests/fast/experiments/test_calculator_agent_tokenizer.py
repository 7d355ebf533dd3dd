from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR, SYSTEM_PROMPT
from torchtitan_rl.experiments.calculator_agent.dataset import ProblemSizes, make_problem
from torchtitan_rl.experiments.calculator_agent.demonstrations import (
    Mistakes,
    conversation,
    demonstration,
    rendered,
    with_mistakes,
)
from torchtitan_rl.experiments.calculator_agent.tokenizer import (
    answer_text,
    build_backend,
    build_tokenizer,
)
from torchtitan_rl.types import Episode

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+3*4"}}</tool_call>'
PROBLEM = {"text": "Adam has 12 balls.", "expression": "12+3*4", "answer": 24}


@cache
def backend() -> Tokenizer:
    return build_backend()


@cache
def tokenizer() -> Any:
    return build_tokenizer()


def encode(text: str) -> list[int]:
    return backend().encode(text).ids


def pieces(text: str) -> list[str]:
    return [backend().decode([token], skip_special_tokens=False) for token in encode(text)]


def demonstrate(mistakes: Mistakes) -> Episode:
    return demonstration(
        PROBLEM, mistakes=mistakes, rng=random.Random(0), tokenizer=tokenizer(), name="p"
    )


def test_digits_and_signs_are_one_token_each_wherever_they_stand() -> None:
    assert pieces("(12+3)*4") == ["(", "1", "2", "+", "3", ")", "*", "4"]
    assert encode(" 12")[1:] == encode("12")
    assert encode(f"{answer_text(12)}")[-3:-1] == encode("12")


def test_no_conversation_needs_single_bytes() -> None:
    sizes = ProblemSizes(two_operations=0.5, max_number=99)
    for index in range(200):
        data = make_problem("train", index, sizes).data
        call = CALL.replace("12+3*4", data["expression"])
        for text in (data["text"], call, answer_text(data["answer"]), SYSTEM_PROMPT):
            for piece in pieces(text):
                assert len(piece) > 1 or not piece.isalpha(), (piece, text)


def test_a_call_is_short_and_its_marks_are_one_token_each() -> None:
    assert len(encode(CALL)) == 22
    assert pieces(CALL)[0] == "<tool_call>"
    assert pieces(CALL)[-1] == "</tool_call>"


@given(st.text())
def test_any_text_can_be_encoded_and_comes_back_unchanged(text: str) -> None:
    assert backend().decode(encode(text), skip_special_tokens=False) == text


# Rendering.


def as_sent_back(call_ids: list[str], expressions: list[str], content: str | None) -> Any:
    """What vLLM hands to the template for an assistant's message that a client sends back: the
    arguments, which hermes' parser wrote as JSON, are read again."""
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": "calculator",
                "arguments": json.loads(json.dumps({"expression": expression})),
            },
        }
        for call_id, expression in zip(call_ids, expressions, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.slow
@pytest.mark.parametrize("expressions", [["12+3*4"], ["(1+2)/3", "7-4"], ['é"\\1']])
@pytest.mark.parametrize("content", [None, "", "I call it."])
def test_a_call_that_comes_back_is_rendered_as_it_was_sampled(
    expressions: list[str], content: str | None
) -> None:
    opening: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "How many?"},
    ]
    ids = [str(place) for place in range(len(expressions))]
    sampled = (content or "") + "".join(
        CALL.replace("12+3*4", json.dumps(expression, ensure_ascii=False)[1:-1])
        for expression in expressions
    )
    results = [{"role": "tool", "tool_call_id": i, "content": "5"} for i in ids]
    history = [*opening, as_sent_back(ids, expressions, content), *results]

    def prompt(messages: list[dict[str, Any]]) -> list[int]:
        text = tokenizer().apply_chat_template(
            messages, tools=[CALCULATOR], tokenize=False, add_generation_prompt=True
        )
        return encode(text)

    seen = prompt(opening) + encode(f"{sampled}<|im_end|>")
    after = prompt(history)
    assert after[: len(seen)] == seen
    responses = "<tool_response>5</tool_response>" * len(ids)
    expected = f"\n<|im_start|>user\n{responses}<|im_end|>\n<|im_start|>assistant\n"
    assert after[len(seen) :] == encode(expected)


@pytest.mark.slow
def test_the_tools_are_one_line_each_in_the_system_message() -> None:
    messages = [{"role": "system", "content": "Hello."}]
    text = tokenizer().apply_chat_template(messages, tools=[CALCULATOR] * 2, tokenize=False)
    line = "calculator(expression): arithmetic"
    assert text == f"<|im_start|>system\nHello.\n{line}\n{line}<|im_end|>\n"
    bare = tokenizer().apply_chat_template(messages, tokenize=False)
    assert bare == "<|im_start|>system\nHello.<|im_end|>\n"


@pytest.mark.slow
def test_tools_without_a_system_message_open_one_of_their_own() -> None:
    messages = [{"role": "user", "content": "Hi."}]
    text = tokenizer().apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
    assert text == (
        "<|im_start|>system\ncalculator(expression): arithmetic<|im_end|>\n"
        "<|im_start|>user\nHi.<|im_end|>\n"
    )


# Demonstrations.


def test_without_mistakes_the_expression_stays_as_it_is() -> None:
    assert with_mistakes("12+3*4", Mistakes(), rng=random.Random(0)) == "12+3*4"


@pytest.mark.parametrize("seed", range(10))
def test_each_kind_of_mistake_changes_one_sign(seed: int) -> None:
    rng = random.Random(seed)
    for mistakes, signs in ((Mistakes(operation=1.0), "+-*/"), (Mistakes(digit=1.0), "123456789")):
        changed = with_mistakes("12+3*4", mistakes, rng=rng)
        differing = [new for old, new in zip("12+3*4", changed, strict=True) if old != new]
        assert len(differing) == 1
        assert differing[0] in signs


def test_a_guess_makes_no_call_and_a_wrong_report_changes_a_digit() -> None:
    rng = random.Random(0)
    guessed = conversation(PROBLEM, Mistakes(guess=1.0), rng=rng)
    assert [message["role"] for message in guessed] == ["system", "user", "assistant"]
    reported = conversation(PROBLEM, Mistakes(report=1.0), rng=rng)
    assert reported[3] == {"role": "tool", "content": "24"}
    assert reported[4]["content"] != answer_text(24)
    assert len(reported[4]["content"]) == len(answer_text(24))


@pytest.mark.slow
def test_a_demonstration_is_the_conversation_as_the_chat_template_writes_it() -> None:
    messages = conversation(PROBLEM, Mistakes(), rng=random.Random(0))
    assert messages[-1]["content"] == answer_text(24)
    text = tokenizer().apply_chat_template(messages, tools=[CALCULATOR], tokenize=False)
    assert tokenizer().decode(demonstrate(Mistakes()).token_ids) + "\n" == text
    prompt, spoken = rendered(messages, tokenizer())
    assert list(prompt + spoken) == encode(text)[:-1]


@pytest.mark.slow
def test_only_what_the_assistant_says_and_its_ends_are_trained_on() -> None:
    episode = demonstrate(Mistakes())
    trained = [
        token for token, mask in zip(episode.token_ids, episode.loss_mask, strict=True) if mask
    ]
    assert tokenizer().decode(trained) == f"{CALL}<|im_end|>{answer_text(24)}<|im_end|>"
