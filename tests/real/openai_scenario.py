"""vLLM's own server and our endpoint's application over one tiny model, in one process each way:
``python -m tests.real.openai_scenario DIR`` serves until its standard input is closed.

It prints one JSON object with what `play_agents` returned and with five base URLs: ``own`` and
``ours`` parse tool calls, ``own_reasoning`` and ``ours_reasoning`` also parse reasoning;
``ours_free`` applies no constraints. Ours is one engine under a router, with a bridge and a link
for each application. What happens to a request of ours depends on its session, see `Happenings`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_rl.backends.vllm.cpu import engine_environment

os.environ.update(engine_environment(1))

from starlette.applications import Starlette
from starlette.routing import Mount

from tests.real.agent_scenario import play_agents
from tests.real.local_endpoint import local_endpoint
from tests.real.models import tiny_model
from tests.support.endpoints import endpoint_spec
from tests.support.loop_replica import loop_replica
from torchtitan_rl.backends.monarch.http_server import HttpServer
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.engine import VllmEngine
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.bridge import EndpointBridge
from torchtitan_rl.serving.config import Constraints, listen
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import SystemStatus
from torchtitan_rl.types import Completion, GenerationRequest, OnProgress, Progress, VersionRun

MAX_MODEL_LEN = 512
TOOL_PARSER, REASONING_PARSER = "hermes", "deepseek_r1"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


class Happenings:
    """Completes requests, as the router does, but for those of sessions with these names."""

    def __init__(self, router: GeneratorRouter) -> None:
        self._router = router
        self.num_sampled = 0  # tokens of counted completions

    async def complete(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        name = request.session_id or ""
        closed = RefusedError(409, "session_closed", f"session {name}")
        if name == "closed" or (name == "closed-to-one" and request.request_id.startswith("0_")):
            raise closed
        if name == "lost":
            raise ReplicaError("replica0 died of /some/path")
        if name == "relabelled":
            return await self._relabelled(request, on_progress)
        if name == "cut":
            return await self._cut(request, on_progress)
        completion = await self._router.generate(request, on_progress)
        if name == "closed-late":
            raise closed
        if name == "counted":
            self.num_sampled += len(completion.token_ids)
        return completion

    async def _relabelled(
        self, request: GenerationRequest, on_progress: OnProgress | None
    ) -> Completion:
        """As if weights had changed twice."""
        runs = (VersionRun(0, 3), VersionRun(5, 4), VersionRun(6, 7))

        def relabel(progress: Progress) -> None:
            assert on_progress is not None
            end = progress.start + len(progress.token_ids)
            so_far = tuple(run for run in runs if run.start < end)
            on_progress(replace(progress, version_runs=so_far))

        completion = await self._router.generate(request, on_progress and relabel)
        return replace(completion, version_runs=runs)

    async def _cut(self, request: GenerationRequest, on_progress: OnProgress | None) -> Completion:
        """While the engine is emptied again and again."""
        completing = asyncio.create_task(self._router.generate(request, on_progress))
        while not completing.done():
            await self._router.pause(mode="abort")
            await self._router.resume()
            await asyncio.sleep(0.03)
        return await completing


def build_engine(model: Path) -> VllmEngine:
    return VllmEngine(
        GeneratorSpec(
            model=model,
            generator=GeneratorConfig(max_model_len=MAX_MODEL_LEN, kv_cache_bytes=32 << 20),
            reasoning_parser=REASONING_PARSER,
        )
    )


async def build_own(model: Path, template: Path, engines: list[Any]) -> Any:
    """vLLM's applications, as ``vllm serve`` makes them, over one engine of the same settings."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    flags = (
        f"--model {model} --served-model-name policy --seed 0 --dtype float32 --enforce-eager"
        f" --max-model-len {MAX_MODEL_LEN} --max-num-batched-tokens 4096 --max-num-seqs 128"
        " --no-enable-chunked-prefill --no-async-scheduling --logprobs-mode processed_logprobs"
        f" --kv-cache-memory-bytes {32 << 20} --chat-template {template}"
        f" --enable-auto-tool-choice --tool-call-parser {TOOL_PARSER}"
    )
    routes = []
    for name, more in {"tools": "", "reasoning": f" --reasoning-parser {REASONING_PARSER}"}.items():
        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args((flags + more).split())
        args.structured_outputs_config.reasoning_parser = args.reasoning_parser
        if not engines:
            engines.append(AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args)))
        app = build_app(args, ("generate",), engines[0].model_config)
        await init_app_state(engines[0], app.state, args, ("generate",))
        routes.append(Mount(f"/{name}", app))
    return Starlette(routes=routes)


def our_endpoint(
    model: Path,
    template: Path,
    router: GeneratorRouter,
    reasoning_parser: str = "",
    constraints: Constraints = "constrained",
) -> AbstractAsyncContextManager[str]:
    """Our application, of a controller that counts."""
    happenings = Happenings(router)
    spec = endpoint_spec(
        model,
        max_model_len=MAX_MODEL_LEN,
        tool_call_parser=TOOL_PARSER,
        reasoning_parser=reasoning_parser,
        chat_template=str(template),
        constraints=constraints,
    )

    def status(bridge: EndpointBridge) -> SystemStatus:
        gauges = {
            'tokens{replica="replica0"}': sum(router.outstanding_tokens().values()),
            "aborted": bridge.counts.aborted,
            "sampled": happenings.num_sampled,
            **bridge.counts.gauges(),
        }
        return SystemStatus(is_healthy=True, gauges=gauges)

    return local_endpoint(
        lambda link: build_application(spec, link),
        happenings.complete,
        handlers={},
        status=status,
    )


async def main(root: Path) -> None:
    model, template = tiny_model(root / "model"), root / "template.jinja"
    template.write_text(TEMPLATE)
    engines: list[Any] = []
    own = HttpServer(
        lambda: build_own(model, template, engines),
        at_end=lambda: [engine.shutdown() for engine in engines],  # type: ignore[arg-type]
        listening=listen("127.0.0.1", 0),
    )
    starting = asyncio.create_task(asyncio.to_thread(own.start))
    loop = EngineLoop(build_engine(model), None, is_leader=True)
    loop.start()
    router = GeneratorRouter([loop_replica("replica0", loop)])
    spec = endpoint_spec(model, max_model_len=MAX_MODEL_LEN, chat_template=str(template))
    agents = await play_agents(replace(spec, generation_config="vllm"), router)
    await starting  # vLLM's metrics are those of the front end that was made last
    urls = {
        name: f"http://127.0.0.1:{own.port}/{path}"
        for name, path in (("own", "tools"), ("own_reasoning", "reasoning"))
    }
    async with (
        our_endpoint(model, template, router, REASONING_PARSER) as urls["ours_reasoning"],
        our_endpoint(model, template, router, constraints="free") as urls["ours_free"],
        our_endpoint(model, template, router) as urls["ours"],
    ):
        print(json.dumps({"urls": urls, "agents": agents}), flush=True)
        os.dup2(2, 1)  # vLLM logs to stdout, which nobody reads from now on
        await asyncio.to_thread(sys.stdin.read)
    await asyncio.to_thread(own.close, 1.0)
    await router.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
