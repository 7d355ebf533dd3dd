"""Search-R1: its reward, and a rollout's searches of a retriever."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from tests.support.ready_configs import made_retriever
from torchtitan_rl import Problem, RolloutConfig
from torchtitan_rl.experiments.search.task import POLICY_DIR
from torchtitan_rl.experiments.search.warm_start import call_text
from torchtitan_rl.experiments.search_r1.task import RetrieverError, SearchR1Task
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.types import Completion, FinishReason, VersionRun

pytest.importorskip("bm25s")
PROBLEM = Problem(
    problem_id="1",
    data={
        "messages": [{"role": "user", "content": "Where does Boris Weaver live?"}],
        "golden_answers": ["Harlow", "the town of Harlow"],
    },
)
RIGHT = [
    "<answer>Harlow</answer>",
    "I think <answer>Kelso</answer>, no: <answer> harlow. </answer>",
    "<answer>A town of  Harlow!</answer>",
]
WRONG = [
    "Harlow",
    "<answer>Harlow",
    "Harlow</answer>",
    "<answer>Harlow, Kelso</answer>",
    "<answer>Harlow</answer> <answer>Kelso</answer>",
    "<answer></answer>",
    "<answer>" * 100_000 + "Harlow",
]


def task(**options: Any) -> SearchR1Task:
    return SearchR1Task(train=("unused.jsonl",), **options)


def test_only_the_last_answer_counts_and_only_if_it_is_right() -> None:
    async def rewards(texts: list[str]) -> list[float]:
        return [await task().score(text, PROBLEM) for text in texts]

    assert asyncio.run(rewards(RIGHT)) == [1.0] * len(RIGHT)
    assert asyncio.run(rewards(WRONG)) == [0.0] * len(WRONG)


@on_event_loop
async def test_a_policy_reads_what_the_retriever_finds():
    tokenizer = load_tokenizer(POLICY_DIR)
    env = task(retriever=made_retriever(), renderer="qwen3", thinking="keep").environment(
        PROBLEM, tokenizer=tokenizer, limits=RolloutConfig()
    )
    first = await env.reset()
    assert '"name": "search"' in tokenizer.decode(first.prompt_token_ids)
    queries = ("Boris Weaver", "zzz", "\ud800")
    second = await env.step(said(tokenizer, "\n".join(call_text(query) for query in queries)))
    text = tokenizer.decode(second.prompt_token_ids[len(first.prompt_token_ids) :])
    answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text, re.DOTALL)
    assert answers[0].startswith("Doc 1: Boris Weaver lives in Harlow.")
    assert answers[1] == "nothing found"
    assert answers[2].startswith("error:")
    end = await env.step(said(tokenizer, "<answer>Harlow</answer>"))
    assert (end.reward, end.metrics["tool_calls"]) == (1.0, 3.0)


def said(tokenizer: Any, text: str) -> Completion:
    ids = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
    return Completion(
        request_id="1",
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.STOP,
    )


class Odd(BaseHTTPRequestHandler):
    """Answers with the next of ``answers``; the last one again and again."""

    answers: list[tuple[int, Any]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        pass


def search(answers: list[tuple[int, Any]], **options: Any) -> list[str]:
    handler = type("Handler", (Odd,), {"answers": answers})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        try:
            return asyncio.run(task(retriever=url, **options).search("x"))
        finally:
            server.shutdown()


def found(contents: Any) -> Any:
    return {"result": [[{"document": {"id": "0", "contents": contents}, "score": 1.0}]]}


def test_a_busy_retriever_is_asked_again_and_its_texts_are_cut_and_made_valid() -> None:
    assert search([(503, {}), (429, {}), (200, found("ab\ud800defg"))], max_document_chars=5) == [
        "Doc 1: ab?de"
    ]


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ((200, b"[" * 100_000), "not Search-R1's interface"),
        ((200, {"result": []}), "not Search-R1's interface"),
        ((200, {"result": [[{"contents": "without scores"}]]}), "not Search-R1's interface"),
        ((200, found(3)), "not Search-R1's interface"),
        ((200, found(["a"])), "not Search-R1's interface"),
        ((200, b" " * ((1 << 24) + 1)), "more than 16777216 bytes"),
        ((401, {}), "status 401"),
        ((503, {}), "status 503 within 0.3 s"),
    ],
)
def test_a_retriever_that_does_not_answer_fails_the_search(answer: Any, cause: str) -> None:
    timeout_s = 0.3 if answer[0] == 503 else 30.0
    with pytest.raises(RetrieverError, match=cause):
        search([answer], search_timeout_s=timeout_s)


def test_a_silent_or_missing_retriever_is_an_error_before_the_run() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RetrieverError, match=r"no answer within 0\.3 s"):
            asyncio.run(
                task(retriever=f"http://127.0.0.1:{port}", search_timeout_s=0.3).search("x")
            )
    wrong = SearchR1Task(
        train=(str(POLICY_DIR / "config.json"),),
        validation=(),
        retriever=f"http://127.0.0.1:{port}",
        search_timeout_s=0.3,
    )
    (error,) = wrong.errors()
    assert error.startswith(f"task.retriever: retriever 'http://127.0.0.1:{port}': ConnectError")
    assert "torchtitan-rl retriever" in error


def test_wrong_fields_are_named() -> None:
    wrong = SearchR1Task(
        train=(str(POLICY_DIR / "config.json"),),
        validation=(),
        num_documents=0,
        max_document_chars=0,
        search_timeout_s=0.0,
    )
    assert [error.partition("=")[0] for error in wrong.errors()] == [
        "task.num_documents",
        "task.max_document_chars",
        "task.search_timeout_s",
    ]
