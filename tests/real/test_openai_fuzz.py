"""``torchtitan-rl serve`` under requests that its OpenAPI document describes, and under ones that
have broken servers: no 5xx, no hang, no stack trace, and no other client notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests

from tests.real.models import tiny_model
from tests.real.openai_fuzz import (
    CHAT,
    MESSAGE,
    RESPONSE,
    STREAMED,
    TEXT,
    TIMEOUT_S,
    Target,
    fuzz,
)
from tests.real.openai_hard_requests import (
    HARD_CHAT,
    HARD_FOR_BOTH,
    HARD_MESSAGES,
    HARD_RESPONSES,
    HARD_TEXT,
    MAX_MODEL_LEN,
)
from tests.real.served import Served, require_end_by_loss_of_endpoint, serve
from tests.support.golden import check_golden
from tests.support.http_attacks import ATTACKS
from tests.support.http_attacks import Target as Attacked

MAX_TOKENS = 64

ROUTES = [
    ("/v1/chat/completions", "post", 20),
    ("/v1/completions", "post", 20),
    ("/v1/responses", "post", 10),
    ("/v1/responses/{response_id}", "get", 5),
    ("/v1/responses/{response_id}", "delete", 5),
    ("/v1/messages", "post", 10),
    ("/v1/messages/count_tokens", "post", 5),
    ("/tokenize", "post", 10),
    ("/detokenize", "post", 10),
    ("/v1/models", "get", 5),
    ("/version", "get", 5),
    ("/health", "get", 5),
    ("/metrics", "get", 5),
    ("/v1/sessions", "post", 10),
    ("/v1/sessions/{session_id}/reward", "post", 10),
    ("/v1/sessions/{session_id}", "delete", 10),
    ("/v1/sessions/{session_id}", "get", 10),
    ("/v1/sessions/{session_id}/heartbeat", "post", 10),
    ("/v1/sessions/{session_id}/return", "post", 10),
    ("/v1/problems/lease", "post", 10),
    ("/v1/tenants/{tenant}", "post", 5),
    ("/v1/tenants/{tenant}", "delete", 5),
    ("/v1/tenants/{tenant}/messages", "post", 5),
    ("/v1/tenants/{tenant}/messages", "get", 5),
    ("/v1/tenants/{tenant}/versions/{version}", "put", 5),
    ("/v1/tenants/{tenant}/versions/{version}", "post", 5),
    ("/admin/load", "post", 10),
    ("/admin/pause", "post", 10),
    ("/admin/resume", "post", 5),
    ("/admin/versions", "get", 5),
]


def settled(server: Served, name: str) -> float:
    """What the controller counts comes with a delay."""
    while True:
        value = server.gauge(name)
        time.sleep(2.5)
        if server.gauge(name) == value:
            return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("fuzz")
    served = serve(
        folder,
        tiny_model(folder / "model"),
        *("--generator.replicas", "1", "--generator.max-model-len", str(MAX_MODEL_LEN)),
        *("--generator.kv-cache-bytes", str(32 << 20), "--endpoint.max-restarts", "0"),
        *("--endpoint.max-tokens", str(MAX_TOKENS), "--endpoint.tool-call-parser", "hermes"),
        key="key",
        environment={"TORCHTITAN_RL_API_KEY": "key", "TORCHTITAN_RL_ADMIN_KEY": "chief"},
    )
    try:
        yield served
    finally:
        served.run.kill_all()


@pytest.fixture(scope="module")
def target(server: Served) -> Target:
    return Target(server.url, "key", "chief")


def greedy_answers(target: Target) -> list[list[int]]:
    """Token ids of chats that all run at once."""

    def ask(number: int) -> list[int]:
        body = CHAT | {
            "messages": [{"role": "user", "content": f"Count to {number}."}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = target.post("/v1/chat/completions", body)
        return list(answer.json()["choices"][0]["token_ids"])

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(4)))


@pytest.fixture(autouse=True)
def undisturbed(target: Target, expected: list[list[int]]) -> Iterator[None]:
    """Every test leaves the server as it was."""
    target.statuses.clear()
    target.errors.clear()
    yield
    assert target.errors == []
    assert requests.get(f"{target.url}/health", timeout=TIMEOUT_S).status_code == 200
    assert greedy_answers(target) == expected


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    return greedy_answers(target)


@pytest.fixture(scope="module")
def document(target: Target) -> dict[str, Any]:
    return target.document()


def _routes(document: dict[str, Any]) -> Iterator[str]:
    """Each with the fields of its request."""
    for path, ways in sorted(document["paths"].items()):
        for method, way in sorted(ways.items()):
            yield f"{method.upper()} {path}"
            for content in way.get("requestBody", {}).get("content", {}).values():
                schema = content.get("schema", {})
                name = schema.get("$ref", "").rpartition("/")[2]
                if name:
                    schema = document["components"]["schemas"][name]
                yield from (f"    {field}" for field in sorted(schema.get("properties", {})))


@pytest.mark.soak
def test_every_route_of_the_document_is_fuzzed(document: dict[str, Any]) -> None:
    described = {(path, method) for path, ways in document["paths"].items() for method in ways}
    check_golden("routes.txt", "\n".join(_routes(document)))
    assert described == {(path, method) for path, method, _ in ROUTES}


@pytest.mark.parametrize(
    "routes",
    [
        *([route] for route in ROUTES if route[0] in STREAMED),
        [route for route in ROUTES if route[0] not in STREAMED],
    ],
    ids=lambda routes: routes[0][0],
)
def test_whatever_the_document_allows_or_forbids_gets_no_5xx_and_no_hang(
    target: Target, document: dict[str, Any], routes: list[tuple[str, str, int]]
) -> None:
    for path, method, num_examples in routes:
        fuzz(target, document, path, method, num_examples=num_examples)
        if path in STREAMED:
            assert target.statuses[200] > num_examples // 2  # it is not all refused at the door
            assert target.statuses[400] > 3


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_requests_that_have_broken_servers_are_answered_or_refused(
    target: Target, streams: bool
) -> None:
    cases = [("/v1/completions", TEXT | more) for more in HARD_FOR_BOTH + HARD_TEXT]
    cases += [("/v1/chat/completions", CHAT | more) for more in HARD_FOR_BOTH + HARD_CHAT]
    cases += [("/v1/responses", RESPONSE | more) for more in HARD_RESPONSES]
    cases += [("/v1/messages", MESSAGE | more) for more in HARD_MESSAGES]
    for path, body in cases:
        target.post(path, body | {"stream": streams})


def test_trap_35_a_prompt_over_the_context_is_a_400_while_others_run_undisturbed(
    target: Target, expected: list[list[int]]
) -> None:
    too_long: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", TEXT | {"prompt": [65] * (MAX_MODEL_LEN + 1)}),
        ("/v1/completions", TEXT | {"prompt": "x" * 100000}),
        ("/v1/completions", TEXT | {"prompt": ["short", "x" * 1000]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "x" * 1000}]}),
    ]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(greedy_answers, target)
        for _ in range(3):
            for path, body in too_long:
                assert target.post(path, body).status_code == 400
                assert target.post(path, body | {"stream": True}).status_code == 400
        assert running.result() == expected


@pytest.mark.soak  # tests/real/test_client_timeouts.py has all clients, and generators by hand
def test_trap_10_an_official_client_that_times_out_and_retries_gets_its_first_run(
    target: Target, server: Served
) -> None:
    client = openai.OpenAI(
        base_url=f"{target.url}/v1", api_key="key:retried", timeout=1.0, max_retries=100
    )
    asked: dict[str, Any] = CHAT | {"temperature": 1.0, "max_tokens": 8}
    num_run = settled(server, "requests_total")
    num_replayed = server.gauge("http_requests_replayed_total")
    with ThreadPoolExecutor(2) as pool:
        target.post("/admin/pause", None)
        try:
            whole = pool.submit(client.chat.completions.create, **asked)
            stream = pool.submit(client.chat.completions.create, **asked, stream=True)
            server.wait_until(
                lambda: server.gauge("http_requests_replayed_total") >= num_replayed + 4, "retries"
            )
            assert not whole.done()
            assert not stream.done()
        finally:
            target.post("/admin/resume", None)
        assert whole.result().choices[0].message.content
        assert len([chunk for chunk in stream.result() if chunk.choices]) > 1
    assert settled(server, "requests_total") == num_run + 2


@pytest.mark.soak
def test_a_client_that_leaves_and_does_not_come_back_is_aborted(
    target: Target, server: Served
) -> None:
    num_aborted = settled(server, "requests_aborted_total")
    url = f"{target.url}/v1"
    target.post("/admin/pause", None)
    try:
        with pytest.raises(requests.Timeout):
            requests.post(
                f"{url}/chat/completions", json=CHAT, headers=target.headers(), timeout=0.5
            )
        client = openai.OpenAI(base_url=url, api_key="key", timeout=0.5, max_retries=0)
        with pytest.raises(openai.APITimeoutError):  # it is waited for, for a few seconds
            client.chat.completions.create(**CHAT)
        server.wait_until(
            lambda: server.gauge("requests_aborted_total") == num_aborted + 2, "two aborts"
        )
        server.wait_until(lambda: server.gauge("http_requests_running") == 0, "no request")
    finally:
        target.post("/admin/resume", None)


def test_a_body_over_the_limit_is_a_413_that_the_client_gets_to_read(target: Target) -> None:
    client = openai.OpenAI(base_url=f"{target.url}/v1", api_key="key", max_retries=0)
    for size in (5 << 20, 30 << 20):
        with pytest.raises(openai.APIStatusError) as raised:
            client.completions.create(**TEXT | {"prompt": "x" * size})
        assert raised.value.status_code == 413


def test_each_key_opens_its_own_routes(target: Target) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{target.url}/v1", api_key="wrong", max_retries=0).models.list()
    for path, key, status in [
        ("/admin/versions", "key", 403),
        ("/admin/versions", "chief", 200),
        ("/v1/models", "chief", 401),
        ("/metrics", "", 401),
        ("/health", "", 200),
    ]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = requests.get(target.url + path, headers=headers, timeout=TIMEOUT_S)
        assert answer.status_code == status, path


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attacked_endpoint_serves_within_its_memory_and_descriptors(
    server: Served, attack: str
) -> None:
    process = server.run.process_of("endpoint-rank0")
    attacked = Attacked(int(server.url.rpartition(":")[2]), process)
    attacked.require_to_hold(attack, more_bytes=150 << 20)


@pytest.mark.soak
@pytest.mark.parametrize("undisturbed", [None])  # not after this one, which comes last
def test_a_killed_endpoint_ends_the_command_with_1_and_leaves_no_process(server: Served) -> None:
    require_end_by_loss_of_endpoint(server.run)
