"""``torchtitan-rl serve`` under requests that its OpenAPI document describes, and under ones that
have broken servers: no 5xx, no hang, no stack trace, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.real.models import tiny_qwen3
from tests.real.openai_fuzz import CHAT, TEXT, TIMEOUT_S, Target, fuzz
from tests.real.runs import Run

MAX_MODEL_LEN = 512
MAX_TOKENS = 64

ROUTES = [
    ("/v1/chat/completions", "post", 50),
    ("/v1/completions", "post", 50),
    ("/tokenize", "post", 20),
    ("/detokenize", "post", 20),
    ("/v1/models", "get", 5),
    ("/version", "get", 5),
    ("/health", "get", 5),
    ("/metrics", "get", 5),
    ("/v1/sessions", "post", 20),
    ("/v1/sessions/{session_id}/reward", "post", 20),
    ("/v1/sessions/{session_id}", "delete", 20),
    ("/v1/sessions/{session_id}", "get", 20),
    ("/admin/pause", "post", 20),
    ("/admin/resume", "post", 5),
    ("/admin/versions", "get", 5),
]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}

# What text and chat requests are made of that broke something somewhere.
HARD_FOR_BOTH: list[dict[str, Any]] = [
    {"structured_outputs": outputs}
    for outputs in (
        {"grammar": "root ::= root"},  # allows no token: vLLM ends the request by "error"
        {"grammar": "root ::= "},
        {"grammar": "x"},
        {"regex": "("},
        {"regex": "((a{100}){100}){100}"},
        {"regex": "a{1,100000000}"},
        {"choice": []},
        {"choice": [""]},
        {"json": "{"},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "zzz"}},
        {"json": {"enum": []}},
        {"json": {"type": "array", "minItems": 1000000000}},
        {"json": nested(25)},
        {"json": True},
        {"structural_tag": "{}"},
        {},
        {"regex": "a", "choice": ["b"]},
    )
] + [
    {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [1]},  # contradict each other
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {str(token): -100 for token in range(288)}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"allowed_token_ids": [-1]},
    {"stop_token_ids": [1 << 40]},
    {"stop_token_ids": [-1]},
    {"stop": ["x"] * 10000},
    {"stop": [""]},
    {"stop": "x" * 1000000},
    {"bad_words": [""]},
    {"bad_words": ["ab"] * 10000},
    {"prompt_logprobs": 1},
    {"seed": (1 << 63) - 1},
    {"seed": -(1 << 63)},
    {"seed": 1 << 63},
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": 1e-300},
    {"top_k": 1 << 62},
    {"top_k": -5},
    {"presence_penalty": 1e308},
    {"repetition_penalty": 1e-300},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1000},
    {"min_tokens": 4, "stop": ["a"]},
    {"use_beam_search": True, "n": 4},
    {"n": 0},
    {"n": -1},
    {"n": 16},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"request_id": "../é\n"},
    {"kv_transfer_params": {"do_remote_decode": True}},
    {"repetition_detection": {"max_pattern_size": 1 << 40, "min_count": 2}},
    {"logprob_token_ids": [99999]},
    {"user": "\x00"},
]
HARD_TEXT: list[dict[str, Any]] = [
    {"prompt": prompt}
    for prompt in ([99999999], [-1], [288], [1 << 63], [], [[]], "", [""], ["a", ""], [[1], "a"])
] + [
    {"prompt": "x" * MAX_MODEL_LEN},
    {"prompt": "x" * 3000000},
    {"prompt": [65] * MAX_MODEL_LEN, "max_tokens": 0},
    {"echo": True, "logprobs": 2},
    {"logprobs": 100},
    {"logprobs": -2},
    {"prompt_embeds": "AAAA"},
    {"suffix": "a"},
]
HARD_CHAT: list[dict[str, Any]] = [
    {"messages": messages}
    for messages in (
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "zzz", "content": "a"}],
        [{"content": "a"}],
        [{"role": "user", "content": "x" * 5000}],
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [FILE]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{"role": "tool", "content": "a"}],
    )
] + [
    {"tools": [FUNCTION], "tool_choice": "required"},
    {"tools": [], "tool_choice": "required"},
    {"tool_choice": "required"},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
    {"chat_template_kwargs": {"chat_template": "{{ x.y.z }}"}},
    {"chat_template_kwargs": {"conversation": 1, "tokenize": True, "return_tensors": "pt"}},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"top_logprobs": 100, "logprobs": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("fuzz")
    output = folder / "url"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHTITAN_RL_API_KEY", "secret")
        environment.setenv("TORCHTITAN_RL_ADMIN_KEY", "chief")
        run = Run(
            [
                str(tiny_qwen3(folder / "model")),
                "--generator.replicas", "1",
                "--generator.max-model-len", str(MAX_MODEL_LEN),
                "--generator.kv-cache-bytes", str(32 << 20),
                "--generator.start-timeout-s", "600",
                "--endpoint.port", "0",
                "--endpoint.start-timeout-s", "600",
                "--endpoint.max-tokens", str(MAX_TOKENS),
                "--endpoint.tool-call-parser", "hermes",
                "--log-dir", str(folder / "logs"),
            ],
            command="serve",
            log=folder / "log",
            output=output,
        )  # fmt: skip
    try:
        run.wait_until(lambda: output.read_text().endswith("\n"), "the endpoint's URL")
        yield Target(output.read_text().strip().removesuffix("/v1"), "secret", "chief")
    finally:
        run.kill_all()


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
    target.mistakes.clear()
    yield
    assert target.mistakes == []
    assert requests.get(f"{target.url}/health", timeout=TIMEOUT_S).status_code == 200
    assert greedy_answers(target) == expected


@pytest.fixture(scope="module")
def expected(target: Target) -> list[list[int]]:
    return greedy_answers(target)


@pytest.fixture(scope="module")
def document(target: Target) -> dict[str, Any]:
    return target.document()


def test_every_route_of_the_document_is_fuzzed(document: dict[str, Any]) -> None:
    described = {(path, method) for path, ways in document["paths"].items() for method in ways}
    assert described == {(path, method) for path, method, _ in ROUTES}


@pytest.mark.parametrize(("path", "method", "num_examples"), ROUTES)
def test_whatever_the_document_allows_or_forbids_gets_no_5xx_and_no_hang(
    target: Target, document: dict[str, Any], path: str, method: str, num_examples: int
) -> None:
    fuzz(target, document, path, method, num_examples=num_examples)
    if path in ("/v1/chat/completions", "/v1/completions"):
        assert target.statuses[200] > num_examples  # it is not all refused at the door
        assert target.statuses[400] > 10


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_requests_that_have_broken_servers_are_answered_or_refused(
    target: Target, streams: bool
) -> None:
    cases = [("/v1/completions", TEXT | more) for more in HARD_FOR_BOTH + HARD_TEXT]
    cases += [("/v1/chat/completions", CHAT | more) for more in HARD_FOR_BOTH + HARD_CHAT]
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
