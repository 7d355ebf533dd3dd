"""Our `SamplingParams` as vLLM's; engine options by name, checked in type and value.

Whatever is refused here is refused before the engine has seen it. vLLM's constructor checks no
types, and a wrong one would fail inside a step, with everybody's requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torchtitan_rl.types import SamplingParams

# What changes which tokens are sampled or where they end. Left out are those that `SamplingParams`
# has a field for, output forms (a completion is token ids), and what an engine must be built for.
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
MAX_LOGIT_BIAS = 100.0  # OpenAI's; vLLM clamps in its server alone, and infinities give NaN


def vllm_sampling_params(sampling: SamplingParams, num_resumed: int) -> Any:
    """A `vllm.SamplingParams` that nobody else holds, of a completion that is to go on behind
    ``num_resumed`` tokens: vLLM's limits count those as well.

    Text is decoded only where stop strings are to be found.

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
        logprobs=sampling.num_logprobs,  # 0: the sampled token's alone
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **_checked_options(sampling.engine_options),
    )


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    if not options:
        return {}
    import msgspec
    from vllm import SamplingParams as VllmSamplingParams

    if unknown := sorted(set(options) - ENGINE_OPTIONS):
        raise ValueError(f"engine_options {unknown} are not served: use {sorted(ENGINE_OPTIONS)}")
    typed = msgspec.convert(dict(options), VllmSamplingParams, str_keys=True)
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
