"""Converts our `SamplingParams` to vLLM's; engine options are checked in name, type and value.

vLLM's constructor checks no types: a wrong one would fail inside a step, and with it every request
of the engine. What is refused here reaches no engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.types import SamplingParams

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
GRAMMAR_BACKEND = "xgrammar"  # of engines and endpoint, and what `training/grammars.py` replays
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

    A structured output applies from the end of reasoning: at once where no option is given (True),
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
