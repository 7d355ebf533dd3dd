"""vLLM's OpenAI-compatible server in front of our router. It runs in the endpoint's process.

The application is assembled from vLLM's own serving classes, routes and error handlers, so a
request has the same meaning as in vLLM. Only the engine core is replaced (`openai_core`).
Differences from ``vllm serve``:

- Only a few routes are served; there is no CORS, and clients cannot send chat templates.
- Control strings in messages are treated as plain text.
- Logprobs are those of the processed distribution.
- A stream that fails before its first token is an error response, not an event.
- Images are data URLs; nothing is fetched (`openai_images`).
- With ``return_token_ids`` an answer (of a stream, each choice's last chunk) has
  ``policy_versions``, a list of ``[first token, version]``.

Invariants: a refused request gets an OpenAI error object and affects no other request. No answer
contains a stack trace or a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import prometheus_client
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.api_router import router as chat_router
from vllm.entrypoints.openai.completion.api_router import router as completion_router
from vllm.entrypoints.openai.models.api_router import router as models_router
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import router as responses_router
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.instrumentator.basic import router as basic_router
from vllm.entrypoints.serve.tokenize.api_router import router as tokenize_router
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import get_prometheus_registry

from torchtitan_rl.backends.specs import EndpointSpec
from torchtitan_rl.backends.vllm.adapters import adapter_arguments, adapter_requests
from torchtitan_rl.backends.vllm.openai_chat import Chat, Completions, Messages, messages_routes
from torchtitan_rl.backends.vllm.openai_constraints import (
    ConstraintPolicy,
    refuse_unsupported_schema,
)
from torchtitan_rl.backends.vllm.openai_core import (
    RefusedRequest,
    RouterCore,
    refuse_unserved,
    session_of_request,
)
from torchtitan_rl.backends.vllm.openai_images import (
    CONNECTOR,
    DataUrls,
    ImageScope,
)
from torchtitan_rl.backends.vllm.openai_responses import Responses, kept_responses
from torchtitan_rl.backends.vllm.sampling import GRAMMAR_BACKEND
from torchtitan_rl.config.lora import AdapterFolder
from torchtitan_rl.config.model import takes_images
from torchtitan_rl.images import MAX_IMAGES, image_reader
from torchtitan_rl.rollout.chatml import ContentTokenizer
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import FAILED, ControllerLink, SystemStatus
from torchtitan_rl.serving.routes import refused

logger = logging.getLogger(__name__)

_MAX_ID_CHARS = 300
_SERVED = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/version",
}


def build_application(spec: EndpointSpec, link: ControllerLink) -> FastAPI:
    """Build the application without keys and limits. The server must run the application, and its
    ASGI lifespan, on the event loop to which ``link`` is attached.
    """
    if takes_images(spec.model):
        reader = image_reader(spec.model)
        assert reader is not None
        DataUrls.reader = reader
        os.environ["VLLM_MEDIA_CONNECTOR"] = CONNECTOR
    llm = RouterLLM(_vllm_config(spec), link, spec.endpoint)
    app = FastAPI(
        title="torchtitan-rl",
        docs_url=None,
        redoc_url=None,
        lifespan=lambda _: _lifespan(llm),
    )
    app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
    _serve_model(app, llm, spec.endpoint, spec.adapters)
    for router in (
        chat_router,
        completion_router,
        responses_router,
        models_router,
        tokenize_router,
        basic_router,
    ):
        served = APIRouter()
        served.routes.extend(route for route in router.routes if route.path in _SERVED)
        app.include_router(served)
    app.include_router(kept_responses(app.state.openai_serving_responses.store))
    app.include_router(messages_routes(app.state.anthropic_serving_messages))
    _add_health_and_metrics(app, llm, link)
    handle_errors(app)
    app.add_middleware(ImageScope)
    return app


class RouterLLM(AsyncLLM):
    """vLLM's asynchronous front end, with `RouterCore` as the engine core."""

    def __init__(self, vllm_config: Any, link: ControllerLink, endpoint: EndpointConfig) -> None:
        reasoning_parser = vllm_config.structured_outputs_config.reasoning_parser
        core = RouterCore(link, model_reasons=bool(reasoning_parser))
        self.constraints = ConstraintPolicy(endpoint.constraints, link.count)
        self._scores_prompts = endpoint.prompt_logprobs
        self._link = link
        self._is_ending = False
        with _core_client(core):
            super().__init__(
                vllm_config=vllm_config,
                executor_class=Executor,  # unused: only vLLM's engine core needs it
                log_stats=True,
                log_requests=False,
            )
        core.fail = self._fail

    def generate(
        self, prompt: Any, sampling_params: VllmSamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate as AsyncLLM does. Raises VLLMValidationError: an option is not served, or the
        id or the session is invalid."""
        if len(request_id) > _MAX_ID_CHARS:  # it is kept with each turn and repeated in each chunk
            message = f"the id (request_id, X-Request-Id) has over {_MAX_ID_CHARS} characters"
            raise VLLMValidationError(message, parameter="request_id")
        refuse_unserved(sampling_params, scores_prompts=self._scores_prompts)
        self.constraints.free(sampling_params)
        refuse_unsupported_schema(sampling_params)
        session_of_request(options.get("session_id"))  # raises for an invalid session
        if isinstance(prompt, dict) and prompt.get("cache_salt") is not None:
            raise VLLMValidationError("cache_salt is not served here", parameter="cache_salt")
        return super().generate(prompt, sampling_params, request_id, **options)

    def start(self) -> None:
        """Start the task that processes outputs, on the event loop. If it ends before `shutdown`,
        no request can be answered any more: all requests get an error and the link fails."""
        self._run_output_handler()
        self.output_handler.add_done_callback(self._on_outputs_end)

    def shutdown(self, timeout: float | None = None) -> None:
        self._is_ending = True
        super().shutdown(timeout)

    def _on_outputs_end(self, task: asyncio.Task[None]) -> None:
        if self._is_ending:
            return
        error = None if task.cancelled() else task.exception()
        # vLLM passes an exception of the task on to its requests, but not a cancellation.
        self.output_processor.propagate_error(RefusedRequest(RefusedError(*FAILED)))
        self._link.fail(f"outputs are no longer taken: {error or 'see the endpoint log'}")

    def _fail(self, request_id: str, error: RefusedRequest) -> None:
        state = self.output_processor.request_states.get(request_id)
        if state is None:
            return
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        aborted = self.output_processor.abort_requests([whole], internal=True)
        self.engine_core.abort(aborted)
        state.queue.put(error)  # replaces the output of the abort


@contextlib.contextmanager
def _core_client(core: RouterCore) -> Iterator[None]:
    """Make `AsyncLLM` use ``core``: it has no argument for this, so the factory that it calls is
    replaced."""
    factory = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = staticmethod(factory)


def _vllm_config(spec: EndpointSpec) -> Any:
    endpoint, images = spec.endpoint, dict[str, Any]()
    if takes_images(spec.model):
        images["limit_mm_per_prompt"] = {"image": MAX_IMAGES, "video": 0}
        images["mm_processor_cache_gb"] = 0
    return AsyncEngineArgs(
        model=str(spec.model),  # the weights are not read
        served_model_name=[endpoint.model_name],
        dtype="float32" if spec.device == "cpu" else spec.dtype,
        max_model_len=spec.max_model_len,
        max_num_batched_tokens=spec.max_model_len,
        enforce_eager=True,  # nothing is compiled here
        enable_chunked_prefill=False,
        async_scheduling=False,
        generation_config=spec.generation_config,
        override_generation_config=(
            {"max_new_tokens": endpoint.max_tokens} if endpoint.max_tokens else {}
        ),
        reasoning_parser=endpoint.reasoning_parser,
        **adapter_arguments(spec.adapters),
        # the same backend as the engines use
        structured_outputs_config=StructuredOutputsConfig(backend=GRAMMAR_BACKEND),
        **images,
    ).create_engine_config()


def _serve_model(
    app: FastAPI, llm: RouterLLM, endpoint: EndpointConfig, adapters: Sequence[AdapterFolder]
) -> None:
    template: dict[str, Any] = {
        "chat_template": load_chat_template(endpoint.chat_template or None),
        "chat_template_content_format": "auto",
    }
    parsers: dict[str, Any] = {
        "enable_auto_tools": bool(endpoint.tool_call_parser),
        "tool_parser": endpoint.tool_call_parser or None,
        "reasoning_parser": endpoint.reasoning_parser,
    }
    if endpoint.tool_call_parser:
        from vllm.parser.metrics import init_parser_metrics

        init_parser_metrics(model_name=endpoint.model_name)
    # Mistral's tokenizer already treats content as plain text.
    if not is_mistral_tokenizer(llm.renderer.tokenizer):
        llm.renderer.tokenizer = ContentTokenizer(llm.renderer.tokenizer)
    renderer = OnlineRenderer(
        llm.model_config, llm.renderer, request_logger=None, **template, **parsers
    )
    renderer.warmup()
    # Clients see the name of the model, not its path.
    names = [BaseModelPath(name=endpoint.model_name, model_path=endpoint.model_name)]
    models = OpenAIServingModels(llm, names)
    models.lora_requests |= adapter_requests(adapters)
    common: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
    state = app.state
    state.engine_client = llm
    state.openai_serving_models = models
    state.openai_serving_chat = Chat(llm, models, "assistant", **common, **template, **parsers)
    state.openai_serving_completion = Completions(llm, models, **common)
    state.openai_serving_responses = Responses(llm, models, **common, **template, **parsers)
    state.anthropic_serving_messages = Messages(
        llm, models, "assistant", **common, **template, **parsers
    )
    state.serving_tokenization = ServingTokenization(models, renderer, **template)


@contextlib.asynccontextmanager
async def _lifespan(llm: RouterLLM) -> AsyncIterator[None]:
    llm.start()
    freeze_gc_heap()
    try:
        yield
    finally:
        llm.shutdown()


def _add_health_and_metrics(app: FastAPI, llm: RouterLLM, link: ControllerLink) -> None:
    @app.get("/health", responses={503: {}})
    async def health() -> Response:
        status = link.status()
        if llm.errored:
            raise RefusedError(*FAILED)
        if not status.is_healthy:
            raise RefusedError(503, "unhealthy", status.cause)
        return JSONResponse({"status": "ok", "policy_version": status.newest_version})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = prometheus_client.generate_latest(get_prometheus_registry()) + _gauges(link.status())
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


def _gauges(status: SystemStatus) -> bytes:
    """Return the gauges in Prometheus's text format. Names may have labels; those of counters end
    in "_total"."""
    gauges = {"torchtitan_rl_healthy": float(status.is_healthy), **status.gauges}
    families: defaultdict[str, list[str]] = defaultdict(list)  # lines of a family must be adjacent
    for name, value in sorted(gauges.items()):
        families[name.partition("{")[0]].append(f"{name} {value}\n")
    return "".join(
        f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}\n{''.join(lines)}"
        for family, lines in families.items()
    ).encode()


def handle_errors(app: FastAPI) -> None:
    """Install vLLM's error handlers, except those that show internals or end the server."""

    async def answer(request: Request, error: Any) -> Response:
        return await refused(request, error.refusal)

    async def dead(request: Request, _: Exception) -> Response:
        return await refused(request, RefusedError(*FAILED))

    async def failed(request: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return await refused(request, RefusedError(500, "internal_error", "internal error"))

    init_exception_handler(app)
    app.add_exception_handler(HTTPException, http_exception_handler)
    app.add_exception_handler(RefusedError, refused)
    app.add_exception_handler(RefusedRequest, answer)
    app.add_exception_handler(EngineDeadError, dead)
    app.add_exception_handler(EngineGenerateError, failed)
    app.add_exception_handler(Exception, failed)
