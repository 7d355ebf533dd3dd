"""Search-R1 (Jin et al. 2025, arXiv:2503.09516) as a `Task`: questions are answered by searching a
corpus; the reward is an exact match with one of the right answers.

A retriever with Search-R1's HTTP interface serves the corpus: ``torchtitan-rl retriever``, or a
server of Search-R1. Search-R1's own tags for a search are replaced by calls of the tool ``search``
in the model's chat format.

Invariant: a rollout whose search is not answered within the deadline fails, and is not trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import httpx

from torchtitan_rl import (
    DataTask,
    MessageTokenEnv,
    Problem,
    RolloutConfig,
    TokenEnv,
    ToolEnv,
    TorchtitanRLError,
    make_renderer,
)
from torchtitan_rl.experiments.search.env import SearchTools

_PAUSE_S = 0.5  # between two attempts
_MAX_ANSWER_BYTES = 1 << 24
_PROBE_S = 3.0
_MOST = {"num_documents": 100, "max_document_chars": 1 << 20, "search_timeout_s": 1e6}
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

_PROMPT = """\
Answer the question. Think step by step. If you lack some knowledge, search for it, as often as \
you want: each search finds passages of an encyclopedia. When you know the answer, give it in a \
few words between <answer> and </answer>, without explanation, such as <answer> Beijing </answer>.
Question: {question}"""


class RetrieverError(TorchtitanRLError):
    """The retriever gave no answer within the deadline, or refused a search."""


@dataclass(frozen=True, kw_only=True)
class SearchR1Task(DataTask):
    """Questions that are answered by searching a corpus, in several turns."""

    train: tuple[str, ...] = ("hf:PeterJinGo/nq_hotpotqa_train::train",)
    validation: tuple[str, ...] = ("hf:PeterJinGo/nq_hotpotqa_train::test",)
    prompt: str = _PROMPT
    answer: str = "{golden_answers[0]}"
    keep: tuple[str, ...] = ("golden_answers",)
    retriever: str = "http://127.0.0.1:8000/retrieve"
    """Address to which searches are sent."""
    headers: dict[str, str] = field(default_factory=dict)
    """HTTP headers, such as ``{"Authorization": "Bearer $TORCHTITAN_RL_API_KEY"}``; ``$NAME``
    stands for an environment variable."""
    num_documents: int = 3
    """Documents that a search returns."""
    max_document_chars: int = 1000
    """Characters of a document that the policy reads."""
    search_timeout_s: float = 30.0
    """Deadline of a search, in seconds; below ``rollout.step_timeout_s``. Until then it is repeated
    while the retriever is away or busy, so a retriever can be restarted during a run."""

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        env = ToolEnv(
            problem.data["messages"],
            SearchTools(self.search),
            partial(self.score, problem=problem),
            replays=True,
        )
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        return MessageTokenEnv(env, renderer)

    async def score(self, answer: str, problem: Problem) -> float:
        """1 if the last ``<answer>`` is one of the right answers, without regard to case,
        punctuation, articles and blanks."""
        found, ends, _ = answer.rpartition("<answer>")[2].partition("</answer>")
        right = map(_normal, problem.data["golden_answers"])
        return float(bool(ends) and "<answer>" in answer and _normal(found) in right)

    async def search(self, query: str) -> list[str]:
        """Return the documents for a query, as the policy reads them.

        Raises:
            RetrieverError: there is no answer within ``search_timeout_s``, or a wrong one.
        """
        cause = "no answer"
        try:
            async with asyncio.timeout(self.search_timeout_s):
                while True:
                    try:
                        return _documents(await self._ask(query), self.max_document_chars)
                    except httpx.TransportError as error:
                        cause = f"{type(error).__name__}: {error}"
                    except httpx.HTTPStatusError as error:
                        cause = f"status {error.response.status_code}"
                        if error.response.status_code not in (429, 502, 503, 504):
                            raise self._error(cause) from error
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise self._error(f"{cause} within {self.search_timeout_s:g} s") from None
        except (ValueError, LookupError, TypeError, RecursionError, httpx.InvalidURL) as error:
            raise self._error(f"not Search-R1's interface ({error!r:.200})") from error

    async def _ask(self, query: str) -> bytes:
        headers = {name: os.path.expandvars(value) for name, value in self.headers.items()}
        body = {"queries": [query], "topk": self.num_documents, "return_scores": True}
        answer = bytearray()
        async with (
            httpx.AsyncClient(verify=_tls(), timeout=None) as client,
            client.stream("POST", self.retriever, json=body, headers=headers) as response,
        ):
            response.raise_for_status()
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise ValueError(f"more than {_MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def resume_identity(self) -> Mapping[str, Any]:
        where = dict.fromkeys(("retriever", "headers", "search_timeout_s"))
        return {**super().resume_identity(), **where}

    def errors(self) -> list[str]:
        found = super().errors()
        for name, most in _MOST.items():
            if not 0 < (value := getattr(self, name)) <= most:
                found.append(f"task.{name}={value}: must be above 0 and at most {most}")
        if "@" in self.retriever:
            found.append(
                "task.retriever is a URL with '@': leave user and password out of the URL; name "
                "the key in headers"
            )
        return found or self._server_errors()

    def _server_errors(self) -> list[str]:
        """A message if the retriever does not answer a search."""
        probe = replace(self, search_timeout_s=min(self.search_timeout_s, _PROBE_S))
        try:
            asyncio.run(probe.search("the"))
        except RetrieverError as error:
            return [f"task.retriever: {error}; start one: torchtitan-rl retriever --help"]
        return []

    def _error(self, cause: str) -> RetrieverError:
        return RetrieverError(f"retriever {self.retriever!r}: {cause}")


def _documents(answer: bytes, max_chars: int) -> list[str]:
    """The texts of the documents in an answer to one query.

    Raises:
        ValueError, LookupError, TypeError, RecursionError: the answer has another form.
    """
    (found,) = json.loads(answer)["result"]
    texts = [one["document"]["contents"] for one in found]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("contents that are no text")
    return [f"Doc {n}: {_valid(text[:max_chars])}" for n, text in enumerate(texts, 1)]


def _valid(text: str) -> str:
    """The text with "?" in place of lone surrogates, which no tokenizer can read."""
    return text.encode(errors="replace").decode()


def _normal(text: str) -> str:
    """The form in which answers are compared, as in SQuAD (Rajpurkar et al. 2016).

    >>> _normal("The Beatles!") == _normal("beatles")
    True
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


@cache
def _tls() -> ssl.SSLContext:
    """One for all clients, because making one takes 20 ms."""
    return ssl.create_default_context()
