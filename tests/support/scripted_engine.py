"""A small deterministic engine without a model, for tests of everything above the engine.

One token per running request and step. The next token is a pure function of all tokens so far, the
seed and the weight version (`scripted_token`): a request that continues from its partial tokens, on
any replica, samples what it would have sampled without the interruption. Each token is a letter of
text (`scripted_text`), so that stop strings work. Engine options are ignored. Requests with a top_p
get kept tokens (`scripted_kept`).
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.generation.engine import EngineLimits, ReadingRate, engine_metrics
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationRequest,
    KeptTokens,
    Progress,
    RoutedExperts,
    SamplingParams,
    TopLogprobs,
)


def scripted_token(
    tokens: Iterable[int], *, seed: int | None, version: int, vocab_size: int
) -> tuple[int, float]:
    """The token after ``tokens`` (prompt and completion so far), and its logprob."""
    return _draw(_digest(tokens), seed=seed, version=version, vocab_size=vocab_size)


def scripted_text(tokens: Iterable[int]) -> str:
    """The text of ``tokens``: one letter each."""
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def scripted_kept(token: int) -> KeptTokens:
    """What a sampler with a top_p kept with ``token``; of some tokens it is not known."""
    return None if token % 50 == 7 else np.array([token, token + 1], dtype="<i4").tobytes()


def scripted_experts(token: int, position: int, version: int) -> bytes:
    """The experts of a token in one layer: three, which tell it, where it is, and the version that
    computed it."""
    return bytes([token % 100, 100 + position % 50, 150 + version % 50])


@dataclass(slots=True)
class _Request:
    request: GenerationRequest
    digest: int  # of the prompt and the tokens so far
    experts_of: int | None = None  # the version whose experts are recorded
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    added_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None

    def stop_string(self) -> str | None:
        """The stop string that the newest token has completed."""
        num_resumed = self.request.num_resumed
        resumed = self.request.prompt_token_ids[-num_resumed:] if num_resumed else ()
        text = scripted_text((*resumed, *self.tokens))
        return next((stop for stop in self.request.sampling.stop if text.endswith(stop)), None)

    def completion(self, reason: FinishReason, stop_reason: int | str | None = None) -> Completion:
        return Completion(
            version_runs=(),
            finish_reason=reason,
            stop_reason=stop_reason,
            metrics=engine_metrics(
                len(self.tokens),
                added_s=self.added_s,
                scheduled_s=self.scheduled_s,
                first_token_s=self.first_token_s,
                last_token_s=self.last_token_s,
                cached_tokens=0,
            ),
            **self.columns(),
        )

    def columns(self, start: int = 0) -> dict[str, Any]:
        tokens, logprobs = tuple(self.tokens[start:]), tuple(self.logprobs[start:])
        sampling = self.request.sampling
        return {
            "request_id": self.request.request_id,
            "token_ids": tokens,
            "logprobs": logprobs,
            "top_logprobs": tuple(map(self._alternatives, tokens, logprobs))
            if sampling.num_logprobs
            else (),
            "kept_tokens": kept_runs(map(scripted_kept, tokens)) if sampling.top_p < 1.0 else (),
            "routed_experts": self._experts(start),
        }

    def _experts(self, start: int) -> RoutedExperts | None:
        if self.experts_of is None or not self.tokens:
            return None
        computed = (*self.request.prompt_token_ids, *self.tokens)[:-1]
        num_prompt = len(self.request.prompt_token_ids)
        first = num_prompt + start - 1 if start else self.request.routed_from
        rows = [
            scripted_experts(token, position, self.experts_of)
            for position, token in enumerate(computed)
        ]
        return RoutedExperts(data=b"".join(rows[first:]), num_layers=1, per_token=3)

    def _alternatives(self, token: int, logprob: float) -> TopLogprobs:
        others = range(1, self.request.sampling.num_logprobs + 1)
        return ((token, logprob), *((token + n, logprob - n) for n in others))


class ScriptedEngine:
    """An `Engine`. ``fail_at_step`` and ``fail_at_pull`` make that step (from 1) or that version
    raise. Like vLLM it refuses to reset the prefix cache while requests run, unless those are
    recomputed. After a sleep a step needs `wake_up` and `swap_weights` first. With ``has_experts``
    it records `scripted_experts`."""

    def __init__(
        self,
        *,
        max_running: int = 8,
        max_model_len: int = 512,
        vocab_size: int = 1000,
        eos_token_id: int | None = None,
        version: int = 0,
        step_delay_s: float = 0.0,
        fail_at_step: int | None = None,
        fail_at_pull: int | None = None,
        has_experts: bool = False,
    ) -> None:
        self._limits = EngineLimits(max_model_len=max_model_len, vocab_size=vocab_size)
        self._max_running = max_running
        self._eos_token_id = eos_token_id
        self._step_delay_s = step_delay_s
        self._fail_at_step = fail_at_step
        self._fail_at_pull = fail_at_pull
        self._has_experts = has_experts
        self._requests: dict[str, _Request] = {}  # in order of admission
        self._rate = ReadingRate()
        self._generated_tokens = 0
        self._steps = 0
        self.version = version
        self.cache_resets = 0
        self.is_closed = False
        self.is_asleep = False
        self.has_weights = True

    @property
    def limits(self) -> EngineLimits:
        return self._limits

    def add_request(self, request: GenerationRequest, *, arrival_s: float) -> None:
        self._requests[request.request_id] = _Request(
            request,
            _digest(request.prompt_token_ids),
            experts_of=self.version if self._has_experts else None,
        )

    def abort(self, request_ids: tuple[str, ...]) -> list[Completion]:
        ended = [self._requests.pop(name) for name in request_ids if name in self._requests]
        return [request.completion(FinishReason.ABORT) for request in ended]

    def step(self) -> list[Completion]:
        self._steps += 1
        if self.is_asleep or not self.has_weights:
            raise RuntimeError("stepped asleep, or before the weights were there again")
        if self._steps == self._fail_at_step:
            raise RuntimeError(f"scripted failure at step {self._steps}")
        scheduled_s = time.monotonic()
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        outputs = []
        for request_id, state in list(self._requests.items())[: self._max_running]:
            if state.scheduled_s is None:
                state.scheduled_s = scheduled_s
            reason, stop_reason = self._sample(state)
            if reason is not None:
                outputs.append(self._requests.pop(request_id).completion(reason, stop_reason))
        return outputs

    def num_unfinished(self) -> int:
        return len(self._requests)

    def generated_lengths(self) -> dict[str, int]:
        return {name: len(state.tokens) for name, state in self._requests.items()}

    def sampled_since(self, starts: Mapping[str, int]) -> list[Progress]:
        return [
            Progress(start=start, version_runs=(), **self._requests[name].columns(start))
            for name, start in starts.items()
            if name in self._requests and len(self._requests[name].tokens) > start
        ]

    def sleep(self) -> None:
        if self._requests:
            raise RuntimeError(f"asked to sleep with {len(self._requests)} requests unfinished")
        self.is_asleep, self.has_weights = True, False

    def wake_up(self) -> None:
        self.is_asleep = False

    def swap_weights(self, version: int) -> None:
        if self.is_asleep:
            raise RuntimeError("asked to swap weights while asleep")
        if version == self._fail_at_pull:
            raise WeightSyncError(f"scripted failure at version {version}")
        self.version, self.has_weights = version, True

    def reset_prefix_cache(self, *, recompute_running: bool) -> bool:
        if self._requests and not recompute_running:
            return False
        self.cache_resets += 1
        return True

    def stats(self) -> EngineStats:
        running = min(len(self._requests), self._max_running)
        return EngineStats(
            version=self.version,
            running=running,
            waiting=len(self._requests) - running,
            kv_use=running / self._max_running,
            preemptions=0,
            generated_tokens=self._generated_tokens,
            tokens_per_second=self._rate.read(self._generated_tokens),
            steps=self._steps,
        )

    def close(self) -> None:
        self.is_closed = True

    def _sample(self, state: _Request) -> tuple[FinishReason | None, int | str | None]:
        """One more token; why that ends the request, if it does, and the stop reason."""
        sampling = state.request.sampling
        token, logprob = _draw(
            state.digest,
            seed=sampling.seed,
            version=self.version,
            vocab_size=self._limits.vocab_size,
        )
        state.digest = _digest((token,), state.digest)
        state.tokens.append(token)
        state.logprobs.append(logprob)
        self._generated_tokens += 1
        state.last_token_s = time.monotonic()
        if state.first_token_s is None:
            state.first_token_s = state.last_token_s
        if len(state.tokens) >= sampling.min_tokens:
            if token == self._eos_token_id and not sampling.ignore_eos:
                return FinishReason.STOP, None
            if token in sampling.stop_token_ids:
                return FinishReason.STOP, token
            if stop := state.stop_string():
                return FinishReason.STOP, stop
        return FinishReason.LENGTH if len(state.tokens) >= sampling.max_tokens else None, None


def _digest(tokens: Iterable[int], start: int = 0) -> int:
    for token in tokens:
        start = zlib.crc32(token.to_bytes(8, "little"), start)
    return start


def _draw(digest: int, *, seed: int | None, version: int, vocab_size: int) -> tuple[int, float]:
    bits = zlib.crc32(f"{seed}:{version}".encode(), digest)
    return bits % vocab_size, -(1 + bits % 4096) / 1024


WAIT_S = 20.0


class SteppedEngine(ScriptedEngine):
    """A scripted engine whose steps wait for permission."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.permits = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)

    def step(self) -> list:
        self.asked.release()
        assert self.permits.acquire(timeout=WAIT_S)
        return super().step()

    def allow(self, steps: int) -> None:
        """Let ``steps`` steps run and wait until the loop asks for the one after."""
        for _ in range(steps):
            self.permits.release()
            assert self.asked.acquire(timeout=WAIT_S)


class GivingUpEngine(ScriptedEngine):
    """Gives up every request whose id begins with "bad" where another would end."""

    def step(self) -> list:
        return [
            replace(output, finish_reason=FinishReason.ABORT, stop_reason="no token is left")
            if output.request_id.startswith("bad")
            else output
            for output in super().step()
        ]


def request(name: str, max_tokens: int = 4, *, prompt: tuple[int, ...] = (1, 2, 3)):
    return GenerationRequest(
        request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens)
    )
