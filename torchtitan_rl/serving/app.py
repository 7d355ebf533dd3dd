"""The application that the HTTP server runs: an OpenAI application, and the parts that each request
passes before it reaches the application.

| part | what it does |
|---|---|
| `answer_errors` | turns exceptions of the other parts into error objects |
| `authenticate` | checks the key, finds the session |
| `Bodies`, `check_body` | read the body, check its size and content |
| `Retries` | answers a repeated request with the response to the first one |
| `answer_errors` | as above, so that `Retries` sees refusals and failures as responses |
| `Admission` | bounds how many requests run and queue |
| the application | vLLM's routes, and those of `routes` |

Everything is plain ASGI, so streams pass chunk by chunk and a client's disconnect reaches the
application's handlers. Requests of other runs (`tenant_routes`) pass only `authenticate` and
`Bodies`; ``GET /health``, which needs no key, only `answer_errors`: it takes no place in the queue.

`check_body` checks the JSON of a request's body; the application checks all other fields:

- It must be valid JSON in UTF-8, without NaN, infinity, lone surrogates or integers of more than
  64 bits: each of these makes some handler fail with a 500.
- Its nesting, and the total numbers of completions and tokens that it requests, are limited.
- Repetitions in a JSON schema (``minItems`` and similar) are limited: a grammar library would
  unroll a billion of them and run out of memory. So are the lengths of alternatives (``enum``,
  ``choice``), patterns and literals: their squares take time in which the engine does not step.
- Its content must be text, for every role and at any depth: vLLM refuses most other parts, and
  silently drops some (a document in a tool's result, an image next to a text).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic_core import from_json
from starlette.types import Receive, Scope, Send

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.images import MAX_IMAGES
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import MESSAGES_PATH, RefusedError, answer_errors
from torchtitan_rl.serving.middleware import (
    Admission,
    Bodies,
    BufferedRequest,
    authenticate,
    is_open,
    request_scope,
    session_id,
)
from torchtitan_rl.serving.retries import Retries, RetryOptions
from torchtitan_rl.serving.routes import Commands, add_routes
from torchtitan_rl.serving.tenant_routes import TENANTS_PREFIX, tenant_routes


class EndpointApp:
    """The ASGI application to serve; adds the endpoint's own routes to ``app``.

    ``max_requests`` limits the requests of all kinds that are open concurrently. ``follows``:
    another process of the endpoint served before, whose runs may be repeated here.
    ``takes_images``: messages may have images. Raises ConfigError: the keys cannot protect an
    endpoint on this address.
    """

    def __init__(
        self,
        app: FastAPI,
        config: EndpointConfig,
        *,
        keys: Keys,
        commands: Commands,
        retries: RetryOptions | None = None,
        max_requests: int = sys.maxsize,
        body_timeout_s: float = 60.0,
        queue_timeout_s: float = 600.0,
        follows: bool = False,
        takes_images: bool = False,
    ) -> None:
        if errors := keys.errors(config.host):
            raise ConfigError(errors)
        add_routes(app, commands)
        app.include_router(tenant_routes(commands))
        self._app = app
        self._config = config
        self._takes_images = takes_images
        self._keys = keys
        self._max_requests = max_requests
        self._num_requests = 0  # open requests whose body has arrived
        self._bodies = Bodies(config.max_body_bytes, timeout_s=body_timeout_s)
        self._parts = Bodies(MAX_BATCH_BYTES, timeout_s=body_timeout_s)
        self._admission = Admission(
            max_running=config.max_concurrent_requests,
            max_queued=config.max_queued_requests,
            timeout_s=queue_timeout_s,
        )
        repeated = partial(commands.command, "repeat") if follows else None
        self._retries = Retries(self._run, retries or RetryOptions(), repeated)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                await self._retries.close()
        elif scope["path"].startswith(f"{TENANTS_PREFIX}/"):
            await answer_errors(scope, send, partial(self._serve_tenant, scope, receive))
        elif is_open(scope):
            await answer_errors(scope, send, partial(self._handle, scope, receive))
        else:
            handle = partial(self._serve, scope, receive)
            await answer_errors(scope, send, handle, replaces_500=False)

    def counts(self) -> Mapping[str, float]:
        """Gauges and counters, named as in Prometheus. Callable from any thread."""
        return {
            "http_requests_running": self._admission.num_running,
            "http_requests_queued": self._admission.num_queued,
            "http_requests_refused_total": self._admission.num_refused,
            "http_requests_replayed_total": self._retries.num_replayed,
            "http_answers_kept": self._retries.num_kept,
            "http_requests_remembered": self._retries.num_remembered,
        }

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id.set(authenticate(scope, self._keys))
        request = await self._bodies.read(scope, receive)
        if request is None:
            return
        try:
            if request.body:
                check_body(
                    request.body, scope["path"], self._config, takes_images=self._takes_images
                )
            if self._num_requests >= self._max_requests:
                message = f"{self._num_requests} requests are open, as many as may be."
                raise RefusedError(429, "too_many_requests", message, headers={"retry-after": "1"})
            self._num_requests += 1
            try:
                await self._retries(scope, request, send)
            finally:
                self._num_requests -= 1
        finally:
            request.release()

    async def _serve_tenant(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer another run. Its requests have numbers, so that repeating one has no effect."""
        if authenticate(scope, self._keys) is not None:
            raise RefusedError(400, "invalid_request", "A training run has no session.")
        request = await self._parts.read(scope, receive)
        if request is not None:
            try:
                await self._handle(scope, request, send)
            finally:
                request.release()

    async def _run(self, scope: Scope, request: BufferedRequest, send: Send) -> None:
        async def handle(send: Send) -> None:
            async with self._admission.place(scope, request) as has_place:
                if has_place:
                    await self._handle(scope, request, send)

        await answer_errors(scope, send, handle)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with request_scope():
            await self._app(scope, receive, send)


MAX_BATCH_BYTES = 64 << 20  # of another run's messages, or of a part of its adapter
MAX_DEPTH = 64  # levels of nesting in the JSON

_MAX_INTEGER = (1 << 64) - 1
_MIN_INTEGER = -(1 << 63)
_TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_REPETITIONS = tuple(
    low + what for low in ("min", "max") for what in ("Items", "Length", "Properties", "Contains")
)
_MAX_REPETITIONS = 100_000  # no completion has as many tokens
_LITERALS = ("choice", "const", "enum", "grammar", "pattern", "regex")
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
_MAX_SQUARES = 10_000_000  # of lengths; xgrammar may take a third of a second for them
_TEXT_PARTS = frozenset(
    [
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
    ]
)
_MEDIA = frozenset(
    [
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
        "media_io_kwargs",
        "mm_processor_kwargs",
        "multi_modal_data",
        "prompt_embeds",
        "video",
        "video_embeds",
        "video_url",
    ]
)


def check_body(
    body: bytes, path: str, limits: EndpointConfig, *, takes_images: bool = False
) -> None:
    """Check a request's body. On `/v1/messages` a `max_tokens` above the limit is not an error: the
    answer is cut off at the limit. Raises RefusedError: the body is invalid (400). The error names
    the field if one is wrong."""
    content = _parse_json(body)
    if not isinstance(content, dict):
        return
    _check_media(content, takes_images)
    _check_constraints(content.get("structured_outputs"))
    n = _integer(content, "n")
    num_completions = (1 if n is None else n) * _num_prompts(content)
    if num_completions > limits.max_n:
        raise _too_large("n", f"n times the prompts is {num_completions}", limits.max_n)
    for name in _TOKEN_LIMITS:
        value = _integer(content, name)
        is_limited = limits.max_tokens and path != MESSAGES_PATH
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
    level, depth, squares = [content], 0, 0
    while level:
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                if depth == MAX_DEPTH:
                    raise _too_deep()
                below.extend(value.values() if isinstance(value, dict) else value)
                if isinstance(value, dict):
                    squares += _checked_squares(value)
            elif isinstance(value, float):
                if value - value != 0:  # infinity: a number such as 1e999
                    raise _bad_json("a number is too large")
            elif isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
                raise _bad_json("an integer has more than 64 bits")
        level, depth = below, depth + 1
    if squares > _MAX_SQUARES:
        message = "Its alternatives, patterns and literals are too long to compile."
        raise RefusedError(400, "limit_exceeded", message)


def check_options(options: Mapping[str, Any]) -> None:
    """Check the engine options of a request that did not come as JSON over HTTP. Raises
    RefusedError: a value would harm the engine (400)."""
    _check_values(dict(options))
    _check_constraints(options.get("structured_outputs"))


def _check_constraints(constraints: Any) -> None:
    """Check schemas that are strings; they are parsed as the application parses them."""
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


def _checked_squares(schema: dict[str, Any]) -> int:
    """Check the repetitions of a schema; return the sum of the squares of its literals' lengths."""
    for name in _REPETITIONS:
        value = schema.get(name)
        if isinstance(value, int | float) and value > _MAX_REPETITIONS:
            raise _too_large(name, f"{name} is {value}", _MAX_REPETITIONS)
    squares = 0
    for name in _LITERALS:
        value = schema.get(name)
        texts = value if isinstance(value, list) else [value]
        if name == "grammar" and isinstance(value, str):
            texts = _QUOTED.findall(value)
        squares += sum(len(text) ** 2 for text in texts if isinstance(text, str))
    return squares


def _num_prompts(content: dict[str, Any]) -> int:
    """Count the prompts. ``prompt`` is one prompt (text or token ids) or a list of prompts;
    ``messages`` is a list of conversations on the batched route."""
    counts = [1]
    for name in ("prompt", "messages"):
        value = content.get(name)
        if isinstance(value, list) and not all(isinstance(item, int) for item in value):
            batched = name == "prompt" or any(isinstance(item, list) for item in value)
            counts.append(len(value) if batched else 1)
    return max(counts)


def _integer(content: dict[str, Any], name: str) -> int | None:
    """Read a limited field, which must be an integer or absent. The application also accepts "5"
    and 5.0, which would bypass the limit."""
    value = content.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise RefusedError(400, "invalid_type", f"{name} must be an integer.", param=name)


def _check_media(content: dict[str, Any], takes_images: bool) -> None:
    """Check that everything is text, except images of a policy that takes them."""
    modalities = content.get("modalities")
    if isinstance(modalities, list) and any(name != "text" for name in modalities):
        raise _not_text("modalities")
    for name in _MEDIA & content.keys():
        _require_text({name: content[name]}, "")
    images: list[str] | None = [] if takes_images else None
    _require_text(content.get("messages"), "messages", images)
    _require_text(content.get("input"), "input")
    _require_text(content.get("system"), "system", is_part=True)
    if images is not None and len(images) > MAX_IMAGES:
        raise _too_large("messages", f"the number of images is {len(images)}", MAX_IMAGES)


def _require_text(
    value: Any, place: str, images: list[str] | None = None, *, is_part: bool = False
) -> None:
    """Check messages, or parts of a message's content, in lists of any depth. The places of images
    are added to ``images``; None: they are not allowed."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            _require_text(item, f"{place}[{index}]", images, is_part=is_part)
    elif images is not None and is_part and _is_image(value):
        images.append(place)
    elif isinstance(value, dict):
        kind = value.get("type", "text")
        if is_part and not (isinstance(kind, str) and kind in _TEXT_PARTS):
            raise _not_text(place)
        for name in _MEDIA & value.keys():
            if value[name] is not None:
                raise _not_text(f"{place}.{name}" if place else name)
        for name in ("content", "output", *(_TEXT_PARTS if is_part else ())):
            _require_text(value.get(name), f"{place}.{name}", images, is_part=True)


def _is_image(part: Any) -> bool:
    """Whether a part is an image in the one form that is served; the URL is checked later."""
    if not isinstance(part, dict) or part.keys() != {"type", "image_url"}:
        return False
    url = part["image_url"]
    is_plain = isinstance(url, dict) and "url" in url and url.keys() <= {"url", "detail"}
    return part["type"] == "image_url" and is_plain and isinstance(url["url"], str)


def _not_text(place: str) -> RefusedError:
    message = f"{place} is neither text nor of another kind that the served policy takes."
    return RefusedError(400, "text_only", message, param=place)


def _too_large(name: str, what: str, limit: int) -> RefusedError:
    message = f"{what}; this server allows {limit}."
    return RefusedError(400, "limit_exceeded", message, param=name)


def _too_deep() -> RefusedError:
    message = f"The JSON is nested more than {MAX_DEPTH} deep."
    return RefusedError(400, "nested_too_deeply", message)


def _bad_json(why: str) -> RefusedError:
    return RefusedError(400, "invalid_json", f"The body is not JSON in UTF-8: {why}.")
