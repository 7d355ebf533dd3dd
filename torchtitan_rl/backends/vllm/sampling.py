"""Converts our `SamplingParams` to vLLM's; engine options are checked in name, type and value.

vLLM's constructor checks no types: a wrong one would fail inside a step, and with it every request
of the engine. What is refused here reaches no engine.

`SampledLogprobs` collects logprobs and kept tokens of a running request, instead of vLLM's
`LogprobsProcessor`, which also ranks, decodes and indexes each entry: 0.2 ms a step with 64 running
requests, for nothing that is used here.

A request that continues after tokens sampled before is treated as if never interrupted:

| for | the resumed tokens are |
|---|---|
| stop strings, penalties, bad words, minimum lengths, repetition detection, grammars | output |
| scheduling (computed at once, or served from the prefix cache) | prompt |

The detokenizer, the scheduler and the model runner each get them once, at admission, and in the
same way on every rank.

`KeptSets` records which tokens vLLM's sampler kept, for the requests that are trained on. vLLM
reports such sets itself only with its V2 model runner, and then only for requests with a top_k.
Here they are read where its sampler has the distribution that it draws from, after every way to cut
tokens (top_p, top_k, min_p, minimum lengths, allowed tokens, grammars). Requests that are not
recorded cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torchtitan_rl.token_sets import WHOLE_VOCABULARY, pack_kept
from torchtitan_rl.types import Grammar, KeptTokens, SamplingParams, TopLogprobs

# Options that change which tokens are sampled or where they end. Not among them: fields of
# `SamplingParams`, forms of output (a completion is token ids), and what an engine is built with.
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
# Not sampling parameters of vLLM: they say where the reasoning before a structured output ends.
REASONING_OPTIONS = frozenset({"reasoning_ended", "reasoning_parser_kwargs"})
GRAMMAR_BACKEND = (
    "xgrammar"  # of engines and endpoint, and what `orchestration/batching.py` replays
)
MAX_LOGIT_BIAS = 100.0  # OpenAI's; vLLM clamps only in its server, and infinities give NaN


def vllm_sampling_params(sampling: SamplingParams, num_resumed: int) -> Any:
    """A new `vllm.SamplingParams`, for a completion that continues after ``num_resumed`` tokens,
    which vLLM's limits count too.

    Text is decoded only where there are stop strings.

    Raises:
        ValueError, TypeError, VLLMValidationError, msgspec.ValidationError: an engine option is
            unknown, or has a wrong type or value.
    """
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
        # 0: the sampled token's alone
        logprobs=sampling.num_logprobs if sampling.with_logprobs else None,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **_checked_options(sampling.engine_options),
    )


def reasoning_of(sampling: SamplingParams) -> tuple[bool | None, dict[str, Any] | None]:
    """Whether reasoning has ended with the prompt, and the arguments of vLLM's reasoning parser.

    A structured output applies from the end of reasoning: at once without the option (True),
    after the end in the prompt (None) or in the completion (False).

    Raises:
        TypeError: an option has a wrong type.
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


class SampledLogprobs:
    """Has those attributes of a `LogprobsProcessor` that vLLM's `RequestState` uses.

    ``sampled``: the logprob of each token, NaN where none were requested. ``top``: where
    alternatives were requested, the pairs of each position, the sampled token first. ``kept``:
    what ``read_kept`` returned for each token, if it is given.
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

    def update_from_output(self, output: Any) -> None:
        """Take the logprobs of an `EngineCoreOutput`: arrays [tokens, the batch's widest + 1]."""
        if self._read_kept is not None and output.new_token_ids:  # at most one in a step
            self.kept.append(self._read_kept())
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


def build_core_request(core: Any, engine_request: Any, num_resumed: int) -> Any:
    """vLLM's `Request` for its core, from an `EngineCoreRequest` whose last ``num_resumed`` prompt
    tokens were sampled before (0: a request that is not resumed).

    Its grammar is compiled and its reasoning parser created here: their errors refuse this request
    alone, and ranks that compiled in the background would start it at different steps. Of
    ``engine_request`` only the tokens before the resumed ones stay as its prompt.

    Raises:
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
        # num_prompt_tokens, of which the scheduler counts cached ones, stays that of all tokens.
        engine_request.prompt_token_ids = request.prompt_token_ids = tokens[:-num_resumed]
        request._output_token_ids.extend(resumed)
        if not core.structured_output_manager.accept_tokens(request, resumed):
            raise ValueError("the tokens to resume from do not fit its structured output")
    return request


def resumed_detokenizer(tokenizer: Any, engine_request: Any, request: Any) -> Any:
    """A detokenizer that has read the resumed tokens; ``tokenizer`` is None without stop strings.

    vLLM searches for stop strings only after ``min_tokens`` output tokens. `vllm_sampling_params`
    adds ``num_resumed`` to that, so the resumed tokens are decoded but never searched alone.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, engine_request)
    detokenizer.update(list(request.output_token_ids), False)
    return detokenizer


def let_runner_resume(core: Any, runner: Any) -> None:
    """Make vLLM's V1 model runner treat resumed tokens as output, as its V2 runner does.

    The V2 runner (on CUDA) gets prompt and output tokens separately, as after a preemption. The V1
    runner gets the prompt alone, and the output here, when it adds the request to its batch.
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


_MAX_GRAMMARS = 64  # serialized ones that are kept


class KeptSets:
    """The set of the newest token of each recorded request, by vLLM's internal request id.

    A set of more than ``max_tokens`` entries is None: its token is not trained on.
    """

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
        """Read the sets of every batch that the sampler of vLLM's model runner draws from."""
        draw = runner.sampler.sample
        names: Callable[..., Sequence[str]]
        names = _v2_names(runner) if is_v2 else lambda *_: runner.input_batch.req_ids

        def draw_and_read(*args: Any, **options: Any) -> Any:
            sampled, processed = draw(*args, **options)
            if self._sets and processed is not None:
                self._read(names(*args), processed)
            return sampled, processed

        runner.sampler.sample = draw_and_read

    def _read(self, names: Sequence[str], processed_RV: Any) -> None:
        """Record the sets of ``processed_RV``: logits or logprobs, one row for each request, -inf
        where a token is cut."""
        rows = [row for row, name in enumerate(names) if name in self._sets]
        if not rows:
            return
        if len(rows) < len(processed_RV):  # a copy, which is slow
            processed_RV = processed_RV[rows]
        for row, kept_V in zip(rows, (processed_RV > -math.inf).cpu().numpy(), strict=True):
            # A row of NaN keeps nothing; the token's logprob is NaN, too, and is masked for that.
            packed = pack_kept(kept_V) if kept_V.any() else WHOLE_VOCABULARY
            self._sets[names[row]] = packed if len(packed) <= self._max_bytes else None


class Grammars:
    """The grammars of requests; one that several requests have is serialized once."""

    def __init__(self) -> None:
        self._data: dict[Any, bytes] = {}  # by what vLLM compiled them from

    def replayable(self, core: Any, request: Any) -> Grammar | None:
        """The grammar of a request of vLLM's core, if each of its tokens is sampled under it and
        `orchestration/batching.py` can replay it."""
        from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

        structured = request.structured_output_request
        if structured is None or not isinstance(structured.grammar, XgrammarGrammar):
            return None
        has_reasoner = core.structured_output_manager.reasoner_cls is not None
        if has_reasoner and not structured.reasoning_ended:
            return None  # it applies from the end of the reasoning on
        key = structured.structured_output_key
        if key not in self._data:
            if len(self._data) == _MAX_GRAMMARS:
                self._data.clear()
            text = structured.grammar.ctx.grammar.serialize_json()
            self._data[key] = zlib.compress(text.encode())
        stop_token_ids = tuple(sorted(request.sampling_params.all_stop_token_ids))
        return Grammar(data=self._data[key], stop_token_ids=stop_token_ids)


def _v2_names(runner: Any) -> Callable[..., Sequence[str]]:
    """The request of each row, from the arguments of the V2 runner's ``Sampler.sample``."""

    def names(_logits: Any, _expanded: Any, _mapping: Any, rows: Any, *_: Any) -> Sequence[str]:
        return [runner.req_states.index_to_req_id[row] for row in rows.tolist()]

    return names
