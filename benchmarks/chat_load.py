"""A load of chats through one of the APIs, from a process of its own that uses little CPU.

    python -m benchmarks.chat_load  < job.json  > result.json

Requests are encoded before the clock starts. Each concurrent client keeps one connection open, and
sends its next request when it has the answer to the previous one. Answers are not parsed: only
their first event, their end and the number of tokens that the server counted are read.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
_CONTENT_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_READ_BYTES = 1 << 16


class LoadError(Exception):
    """The server refused a request or closed a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one request, in seconds since the request was sent. ``tokens`` is the number of
    tokens that the server counted."""

    first_s: float  # until the first event of a stream, or the head of a whole answer
    total_s: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The result of a load. ``cpu_s`` is the CPU time of the process that sends the requests."""

    seconds: float
    cpu_s: float
    timings: tuple[Timing, ...]


def run_load(
    host: str,
    port: int,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int,
    path: str = "/v1/chat/completions",
) -> LoadResult:
    """Send every body to ``path``, ``concurrency`` at a time.

    Raises:
        LoadError: a request was not answered with 200.
    """
    requests = [_request(host, port, path, body) for body in bodies]
    return asyncio.run(_run(host, port, requests, concurrency))


async def _run(host: str, port: int, requests: list[bytes], concurrency: int) -> LoadResult:
    waiting, timings = iter(requests), list[Timing]()
    started, cpu_started = time.monotonic(), _cpu_s()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(_client(host, port, waiting, timings))
    return LoadResult(
        seconds=time.monotonic() - started,
        cpu_s=_cpu_s() - cpu_started,
        timings=tuple(timings),
    )


async def _client(
    host: str,
    port: int,
    waiting: Iterator[bytes],
    timings: list[Timing],
) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    for request in waiting:
        sent = time.monotonic()
        writer.write(request)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            # Servers close connections that were idle for a few seconds.
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head[:20]:
            raise LoadError((head + await reader.read(2000)).decode(errors="replace"))
        first_s = time.monotonic() - sent
        length = _CONTENT_LENGTH.search(head)
        if length is not None:
            answer = await reader.readexactly(int(length[1]))
        else:
            answer, first_s = await _read_stream(reader, sent)
        counts = _COMPLETION_TOKENS.findall(answer)
        if not counts:
            raise LoadError(f"an answer without usage: {answer[-500:]!r}")
        timings.append(
            Timing(first_s=first_s, total_s=time.monotonic() - sent, tokens=int(counts[-1]))
        )
    writer.close()


async def _read_stream(reader: asyncio.StreamReader, sent: float) -> tuple[bytes, float]:
    """Read a chunked body. Returns its last bytes, and the time until its first bytes."""
    tail = await reader.read(_READ_BYTES)
    first_s = time.monotonic() - sent
    while not tail.endswith(b"0\r\n\r\n"):
        piece = await reader.read(_READ_BYTES)
        if not piece:
            raise LoadError("the server closed a connection in a stream")
        tail = tail[-2000:] + piece
    return tail, first_s


def _request(host: str, port: int, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\n"
        f"Host: {host}:{port}\r\n"
        "Authorization: Bearer any\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    job = json.load(sys.stdin)
    result = run_load(**job)
    json.dump(asdict(result), sys.stdout)


if __name__ == "__main__":
    main()
