"""Names and types of vLLM's own options, checked against the installed vLLM in a child process."""

from __future__ import annotations

import json

from torchtitan_rl.config.vllm_options import OWNED, _field_errors, vllm_option_errors
from torchtitan_rl.generation.config import GeneratorConfig

RIGHT = {
    "enforce_eager": False,
    "attention_backend": "FLASH_ATTN",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
    },
}
WRONG = {
    "enforce_eagre": True,
    "enforce_eager": "yes",
    "attention_backend": "FLASH",
    "kv_cache_dtype": "fp9",
    "\x1b[31m": "control characters",
    "compilation_config": {"levels": "9" * 1_000_000},
    "speculative_config": {
        "method": "ngrm",
        "num_speculative_tokens": "4",
        "prompt_lookup_max": 0,
        "lookup": 3,
    },
}


def test_names_and_types_are_those_of_vllm_and_each_refused_field_exists() -> None:
    found = _field_errors(json.dumps(dict.fromkeys(OWNED, ("no", "type")) | RIGHT))
    assert [error for error in found if "is not a field" in error] == []
    assert {error.split(" is ")[0] for error in found} <= OWNED.keys()
    errors = vllm_option_errors(GeneratorConfig(vllm=WRONG), is_on_cpu=True)
    for error, words in zip(
        errors,
        (
            "enforce_eagre is not a field of vLLM's EngineArgs (similar: enforce_eager",
            'enforce_eager is "yes": it must be a valid boolean',
            'attention_backend is "FLASH": it must be one of FLASH_ATTN, ',
            "kv_cache_dtype is \"fp9\": it must be 'auto', ",
            "\\u001b[31m is not a field of vLLM's EngineArgs",
            f'compilation_config is {{"levels": "{"9" * 188}...: levels: Unexpected keyword',
            "speculative_config.method is \"ngrm\": it must be 'ngram', ",
            'speculative_config.num_speculative_tokens is "4": it must be a valid integer',
            "speculative_config.prompt_lookup_max is 0: it must be greater than or equal to 1",
            "speculative_config.lookup is not a field of vLLM's SpeculativeConfig",
        ),
        strict=True,
    ):
        assert error.startswith(f"generator.vllm: {words}")
