"""Tiny random Hugging Face checkpoints for the tests on real components.

`tiny_model` writes a Qwen3, or another family, of about 0.15 M parameters with a byte-level
tokenizer (no merges, one token per byte) that has Qwen3's special tokens and a ChatML template.
Weights are random but wide enough that its distributions are neither flat nor one-hot. Heads are
divisible by 2 (TP = 2).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
VOCAB_SIZE = 288  # 256 bytes, the special tokens, and a few ids that no text gives
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


NUM_VERSIONS = 4


def versions(root: Path) -> list[Path]:
    """Where the policies are that an engine pulls."""
    return [root / f"v{version}" for version in range(NUM_VERSIONS)]


def tiny_tokenizer() -> Any:
    """A `transformers` tokenizer: one token per byte, plus Qwen3's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(
    path: Path,
    *,
    tied: bool = True,
    seed: int = 0,
    std: float = 0.15,
    dtype: str = "float32",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 1024,
    family: str = "qwen3",
    expert_size: int = 64,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write a random checkpoint with its tokenizer to the directory ``path`` and return it. The
    same sizes for every family (``model_type``), and ``num_layers`` with experts, if it has any.
    ``changes``: other fields of config.json."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    more: dict[str, Any] = {"head_dim": 32}
    if family == "qwen3_moe":
        more |= EXPERTS | {"moe_intermediate_size": expert_size}
    elif family == "deepseek_v3":
        num_layers, num_kv_heads = num_layers + DEEPSEEK["first_k_dense_replace"], num_heads
        more = DEEPSEEK | {"moe_intermediate_size": expert_size}
    more |= changes or {}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        sliding_window=None,  # which Mistral has otherwise
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        initializer_range=std,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):  # zero otherwise
                torch.nn.init.normal_(parameter, std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(".e_score_correction_bias"):  # zero otherwise
                torch.nn.init.normal_(buffer, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def hf_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by Hugging Face name; a tied head is absent."""
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def hf_logprobs(
    path: Path, token_ids: tuple[int, ...], *, num_prompt: int, temperature: float = 1.0
) -> list[float]:
    """Logprob of each token after the first ``num_prompt``, by `transformers` in float32."""
    logprobs_LV = hf_logprob_rows(path, token_ids, temperature=temperature)
    return [
        float(logprobs_LV[position - 1, token_ids[position]])
        for position in range(num_prompt, len(token_ids))
    ]


def hf_logprob_rows(path: Path, token_ids: tuple[int, ...], *, temperature: float = 1.0) -> Any:
    """Logprobs of the whole vocabulary after each token [L, V], by `transformers` in float32."""
    import torch

    with torch.inference_mode():
        logits_LV = _hf_model(path)(torch.tensor([token_ids])).logits[0] / temperature
    return logits_LV.log_softmax(-1).numpy()


def hf_experts(*parts: tuple[Path, tuple[int, ...]]) -> Any:
    """The experts of each token and layer [T, X, K], sorted, by `transformers` in float32. Each
    part has its own policy, which computes its tokens with the keys and values of the parts
    before."""
    import torch
    from transformers import DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    cache = DynamicCache()
    found: list[list[torch.Tensor]] = []
    kept: dict[int, list[torch.Tensor]] = {}
    expand = DeepseekV3Attention.expand_kv

    def expand_new(self: Any, *latent: torch.Tensor) -> list[torch.Tensor]:
        # transformers keeps latent vectors, and projects them again; engines keep the results.
        old = kept.get(self.layer_idx)
        new = expand(self, *(x if old is None else x[:, :, old[0].shape[2] :] for x in latent))
        kept[self.layer_idx] = (
            [*new]
            if old is None
            else [torch.cat(pair, dim=2) for pair in zip(old, new, strict=True)]
        )
        return kept[self.layer_idx]

    def keep(_router: Any, _input: Any, output: Any) -> None:
        found[-1].append(output[2].sort().values)

    for path, token_ids in parts:
        model = _hf_model(path)
        routers = [one for name, one in model.named_modules() if name.endswith(".mlp.gate")]
        hooks = [router.register_forward_hook(keep) for router in routers]
        found.append([])
        with torch.inference_mode(), patch.object(DeepseekV3Attention, "expand_kv", expand_new):
            model(torch.tensor([token_ids]), past_key_values=cache)
        for hook in hooks:
            hook.remove()
    return torch.cat([torch.stack(of_layers, dim=1) for of_layers in found]).numpy()


@cache
def _hf_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
