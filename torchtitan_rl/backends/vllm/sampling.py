"""Converts our `SamplingParams` to vLLM's; checks name, type and value of the engine options.

vLLM's constructor checks no types. A wrong type would raise inside a step and fail every request of
the engine, so a wrong type is refused here.

A request that resumes after earlier sampled tokens is treated as if it had never been interrupted:

| for | the resumed tokens are |
|---|---|
| stop strings, penalties, bad words, minimum lengths, repetition detection, grammars | output |
| scheduling (computed at once, or served from the prefix cache) | prompt |

The detokenizer, the scheduler and the model runner each get them once, at admission.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torchtitan_rl.token_sets import WHOLE_VOCABULARY, pack_kept
from torchtitan_rl.types import Grammar, KeptTokens, SamplingParams, TokenScores, TopLogprobs

# Options that change which tokens are sampled or where a completion ends. Excluded are the fields
# of `SamplingParams`, output formats (a completion is token ids) and engine-wide settings.
ENGINE_OPTIONS = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "frequency_penalty",
        "include_stop_str_in_output",
        "logit_bias",
        "logprob_token_ids",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "structured_outputs",
    }
)
# These are no sampling parameters of vLLM: they tell where reasoning ends and a structured output
# begins.
REASONING_OPTIONS = frozenset({"reasoning_ended", "reasoning_parser_kwargs"})
GRAMMAR_BACKEND = (
    "xgrammar"  # for engines and endpoint; `orchestration/batching.py` replays its grammars
)
MAX_LOGIT_BIAS = 100.0  # OpenAI's limit; vLLM clamps only in its server, and infinities give NaN
# Limits of vLLM's V2 model runner (on CUDA), which raises inside a step: that would fail every
# request of the engine. Every engine has them, so that a request is served on all devices or none.
MAX_TOKENS_OF = {
    "allowed_token_ids": 1024,
    "logit_bias": 1024,
    "bad_words": 1024,
    "stop_token_ids": 128,
}


def vllm_sampling_params(sampling: SamplingParams, num_resumed: int) -> Any:
    """Return a new `vllm.SamplingParams` for a completion that resumes after ``num_resumed``
    tokens, which vLLM's limits also count. vLLM decodes text only for requests with stop strings.
    Raises ValueError, TypeError, VLLMValidationError, msgspec.ValidationError: an engine option is
    unknown, or has a wrong type or value."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        max_tokens=sampling.max_tokens + num_resumed,
        min_tokens=sampling.min_tokens + num_resumed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        # 0 requests the logprob of the sampled token only.
        logprobs=sampling.num_logprobs if sampling.with_logprobs else None,
        prompt_logprobs=sampling.prompt_logprobs,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **_checked_options(sampling.engine_options),
    )


def reasoning_of(sampling: SamplingParams) -> tuple[bool | None, dict[str, Any] | None]:
    """Return whether reasoning has ended before the completion, and the arguments of vLLM's parser
    of it.

    A structured output constrains only the tokens after the reasoning. With True, the default, that
    is from the first token of the completion; with False, after the reasoning in the completion;
    with None, vLLM looks into the prompt to find out. Raises TypeError: an option has a wrong type.
    """
    ended = sampling.engine_options.get("reasoning_ended", True)
    arguments = sampling.engine_options.get("reasoning_parser_kwargs")
    if not (ended is None or isinstance(ended, bool)):
        raise TypeError(f"engine_options: reasoning_ended = {ended!r}: use True, False or None")
    if not (arguments is None or isinstance(arguments, Mapping)):
        raise TypeError("engine_options: reasoning_parser_kwargs is not a mapping")
    return ended, None if arguments is None else dict(arguments)


def _checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if name not in REASONING_OPTIONS}
    if not options:
        return {}
    import msgspec
    from vllm import SamplingParams as VllmSamplingParams

    if unknown := sorted(set(options) - ENGINE_OPTIONS):
        raise ValueError(f"engine_options {unknown} are not served: use {sorted(ENGINE_OPTIONS)}")
    typed = msgspec.convert(options, VllmSamplingParams, str_keys=True)
    checked = {name: getattr(typed, name) for name in options}
    for name, value in checked.items():
        if dataclasses.is_dataclass(value):
            fields = {field.name for field in dataclasses.fields(value) if field.init}
            if unknown := sorted(set(options[name]) - fields):
                raise ValueError(f"engine_options: {name} has no {unknown}")
    if checked.get("logit_bias"):
        checked["logit_bias"] = {
            token: min(MAX_LOGIT_BIAS, max(-MAX_LOGIT_BIAS, bias))
            for token, bias in checked["logit_bias"].items()
        }
    return checked


def check_numbers_of_tokens(params: Any) -> None:
    """Check `MAX_TOKENS_OF` for a `vllm.SamplingParams` that vLLM's input processor has completed,
    with the model's own stop tokens. Raises ValueError: an option has too many tokens."""
    numbers = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "bad_words": sum(map(len, params.bad_words_token_ids or ())),
        "stop_token_ids": len(params.all_stop_token_ids),
    }
    for name, number in numbers.items():
        if number > MAX_TOKENS_OF[name]:
            raise ValueError(f"{name} has {number} tokens: give at most {MAX_TOKENS_OF[name]}")


class SampledLogprobs:
    """Has those attributes of a `LogprobsProcessor` that vLLM's `RequestState` uses. (vLLM's own
    also ranks, decodes and indexes each entry: 0.2 ms a step with 64 running requests.)

    - ``sampled``: the logprob of each token; NaN if the request has no logprobs.
    - ``top``: one tuple of (token, logprob) pairs per position, the sampled token first.
    - ``kept``: the results of ``read_kept``, one per token.
    - ``prompt_scores``: the scores of the prompt's tokens, if they were requested.
    """

    logprobs = None
    cumulative_logprob = None
    prompt_logprobs = None
    prompt_token_id_logprobs = None

    def __init__(
        self, sampling: SamplingParams, read_kept: Callable[[], KeptTokens] | None = None
    ) -> None:
        self._has_any = sampling.with_logprobs
        self._width = sampling.num_logprobs + 1
        self._read_kept = read_kept
        self.sampled: list[float] = []
        self.top: list[TopLogprobs] = []
        self.kept: list[KeptTokens] = []
        self.prompt_scores: TokenScores | None = None

    def update_from_output(self, output: Any) -> None:
        """Append the logprobs of an `EngineCoreOutput`: arrays [tokens, 1 + the largest number of
        alternatives in the batch]. Only speculative decoding samples several tokens in a step."""
        if self._read_kept is not None and output.new_token_ids:
            self.kept += [self._read_kept()] * len(output.new_token_ids)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_scores = _scores_of(output.new_prompt_logprobs_tensors)
        if not self._has_any:
            self.sampled += [math.nan] * len(output.new_token_ids)
        new = output.new_logprobs
        if new is None:
            return
        self.sampled += new.logprobs[:, 0].tolist()
        if self._width > 1:
            for ids, logprobs in zip(
                new.logprob_token_ids[:, : self._width].tolist(),
                new.logprobs[:, : self._width].tolist(),
                strict=True,
            ):
                self.top.append(tuple(zip(ids, logprobs, strict=True)))


def _scores_of(tensors: Any) -> TokenScores:
    ids, logprobs = tensors.logprob_token_ids.numpy(), tensors.logprobs.numpy()
    return TokenScores(
        logprobs=tuple(logprobs[:, 0].tolist()),
        top_ids=ids[:, 1:].astype("<i4").tobytes(),
        top_logprobs=logprobs[:, 1:].astype("<f4").tobytes(),
    )


def build_core_request(core: Any, engine_request: Any, num_resumed: int) -> Any:
    """Build a `Request` of vLLM's core from an `EngineCoreRequest` whose last ``num_resumed``
    prompt tokens were sampled earlier, and are removed from its prompt.

    The grammar is compiled and the reasoning parser created here, not in the background: an error
    then refuses only this request, and all ranks start the request at the same step. Raises
    ValueError: the grammar rejects the resumed tokens.
    """
    request, _ = core.preprocess_add_request(engine_request)
    structured = request.structured_output_request
    if structured is not None and isinstance(structured._grammar, Future):
        structured.grammar = structured._grammar.result()
    core.structured_output_manager._get_reasoner(request)
    if num_resumed:
        tokens = engine_request.prompt_token_ids
        resumed = tokens[-num_resumed:]
        # `num_prompt_tokens` still counts all tokens: the scheduler counts cached ones among them.
        engine_request.prompt_token_ids = request.prompt_token_ids = tokens[:-num_resumed]
        request._output_token_ids.extend(resumed)
        if not core.structured_output_manager.accept_tokens(request, resumed):
            raise ValueError("the tokens to resume from do not fit its structured output")
    return request


def resumed_detokenizer(tokenizer: Any, engine_request: Any, request: Any) -> Any:
    """Return a detokenizer that has read the resumed tokens. ``tokenizer`` is None without stop
    strings.

    vLLM searches for these only after ``min_tokens`` output tokens, to which `vllm_sampling_params`
    adds ``num_resumed``: a stop string within the resumed tokens does not end the request.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, engine_request)
    detokenizer.update(list(request.output_token_ids), False)
    return detokenizer


def let_runner_resume(core: Any, runner: Any) -> None:
    """Make vLLM's V1 model runner treat resumed tokens as output, as its V2 runner does.

    The V2 runner (on CUDA) gets prompt and output tokens separately, as after a preemption. The V1
    runner gets only the prompt; the output is added when it adds the request to its batch.
    """
    if core.vllm_config.use_v2_model_runner:
        return
    add_row = runner.input_batch.add_request
    requests = core.scheduler.requests

    def add_row_with_resumed(state: Any) -> Any:
        start = len(state.output_token_ids)
        state.output_token_ids.extend(requests[state.req_id].output_token_ids[start:])
        return add_row(state)

    runner.input_batch.add_request = add_row_with_resumed


_MAX_GRAMMARS = 64  # serialized grammars in the cache


class KeptSets:
    """The set of tokens that vLLM's sampler kept after all truncation for the newest token of each
    recorded request, by vLLM's internal request ids. vLLM itself reports such sets only with its V2
    model runner and only for requests with a top_k. A set is None if its shortest encoding takes
    more than ``4 * max_tokens`` bytes; its token is not trained on."""

    def __init__(self, max_tokens: int) -> None:
        self._max_bytes = 4 * max_tokens
        self._sets: dict[str, KeptTokens] = {}

    def record(self, request_id: str) -> None:
        self._sets[request_id] = None

    def forget(self, request_id: str) -> None:
        self._sets.pop(request_id, None)

    def __getitem__(self, request_id: str) -> KeptTokens:
        return self._sets[request_id]

    def observe(self, runner: Any, *, is_v2: bool) -> None:
        """Wrap the sampler of vLLM's model runner, so that sets are read from every batch."""
        draw = runner.sampler.sample

        def draw_and_read(*args: Any, **options: Any) -> Any:
            sampled, processed = draw(*args, **options)
            if self._sets and processed is not None:
                if is_v2:  # its fourth argument has the requests of the rows
                    names = [runner.req_states.index_to_req_id[row] for row in args[3].tolist()]
                else:
                    names = runner.input_batch.req_ids
                self._read(names, processed)
            return sampled, processed

        runner.sampler.sample = draw_and_read

    def _read(self, names: Sequence[str], processed_RV: Any) -> None:
        """Record the sets of ``processed_RV``: a row per request, -inf for each excluded token."""
        rows = [row for row, name in enumerate(names) if name in self._sets]
        if not rows:
            return
        if len(rows) < len(processed_RV):  # indexing copies, which is slow
            processed_RV = processed_RV[rows]
        for row, kept_V in zip(rows, (processed_RV > -math.inf).cpu().numpy(), strict=True):
            # A row of NaN keeps no token; its logprob is NaN too, so the token is masked anyway.
            packed = pack_kept(kept_V) if kept_V.any() else WHOLE_VOCABULARY
            self._sets[names[row]] = packed if len(packed) <= self._max_bytes else None


class Grammars:
    def __init__(self) -> None:
        self._data: dict[Any, bytes] = {}  # keyed by the specification that vLLM compiled

    def replayable(self, core: Any, request: Any) -> Grammar | None:
        """Return the grammar of vLLM's ``request`` if it applies to each of its tokens and
        `orchestration/batching.py` can replay it; otherwise None."""
        from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

        structured = request.structured_output_request
        if structured is None or not isinstance(structured.grammar, XgrammarGrammar):
            return None
        has_reasoner = core.structured_output_manager.reasoner_cls is not None
        if has_reasoner and not structured.reasoning_ended:
            return None  # the grammar applies only after the reasoning
        key = structured.structured_output_key
        if key not in self._data:
            if len(self._data) == _MAX_GRAMMARS:
                self._data.clear()
            text = structured.grammar.ctx.grammar.serialize_json()
            self._data[key] = zlib.compress(text.encode())
        stop_token_ids = tuple(sorted(request.sampling_params.all_stop_token_ids))
        return Grammar(data=self._data[key], stop_token_ids=stop_token_ids)
