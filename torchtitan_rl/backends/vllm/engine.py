"""`VllmEngine`: vLLM's `LLMEngine` as an `Engine`; `start_engine_loop`: the loop that steps it.

Each rank has one instance in its own process; their loops step them in lockstep ("external
launcher"). The variables of `engine_environment` must be set when the process starts.

Invariants
- Request ids are mapped here, because vLLM adds a random suffix, which differs between ranks.
- Prefills are chunked only on CUDA: on a CPU, seeded requests cannot be sampled in chunks.
- Scheduling is synchronous, so lengths read between steps are exact. Otherwise the tokens of the
  step before a pull, sampled under the old weights, would be added after the pull.
- Grammars use xgrammar; a request that xgrammar does not support is refused. With "auto", the first
  schema would choose the backend, and so decide which later requests are refused.
- Prefix blocks are salted with the number of the last pull. A request that is added after a pull
  therefore never reads older blocks, even if the cache could not be reset.
- A pull drops the vision tower's outputs, which vLLM caches by image.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.adapters import EngineAdapters
from torchtitan_rl.backends.vllm.arguments import engine_arguments, memory_advice
from torchtitan_rl.backends.vllm.cpu import (
    keep_expert_weights,
    keep_linear_weights,
    repack,
    unique_shared_memory,
)
from torchtitan_rl.backends.vllm.images import keep_pixels, make_prompt
from torchtitan_rl.backends.vllm.pulled import PulledWeights, filled_by, latent_products
from torchtitan_rl.backends.vllm.routing import make_recorder
from torchtitan_rl.backends.vllm.sampling import (
    Grammars,
    KeptSets,
    SampledLogprobs,
    build_core_request,
    check_numbers_of_tokens,
    let_runner_resume,
    reasoning_of,
    resumed_detokenizer,
    vllm_sampling_params,
)
from torchtitan_rl.config.model import takes_images
from torchtitan_rl.errors import (
    EngineMemoryError,
    InvalidRequestError,
    LoopFailedError,
    WeightSyncError,
)
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.decision import KvPolicy
from torchtitan_rl.generation.engine import EngineLimits, ReadingRate, engine_metrics
from torchtitan_rl.generation.loop import EngineLoop, OnWork, start_loop
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationRequest,
    KeptTokens,
    Progress,
    SamplingParams,
)

if TYPE_CHECKING:
    from torchtitan_rl.weights.shm import WeightStaging

# The cause when vLLM ends a request with an error: the grammar rejects every token.
_NO_TOKEN = "its constraints (structured output, allowed or biased tokens) leave it no token"


class VllmEngine:
    """Implements `Engine`. With ``tensor_parallel > 1`` the variables of torch.distributed must be
    set. Raises EngineMemoryError: there is too little memory for the weights or the KV cache."""

    def __init__(self, spec: GeneratorSpec, weights: WeightStaging | None = None) -> None:
        is_first = "vllm" not in sys.modules
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if is_first:
            # vLLM's start collects garbage six times, which took a fifth of its CPU time with the
            # objects of imports. Of an earlier engine there may be garbage.
            gc.freeze()
        self._spec = spec
        self._weights = weights
        self._version = 0
        self._num_pulls = 0
        self._is_profiled = False
        self._running: dict[str, _EngineRequest] = {}
        self._rate = ReadingRate()
        is_cpu = spec.device == "cpu"
        if is_cpu:
            from torchtitan_rl.backends.vllm.cpu_kernels import use_cpu_kernels

            keep_linear_weights()
            keep_expert_weights()
            use_cpu_kernels()
        if takes_images(spec.model):
            keep_pixels()
        is_cpu_group = is_cpu and spec.generator.tensor_parallel > 1
        names = unique_shared_memory(int(os.environ["RANK"])) if is_cpu_group else nullcontext()
        self._engine: Any
        try:
            with names:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_arguments(spec)))
        except (ValueError, torch.OutOfMemoryError) as error:
            if advice := memory_advice(error, spec):
                raise EngineMemoryError(advice) from error
            raise
        self._counters = _Counters()
        self._engine.logger_manager = self._counters
        self._core = self._engine.engine_core.engine_core
        worker = self._engine.model_executor.driver_worker.worker
        self._model = worker.get_model()
        self._pulled = PulledWeights(self._model)
        self._adapters = EngineAdapters(self._engine, spec)
        let_runner_resume(self._core, worker.model_runner)
        self._speculates = self._core.vllm_config.speculative_config is not None
        self._grammars = Grammars()
        self._kept_sets = KeptSets(spec.generator.max_recorded_candidates)
        is_v2 = self._core.vllm_config.use_v2_model_runner
        self._kept_sets.observe(worker.model_runner, is_v2=is_v2)
        self._routing = make_recorder(worker) if spec.records_routing and is_cpu else None
        self.limits = EngineLimits(
            max_model_len=spec.generator.max_model_len,
            vocab_size=self._engine.model_config.get_vocab_size(),
            image_token_id=getattr(self._engine.model_config.hf_config, "image_token_id", None),
        )
        self._profile(0)

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        is_shared = not self._spec.weight_sync.reset_prefix_cache_on_pull
        salt = None if is_shared else f"pull-{self._num_pulls}"
        num_resumed, detokenizer = request.num_resumed, None
        try:
            prompt = make_prompt(self._engine.renderer, request, salt)
            params = vllm_sampling_params(request.sampling, num_resumed)
            engine_request = self._engine.input_processor.process_inputs(
                request.request_id,
                prompt,
                params,
                supported_tasks=self._engine.get_supported_tasks(),
                arrival_time=arrival_s,
                lora_request=self._adapters.request(request.adapter),
            )
            check_numbers_of_tokens(engine_request.sampling_params)
            self._engine.input_processor.assign_request_id(engine_request)
            engine_request.reasoning_ended, engine_request.reasoning_parser_kwargs = reasoning_of(
                request.sampling
            )
            core_request = build_core_request(self._core, engine_request, num_resumed)
            if num_resumed:
                tokenizer = self._engine.tokenizer if params.detokenize else None
                detokenizer = resumed_detokenizer(tokenizer, engine_request, core_request)
        except Exception as cause:  # of many types; vLLM has not added the request yet
            raise InvalidRequestError(
                f"request {request.request_id!r} refused by vLLM: {cause}"
            ) from cause
        self._engine.output_processor.add_request(engine_request, None, None, 0)
        state = self._engine.output_processor.request_states[engine_request.request_id]
        read_kept = self._distribution(request.sampling, core_request)
        state.logprobs_processor = SampledLogprobs(request.sampling, read_kept)
        state.detokenizer = detokenizer or state.detokenizer
        self._core.add_request(core_request)
        self._running[request.request_id] = _EngineRequest(
            state, num_resumed, len(request.prompt_token_ids), request.routed_from
        )

    def abort(self, request_ids: tuple[str, ...]) -> list[Completion]:
        found = [self._pop(name) for name in request_ids if name in self._running]
        # vLLM returns no output for an aborted request, so the tokens are read before the abort.
        outputs = [self._completion(running) for running in found]
        if found:
            self._engine.abort_request([one.state.request_id for one in found], internal=True)
        return outputs

    def step(self) -> list[Completion]:
        self._counters.steps += 1
        outputs = []
        stepped = self._engine.step()
        self._read_routing()
        for output in stepped:
            if not output.finished:
                continue
            running = self._pop(output.request_id)
            self._counters.generated_tokens -= running.num_dropped
            sampled = output.outputs[0]
            if sampled.finish_reason == "error":
                outputs.append(self._completion(running, stop_reason=_NO_TOKEN))
                continue
            reason = _finish_reason(output.request_id, sampled.finish_reason)
            outputs.append(self._completion(running, reason, stop_reason=sampled.stop_reason))
        return outputs

    def num_unfinished(self) -> int:
        return len(self._running)

    def generated_lengths(self) -> dict[str, int]:
        return {name: running.num_sampled for name, running in self._running.items()}

    def sampled_since(self, starts: Mapping[str, int]) -> list[Progress]:
        return [
            Progress(start=start, version_runs=(), **self._columns(running, start))
            for request_id, start in starts.items()
            if (running := self._running.get(request_id)) and running.num_sampled > start
        ]

    def sleep(self) -> None:
        if self._running:
            raise RuntimeError(f"cannot sleep with {len(self._running)} requests unfinished")
        if self._spec.sleeps and self._spec.device == "cuda":
            # Level 2 frees the weights too, because a pull comes before the next step. A pull of an
            # adapter does not restore its base, so level 1 keeps all weights on the host.
            self._engine.sleep(level=2 if self._spec.lora is None else 1)

    def wake_up(self) -> None:
        if self._spec.sleeps and self._spec.device == "cuda":
            self._engine.wake_up()

    def swap_weights(self, version: int) -> None:
        if self._weights is None:
            raise WeightSyncError(f"version {version}: this engine was built without weight sync")
        tensors = self._weights.tensors(version)
        if self._spec.tenants is not None:
            self._adapters.fill_slot(tensors, version)
        elif self._spec.lora is None:
            self._load_weights(tensors, version)
        else:
            self._adapters.replace(tensors, version)
        self._version = version
        self._num_pulls += 1
        self._profile(version)

    def _load_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        try:
            loaded = self._model.load_weights(iter(tensors.items()))
        except Exception as cause:
            raise WeightSyncError(
                f"version {version}: a tensor does not fit {self._spec.model}: {cause!r}"
            ) from cause
        derived = latent_products(self._model)
        needed = filled_by(self._model, tensors) - derived.keys()
        if loaded is not None and (missing := needed - loaded):
            raise WeightSyncError(f"version {version} lacks {sorted(missing)}")
        if self._spec.device == "cpu":
            repack(self._model)
        for layer in set(derived.values()):
            layer.process_weights_after_loading(self._engine.model_config.dtype)
        if self.limits.image_token_id is not None:
            self._core.reset_encoder_cache()
        if self._spec.weight_sync.check_pulls:
            self._pulled.check(tensors, version)

    def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
        return bool(self._engine.reset_prefix_cache(reset_running_requests=recompute_running))

    def stats(self) -> EngineStats:
        running, waiting = self._core.scheduler.get_request_counts()
        cache = self._engine.vllm_config.cache_config
        return EngineStats(
            version=self._version,
            running=running,
            waiting=waiting,
            kv_use=float(self._core.scheduler.kv_cache_manager.usage),
            kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
            preemptions=self._counters.preemptions,
            generated_tokens=self._counters.generated_tokens,
            tokens_per_second=self._rate.read(self._counters.generated_tokens),
            steps=self._counters.steps,
        )

    def close(self) -> None:
        if self._is_profiled:
            self._engine.stop_profile()
        self._engine.engine_core.shutdown()

    def _profile(self, version: int) -> None:
        if self._is_profiled:
            self._engine.stop_profile()
        self._is_profiled = version in self._spec.profiled_versions
        if self._is_profiled:
            self._engine.start_profile(f"step{version + 1}-{self._spec.name}")

    def _distribution(
        self, sampling: SamplingParams, core_request: Any
    ) -> Callable[[], KeptTokens] | None:
        """Return a function that reads the set of tokens from which the newest token was sampled;
        None if it is not trained on or no token was excluded. With speculative decoding the set is
        unknown, unless it follows from a grammar."""
        has_grammar = core_request.structured_output_request is not None
        if not sampling.with_logprobs or not (sampling.truncates or has_grammar):
            return None
        if not sampling.truncates:
            grammar = self._grammars.replayable(self._core, core_request)
            if grammar is not None:
                return lambda: grammar
        if self._speculates:
            return lambda: None
        request_id = core_request.request_id
        self._kept_sets.record(request_id)
        return lambda: self._kept_sets[request_id]

    def _pop(self, name: str) -> _EngineRequest:
        running = self._running.pop(name)
        self._kept_sets.forget(running.state.request_id)
        return running

    def _read_routing(self) -> None:
        """Copy the experts of the tokens that a step computed; those of a prompt when its first
        token has been sampled, because a pull between two chunks may have it computed again. The
        scheduler has forgotten requests that ended; theirs are all tokens but the last one."""
        if self._routing is None:
            return
        scheduled = self._core.scheduler.requests
        for running in self._running.values():
            if not running.num_sampled:
                continue
            name = running.state.request_id
            if name in scheduled:
                num_tokens = scheduled[name].num_computed_tokens
            else:
                num_tokens = running.num_prompt + running.num_sampled - 1
            self._routing.read(name, running.routed, num_tokens)

    def _completion(
        self,
        running: _EngineRequest,
        reason: FinishReason = FinishReason.ABORT,
        *,
        stop_reason: int | str | None = None,
    ) -> Completion:
        columns = self._columns(running)
        stats = running.state.stats  # a time of 0.0: not happened yet
        return Completion(
            version_runs=(),
            finish_reason=reason,
            stop_reason=stop_reason,
            metrics=engine_metrics(
                len(columns["token_ids"]),
                added_s=running.added_s,
                scheduled_s=stats.scheduled_ts or None,
                first_token_s=stats.first_token_ts or None,
                last_token_s=stats.last_token_ts or None,
                cached_tokens=running.state.num_cached_tokens,
            ),
            prompt_scores=running.state.logprobs_processor.prompt_scores,
            **columns,
        )

    def _columns(self, running: _EngineRequest, start: int = 0) -> dict[str, Any]:
        """Return the fields that `Completion` and `Progress` share, from token ``start`` on."""
        state, sampled = running.state, running.state.logprobs_processor
        token_ids, first = state.detokenizer.output_token_ids, running.num_resumed
        num_sampled = len(token_ids) - first
        if len(sampled.sampled) != num_sampled:
            raise RuntimeError(
                f"request {state.external_req_id!r}: {num_sampled} tokens but "
                f"{len(sampled.sampled)} logprobs"
            )
        routed = None
        if self._routing is not None and num_sampled > start:
            begin = running.num_prompt + start - 1 if start else running.routed_from
            end = running.num_prompt + num_sampled - 1
            routed = self._routing.part(running.routed, begin, end)
        return {
            "request_id": state.external_req_id,
            "token_ids": tuple(token_ids[first + start :]),
            "logprobs": tuple(sampled.sampled[start:]),
            "top_logprobs": tuple(sampled.top[start:]),
            "kept_tokens": kept_runs(sampled.kept[start:]),
            "routed_experts": routed,
        }


@dataclass(frozen=True, slots=True)
class _EngineRequest:
    """A running request: vLLM's `RequestState`. Its first ``num_resumed`` output tokens were
    sampled before this request was added to the engine, and are the last of its ``num_prompt``
    tokens of prompt. ``routed`` are the experts of its tokens so far (`RoutingRecorder`), of which
    those from ``routed_from`` on are reported."""

    state: Any
    num_resumed: int
    num_prompt: int
    routed_from: int
    routed: bytearray = field(default_factory=bytearray)
    added_s: float = field(default_factory=time.monotonic)

    @property
    def num_sampled(self) -> int:
        return int(self.state.detokenizer.num_output_tokens()) - self.num_resumed

    @property
    def num_dropped(self) -> int:
        """Number of tokens that a step sampled after the one that completed a stop string. Only
        steps of speculative decoding sample several tokens."""
        return int(self.state.stats.num_generation_tokens) - self.num_sampled


class _Counters:
    """Replaces vLLM's stat loggers with counters. Recomputations after a pull count as preemptions.
    ``generated_tokens`` counts every sampled token: the scheduler reports all tokens of a step, and
    no request is aborted during a step."""

    def __init__(self) -> None:
        self.steps = 0
        self.preemptions = 0
        self.generated_tokens = 0

    def record(self, *, iteration_stats: Any, **_: Any) -> None:
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.generated_tokens += iteration_stats.num_generation_tokens

    def log(self) -> None:
        """vLLM calls this every 10 s; the loop's stats are read instead."""

    def record_sleep_state(self, sleep: int, level: int) -> None:
        """vLLM calls this; the controller itself requested the sleep."""


def _finish_reason(request_id: str, reason: str | None) -> FinishReason:
    if reason in ("stop", "repetition"):
        return FinishReason.STOP
    if reason == "length":
        return FinishReason.LENGTH
    raise RuntimeError(f"vLLM ended request {request_id!r} by {reason!r}")


def start_engine_loop(
    spec: GeneratorSpec,
    rank: int,
    weights: WeightStaging | None = None,
    *,
    on_end: Callable[[LoopFailedError | None], None] | None = None,
    on_pulled: Callable[[int], None] | None = None,
    on_work: OnWork | None = None,
) -> EngineLoop:
    """Build the engine and its loop, and start the loop. Collective. See `EngineLoop` for the
    callbacks."""
    generator, sync = spec.generator, spec.weight_sync

    def build() -> EngineLoop:
        engine = VllmEngine(spec, weights)
        channel = None
        if generator.tensor_parallel > 1:
            channel = GlooLockstep(timeout_s=generator.collective_timeout_s)
        return EngineLoop(
            engine,
            channel,
            is_leader=rank == 0,
            config=LoopConfig(
                name=spec.name,
                max_steps_per_decision=generator.max_steps_per_decision,
                heartbeat_s=generator.heartbeat_s,
                stream_interval_s=spec.stream_interval_s,
                kv_policy=KvPolicy(
                    reset_prefix_cache=sync.reset_prefix_cache_on_pull,
                    recompute_running=sync.recompute_running_on_pull,
                ),
            ),
            on_end=on_end,
            on_pulled=on_pulled,
            on_work=on_work,
        )

    return start_loop(build, name=spec.name)


HEADER_BYTES = 2048  # 8 bytes of length, then the payload's first bytes: enough for most decisions


class GlooLockstep:
    """A `LockstepChannel` from rank 0 of the default process group to all its ranks, over a gloo
    group separate from the model's collectives, created on all ranks in the same order. A broadcast
    that waits for longer than ``timeout_s`` raises on the waiting ranks."""

    def __init__(self, *, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)

    def broadcast(self, data: bytes | None) -> bytes:
        capacity = HEADER_BYTES - 8  # bytes of the payload that fit into the header
        if data is not None:
            head = len(data).to_bytes(8, "little") + data[:capacity]
            self._header[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(self._header, src=0, group=self._group)
        received = self._header.numpy().tobytes()
        num_bytes = int.from_bytes(received[:8], "little")
        if num_bytes <= capacity:
            return received[8 : 8 + num_bytes]
        rest = torch.empty(num_bytes - capacity, dtype=torch.uint8)
        if data is not None:
            rest.copy_(torch.frombuffer(bytearray(data[capacity:]), dtype=torch.uint8))
        dist.broadcast(rest, src=0, group=self._group)
        return received[8:] + rest.numpy().tobytes()

    def barrier(self) -> None:
        dist.barrier(group=self._group)
