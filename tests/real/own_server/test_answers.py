"""The official client gets the same answers of our endpoint as of vLLM's own server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.real.openai_answers import about, joined, plain
from tests.real.openai_requests import (
    BASE,
    CHATS,
    END,
    MESSAGES,
    REFUSED,
    TEXT,
    TEXTS,
    THINK_END,
    UNSERVED,
    extra,
)


@pytest.fixture(scope="module")
def urls(openai_scenario: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = openai_scenario["urls"]
    return found


def client(url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def own(urls: dict[str, str]) -> openai.OpenAI:
    return client(urls["own"])


@pytest.fixture(scope="module")
def ours(urls: dict[str, str]) -> openai.OpenAI:
    return client(urls["ours"])


def chat(server: openai.OpenAI, **request: Any) -> dict[str, Any]:
    if request.get("stream"):
        return joined(server.chat.completions.create(**{**BASE, **request}))
    return plain(server.chat.completions.create(**{**BASE, **request}))


def text(server: openai.OpenAI, **request: Any) -> dict[str, Any]:
    if request.get("stream"):
        return joined(server.completions.create(**{**TEXT, **request}))
    return plain(server.completions.create(**{**TEXT, **request}))


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("case", CHATS)
def test_a_chat_is_answered_as_vllms_own_server_does(own, ours, case: str) -> None:
    assert chat(ours, **CHATS[case]) == about(chat(own, **CHATS[case]))


@pytest.mark.parametrize("case", CHATS)
def test_a_streamed_chat_says_what_vllms_own_server_says(own, ours, case: str) -> None:
    assert chat(ours, **CHATS[case], **STREAMED) == about(chat(own, **CHATS[case], **STREAMED))


@pytest.mark.parametrize("case", TEXTS)
def test_a_completion_is_that_of_vllms_own_server(own, ours, case: str) -> None:
    assert text(ours, **TEXTS[case]) == about(text(own, **TEXTS[case]))


@pytest.mark.parametrize("case", TEXTS)
def test_a_streamed_completion_is_that_of_vllms_own_server(own, ours, case: str) -> None:
    assert text(ours, **TEXTS[case], **STREAMED) == about(text(own, **TEXTS[case], **STREAMED))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_request_is_refused_in_vllms_words(urls, case: str, stream: bool) -> None:
    path, body = REFUSED[case]
    answers = [
        httpx.post(f"{urls[server]}/v1{path}", json={**body, "stream": stream})
        for server in ("own", "ours")
    ]
    assert answers[1].status_code in (400, 404, 422)
    assert answers[1].headers["content-type"] == "application/json"
    words = [answer.text.removeprefix("data: ").partition("\n")[0] for answer in answers]
    own, ours = map(json.loads, words)
    if case in ("schema", "regex"):  # vLLM's own server asks another library, whose words these are
        own["error"].pop("message")
        ours["error"].pop("message")
    assert ours == own


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", UNSERVED)
def test_what_cannot_be_served_is_refused(urls, case: str, stream: bool) -> None:
    path, body = UNSERVED[case]
    answer = httpx.post(f"{urls['ours']}/v1{path}", json={**body, "stream": stream})
    assert answer.status_code == 400
    assert "not served" in answer.json()["error"]["message"]


def test_tools_were_called(own, ours) -> None:
    """What the comparisons above are about."""
    for case in ("a forced tool", "a required tool", "a tool by itself"):
        for stream in ({}, STREAMED):
            message = chat(ours, **CHATS[case], **stream)["choices"][0]
            calls = (message.get("message") or message["delta"])["tool_calls"]
            assert calls[0]["function"]["name"] == "add"


@pytest.mark.parametrize(
    "case", ["stop strings", "an included stop string", "a special token as stop string"]
)
def test_the_engine_samples_no_token_after_a_stop_string(urls, ours, case: str) -> None:
    sampled = gauge(urls, "sampled")
    answer = plain(in_session(ours, "counted", **CHATS[case]))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] in CHATS[case]["stop"]
    await_gauge(urls, "sampled", sampled + answer["usage"]["completion_tokens"])


def test_a_stop_token_is_named(ours) -> None:
    choice = chat(ours, **CHATS["stop tokens"])["choices"][0]
    assert choice["stop_reason"] in CHATS["stop tokens"]["extra_body"]["stop_token_ids"]


@pytest.mark.parametrize("stream", [{}, STREAMED])
def test_reasoning_is_parsed_as_by_vllms_own_server(urls, stream: dict[str, Any]) -> None:
    # This model's token is a special one; and half a character before it is lost in vLLM's stream.
    shown = extra(skip_special_tokens=False, allowed_token_ids=[*range(94), THINK_END])
    request = {"max_tokens": 60, "logit_bias": {str(THINK_END): 2}, **shown, **stream}
    answers = [chat(client(urls[name]), **request) for name in ("own_reasoning", "ours_reasoning")]
    assert answers[1] == answers[0]
    message = answers[1]["choices"][0]
    message = message.get("message") or message["delta"]
    assert message["reasoning"]
    assert message["content"]


@pytest.mark.parametrize("stream", [{}, STREAMED])
@pytest.mark.parametrize("name", ["s", "cut"])
def test_structured_output_binds_only_after_the_reasoning(urls, name: str, stream) -> None:
    """However often the request is cut."""
    bound = extra(
        structured_outputs={"choice": ["red", "green"]},
        skip_special_tokens=False,
        allowed_token_ids=[*range(94), THINK_END, END],
    )
    request = {"temperature": 0, "max_tokens": 300, **bound}
    server = client(urls["ours_reasoning"])
    answer = in_session(server, name, **request, **stream)
    choice = (joined(answer) if stream else plain(answer))["choices"][0]
    message = choice.get("message") or choice["delta"]
    assert choice["finish_reason"] == "stop"
    assert message["content"] in ("red", "green")
    assert len(message["reasoning"]) > 20
    (whole,) = in_session(server, "s", **request).choices
    assert (message["reasoning"], message["content"]) == (
        whole.message.reasoning,
        whole.message.content,
    )


def test_constraints_that_leave_no_token_fail_their_request_alone(ours) -> None:
    """Once, this ended the engine, and by the router's retry one engine after the other."""
    before = chat(ours)
    stuck = extra(structured_outputs={"choice": ["red", "green"]}, allowed_token_ids=[64, 65])
    for stream in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError, match="leave it no token"):
            chat(ours, **stuck, **stream)
    assert chat(ours) == before


def test_the_asynchronous_client_gets_the_same_answers_at_once(urls, own) -> None:
    async def ask() -> list[Any]:
        server = openai.AsyncOpenAI(base_url=f"{urls['ours']}/v1", api_key="x", max_retries=0)
        calls = [
            server.chat.completions.create(**{**BASE, **CHATS[case], "seed": seed})
            for case in ("three answers", "stop strings", "a JSON schema", "top logprobs")
            for seed in range(4)
        ]
        stream = await server.chat.completions.create(**{**BASE, "stream": True})
        chunks = [chunk async for chunk in stream]
        return [*map(plain, await asyncio.gather(*calls)), joined(chunks)]

    *answers, streamed = asyncio.run(ask())
    expected = [
        chat(own, **{**CHATS[case], "seed": seed})
        for case in ("three answers", "stop strings", "a JSON schema", "top logprobs")
        for seed in range(4)
    ]
    assert answers == about(expected)
    assert streamed == about(chat(own, stream=True))


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/tokenize", "/detokenize"])
def test_the_other_routes_answer_as_vllms_do(urls, path: str) -> None:
    bodies = {
        "/tokenize": {"model": "policy", "messages": MESSAGES},
        "/detokenize": {"model": "policy", "tokens": [65, 66]},
    }
    answers = []
    for server in ("own", "ours"):
        url = f"{urls[server]}{path}"
        answer = httpx.post(url, json=bodies[path]) if path in bodies else httpx.get(url)
        assert answer.status_code == 200
        answers.append(plain(answer.json()))
    if path == "/v1/models":
        answers[0]["data"][0]["root"] = "policy"  # ours does not say where the model lies
    assert answers[1] == answers[0]


def test_only_these_routes_are_served(urls) -> None:
    document = httpx.get(f"{urls['ours']}/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/version",
        "/health",
        "/metrics",
    }


def in_session(server: openai.OpenAI, name: str, **request: Any) -> Any:
    return server.chat.completions.create(
        **{**BASE, **request}, extra_headers={"X-Session-ID": name}
    )


@pytest.mark.parametrize("request_", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_a_refused_request_fails_alone_and_in_the_controllers_words(ours, request_) -> None:
    with pytest.raises(openai.ConflictError) as refused:
        in_session(ours, "closed", **request_)
    assert refused.value.code == "session_closed"
    assert refused.value.body["message"] == "session closed"
    with pytest.raises(openai.APIStatusError) as lost:
        in_session(ours, "lost", **request_)
    assert lost.value.status_code == 503
    assert "/some/path" not in lost.value.response.text
    assert chat(ours)["choices"][0]["finish_reason"]


def test_a_stream_that_is_refused_late_ends_with_the_error(ours) -> None:
    stream = in_session(ours, "closed-late", stream=True, max_tokens=200, temperature=0)
    seen = []
    with pytest.raises(openai.APIError) as refused:
        seen.extend(stream)
    assert seen
    assert refused.value.code == "session_closed"


def test_each_token_carries_its_policy_version(ours) -> None:
    runs = [[0, 3], [5, 4], [6, 7]]
    asked = {"n": 2, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    answer = in_session(ours, "relabelled", **asked)
    assert [choice.policy_versions for choice in answer.choices] == [runs, runs]
    chunks = list(in_session(ours, "relabelled", **asked, stream=True))
    last = {
        choice.index: choice.policy_versions
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason
    }
    assert last == {0: runs, 1: runs}
    completion = ours.completions.create(
        **{**TEXT, **asked, "prompt": ["abc", "de"]}, extra_headers={"X-Session-ID": "relabelled"}
    )
    assert [choice.policy_versions for choice in completion.choices] == [runs] * 4
    assert not hasattr(in_session(ours, "relabelled").choices[0], "policy_versions")


@pytest.mark.parametrize("case", ["greedy", "stop strings", "a JSON schema", "penalties"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_greedy_answer_is_the_same_however_often_it_is_cut(ours, case, stream) -> None:
    """Traps 6 and 8: resumed by tokens, with everything that looks back at the text."""
    request = {**CHATS[case], "temperature": 0, "max_tokens": 300}
    whole = chat(ours, **request)
    if stream:
        cut = joined(in_session(ours, "cut", **request, **STREAMED))
        assert cut["choices"][0]["delta"]["content"] == whole["choices"][0]["message"]["content"]
        assert cut["usage"] == whole["usage"]
    else:
        assert plain(in_session(ours, "cut", **request)) == whole


ENDLESS = {"max_tokens": None, "n": 4, "extra_body": {"ignore_eos": True}}


def test_a_client_that_leaves_leaves_nothing_running(urls, ours) -> None:
    before = gauge(urls, "aborted")
    stream = in_session(ours, "s", **ENDLESS, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        in_session(client(urls["ours"], timeout=0.5), "s", **ENDLESS)
    await_gauge(urls, "aborted", before + 8)
    await_gauge(urls, 'tokens{replica="replica0"}', 0)


def test_the_siblings_of_a_refused_request_are_aborted(urls, ours) -> None:
    before = gauge(urls, "aborted")
    with pytest.raises(openai.ConflictError):
        in_session(ours, "closed-to-one", **ENDLESS)
    with pytest.raises(openai.APIError, match="session closed-to-one"):  # before or in the stream
        list(in_session(ours, "closed-to-one", **ENDLESS, stream=True))
    await_gauge(urls, "aborted", before + 6)


def gauge(urls: dict[str, str], name: str) -> float:
    lines = httpx.get(f"{urls['ours']}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def await_gauge(urls: dict[str, str], name: str, value: float) -> None:
    deadline = time.monotonic() + 300
    while gauge(urls, name) != value and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gauge(urls, name) == value


@pytest.mark.parametrize("name", ["a b", "x" * 129, "../x", "\u00e4"])
def test_a_session_that_the_body_names_has_the_form_of_any_other(urls, name: str) -> None:
    body = {"model": "policy", "prompt": "x", "max_tokens": 1, "session_id": name}
    answer = httpx.post(f"{urls['ours']}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


def test_health_and_metrics_tell_of_the_system(urls) -> None:
    answer = httpx.get(f"{urls['ours']}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "policy_version": 0})
    metrics = httpx.get(f"{urls['ours']}/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    families = [family.name for family in text_string_to_metric_families(metrics.text)]
    assert len(set(families)) == len(families)
    assert "torchtitan_rl_healthy 1.0" in metrics.text
    assert 'tokens{replica="replica0"}' in metrics.text
    generated = [
        float(line.split()[-1])
        for line in metrics.text.splitlines()
        if line.startswith("vllm:generation_tokens_total{")
    ]
    assert generated[0] > 100
