"""Limits: which JSON a request may be, how much it may ask for, and that it is text only."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.serving.app import MAX_DEPTH, check_body
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import RefusedError

LIMITS = EndpointConfig(max_n=4, max_tokens=50)


def refusal(
    body: bytes | None = None, *, takes_images: bool = False, **request: Any
) -> tuple[str, str | None] | None:
    """Code and parameter of the 400; None for a request that passes."""
    try:
        sent = json.dumps(request).encode() if body is None else body
        check_body(sent, "/v1/completions", LIMITS, takes_images=takes_images)
    except RefusedError as error:
        return (error.code, error.param) if error.status == 400 else (str(error.status), None)
    return None


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"\\uDFFF": 1}',
        b'{"seed": 18446744073709551616}',
        b'{"seed": ' + b"9" * 90 + b"}",
        '{"a": "ü"}'.encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"{}{}",
    ],
)
def test_what_is_not_plain_json_in_utf_8_is_400(body: bytes) -> None:
    assert refusal(body) == ("invalid_json", None)


def test_nesting_is_bounded() -> None:
    depth = MAX_DEPTH
    assert refusal(b"[" * depth + b"]" * depth) is None
    assert refusal(b'{"a":' * depth + b"1" + b"}" * depth) is None
    depth += 1
    for body in (
        b"[" * depth + b"]" * depth,
        b'{"a":' * depth + b"1" + b"}" * depth,
        b"[" * 1_000_000,
    ):
        assert refusal(body) == ("nested_too_deeply", None)


def test_n_is_limited_and_prompts_multiply_it() -> None:
    exceeded = ("limit_exceeded", "n")
    assert refusal(n=4) is None
    assert refusal(n=2, prompt=["a", "b"]) is None
    assert refusal(prompt=[1, 2, 3, 4, 5, 6]) is None  # one prompt of token ids
    assert refusal(n=2, prompt=[[1, 2, 3], [4]]) is None
    assert refusal(messages=[{}] * 6) is None
    assert refusal(n=5) == exceeded
    assert refusal(prompt=["a"] * 5) == exceeded
    assert refusal(n=3, prompt=["a", "b"]) == exceeded
    assert refusal(n=2, prompt=[[1], [2], [3]]) == exceeded
    assert refusal(messages=[[{}]] * 5) == exceeded


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"]
)
def test_the_tokens_of_a_completion_are_limited(name: str) -> None:
    assert refusal(**{name: 50}) is None
    assert refusal(**{name: None}) is None
    assert refusal(**{name: 51}) == ("limit_exceeded", name)
    check_body(json.dumps({name: 51}).encode(), "/v1/messages", LIMITS)


@pytest.mark.parametrize("value", ["5000", 5000.0, True, [5000], {}])
def test_a_limited_field_that_is_not_an_integer_cannot_bypass_its_limit(value: Any) -> None:
    for name in ("n", "max_tokens"):
        assert refusal(**{name: value}) == ("invalid_type", name)


@pytest.mark.parametrize("name", ["minItems", "maxItems", "maxLength", "minProperties"])
def test_a_schema_may_not_repeat_anything_a_billion_times(name: str) -> None:
    # llguidance unrolls repetitions, and once took the memory of the endpoint's process.
    for amount in (10**9, 1e9):
        schema = {"type": "array", "items": [{name: amount}]}
        for request in (
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema)}},
            {"structured_outputs": {"structural_tag": json.dumps({"format": schema})}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            {"tools": [{"function": {"parameters": schema}}]},
        ):
            assert refusal(**request) == ("limit_exceeded", name)
    assert refusal(json={name: 100_000}) is None
    assert refusal(properties={name: {"type": "string"}}) is None


LONG = ["a" * 2000 + f"{number}" for number in range(16)]


@pytest.mark.parametrize(
    "constraints",
    [
        {"choice": LONG},
        {"regex": "|".join(LONG)},
        {"grammar": f"root ::= {' | '.join(json.dumps(one) for one in LONG)}"},
        {"json": {"enum": LONG}},
        {"json": json.dumps({"anyOf": [{"const": one} for one in LONG]})},
        {"json": {"properties": {one: {"pattern": one} for one in LONG}}},
    ],
    ids=lambda constraints: "-".join(constraints),
)
def test_long_alternatives_which_take_seconds_to_compile_are_refused(constraints: Any) -> None:
    assert refusal(structured_outputs=constraints) == ("limit_exceeded", None)
    assert refusal(structured_outputs={"choice": [one[:200] for one in LONG]}) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None)
@given(json_values)
def test_any_json_passes_or_is_refused_with_400(value: Any) -> None:
    refused = refusal(n=value, prompt=value, messages=value, max_tokens=value)
    assert refused is None or not refused[0].isdigit()


TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MEDIA: list[dict[str, Any]] = [
    IMAGE,
    {"type": "image"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "of a kind to come"},
    {"type": ["text"]},
    {"image_url": "https://x/y.png"},  # without a type, as vLLM takes it
    {"type": "text", "text": "x", "image_url": "https://x/y.png"},
]


@pytest.mark.parametrize("part", MEDIA)
def test_a_part_that_is_not_text_is_refused_with_its_place(part: dict[str, Any]) -> None:
    for role in ("user", "tool"):
        messages = [{"role": "user", "content": "hi"}, {"role": role, "content": [TEXT, part]}]
        refused = refusal(messages=messages)
        assert refused is not None
        assert refused[0] == "text_only"
        assert str(refused[1]).startswith("messages[1].content[1]")


def test_a_policy_that_takes_images_gets_them_in_one_form_alone() -> None:
    def passes(*parts: Any, **more: Any) -> bool:
        messages = [{"role": "user", "content": list(parts)}]
        return refusal(takes_images=True, messages=messages, **more) is None

    assert passes(TEXT, *[IMAGE] * 16)
    assert passes({"type": "image_url", "image_url": {"url": "data:", "detail": "low"}})
    assert not passes(*[IMAGE] * 17)
    assert not passes({**IMAGE, "uuid": "a"})
    assert not passes(IMAGE, mm_processor_kwargs={"max_pixels": 1})
    assert not passes(IMAGE, media_io_kwargs={})
    assert not passes({"type": "image_url", "image_url": "data:"})
    for part in MEDIA[1:]:
        assert not passes(TEXT, part)


NESTED = {"type": "text", "text": "x", "content": [TEXT, IMAGE]}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": [TEXT, IMAGE]}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document"}]}


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"messages": [{"content": [TEXT, [TEXT, [IMAGE]]]}]}, "messages[0].content[1][1][0]"),
        ({"messages": [{"content": [NESTED]}]}, "messages[0].content[0].content[1]"),
        ({"messages": [{"content": [RESULT]}]}, "messages[0].content[0].content[0]"),
        ({"messages": [{"content": IMAGE}]}, "messages[0].content"),
        ({"messages": [[{"content": [IMAGE]}]]}, "messages[0][0].content[0]"),
        ({"input": [OUTPUT]}, "input[0].output[1]"),
        ({"system": [TEXT, IMAGE]}, "system[1]"),
        ({"prompt": "hi", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"messages": [], "modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [], "audio": {"voice": "x"}}, "audio"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ],
)
def test_media_are_found_in_any_place(request_: dict[str, Any], place: str) -> None:
    assert refusal(**request_) == ("text_only", place)


def test_text_of_every_kind_is_let_through() -> None:
    parts = [
        "plain",
        TEXT,
        {"text": "without a type"},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "x"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"image": "a word"}},
        {"type": "tool_result", "tool_use_id": "1", "content": [TEXT]},
    ]
    message = {"role": "assistant", "content": parts, "audio": None}
    assert refusal(messages=[message], modalities=["text"]) is None
    assert refusal(messages=[{"role": "user", "content": None}], prompt=["a", "b"]) is None
