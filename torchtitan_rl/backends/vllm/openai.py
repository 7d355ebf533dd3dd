"""vLLM's OpenAI-compatible server over our router, for the endpoint's process alone.

The application is assembled from vLLM's own serving classes, routes and error handlers: request
semantics are vLLM's. Only its engine core is ours (`vllm_openai_core`). What differs from
``vllm serve``: few routes, no CORS, no chat templates from clients, logprobs are of the processed
distribution, a stream that fails before its first token is an error response rather than an event,
and answers to requests with ``return_token_ids`` name the policy version of each token:
``choices[i].policy_versions`` is a list of ``[first token, version]`` (in a stream on the choice's
last chunk).

Invariants: a request that is refused, anywhere, gets an OpenAI error object and disturbs no other;
no answer carries a stack trace or a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Literal

import prometheus_client
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.basic import router as basic_router
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import get_prometheus_registry

from torchtitan_rl.backends.vllm.openai_answers import Chat, Completions, error_response
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest, RouterCore, refuse_unserved
from torchtitan_rl.config.checks.endpoint import template_error
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving import http_auth, http_context
from torchtitan_rl.serving.link import FAILED, ControllerLink
from torchtitan_rl.serving.messages import SystemStatus

logger = logging.getLogger(__name__)

_DEAD = "the endpoint has failed"
_FAILED = "internal error"
_SERVED = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/version",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIOptions:
    """What the HTTP layer must know of the model. ``max_model_len`` is that of the replicas."""

    model: str  # a directory in Hugging Face format; its weights are not read
    max_model_len: int
    model_name: str = "policy"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # on CUDA; a CPU computes in float32
    tool_call_parser: str = ""  # vLLM's names; empty: tool calls stay text
    reasoning_parser: str = ""
    chat_template: str = ""  # a file; empty: the tokenizer's own
    max_tokens: int = 0  # of one completion; 0: what the context has room for
    generation_config: Literal["auto", "vllm"] = "auto"  # vllm: not the model's own defaults


def build_application(options: OpenAIOptions, link: ControllerLink) -> FastAPI:
    """The whole application, without keys and limits. It runs on the event loop that ``link`` is
    attached to; its lifespan must be run.

    Raises:
        ConfigError: vLLM knows no such parser, or the chat template cannot be read.
    """
    _check_names(options)
    llm = RouterLLM(_vllm_config(options), link)
    app = FastAPI(
        title="torchtitan-rl",
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _lifespan(llm),
    )
    app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    _serve_model(app, llm, options)
    for router in (chat_router, completion_router, models_router, tokenize_router, basic_router):
        served = APIRouter()
        served.routes.extend(route for route in router.routes if route.path in _SERVED)
        app.include_router(served)
    _watch_routes(app, llm, link)
    handle_errors(app)
    return app


def _check_names(options: OpenAIOptions) -> None:
    errors = []
    for kind, name, manager in (
        ("tool_call_parser", options.tool_call_parser, ToolParserManager),
        ("reasoning_parser", options.reasoning_parser, ReasoningParserManager),
    ):
        known = manager.list_registered()
        if name and name not in known:
            errors.append(f"endpoint.{kind} = {name!r}: vLLM has {', '.join(known)}")
    if options.chat_template and (message := template_error(options.chat_template)):
        errors.append(f"endpoint.chat_template = {options.chat_template!r}: {message}")
    if errors:
        raise ConfigError(errors)


class RouterLLM(AsyncLLM):
    """vLLM's asynchronous front end with our engine core."""

    def __init__(self, vllm_config: Any, link: ControllerLink) -> None:
        reasoning_parser = vllm_config.structured_outputs_config.reasoning_parser
        core = RouterCore(link, model_reasons=bool(reasoning_parser))
        self._link = link
        self._is_ending = False
        with _core_client(core):
            super().__init__(
                vllm_config=vllm_config,
                executor_class=Executor,  # never made: it belongs to the engine core
                log_stats=True,
                log_requests=False,
            )
        core.fail = self._fail

    def generate(
        self, prompt: Any, sampling_params: VllmSamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """As AsyncLLM's.

        Raises:
            VLLMValidationError: it asks for what is not served.
        """
        refuse_unserved(sampling_params)
        _check_session(options.get("session_id"))
        if isinstance(prompt, dict) and prompt.get("cache_salt") is not None:
            raise VLLMValidationError("cache_salt is not served here", parameter="cache_salt")
        return super().generate(prompt, sampling_params, request_id, **options)

    def start(self) -> None:
        """Start to take outputs; on the event loop. Where that ends by itself no request would
        ever be answered: all get an error, and the link is told."""
        self._run_output_handler()
        self.output_handler.add_done_callback(self._on_outputs_end)

    def shutdown(self, timeout: float | None = None) -> None:
        self._is_ending = True
        super().shutdown(timeout)

    def _on_outputs_end(self, task: asyncio.Task[None]) -> None:
        if self._is_ending:
            return
        error = None if task.cancelled() else task.exception()
        # vLLM tells its requests of an exception, but not of a cancellation.
        self.output_processor.propagate_error(RefusedRequest(FAILED))
        self._link.fail(f"outputs are no longer taken: {error or 'see the endpoint log'}")

    def _fail(self, request_id: str, error: RefusedRequest) -> None:
        """End a request, with all that the same client wants of its prompt, by an error."""
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        aborted = self.output_processor.abort_requests([whole], internal=True)
        self.engine_core.abort(aborted)
        state.queue.put(error)  # takes the place of the abort's output


def _check_session(named: str | None) -> None:
    """Raises `VLLMValidationError`: the body names none, or another one than the headers."""
    if named is None:
        return
    if not http_auth.is_session_id(named):
        message = "session_id: use 1 to 128 characters of A-Z, a-z, 0-9 and ._:/-"
        raise VLLMValidationError(message, parameter="session_id")
    if http_context.session_id.get() not in (None, named):
        message = "the body and the headers name different sessions"
        raise VLLMValidationError(message, parameter="session_id")


@contextlib.contextmanager
def _core_client(core: RouterCore) -> Iterator[None]:
    """AsyncLLM makes its engine core by this factory and has no argument for another."""
    factory = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(factory)


def _vllm_config(options: OpenAIOptions) -> Any:
    return AsyncEngineArgs(
        model=options.model,
        served_model_name=[options.model_name],
        dtype="float32" if options.device == "cpu" else options.dtype,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_model_len,
        enforce_eager=True,  # nothing is compiled here
        enable_chunked_prefill=False,
        async_scheduling=False,
        generation_config=options.generation_config,
        override_generation_config=(
            {"max_new_tokens": options.max_tokens} if options.max_tokens else {}
        ),
        reasoning_parser=options.reasoning_parser,
    ).create_engine_config()


def _serve_model(app: FastAPI, llm: RouterLLM, options: OpenAIOptions) -> None:
    """Sets up what vLLM's routes look for in the application's state."""
    template: dict[str, Any] = {
        "chat_template": load_chat_template(options.chat_template or None),
        "chat_template_content_format": "auto",
    }
    parsers: dict[str, Any] = {
        "enable_auto_tools": bool(options.tool_call_parser),
        "tool_parser": options.tool_call_parser or None,
        "reasoning_parser": options.reasoning_parser,
    }
    if options.tool_call_parser:
        from vllm.parser.metrics import init_parser_metrics

        init_parser_metrics(model_name=options.model_name)
    renderer = OnlineRenderer(
        llm.model_config, llm.renderer, request_logger=None, **template, **parsers
    )
    renderer.warmup()
    # The path of the model is nobody's business.
    names = [BaseModelPath(name=options.model_name, model_path=options.model_name)]
    models = OpenAIServingModels(llm, names)
    common: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
    state = app.state
    state.engine_client = llm
    state.openai_serving_models = models
    state.openai_serving_chat = Chat(llm, models, "assistant", **common, **template, **parsers)
    state.openai_serving_completion = Completions(llm, models, **common)
    state.serving_tokenization = ServingTokenization(models, renderer, **template)


@contextlib.asynccontextmanager
async def _lifespan(llm: RouterLLM) -> AsyncIterator[None]:
    llm.start()
    freeze_gc_heap()
    try:
        yield
    finally:
        llm.shutdown()


def _watch_routes(app: FastAPI, llm: RouterLLM, link: ControllerLink) -> None:
    @app.get("/health", responses={HTTPStatus.SERVICE_UNAVAILABLE.value: {}})
    async def health() -> Response:
        status = link.status()
        if llm.errored:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, _DEAD, "endpoint_failed")
        if not status.is_healthy:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, status.cause, "unhealthy")
        return JSONResponse({"status": "ok", "policy_version": status.newest_version})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(get_prometheus_registry()) + _gauges(link.status())
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _gauges(status: SystemStatus) -> bytes:
    """In Prometheus's text format; names may carry labels, and end in "_total" where they count."""
    gauges = {"torchtitan_rl_healthy": float(status.is_healthy), **status.gauges}
    families: defaultdict[str, list[str]] = defaultdict(list)  # the lines of one stand together
    for name, value in sorted(gauges.items()):
        families[name.partition("{")[0]].append(f"{name} {value}\n")
    return "".join(
        f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}\n{''.join(lines)}"
        for family, lines in families.items()
    ).encode()


def handle_errors(app: FastAPI) -> None:
    """vLLM's handlers, but for those that name internals or end the server."""

    async def refused(_: Request, error: Any) -> Response:
        return error_response(error.http_status, error.message, error.code)

    async def dead(_: Request, error: Exception) -> Response:
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, _DEAD, "endpoint_failed")

    async def failed(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, _FAILED, "internal_error")

    init_exception_handler(app)
    app.add_exception_handler(HTTPException, http_exception_handler)
    app.add_exception_handler(RefusedRequest, refused)
    app.add_exception_handler(EngineDeadError, dead)
    app.add_exception_handler(EngineGenerateError, failed)
    app.add_exception_handler(Exception, failed)
