"""The context of the current HTTP request: its session, and what to close after it.

Context variables are inherited by tasks, so all code that the handler awaits or starts has them.

Which requests belong to a response, by the names that vLLM gives them.

A response has one request for each prompt and each of its ``n`` choices, named after the response:

| response | request |
|---|---|
| ``chatcmpl-ID`` (chat, messages) | ``chatcmpl-ID-RANDOM`` |
| ``cmpl-ID`` | ``cmpl-ID-PROMPT-RANDOM`` |
| ``resp_ID`` | ``resp_ID_NUMBER-RANDOM`` |

RANDOM is 8 hexadecimal digits; where ``n`` is above 1, the number of the choice and "_" come first.
ID may be the client's own (``X-Request-Id``), so a name is read from both of its ends.

The file with the episodes of rewarded sessions, one JSON line each.

Invariant: either all lines of a session are in the file or none is, also where the disk is full.
After a kill -9 in the middle of them the last, cut line is removed when the file is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torchtitan_rl.files import append_line, open_for_append
from torchtitan_rl.serving.session_report import SessionReport

logger = logging.getLogger(__name__)

session_id: ContextVar[str | None] = ContextVar("torchtitan_rl_session_id", default=None)

_at_end: ContextVar[contextlib.AsyncExitStack | None] = ContextVar(
    "torchtitan_rl_at_end", default=None
)


def close_at_end(close: Callable[[], Awaitable[None]]) -> None:
    """Call ``close`` when the request's handler has returned, failed or been cancelled.

    A stream that its handler left half-way would otherwise run until it is garbage collected.
    Outside of a request nothing happens.
    """
    stack = _at_end.get()
    if stack is not None:
        stack.push_async_callback(close)


@contextlib.asynccontextmanager
async def request_scope() -> AsyncIterator[None]:
    """The scope of `close_at_end`: everything is closed on leaving, also where it is cancelled."""
    stack = contextlib.AsyncExitStack()
    token = _at_end.set(stack)
    try:
        yield
    finally:
        _at_end.reset(token)
        await asyncio.shield(asyncio.ensure_future(_close(stack)))


async def _close(stack: contextlib.AsyncExitStack) -> None:
    try:
        await stack.aclose()
    except Exception:
        logger.exception("a stream could not be closed")


_FORMS = [
    re.compile(rf"(?:(?P<index>\d+)_)?{form}-[0-9a-f]{{8}}", re.DOTALL)
    for form in (
        r"(?P<response>chatcmpl-.*)",
        r"(?P<response>cmpl-.*)-(?P<prompt>\d+)",
        r"(?P<response>resp_.*)_\d+",
    )
]


@dataclass(frozen=True, slots=True)
class _Name:
    response: str
    prompt: int = 0
    index: int = 0  # among the choices of its prompt


def requests_of_response(
    request_ids: Iterable[str], response_id: str, choice: int | None = None
) -> list[str]:
    """Those of a session's requests that belong to a response, or to one choice of it.

    ``choice`` is the index in the response: those of its first prompt come first.
    """
    found = _choices(request_ids, response_id)
    return [key for key, index in found.items() if choice in (None, index)]


def choices_of_response(request_ids: Iterable[str], response_id: str) -> list[int]:
    """The choices of a response; none where there is no such response."""
    return sorted(set(_choices(request_ids, response_id).values()))


def _choices(request_ids: Iterable[str], response_id: str) -> dict[str, int]:
    """The requests of a response, with the choice that each one is."""
    names = {request_id: _name(request_id) for request_id in request_ids}
    found = {key: name for key, name in names.items() if name.response == response_id}
    per_prompt = 1 + max((name.index for name in found.values()), default=0)
    return {key: name.prompt * per_prompt + name.index for key, name in found.items()}


def _name(request_id: str) -> _Name:
    """A request of none of the forms is a response of its own."""
    for form in _FORMS:
        if match := form.fullmatch(request_id):
            parts = match.groupdict()
            return _Name(parts["response"], int(parts.get("prompt") or 0), int(parts["index"] or 0))
    return _Name(request_id)


class EpisodesFile:
    """Appends to ``path``; one writer.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_for_append(path)

    def write(self, report: SessionReport) -> None:
        """Write one line for each episode, with its session's id, its reward and its temperatures.

        Raises:
            OSError: nothing of the session was written.
        """
        lines = [
            json.dumps(
                {"session_id": report.session_id, **episode},
                separators=(",", ":"),
                allow_nan=False,
            )
            + "\n"
            for episode in report.to_json()["episodes"]
        ]
        append_line(self._file, "".join(lines).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
