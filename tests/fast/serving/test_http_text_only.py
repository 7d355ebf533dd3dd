"""The served policy is text only: media in a request are refused by name, nowhere dropped."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.http_driver import Client, OnDemandApp, settle
from torchtitan_rl.serving.http_body import BufferedBody
from torchtitan_rl.serving.http_errors import HttpError, OpenAIErrors
from torchtitan_rl.serving.http_limits import RequestLimits, check_request

TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
MEDIA: list[dict[str, Any]] = [
    IMAGE,
    {"type": "input_image", "image_url": "https://x/y.png"},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "image"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": "https://x/y.wav"}},
    {"type": "video_url", "video_url": {"url": "https://x/y.mp4"}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "prompt_embeds", "data": "AAAA"},
    {"type": "of a kind to come"},
    {"type": ["text"]},
    {"image_url": "https://x/y.png"},  # without a type, as vLLM takes it
    {"type": "text", "text": "x", "image_url": "https://x/y.png", "uuid": "u"},
]


def refused_part(**request: Any) -> str | None:
    """Where it is; None for a request that is let through."""
    with pytest.raises(HttpError) as caught:
        check_request(json.dumps({**request, "n": 1.5}).encode(), RequestLimits())
    error = caught.value
    if error.code == "invalid_type":  # that of n, which is looked at later
        return None
    assert (error.status, error.code) == (400, "text_only")
    assert "text only" in error.message
    return error.param


@pytest.mark.parametrize("part", MEDIA)
@pytest.mark.parametrize("role", ["user", "system", "tool", "assistant"])
def test_a_part_that_is_not_text_is_refused_by_its_place_whoever_it_is_from(
    part: dict[str, Any], role: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": role, "content": [TEXT, part]}]
    assert (refused_part(messages=messages) or "").startswith("messages[1].content[1]")


def test_a_nested_part_is_found() -> None:
    result = {"type": "text", "text": "x", "content": [TEXT, IMAGE]}
    for content, place in [
        ([TEXT, [TEXT, [IMAGE]]], "messages[0].content[1][1][0]"),
        ([result], "messages[0].content[0].content[1]"),
        ([{"type": "text", "text": [IMAGE]}], "messages[0].content[0].text[0]"),
        (IMAGE, "messages[0].content"),
    ]:
        assert refused_part(messages=[{"role": "tool", "content": content}]) == place


def test_conversations_of_a_batch_and_inputs_are_looked_at_too() -> None:
    message = {"role": "user", "content": [IMAGE]}
    assert refused_part(messages=[[message], [message]]) == "messages[0][0].content[0]"
    assert refused_part(input=[message]) == "input[0].content[0]"


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"prompt": "hi", "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "hi", "multi_modal_data": {"image": "AAAA"}}, "multi_modal_data"),
        ({"messages": [], "modalities": ["text", "audio"]}, "modalities"),
        ({"messages": [], "audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ],
)
def test_media_in_other_fields_are_refused(request_: dict[str, Any], place: str) -> None:
    assert refused_part(**request_) == place


def test_text_of_every_kind_is_let_through() -> None:
    parts = [
        "plain",
        TEXT,
        {"text": "without a type"},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "x"},
        {"type": "output_text", "text": "x"},
        {"type": "refusal", "refusal": "no"},
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_reference", "name": "f"},
    ]
    message = {"role": "assistant", "content": parts, "audio": None}
    assert refused_part(messages=[message], modalities=["text"]) is None
    assert refused_part(messages=[{"role": "user", "content": None}], prompt=["a", "b"]) is None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
def test_no_route_sees_a_request_with_an_image(path: str) -> None:
    async def run() -> None:
        app = OnDemandApp()
        shell = OpenAIErrors(BufferedBody(app, limits=RequestLimits(), timeout_s=60.0))
        body = json.dumps({"messages": [{"role": "user", "content": [IMAGE]}]}).encode()
        client = Client(shell, path, body=body)
        assert await client.refusal() == (400, "text_only", "messages[0].content[0]")
        await settle()
        assert app.calls == []

    asyncio.run(run())
