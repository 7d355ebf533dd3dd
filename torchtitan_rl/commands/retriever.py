"""``torchtitan-rl retriever --corpus FILE...``: serves searches of a corpus by BM25 (Robertson and
Zaragoza 2009, from `bm25s`), with the HTTP interface of Search-R1 (Jin et al. 2025,
arXiv:2503.09516), so its clients and servers can take each other's place::

    POST /retrieve  {"queries": ["who wrote Faust?"], "topk": 3, "return_scores": true}
    ->  {"result": [[{"document": {"id": "0", "contents": "..."}, "score": 7.1}, ...]]}

Without ``return_scores`` each result is the document alone. ``GET /health`` needs no key.

Invariants: a request changes nothing, and the same query always has the same result. Memory holds
the index and the offsets of the corpus's lines, but no documents. Requests are bounded: in bytes,
queries, documents and words of a query, and in how many run and wait at the same time.

Exit codes: 2 the options or the corpus are wrong; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import msgspec
from annotated_types import Interval
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from torchtitan_rl.bounds import Name, check_fields
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.data.columns import column
from torchtitan_rl.data.rows import DataError, Row, Rows, open_sources, require
from torchtitan_rl.errors import ConfigError, EndpointLostError
from torchtitan_rl.launch.own_user import accept_own_user
from torchtitan_rl.serving.config import API_KEY, Keys, is_loopback, listen, reachable
from torchtitan_rl.serving.connections import ConnectionLimits, bounded_server
from torchtitan_rl.serving.errors import RefusedError, answer_errors
from torchtitan_rl.serving.middleware import Admission, Bodies, authenticate, is_open

_MAX_QUERIES = 4096  # of a request; clients of Search-R1 send those of a whole batch
_MAX_TOPK = 100
_MAX_DOCUMENTS = 16_384  # of an answer
_MAX_WORDS = 64  # of a query; the others are ignored
_MAX_BODY_BYTES = 4 << 20
_BODY_S = 30.0
_MAX_QUEUED = 8192
_QUEUE_S = 600.0
_BACKLOG = 2048
_MAX_CONNECTIONS = 8192
_OTHER_FILES = 64  # that the process may open besides connections
_CORPUS_FILE = "corpus.json"  # in the folder of an index


@dataclass(frozen=True, kw_only=True)
class RetrieverConfig:
    """Serve searches of a corpus by BM25, with the HTTP interface of Search-R1."""

    corpus: tuple[Name, ...]
    """Files with a document in each row, in the column ``contents``; JSON Lines, or what a task's
    ``train`` takes."""
    index: Path | None = None
    """Folder of the index. The first start writes it, and later ones map it into memory instead of
    reading the whole corpus. Without a folder, each start makes the index."""
    host: Name = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a key in the environment
    variable TORCHTITAN_RL_API_KEY, which clients send as a bearer token, and so do clients of other
    users of this machine."""
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    topk: Annotated[int, Interval(ge=1, le=_MAX_TOPK)] = 3
    """Number of documents for requests that do not say it."""


def main(words: Sequence[str]) -> int:
    config = parse_options(RetrieverConfig, words, prog="torchtitan-rl retriever")
    check_fields(config, "--")
    keys = Keys.of()
    if not keys.api and not is_loopback(config.host):
        raise ConfigError(
            f"--host is {config.host}: other machines can reach it: set {API_KEY}, or listen on "
            "127.0.0.1"
        )
    try:
        listening = listen(config.host, config.port, backlog=_BACKLOG)
    except EndpointLostError as error:
        raise ConfigError(
            f"--host is {config.host} and --port {config.port}: {error.__cause__}; give another"
        ) from error
    with listening:
        corpus = Corpus(config.corpus, config.index)
        address = f"http://{reachable(config.host)}:{listening.getsockname()[1]}/retrieve"
        print(f"{len(corpus)} documents: {address}", flush=True)
        app = retriever_app(corpus, topk=config.topk, keys=keys)
        serve_retriever(app, listening, keys=keys)
    return 0


class Corpus:
    """The documents of a corpus, and their index. Raises ConfigError if the corpus cannot be read,
    or ``folder`` has the index of another one."""

    def __init__(self, sources: Sequence[str], folder: Path | None = None) -> None:
        self._bm25s = require("bm25s", "bm25s")
        self._rows = open_sources(sources)
        self._ends = list(accumulate(sum(rows.blocks) for rows in self._rows))
        if folder is not None and folder.exists():
            self._index = _load(self._bm25s, folder, self._rows)
        else:
            try:
                words = self._words(self._contents())
            except DataError as error:
                raise ConfigError(f"--corpus: {error}") from error
            if not words.vocab:
                raise ConfigError("--corpus has no words: give a file that has")
            self._index = self._bm25s.BM25()
            self._index.index(words, show_progress=False)
            if folder is not None:
                _save(self._index, folder, self._rows)

    def __len__(self) -> int:
        return self._ends[-1]

    def find(self, query: str, count: int) -> list[tuple[Row, float]]:
        """The at most ``count`` best documents that have a word of the query, each with its score.
        The first of equally good documents comes first."""
        import numpy as np

        known = self._index.vocab_dict
        words = [word for word in self._words([query]).vocab if word in known][:_MAX_WORDS]
        if not words:
            return []
        scores = self._index.get_scores(words)
        count = min(count, len(scores))
        best = np.argpartition(-scores, count - 1)[:count]
        best = best[np.lexsort((best, -scores[best]))]
        return [
            (self._document(place), float(scores[place])) for place in best if scores[place] > 0
        ]

    def _words(self, texts: Any) -> Any:
        return self._bm25s.tokenize(texts, show_progress=False)

    def _document(self, place: int) -> Row:
        source = bisect_right(self._ends, place)
        rows = self._rows[source]
        return rows.read(int(place) - (self._ends[source] - sum(rows.blocks))) or {}

    def _contents(self) -> Iterator[str]:
        for rows in self._rows:
            for index in range(sum(rows.blocks)):
                row = rows.read(index)
                place = f"{rows.place} {rows.first + index}"
                yield "" if row is None else str(column("contents", row, place))


def _load(bm25s: Any, folder: Path, rows: Sequence[Rows]) -> Any:
    try:
        made_of = json.loads((folder / _CORPUS_FILE).read_text())
        sources = ", ".join(made_of)
        index = bm25s.BM25.load(folder, mmap=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--index is {folder}: it is no index ({error}); give a folder that does not exist"
        ) from error
    if made_of != [one.size for one in rows]:
        raise ConfigError(
            f"--index is {folder}: it was made of {sources}; give another folder, or that corpus"
        )
    return index


def _save(index: Any, folder: Path, rows: Sequence[Rows]) -> None:
    """Write the index; it gets its name when it is whole."""
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        index.save(unfinished, show_progress=False)
        (unfinished / _CORPUS_FILE).write_text(json.dumps([one.size for one in rows]))
        unfinished.rename(folder)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"--index is {folder}: it cannot be written ({error})") from error


class _Asked(msgspec.Struct):
    queries: Annotated[list[str], msgspec.Meta(max_length=_MAX_QUERIES)]
    topk: Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOPK)] | None = None  # the server's
    return_scores: bool = False


def retriever_app(corpus: Corpus, *, topk: int, keys: Keys) -> ASGIApp:
    """The application. Searches run in threads, one for each core; others wait in a queue."""
    num_threads = os.cpu_count() or 1
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix="search")
    bodies = Bodies(_MAX_BODY_BYTES, timeout_s=_BODY_S)
    places = Admission(max_running=num_threads, max_queued=_MAX_QUEUED, timeout_s=_QUEUE_S)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(scope, send, partial(serve, scope, receive))

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if is_open(scope):
            return await _answer({"documents": len(corpus)})(scope, receive, send)
        authenticate(scope, keys)
        if (scope["method"], scope["path"]) != ("POST", "/retrieve"):
            raise RefusedError(404, "not_found", "There is POST /retrieve, and GET /health.")
        request = await bodies.read(scope, receive)
        if request is None:
            return None
        try:
            asked = _parsed(request.body, topk)
            async with places.place(scope, request) as has_place:
                if has_place:
                    search = partial(_search, corpus, asked)
                    found = await asyncio.get_running_loop().run_in_executor(threads, search)
                    await _answer({"result": found})(scope, receive, send)
        finally:
            request.release()

    return app


def _parsed(body: bytes, topk: int) -> _Asked:
    """Read a request; one that does not say how many documents it wants gets ``topk``. Raises
    RefusedError."""
    try:
        asked = msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        message = f"The body is not a request: {error}"
        raise RefusedError(400, "invalid_request", message) from None
    asked.topk = asked.topk or topk
    if (number := len(asked.queries) * asked.topk) > _MAX_DOCUMENTS:
        message = f"{number} documents are wanted: an answer has at most {_MAX_DOCUMENTS}."
        raise RefusedError(400, "too_many_documents", message)
    return asked


def _search(corpus: Corpus, asked: _Asked) -> list[list[Any]]:
    found = (corpus.find(query, asked.topk or 1) for query in asked.queries)
    if asked.return_scores:
        return [[{"document": row, "score": score} for row, score in one] for one in found]
    return [[row for row, _ in one] for one in found]


def _answer(content: Any) -> Response:
    return Response(msgspec.json.encode(content, enc_hook=str), media_type="application/json")


def serve_retriever(app: ASGIApp, listening: socket.socket, *, keys: Keys) -> None:
    """Serve on this socket until a signal ends it. Without a key, connections of other users of
    this machine are closed."""
    import uvloop

    if not keys.api:
        accept_own_user(uvloop.loop.__file__, "accept4")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = _MAX_CONNECTIONS if most == resource.RLIM_INFINITY else most - _OTHER_FILES
    limits = ConnectionLimits(max_connections=min(room, _MAX_CONNECTIONS), body_s=_BODY_S + 10)
    uvloop.run(bounded_server(app, limits).serve(sockets=[listening]))
