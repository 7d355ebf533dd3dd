"""The engines that `benchmarks/generation.py` compares, each in its own worker process.

A side is called with the name of a way to run a workload (`one`, `rounds`, `all`, `offline`) and
the workload; it answers with a `SideResult`. All engines have the same settings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.workload import (
    Complete,
    Timing,
    Workload,
    all_at_once,
    in_rounds,
    one_after_another,
    request_of,
)
from torchtitan_rl.generation.engine import Engine
from torchtitan_rl.types import Completion, GenerationRequest

MAX_MODEL_LEN = 2304  # three turns of the longest answers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The settings of all engines. ``max_running``: the maximum number of requests in a batch, and
    the number of rollouts in a synchronous batch."""

    policy: str
    max_running: int = 64
    max_model_len: int = MAX_MODEL_LEN
    kv_cache_bytes: int = 512 << 20
    device: str = "cpu"
    threads: int = 1  # OpenMP threads of the engine's process, on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One engine step: its content and its duration."""

    tokens: int  # sampled in this step, one for each request in the batch
    prompt_tokens: int  # of requests that were added right before this step
    kv_use: float  # share of the cache in use after this step
    seconds: float
    adding_s: float  # the engine's time to accept those requests, before this step


@dataclass(frozen=True, slots=True, kw_only=True)
class SideResult:
    timing: Timing
    steps: tuple[StepSample, ...] = ()  # empty if the side cannot measure them


def build_loop(settings: EngineSettings) -> Callable[[str, Any], Any]:
    """Our engine loop in this process, without router or Monarch."""
    from torchtitan_rl.backends.vllm.engine import VllmEngine
    from torchtitan_rl.generation.loop import EngineLoop, start_loop

    engines: list[MeasuredEngine] = []

    def build() -> EngineLoop:
        engines.append(MeasuredEngine(VllmEngine(_our_spec(settings))))
        return EngineLoop(engines[0], None, is_leader=True)

    loop = start_loop(build, name="benchmark")

    async def complete(request: GenerationRequest) -> tuple[int, ...]:
        return (await asyncio.wrap_future(loop.submit(request))).token_ids

    def side(name: str, workload: Any) -> Any:
        if name == "close":
            return loop.close()
        engines[0].samples.clear()
        timing = asyncio.run(_ways(settings)[name](workload, complete))
        return SideResult(timing=timing, steps=tuple(engines[0].samples))

    return side


def build_monarch(settings: EngineSettings, log_dir: str) -> Callable[[str, Any], Any]:
    """Our engine loop in one Monarch replica (another process), called through
    `GeneratorRouter`."""
    runner = asyncio.Runner()
    router = runner.run(_monarch_router(settings, Path(log_dir)))

    async def complete(request: GenerationRequest) -> tuple[int, ...]:
        return (await router.generate(request)).token_ids

    def side(name: str, workload: Any) -> Any:
        if name == "close":
            runner.run(router.close())
            return runner.close()
        return SideResult(timing=runner.run(_ways(settings)[name](workload, complete)))

    return side


def build_async_llm(settings: EngineSettings) -> Callable[[str, Any], Any]:
    """vLLM's `AsyncLLM`: its engine core runs in a second process."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    runner = asyncio.Runner()

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**_vllm_arguments(settings)))

    engine = runner.run(start())

    async def complete(request: GenerationRequest) -> list[int]:
        sampling = _vllm_sampling(SamplingParams, RequestOutputKind.FINAL_ONLY, request)
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_token_ids))
        tokens: list[int] = []
        async for output in engine.generate(prompt, sampling, request.request_id):
            tokens = output.outputs[0].token_ids
        return tokens

    def side(name: str, workload: Any) -> Any:
        if name == "close":
            engine.shutdown()
            return runner.close()
        return SideResult(timing=runner.run(_ways(settings)[name](workload, complete)))

    return side


def build_offline(settings: EngineSettings) -> Callable[[str, Any], Any]:
    """vLLM's `LLM.generate`, which gets all prompts at once: only for rollouts of one turn."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(**_vllm_arguments(settings))

    def side(name: str, workload: Any) -> Any:
        if name == "close":
            return None
        requests = [request_of(rollout, 0, ()) for rollout in workload.rollouts]
        started = time.monotonic()
        outputs = llm.generate(
            [TokensPrompt(prompt_token_ids=list(r.prompt_token_ids)) for r in requests],
            [_vllm_sampling(SamplingParams, RequestOutputKind.FINAL_ONLY, r) for r in requests],
            use_tqdm=False,
        )
        seconds = time.monotonic() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return SideResult(timing=Timing(seconds=seconds, num_tokens=tokens, latencies_s=()))

    return side


class MeasuredEngine:
    """Wraps an `Engine` and records each of its steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._admitted = 0
        self._adding_s = 0.0
        self._generated = 0
        self.samples: list[StepSample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        started = time.perf_counter()
        self._engine.add_request(request, arrival_s=arrival_s)
        self._adding_s += time.perf_counter() - started
        self._admitted += len(request.prompt_token_ids)

    def step(self) -> list[Completion]:
        started = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - started
        stats = self._engine.stats()
        self.samples.append(
            StepSample(
                tokens=stats.generated_tokens - self._generated,
                prompt_tokens=self._admitted,
                kv_use=stats.kv_use,
                seconds=seconds,
                adding_s=self._adding_s,
            )
        )
        self._admitted, self._adding_s = 0, 0.0
        self._generated = stats.generated_tokens
        return outputs


def _ways(settings: EngineSettings) -> dict[str, Callable[[Workload, Complete], Awaitable[Timing]]]:
    return {
        "one": one_after_another,
        "rounds": partial(in_rounds, batch=settings.max_running),
        "all": all_at_once,
    }


def _our_spec(settings: EngineSettings, log_dir: Path = Path()) -> Any:
    from torchtitan_rl.backends.specs import GeneratorSpec
    from torchtitan_rl.generation.config import GeneratorConfig

    return GeneratorSpec(
        name="replica0",
        model=Path(settings.policy),
        device="cuda" if settings.device == "cuda" else "cpu",
        generator=GeneratorConfig(
            max_model_len=settings.max_model_len,
            max_running_requests=settings.max_running,
            kv_cache_bytes=settings.kv_cache_bytes,
        ),
        log_dir=log_dir,
    )


def _vllm_arguments(settings: EngineSettings) -> dict[str, Any]:
    """The arguments with which our adapter builds its engine, for an engine that vLLM builds
    itself."""
    from torchtitan_rl.backends.vllm.arguments import engine_arguments

    return engine_arguments(_our_spec(settings))


def _vllm_sampling(params: Any, kind: Any, request: GenerationRequest) -> Any:
    return params(
        n=1,
        max_tokens=request.sampling.max_tokens,
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=kind,
    )


async def _monarch_router(settings: EngineSettings, log_dir: Path) -> Any:
    from torchtitan_rl.routing.router import GeneratorRouter

    return GeneratorRouter([await monarch_replica(settings, log_dir)])


async def monarch_replica(settings: EngineSettings, log_dir: Path) -> Any:
    """Start a Monarch replica."""
    from torchtitan_rl.backends.monarch.generator import spawn_replica
    from torchtitan_rl.backends.monarch.runtime import supervise
    from torchtitan_rl.config.plan import ProcessGroup

    supervise()
    devices = ("0",) if settings.device == "cuda" else ()
    group = ProcessGroup(name="replica0", ranks=1, threads=settings.threads, devices=devices)
    replica = await spawn_replica(group, _our_spec(settings, log_dir))
    await replica.peer.start()
    return replica
