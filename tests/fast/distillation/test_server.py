"""A teacher behind a URL: failures, refusals, and answers of servers that are broken."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest

from tests.support.async_tests import on_event_loop
from tests.support.scripted_http import Reply, ScriptedHttp, scripted_http
from torchtitan_rl.distillation import server
from torchtitan_rl.distillation.server import ServedTeacher, check_server
from torchtitan_rl.errors import TeacherError
from torchtitan_rl.types import TokenScores

TOKENS = (5, 6, 7)
SCORES = TokenScores(logprobs=(-0.25, -1.5))


def answer(*entries: Any) -> Reply:
    return Reply(body={"choices": [{"prompt_logprobs": list(entries)}]})


def entry(token: int, logprob: Any, text: Any = None) -> dict[str, Any]:
    """As vLLM writes it; another token comes first."""
    others = {"1": {"logprob": -9.0, "rank": 1, "decoded_token": "?"}}
    return others | {str(token): {"logprob": logprob, "rank": 2, "decoded_token": text}}


GOOD = answer(None, entry(6, -0.25), entry(7, -1.5))
BROKEN = [
    Reply(status=0),
    Reply(status=429),
    Reply(status=503, body="starting"),
    Reply(body="no json"),
    Reply(body="[" * 100_000),
    Reply(body={"choices": []}),
    Reply(body=[1]),
    answer(),
    answer(None, entry(6, -0.25)),
    answer(None, 1, 2),
    answer(None, entry(6, -0.25), entry(8, -1.5)),
    answer(None, entry(6, -0.25), {"7": -1.5}),
    answer(None, entry(6, -0.25), entry(7, -1.5) | {"-1": {"logprob": -1.0}}),
    answer(None, entry(6, -0.25), entry(7, -1.5) | {"²": {"logprob": -1.0}}),
    answer(None, entry(6, "-0.25"), entry(7, -1.5)),
    answer(None, entry(6, True), entry(7, -1.5)),
    answer(None, entry(6, 0.5), entry(7, -1.5)),
    Reply(body=json.dumps(GOOD.body).replace("-1.5", "NaN")),
    Reply(body=json.dumps(GOOD.body).replace("-1.5", "-1e300")),
    Reply(body=json.dumps(GOOD.body).replace("-1.5", "-1" + "0" * 400)),
    Reply(body=json.dumps(GOOD.body).replace("-1.5", "-Infinity")),
    Reply(body=" " * (1 << 20) + json.dumps(GOOD.body)),
    Reply(body=GOOD.body, headers={"content-encoding": "gzip"}),
]


def served(http: ScriptedHttp, *, timeout_s: float = 20.0) -> tuple[ServedTeacher, list[str]]:
    said: list[str] = []
    url = f"http://127.0.0.1:{http.port}/v1"
    return ServedTeacher(url, model="m", timeout_s=timeout_s, say=said.append), said


@pytest.mark.parametrize("broken", BROKEN)
@on_event_loop
async def test_a_failed_attempt_is_repeated(broken: Reply) -> None:
    server_pause = server._FIRST_PAUSE_S
    server._FIRST_PAUSE_S = 0.01
    try:
        async with scripted_http(broken, GOOD) as http:
            teacher, _ = served(http)
            assert await teacher.score("r", TOKENS) == SCORES
            assert teacher.num_failures() == 1
            assert http.received == 2 * [
                {
                    "model": "m",
                    "prompt": [5, 6, 7],
                    "max_tokens": 1,
                    "temperature": 0.0,
                    "prompt_logprobs": 0,
                }
            ]
            await teacher.close()
    finally:
        server._FIRST_PAUSE_S = server_pause


@on_event_loop
async def test_a_server_that_is_away_is_reported_and_ends_at_the_deadline() -> None:
    async with scripted_http(Reply(status=500, body="no\nmemory")) as http:
        teacher, said = served(http, timeout_s=2.0)
        with pytest.raises(TeacherError, match=r"timeout_s \(2 s\): HTTP 500: no memory"):
            await asyncio.gather(teacher.score("a", TOKENS), teacher.score("b", TOKENS))
        assert len(said) == 1
        await teacher.close()


@on_event_loop
async def test_a_server_that_never_answers_ends_at_the_deadline() -> None:
    async with scripted_http(None) as http:
        teacher, _ = served(http, timeout_s=1.0)
        with pytest.raises(TeacherError, match="no scores of r within"):
            await teacher.score("r", TOKENS)
        await teacher.close()


@on_event_loop
async def test_a_refusal_is_not_repeated() -> None:
    async with scripted_http(Reply(status=400, body={"error": "too long"})) as http:
        teacher, _ = served(http)
        with pytest.raises(TeacherError, match="refuses a request: HTTP 400"):
            await teacher.score("r", TOKENS)
        assert len(http.received) == 1
        await teacher.close()


def check(*replies: Reply | None, model: str = "m") -> str:
    """The last reply is also that to further requests."""
    found: list[str] = []

    @on_event_loop
    async def work() -> None:
        async with scripted_http(*replies) as http:
            found.append(
                await asyncio.to_thread(
                    check_server,
                    f"http://127.0.0.1:{http.port}/v1",
                    model=model,
                    vocab_size=3,
                    max_tokens=300,
                    decode=lambda ids: f"t{ids[0]}",
                )
            )

    work()
    return found[0]


def probe(*texts: Any) -> Reply:
    """The answer to the tokens 0, 0, 1, 2, 2."""
    tokens = (0, 1, 2, 2)
    pairs = zip(tokens, texts, strict=True)
    return answer(None, *(entry(token, -1.0, text) for token, text in pairs))


def models(longest: Any) -> Reply:
    return Reply(body={"data": [{"id": "first", "max_model_len": longest}]})


def test_a_server_with_the_policys_tokenizer_may_teach() -> None:
    good = probe("t0", "t1", "\ufffd", None)
    assert check(good) == "m"
    for longest in (301, None):
        assert check(models(longest), good, model="") == "first"


@pytest.mark.parametrize(
    ("reply", "cause"),
    [
        (probe("t0", "other", "t2", "t2"), "token 1 is 'other' there and 't1'"),
        (probe(None, None, None, None), "without --skip-tokenizer-init"),
        (Reply(status=404, body="not\x1b here"), "HTTP 404.*--served-model-name.* teacher.model"),
        (Reply(status=401, body="no"), "HTTP 401.*--api-key.* in TORCHTITAN_RL_TEACHER_KEY"),
        (Reply(status=400, body="no"), "HTTP 400.*vllm serve with --max-logprobs 1 or more"),
        (answer(None, *4 * [entry(0, 7.5)]), "token 0 is 7.5 .*without --logprobs-mode"),
        (Reply(body={"choices": [{"text": ""}]}), "no prompt_logprobs"),
        (Reply(status=0), "disconnected"),
        (Reply(body=" " * (1 << 20)), "too large"),
        (Reply(body="", headers={"content-encoding": "zstd"}), "compressed"),
        (None, "no answer within 0.5 s"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(
    reply: Reply | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_CHECK_TIMEOUT_S", 0.5 if reply is None else 30.0)
    with pytest.raises(TeacherError, match=cause) as raised:
        check(reply)
    assert str(raised.value).isprintable()


def test_a_server_whose_requests_are_too_short_is_refused() -> None:
    with pytest.raises(TeacherError, match=r"at most 300 tokens.* --max-model-len 301 or more"):
        check(models(300), model="first")
    with pytest.raises(TeacherError, match=r"names no model \(HTTP 404\).* ends in /v1"):
        check(Reply(status=404, body="no"), model="")


def test_a_url_that_is_none_is_an_error() -> None:
    for url in ("http://127.0.0.1:1/v1", "http://[", "http://"):
        with pytest.raises(TeacherError):
            check_server(url, model="m", vocab_size=3, max_tokens=300, decode=str)


TOP = answer(
    None,
    {"6": {"logprob": -3.0}, "9": {"logprob": -0.25}, "1": {"logprob": -2.0}},
    {"7": {"logprob": -0.5}, "4": {"logprob": -1.5}},
)


@on_event_loop
async def test_the_most_likely_tokens_are_read_in_order() -> None:
    async with scripted_http(TOP) as http:
        teacher = ServedTeacher(
            f"http://127.0.0.1:{http.port}/v1",
            model="m",
            num_top=2,
            timeout_s=20.0,
            say=lambda line: None,
        )
        scores = await teacher.score("r", TOKENS)
        await teacher.close()
    assert scores.logprobs == (-3.0, -0.5)
    assert struct.unpack("<4i", scores.top_ids) == (9, 1, 7, 4)
    assert struct.unpack("<4f", scores.top_logprobs) == (-0.25, -2.0, -0.5, -1.5)
    assert http.received[0]["prompt_logprobs"] == 2


def test_too_few_likely_tokens_are_refused() -> None:
    with pytest.raises(server._FailedError, match="2 of 3 most likely"):
        server.read_scores(json.dumps(TOP.body).encode(), TOKENS, num_top=3)
