"""The sizes of published models, for plans on made-up devices where the model itself is missing.

Nothing is downloaded. A model is known by the last part of its name, with or without a suffix such
as ``-Instruct``. Quantized models are not, because they cannot be trained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torchtitan_rl.config.memory import num_weights
from torchtitan_rl.config.model import PolicyFacts, architecture_of

_QWEN_VOCABULARY = 152_064
# The fields of `_NAMES`.
_QWEN3 = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151_936, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151_936, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151_936, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151_936, False),
}
_QWEN2 = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151_936, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151_936, True),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151_936, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, _QWEN_VOCABULARY, False),
    "Qwen2.5-14B": (5120, 13824, 48, 40, 8, 128, _QWEN_VOCABULARY, False),
    "Qwen2.5-32B": (5120, 27648, 64, 40, 8, 128, _QWEN_VOCABULARY, False),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, _QWEN_VOCABULARY, False),
}
# As in the models' config.json. With norms and biases these sizes give 3,754,622,976 and
# 8,292,166,656 weights, as the published files have.
_QWEN2_5_VL = {
    "Qwen2.5-VL-3B": (2048, 11008, 36, 16, 2, 128, 151_936, True),
    "Qwen2.5-VL-7B": (3584, 18944, 28, 28, 4, 128, _QWEN_VOCABULARY, False),
}
_VISION = {
    "image_token_id": 151_655,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_LLAMA = {
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, 128_256, True),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128, 128_256, True),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, 128_256, False),
    "Llama-3.1-70B": (8192, 28672, 80, 64, 8, 128, 128_256, False),
}
# The same sizes (the hidden dimension is that of dense layers), then those of the experts.
_QWEN3_MOE = {
    "Qwen3-30B-A3B": (2048, 6144, 48, 32, 4, 128, 151_936, False, 768, 128, 8),
    "Qwen3-235B-A22B": (4096, 12288, 94, 64, 4, 128, 151_936, False, 1536, 128, 8),
}
# The same, then shared experts, dense layers, and latent attention.
_DEEPSEEK_V3 = {
    "Moonlight-16B-A3B": (
        *(2048, 11264, 27, 16, 16, 192, 163_840, False, 1408, 64, 6),
        *(2, 1, None, 512, 128, 64, 128),
    ),
}
_NAMES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings"),
    *("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    *("n_shared_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_QUANTIZED = re.compile(r"-(FP8|AWQ|GPTQ|GGUF|MLX|Int[48]|[48]bit|bnb)\b", re.IGNORECASE)
_FAMILIES = (
    ("qwen3", 40_960, _QWEN3),
    ("qwen2", 32_768, _QWEN2),
    ("qwen2_5_vl", 128_000, _QWEN2_5_VL),
    ("llama", 131_072, _LLAMA),
    ("qwen3_moe", 40_960, _QWEN3_MOE),
    ("deepseek_v3", 8192, _DEEPSEEK_V3),
)


def published_facts(checkpoint: str) -> PolicyFacts | None:
    """The facts about a published model; None if its sizes are not known here."""
    name = Path(checkpoint).name
    if _QUANTIZED.search(name):
        return None
    for model_type, positions, models in _FAMILIES:
        for known, sizes in models.items():
            if name != known and not name.startswith(f"{known}-"):
                continue
            config: dict[str, Any] = {"model_type": model_type, "dtype": "bfloat16"}
            config |= dict(zip(_NAMES, sizes, strict=False))
            policy = architecture_of(config | (_VISION if model_type == "qwen2_5_vl" else {}))
            return PolicyFacts(
                num_heads=policy.num_heads,
                num_kv_heads=policy.num_kv_heads,
                max_positions=positions,
                vocab_size=policy.vocab_size,
                num_bytes=2 * num_weights(policy),
                kv_values_per_token=policy.kv_values_per_token,
                latent_values_per_token=policy.latent_values_per_token,
                architecture=policy,
            )
    return None
