"""`/v1/responses` and `/v1/messages` answer as in vLLM's own server, and agents' constraints are
applied or not, as the endpoint is told."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.real.openai_answers import about, plain
from tests.real.openai_requests import ADD, BASE, CALL, CHATS, SCHEMA

STRICT = {"type": "function", "strict": True, **ADD["function"]}
ASKED = {"model": "policy", "input": "hello there", "max_output_tokens": 24, "temperature": 0}
JSON_ANSWER = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"instructions": "be short"},
    "seeded": {"temperature": 1.0, "extra_body": {"seed": 5}},
    "a required tool": {"tools": [STRICT], "tool_choice": "required", "max_output_tokens": 200},
    "a forced tool": {
        "tools": [STRICT],
        "tool_choice": {"type": "function", "name": "add"},
        "max_output_tokens": 200,
    },
    "a schema": {"text": JSON_ANSWER, "max_output_tokens": 200},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "a call and its result": {
        "tools": [STRICT],
        "input": [
            {"role": "user", "content": "1 + 1?"},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "2"},
        ],
    },
}
TOLD = {
    "model": "policy",
    "messages": [{"role": "user", "content": "hello there"}],
    "max_tokens": 24,
    "extra_body": {"temperature": 0},
}
TOOL = {"name": "add", "input_schema": ADD["function"]["parameters"]}
MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"system": "be short"},
    "blocks": {"system": [{"type": "text", "text": "be short"}], "stop_sequences": ["e", "o"]},
    "a required tool": {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200},
    "a strict tool": {
        "tools": [{**TOOL, "strict": True}],
        "tool_choice": {"type": "tool", "name": "add"},
        "max_tokens": 200,
    },
    "a call and its result": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "1 + 1?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}],
            },
        ],
    },
}
ONE_ANSWER = {"item_id", "call_id", "created_at", "completed_at", "store", "input_tokens_details"}


@pytest.fixture(scope="module")
def urls(openai_scenario: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = openai_scenario["urls"]
    return found


def responses(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).responses


def messages(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages


def content(value: Any) -> Any:
    """Without what belongs to one answer alone; "signature" is a random number of vLLM's."""
    value = plain(value)
    if isinstance(value, dict):
        kept = {key: content(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if key not in {*ONE_ANSWER, "signature"}}
    return [content(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", RESPONSES)
def test_a_response_is_that_of_vllms_own_server(urls, case: str) -> None:
    own, ours = (
        responses(urls[name]).create(**{**ASKED, **RESPONSES[case]}) for name in ("own", "ours")
    )
    assert content(ours) == about(content(own))


@pytest.mark.parametrize(
    "case", sorted(set(RESPONSES) - {"logprobs"})
)  # vLLM's depend on the chunks
def test_a_streamed_response_is_that_of_vllms_own_server(urls, case: str) -> None:
    def deltas(events: list[Any]) -> str:
        return "".join(event.delta for event in events if event.type.endswith(".delta"))

    asked = {**ASKED, **RESPONSES[case], "stream": True}
    own, ours = (list(responses(urls[name]).create(**asked)) for name in ("own", "ours"))
    assert [event.sequence_number for event in ours] == list(range(len(ours)))
    assert ours[-1].type == "response.completed"
    assert content(ours[-1].response) == content(own[-1].response)
    assert deltas(ours) == deltas(own)


@pytest.mark.parametrize("case", MESSAGES)
def test_a_message_is_that_of_vllms_own_server(urls, case: str) -> None:
    own, ours = (
        messages(urls[name]).create(**{**TOLD, **MESSAGES[case]}) for name in ("own", "ours")
    )
    assert content(ours) == content(own)


@pytest.mark.parametrize(
    "case", sorted(set(MESSAGES) - {"a required tool"})
)  # its arguments are numbers, which vLLM streams as a block and this endpoint as text
def test_a_streamed_message_is_that_of_vllms_own_server(urls, case: str) -> None:
    def deltas(events: list[Any]) -> list[Any]:
        """Texts joined; then the stop reason and usage."""
        parts = [event.delta for event in events if event.type == "content_block_delta"]
        texts = [getattr(part, "text", None) or getattr(part, "partial_json", "") for part in parts]
        kinds = [event.content_block.type for event in events if event.type.endswith("block_start")]
        return [kinds, "".join(texts), plain(events[-2]), events[-1].type]

    asked = {**TOLD, **MESSAGES[case], "stream": True}
    own, ours = (list(messages(urls[name]).create(**asked)) for name in ("own", "ours"))
    assert deltas(ours) == deltas(own)


def test_a_message_may_ask_for_more_tokens_than_there_is_room_for(urls) -> None:
    """Its clients must ask for a number, and send that of large models."""
    message = messages(urls["ours"]).create(**{**TOLD, "max_tokens": 16_384})
    assert message.stop_reason in ("max_tokens", "end_turn")


def test_the_tokens_of_a_message_are_counted(urls) -> None:
    asked = {name: TOLD[name] for name in ("model", "messages")}
    counted = messages(urls["ours"]).count_tokens(**asked).input_tokens
    assert counted == messages(urls["ours"]).create(**TOLD).usage.input_tokens


def test_reasoning_is_an_item_and_a_block_of_its_own(urls) -> None:
    """This policy never ends its reasoning by itself."""
    (item,) = responses(urls["ours_reasoning"]).create(**ASKED).output
    assert item.type == "reasoning"
    assert item.content[0].text
    block = messages(urls["ours_reasoning"]).create(**TOLD).content[0]
    assert (block.type, bool(block.thinking)) == ("thinking", True)


def test_a_response_continues_the_conversation_that_it_names_tool_calls_included(urls) -> None:
    ours = responses(urls["ours"])
    tools = {"tools": [{**STRICT, "strict": False}], "max_output_tokens": 200}
    structured = {"structured_outputs": {"regex": CALL}}
    first = ours.create(**{**ASKED, **tools}, extra_body=structured)
    (call,) = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = ours.create(**{**ASKED, **tools, "input": [result]}, previous_response_id=first.id)
    whole = [{"role": "user", "content": ASKED["input"]}, call.model_dump(), result]
    assert second.previous_response_id == first.id
    assert content(second.output) == content(
        ours.create(**{**ASKED, **tools, "input": whole}).output
    )
    assert content(ours.retrieve(second.id)) == content(second)
    ours.delete(second.id)
    with pytest.raises(openai.NotFoundError) as gone:
        ours.retrieve(second.id)
    assert gone.value.code == "response_not_found"


def test_every_part_of_an_assistants_message_is_read(urls) -> None:
    def tokens(content: Any) -> int:
        said = {"type": "message", "role": "assistant", "content": content}
        history = [{"role": "user", "content": "hi"}, said, {"role": "user", "content": "go on"}]
        return int(responses(urls["ours"]).create(**{**ASKED, "input": history}).usage.input_tokens)

    parts = [{"type": "output_text", "text": text, "annotations": []} for text in ("one", "two")]
    refused = [{"type": "refusal", "refusal": "onetwo"}]
    assert tokens(parts) == tokens(refused) == tokens("onetwo") == tokens([]) + len("onetwo")


def test_a_response_that_was_not_stored_is_not_found(urls) -> None:
    ours = responses(urls["ours"])
    unstored = ours.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        ours.create(**ASKED, previous_response_id=unstored.id)


@pytest.mark.parametrize("more", [{"background": True}, {"conversation": "c"}])
def test_what_responses_cannot_do_here_is_refused(urls, more: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="not served"):
        responses(urls["ours"]).create(**ASKED, extra_body=more)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_request_of_either_api_is_an_error_response(urls, stream: bool) -> None:
    closed = {"extra_headers": {"X-Session-ID": "closed"}, "stream": stream}
    with pytest.raises(openai.ConflictError) as refused:
        responses(urls["ours"]).create(**ASKED, **closed)
    assert refused.value.code == "session_closed"
    with pytest.raises(anthropic.ConflictError, match="session closed"):
        messages(urls["ours"]).create(**TOLD, **closed)


def test_a_stream_that_is_refused_late_ends_with_the_error(urls) -> None:
    late = {"extra_headers": {"X-Session-ID": "closed-late"}, "stream": True}
    *_, last = responses(urls["ours"]).create(**ASKED, **late)
    assert (last.type, last.code) == ("error", "session_closed")
    with pytest.raises(anthropic.APIStatusError, match="session closed-late"):
        list(messages(urls["ours"]).create(**TOLD, **late))


CONSTRAINED = [
    "a JSON schema",
    "a regular expression",
    "a forced tool",
    "a required tool",
    "logit bias",
    "bad words",
    "a stop string after a minimum",
    "no end of sequence",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", CONSTRAINED)
def test_nothing_constrains_the_sampling_of_a_free_endpoint(urls, case: str, stream) -> None:
    """It says what it says to the same request without the constraint."""
    constrained = {**BASE, **CHATS[case]}
    body = {**constrained, **constrained.pop("extra_body", {}), "stream": stream}
    free = {
        name: value
        for name, value in body.items()
        if name
        not in {
            *("response_format", "structured_outputs", "tool_choice", "logit_bias", "ignore_eos"),
            *("bad_words", "allowed_token_ids", "min_tokens"),
        }
    }
    body |= {"return_token_ids": True}
    free |= {"return_token_ids": True}
    url = f"{urls['ours_free']}/v1/chat/completions"
    answers = [httpx.post(url, json=asked, timeout=60).text for asked in (body, free)]
    sampled = [
        [
            token
            for line in text.removeprefix("data: ").split("\n\ndata: ")
            if line.strip() != "[DONE]"
            for choice in json.loads(line)["choices"]
            for token in choice.get("token_ids") or []
        ]
        for text in answers
    ]
    assert sampled[0] == sampled[1]


def counted(url: str, event: str) -> float:
    name = f'request_events_total{{event="{event}"}}'
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def await_count(url: str, event: str, number: float) -> None:
    deadline = time.monotonic() + 60
    while counted(url, event) != number and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counted(url, event) == number


@pytest.mark.parametrize(
    ("written", "is_broken"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', False),
        ('<tool_call>{"name": "add", "arguments": 7}</tool_call>', True),
        ('<tool_call>{"name": "add", "arguments"', True),
        ("<tool_call>add</tool_call>", True),
    ],
)
def test_a_broken_call_is_counted_in_every_api(urls, written: str, is_broken: bool) -> None:
    url = urls["ours"]
    server = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    forced = {"structured_outputs": {"choice": [written]}}
    asked = {**BASE, "tools": [ADD], "extra_body": forced, "max_tokens": 128}
    before = counted(url, "broken_calls")
    server.chat.completions.create(**asked)
    list(server.chat.completions.create(**asked, stream=True))
    flat = {"type": "function", **ADD["function"]}
    asked = {**ASKED, "tools": [flat], "extra_body": forced, "max_output_tokens": 128}
    server.responses.create(**asked)
    list(server.responses.create(**asked, stream=True))
    await_count(url, "broken_calls", before + 4 * is_broken)


def test_a_required_call_that_is_missing_is_text_and_counted(urls) -> None:
    events = ("missing_calls", "unconstrained/tool_choice", "unconstrained/tools.strict")
    before = [counted(urls["ours_free"], event) for event in events]
    tools = {"tools": [{"type": "function", "function": {"strict": True, **ADD["function"]}}]}
    server = openai.OpenAI(base_url=f"{urls['ours_free']}/v1", api_key="none", max_retries=0)
    required = {**BASE, **tools, "tool_choice": "required"}
    (choice,) = server.chat.completions.create(**required).choices
    assert choice.message.content
    assert not choice.message.tool_calls
    assert list(server.chat.completions.create(**required, stream=True))
    item = server.responses.create(**ASKED, tools=[STRICT], tool_choice="required").output[0]
    assert item.type == "message"
    asked = {**TOLD, "tools": [TOOL], "tool_choice": {"type": "any"}}
    assert messages(urls["ours_free"]).create(**asked).content[0].type == "text"
    await_count(urls["ours_free"], "missing_calls", before[0] + 4)
    after = [counted(urls["ours_free"], event) for event in events]
    assert after == [before[0] + 4, before[1] + 4, before[2] + 3]
