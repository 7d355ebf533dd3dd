"""Reads and checks a request's body before the application sees the request.

The layers further in get a `BufferedRequest`. Reading is bounded in bytes (for a chunked body while
it arrives) and in time, and all bodies together are bounded in bytes.

Checks the JSON of a request before the application gets it.

- It must be valid JSON in UTF-8, without NaN, infinity, lone surrogates or integers of more than
  64 bits: each of these makes some handler fail with a 500.
- Its nesting, and its total numbers of completions and tokens, are limited.
- So are repetitions in a JSON schema (``minItems`` and similar): a grammar library unrolls a
  billion of them until the process runs out of memory.
- Its content must be text: a chat template would drop an image, or leave its placeholder as text.
  So every part of a message's content must have a text type, on every route, for every role and at
  any depth, and no field of a request, message or part may have another medium.

All other fields are checked by the application.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pydantic_core import from_json
from starlette.types import Message, Receive, Scope, Send

from torchtitan_rl.serving.anthropic_errors import MESSAGES_PATH
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import HttpError

_CLOSE = {"connection": "close"}
_MAX_HELD_BODIES = 64  # of the largest size, all requests together
_MAX_EXCESS = 4  # bodies that are read and dropped, so that the client gets to read the refusal


class HeldBody:
    """Counts the users of one body; ``release`` is called when the last one has released it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._num_users = 1

    def hold(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._release()


class BufferedRequest:
    """A request's whole body. As an ASGI ``receive`` it gives the body, then waits for the
    client's disconnect.

    ``gone`` returns once the client has disconnected, at every call. Code that keeps the body
    longer than the client's request calls ``held.hold()``, and ``held.release()`` afterwards.
    """

    def __init__(
        self, body: bytes, gone: Callable[[], Awaitable[None]], held: HeldBody | None = None
    ) -> None:
        self.body = body
        self.gone = gone
        self.held = held or HeldBody(lambda: None)
        self._is_given = False

    async def __call__(self) -> Message:
        if not self._is_given:
            self._is_given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.gone()
        return {"type": "http.disconnect"}

    async def unless_gone(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work``; False where the client leaves first, and ``work`` is cancelled."""
        works, leaves = asyncio.ensure_future(work), asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({works, leaves}, return_when=asyncio.FIRST_COMPLETED)
            (works if works.done() else leaves).result()
            return works.done()
        finally:
            works.cancel()
            leaves.cancel()


class Handler(Protocol):
    """Handles a request with a buffered body; any ASGI application does."""

    async def __call__(self, scope: Scope, receive: BufferedRequest, send: Send, /) -> None: ...


class BufferedBody:
    """ASGI middleware: reads and checks the body, then calls ``handler`` with it."""

    def __init__(
        self,
        handler: Handler,
        limits: EndpointConfig,
        *,
        timeout_s: float,
        max_requests: int = sys.maxsize,
    ) -> None:
        self._handler = handler
        self._max_requests = max_requests
        self._num_requests = 0  # that are whole
        self._limits = limits
        self._timeout_s = timeout_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: list[bytes] = []

        def release() -> None:
            self._held_bytes -= sum(map(len, chunks))

        held = HeldBody(release)
        try:
            if not await self._read(scope, receive, chunks):
                return  # the client left before the body was complete
            chunks[:] = [b"".join(chunks)]
            if chunks[0]:
                caps_tokens = scope["path"] == MESSAGES_PATH
                check_request(chunks[0], self._limits, caps_tokens=caps_tokens)
            request = BufferedRequest(chunks[0], _until_gone(receive), held)
            await self._handle(scope, request, send)
        finally:
            held.release()

    async def _handle(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        if self._num_requests >= self._max_requests:
            raise HttpError(
                429,
                f"{self._num_requests} requests are open, as many as may be.",
                code="too_many_requests",
                headers={"retry-after": "1"},
            )
        self._num_requests += 1
        try:
            await self._handler(scope, request, send)
        finally:
            self._num_requests -= 1

    async def _read(self, scope: Scope, receive: Receive, chunks: list[bytes]) -> bool:
        """Whether the client stayed until the end of the body."""
        excess = self._excess(scope)
        num_bytes = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while excess < _MAX_EXCESS * self._limits.max_body_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    chunk = message.get("body", b"")
                    num_bytes += len(chunk)
                    excess = max(excess, num_bytes - self._limits.max_body_bytes)
                    if not excess:
                        self._hold(chunk, chunks)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise HttpError(
                408,
                f"The request's body did not arrive within {self._timeout_s:g} s.",
                code="body_timeout",
                headers=_CLOSE,
            ) from None
        if excess:
            raise HttpError(
                413,
                f"The request's body is larger than {self._limits.max_body_bytes} bytes.",
                code="body_too_large",
                headers=_CLOSE,
            )
        return True

    def _hold(self, chunk: bytes, chunks: list[bytes]) -> None:
        if self._held_bytes + len(chunk) > _MAX_HELD_BODIES * self._limits.max_body_bytes:
            raise HttpError(
                429,
                "The server holds as many bytes of requests as it may.",
                code="too_many_bytes",
                headers={"retry-after": "1", **_CLOSE},
            )
        self._held_bytes += len(chunk)
        chunks.append(chunk)

    def _excess(self, scope: Scope) -> int:
        """By how many bytes the announced length exceeds the limit."""
        for name, value in scope["headers"]:
            if name.lower() == b"content-length" and value.isdigit():
                # Converting more digits than any length has would be slow.
                announced = int(value) if len(value) < 19 else sys.maxsize
                return max(0, announced - self._limits.max_body_bytes)
        return 0


def _until_gone(receive: Receive) -> Callable[[], Awaitable[None]]:
    is_gone = False

    async def gone() -> None:
        nonlocal is_gone
        while not is_gone:
            is_gone = (await receive())["type"] == "http.disconnect"

    return gone


MAX_DEPTH = 64  # of the JSON

_MAX_INTEGER = (1 << 64) - 1
_MIN_INTEGER = -(1 << 63)
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_REPETITIONS = tuple(
    low + what for low in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)
_MAX_REPETITIONS = 100_000  # no completion has as many tokens
_TEXT_PARTS = frozenset(
    {
        "input_text",
        "output_text",
        "reasoning_text",
        "redacted_thinking",
        "refusal",
        "summary_text",
        "text",
        "thinking",
        "tool_reference",
        "tool_result",
        "tool_use",
    }
)
_MEDIA = frozenset(
    {
        "audio",
        "audio_embeds",
        "audio_url",
        "document",
        "file",
        "image",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "input_video",
        "multi_modal_data",
        "prompt_embeds",
        "video",
        "video_embeds",
        "video_url",
    }
)


def check_request(body: bytes, limits: EndpointConfig, *, caps_tokens: bool = False) -> None:
    """``caps_tokens``: a completion that may not be as long as asked for is cut instead.

    Raises:
        HttpError: 400, naming the field where it is one.
    """
    content = _parse_json(body)
    if not isinstance(content, dict):
        return
    _check_text_only(content)
    _check_constraints(content.get("structured_outputs"))
    n = _integer(content, "n")
    num_completions = (1 if n is None else n) * _num_prompts(content)
    if num_completions > limits.max_n:
        raise _too_large("n", f"n times the prompts is {num_completions}", limits.max_n)
    for name in _TOKEN_LIMITS:
        value = _integer(content, name)
        is_limited = limits.max_tokens and not caps_tokens
        if is_limited and value is not None and value > limits.max_tokens:
            raise _too_large(name, f"{name} is {value}", limits.max_tokens)


def _parse_json(body: bytes) -> Any:
    try:
        content = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise _too_deep() from None
        raise _bad_json(str(error)) from None
    _check_values(content)
    return content


def _check_values(content: Any) -> None:
    level, depth = [content], 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                if depth == MAX_DEPTH:
                    raise _too_deep()
                below.extend(value.values() if isinstance(value, dict) else value)
                if isinstance(value, dict):
                    _check_repetitions(value)
            elif isinstance(value, float):
                if value - value != 0:  # infinity: a number such as 1e999
                    raise _bad_json("a number is too large")
            elif isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
                raise _bad_json("an integer has more than 64 bits")
        level, depth = below, depth + 1


def _check_constraints(constraints: Any) -> None:
    """Check schemas that are given as a string, parsed as the application does."""
    if not isinstance(constraints, dict):
        return
    for text in (constraints.get("json"), constraints.get("structural_tag")):
        if isinstance(text, str):
            try:
                schema = json.loads(text)
            except RecursionError:
                raise _too_deep() from None
            except ValueError:
                continue  # the application refuses it
            _check_values(schema)


def _check_repetitions(schema: dict[str, Any]) -> None:
    for name in _REPETITIONS:
        value = schema.get(name)
        if isinstance(value, int | float) and value > _MAX_REPETITIONS:
            raise _too_large(name, f"{name} is {value}", _MAX_REPETITIONS)


def _num_prompts(content: dict[str, Any]) -> int:
    """``prompt`` may be one prompt, of text or token ids, or a list of either; ``messages`` of the
    batched route is a list of conversations."""
    counts = [1]
    for name in ("prompt", "messages"):
        value = content.get(name)
        if isinstance(value, list) and not all(isinstance(item, int) for item in value):
            batched = name == "prompt" or any(isinstance(item, list) for item in value)
            counts.append(len(value) if batched else 1)
    return max(counts)


def _integer(content: dict[str, Any], name: str) -> int | None:
    """A limited field: an integer, or absent. The application also accepts "5" and 5.0, which would
    bypass the limit."""
    value = content.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise HttpError(400, f"{name} must be an integer.", code="invalid_type", param=name)


def _check_text_only(content: dict[str, Any]) -> None:
    _check_media(content, "")
    modalities = content.get("modalities")
    if isinstance(modalities, list) and any(name != "text" for name in modalities):
        raise _not_text("modalities", "it asks for an answer other than text")
    for name in ("messages", "input"):
        _check_messages(content.get(name), name)
    _check_content(content.get("system"), "system")


def _check_messages(messages: Any, place: str) -> None:
    """Check a list of messages, or of conversations."""
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        at = f"{place}[{index}]"
        if isinstance(message, dict):
            _check_media(message, at)
            for name in ("content", "output"):  # of a message, of a tool's answer
                _check_content(message.get(name), f"{at}.{name}")
        else:
            _check_messages(message, at)


def _check_content(content: Any, place: str) -> None:
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_content(part, f"{place}[{index}]")
    elif isinstance(content, dict):
        kind = content.get("type", "text")
        if not (isinstance(kind, str) and kind in _TEXT_PARTS):
            raise _not_text(place, f"it is of type {str(kind)[:40]!r}")
        _check_media(content, place)
        for name in ("content", *_TEXT_PARTS):
            _check_content(content.get(name), f"{place}.{name}")


def _check_media(fields: dict[str, Any], place: str) -> None:
    for name in _MEDIA & fields.keys():
        if fields[name] is not None:
            raise _not_text(f"{place}.{name}" if place else name, "it is not text")


def _not_text(place: str, why: str) -> HttpError:
    message = f"{place}: {why}, and the served policy is text only."
    return HttpError(400, message, code="text_only", param=place)


def _too_large(name: str, what: str, limit: int) -> HttpError:
    message = f"{what}; this server allows {limit}."
    return HttpError(400, message, code="limit_exceeded", param=name)


def _too_deep() -> HttpError:
    message = f"The JSON is nested more than {MAX_DEPTH} deep."
    return HttpError(400, message, code="nested_too_deeply")


def _bad_json(why: str) -> HttpError:
    return HttpError(400, f"The body is not JSON in UTF-8: {why}.", code="invalid_json")
