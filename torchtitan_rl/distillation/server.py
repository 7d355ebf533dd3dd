"""A teacher behind a URL: any server whose ``/v1/completions`` takes token ids and returns
``prompt_logprobs``. Its answers are checked, because they come from another program: an answer of
another form, or one that is too large, is a failure like a lost connection."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from torchtitan_rl.errors import TeacherError, one_line
from torchtitan_rl.types import TokenScores

API_KEY = "TORCHTITAN_RL_TEACHER_KEY"
_RETRIED = (408, 409, 425, 429)  # and all from 500 on
_CONNECTIONS = 64
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
_REPORTED_FAILURES = 3  # in a row, before the user is told
_CHECK_TIMEOUT_S = 180.0  # vllm serve on a CPU compiles for 40 s at its first request for scores
_CHECKED_TOKENS = 128
_LOGPROBS = (-1e5, 1e-3)  # rounding may give a little more than 0
_BASE_BYTES, _ENTRY_BYTES = 1 << 16, 1 << 10  # largest answer, and part of it for one logprob


@dataclass(eq=False)
class ServedTeacher:
    """A `Teacher` behind ``url``, which serves it as ``model``. A request that fails is sent again
    until ``timeout_s`` have passed; one that the server refuses is not."""

    url: str
    model: str
    timeout_s: float
    say: Callable[[str], None]
    num_top: int = 0

    def __post_init__(self) -> None:
        self._num_failures = self._in_a_row = 0
        self._http = _client(self.url)

    async def score(self, name: str, token_ids: tuple[int, ...]) -> TokenScores:
        last = "it did not answer"
        pause_s = _FIRST_PAUSE_S
        try:
            async with asyncio.timeout(self.timeout_s):
                while True:
                    try:
                        scores = await self._ask(token_ids)
                    except _FailedError as error:
                        last = str(error)
                        self._note_failure(last)
                    else:
                        self._in_a_row = 0
                        return scores
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except TimeoutError as error:
            raise TeacherError(
                f"teacher {self.url}: no scores of {name} within teacher.timeout_s "
                f"({self.timeout_s:g} s): {last}"
            ) from error

    def num_failures(self) -> int:
        return self._num_failures

    async def close(self) -> None:
        await self._http.aclose()

    def _note_failure(self, cause: str) -> None:
        self._num_failures += 1
        self._in_a_row += 1
        if self._in_a_row == _REPORTED_FAILURES:
            self.say(
                f"teacher {self.url} does not answer, and is asked again: {cause}; its rollouts "
                "are kept"
            )

    async def _ask(self, token_ids: tuple[int, ...]) -> TokenScores:
        body = request_body(self.model, token_ids, num_top=self.num_top)
        status, content = await _scores_answer(self._http, body)
        if status == 200:
            return read_scores(content, token_ids, num_top=self.num_top)
        what = f"HTTP {status}: {_shown(content)}"
        if status in _RETRIED or status >= 500:
            raise _FailedError(what)
        raise TeacherError(f"teacher {self.url} refuses a request: {what}")


class _FailedError(Exception):
    """An attempt failed, and may be repeated."""


def _client(url: str) -> httpx.AsyncClient:
    """A client without deadlines: each caller has its own, for whole answers."""
    key = os.environ.get(API_KEY, "")
    return httpx.AsyncClient(
        base_url=f"{url.rstrip('/')}/",
        # A compressed answer would have to be expanded before its size is known.
        headers={"Accept-Encoding": "identity"}
        | ({"Authorization": f"Bearer {key}"} if key else {}),
        timeout=None,
        limits=httpx.Limits(max_connections=_CONNECTIONS),
    )


async def _answer(
    http: httpx.AsyncClient, method: str, path: str, body: Any, *, most_bytes: int = _BASE_BYTES
) -> tuple[int, bytes]:
    """The status and the content of an answer; raises _FailedError if there is none, it is larger
    than ``most_bytes``, or compressed."""
    content = bytearray()
    try:
        async with http.stream(method, path, json=body) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise _FailedError("its answer is compressed")
            async for part in response.aiter_raw():
                content += part
                if len(content) > most_bytes:
                    raise _FailedError("its answer is too large")
    except httpx.HTTPError as error:
        raise _FailedError(one_line(error) or type(error).__name__) from error
    return response.status_code, bytes(content)


async def _scores_answer(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, bytes]:
    num_logprobs = (1 + int(body["prompt_logprobs"])) * len(body["prompt"])
    most_bytes = _BASE_BYTES + _ENTRY_BYTES * num_logprobs
    return await _answer(http, "POST", "completions", body, most_bytes=most_bytes)


def request_body(model: str, token_ids: Sequence[int], *, num_top: int) -> dict[str, Any]:
    """The body of a request for scores, which has to sample one token, too."""
    return {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": num_top,
    }


def read_scores(content: bytes, token_ids: Sequence[int], *, num_top: int) -> TokenScores:
    """Read the scores of all tokens after the first one, and the ``num_top`` most likely tokens.
    Raises _FailedError: this is not the answer to `request_body`."""
    logprobs: list[float] = []
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    for token, entry in zip(token_ids[1:], _entries(content, len(token_ids)), strict=True):
        found = {_token_id(name): _logprob(name, one) for name, one in entry.items()}
        if token not in found:
            raise _FailedError(f"its answer has no logprob of token {token}")
        logprobs.append(found[token])
        # The token itself is in the answer even if it is not one of the most likely ones.
        likely = sorted(found, key=lambda one: -found[one])[:num_top]
        if len(likely) < num_top:
            raise _FailedError(f"its answer has {len(likely)} of {num_top} most likely tokens")
        top_ids += likely
        top_logprobs += (found[one] for one in likely)
    return TokenScores(
        logprobs=tuple(logprobs),
        top_ids=struct.pack(f"<{len(top_ids)}i", *top_ids),
        top_logprobs=struct.pack(f"<{len(top_ids)}f", *top_logprobs),
    )


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise _FailedError(f"{_shown(name.encode())!r} in its answer is no token id")
    return int(name)


def _logprob(name: str, entry: Any) -> float:
    logprob = entry.get("logprob") if isinstance(entry, dict) else None
    if isinstance(logprob, bool) or not isinstance(logprob, int | float):
        raise _FailedError(f"its answer has no logprob of token {name}")
    if not _LOGPROBS[0] <= logprob <= _LOGPROBS[1]:  # false of NaN, too
        raise _FailedError(
            f"its logprob of token {name} is {str(logprob)[:20]} (vllm serve returns logprobs "
            "without --logprobs-mode)"
        )
    return float(logprob)


def _entries(content: bytes, num_tokens: int) -> list[dict[str, Any]]:
    try:
        entries = json.loads(content)["choices"][0]["prompt_logprobs"]
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise _FailedError(f"its answer has no prompt_logprobs: {_shown(content)}") from error
    if not isinstance(entries, list) or len(entries) != num_tokens:
        raise _FailedError(f"its answer has no prompt_logprobs of {num_tokens} tokens")
    if not all(isinstance(entry, dict) for entry in entries[1:]):
        raise _FailedError("its prompt_logprobs are not objects")
    return entries[1:]


def _shown(content: bytes) -> str:
    text = " ".join(content[:300].decode(errors="replace").split())
    return text if text.isprintable() else ascii(text)


def check_server(
    url: str,
    *,
    model: str,
    vocab_size: int,
    max_tokens: int,
    decode: Callable[[list[int]], str],
    num_top: int = 0,
) -> str:
    """Ask the server for the scores of tokens from the whole vocabulary, and compare their texts
    with ``decode``, the policy's. Returns the model's name on the server. A rollout has
    ``max_tokens``. Raises TeacherError: the server does not answer, returns no prompt logprobs, has
    another tokenizer, or takes no such long requests."""
    step = max(1, vocab_size // _CHECKED_TOKENS)
    token_ids = [0, *range(0, vocab_size, step), vocab_size - 1]
    num_top = max(num_top, 1)  # the most likely token shows whether a server returns logits
    try:
        port = httpx.URL(url).port
        if port is not None and port >= 1 << 16:
            raise TeacherError(f"port {port}: give at most 65535")
        model, content = asyncio.run(
            _ask_once(url, model, token_ids, num_top=num_top, max_tokens=max_tokens)
        )
        read_scores(content, token_ids, num_top=num_top)
        entries = _entries(content, len(token_ids))
    except TimeoutError as error:
        raise TeacherError(f"no answer within {_CHECK_TIMEOUT_S:g} s") from error
    except httpx.InvalidURL as error:
        raise TeacherError(one_line(error)) from error
    except _FailedError as error:
        raise TeacherError(
            f"{error}; give a server with prompt logprobs that runs, such as vllm serve MODEL, or "
            "torchtitan-rl serve MODEL --endpoint.prompt-logprobs"
        ) from error
    scored = list(zip(token_ids[1:], entries, strict=True))
    if not any(entry[str(token)].get("decoded_token") for token, entry in scored):
        raise TeacherError(
            "it returns no texts of tokens, so its tokenizer cannot be compared with the policy's; "
            "start vllm serve without --skip-tokenizer-init"
        )
    for token, entry in scored:
        text, own = entry[str(token)].get("decoded_token"), decode([token])
        # Tokens that are parts of a character have no text of their own, and some tokenizers drop
        # leading spaces.
        is_text = isinstance(text, str) and "\ufffd" not in text + own
        if is_text and text.strip() != own.strip():
            raise TeacherError(
                f"token {token} is {text!r} there and {own!r} in the policy's tokenizer; give a "
                "teacher with the policy's tokenizer"
            )
    return model


async def _ask_once(
    url: str, model: str, token_ids: Sequence[int], *, num_top: int, max_tokens: int
) -> tuple[str, bytes]:
    async with asyncio.timeout(_CHECK_TIMEOUT_S), _client(url) as http:
        status, content = await _answer(http, "GET", "models", None)
        served = _served_models(content)
        if not model and not served:
            raise TeacherError(f"it names no model (HTTP {status}); {_hint(status, num_top)}")
        model = model or next(iter(served))
        longest = served.get(model)
        if isinstance(longest, int) and longest <= max_tokens:
            raise TeacherError(
                f"its requests have at most {longest} tokens; a rollout has up to {max_tokens} "
                "(rollout.max_total_tokens), and a request for its scores one more; start vllm "
                f"serve with --max-model-len {max_tokens + 1} or more"
            )
        body = request_body(model, token_ids, num_top=num_top)
        status, content = await _scores_answer(http, body)
    if status != 200:
        raise TeacherError(f"HTTP {status}: {_shown(content)}; {_hint(status, num_top)}")
    return model, content


def _served_models(content: bytes) -> dict[str, Any]:
    """The names of a server's models, each with the length of its longest request or None."""
    try:
        models = json.loads(content)["data"]
        return {str(one["id"]): one.get("max_model_len") for one in models}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}


def _hint(status: int, num_top: int) -> str:
    match status:
        case 401 | 403:
            return f"give its key (vllm serve --api-key) in {API_KEY}"
        case 404:
            return (
                "give its model's name (vllm serve --served-model-name) by teacher.model, and a "
                "teacher.url that ends in /v1"
            )
    if status >= 500:
        return "see its log"
    return (
        "give a server that takes the ids of the policy's tokens and returns prompt_logprobs of "
        f"{num_top}: vllm serve with --max-logprobs {num_top} or more"
    )
