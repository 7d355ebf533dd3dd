"""Which models can be trained is decided from their ``config.json``, before anything starts."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.config_mutations import with_value
from torchtitan_rl.config.model import FAMILIES, find_policy, read_architecture
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError

QWEN3: dict[str, Any] = json.loads((Path(TINY.policy.checkpoint) / "config.json").read_text())

MOE: dict[str, Any] = {"model_type": "qwen3_moe"}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": None,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(QWEN3 | changes))
    return folder


def architecture_errors(folder: Path) -> list[str]:
    try:
        read_architecture(folder)
    except ConfigError as error:
        return error.errors
    return []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "mamba"},
            "model_type 'mamba' is not supported; use one of qwen3, qwen2, llama",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_bias": True}, "mlp_bias True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window True is not supported"),
        ({"model_type": "llama", "sliding_window": 64}, "sliding_window 64 is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types sliding_attention: use full_attention alone",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config {'quant_method"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type 'yarn' is not supported; use default or llama3",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type 'linear' is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type 'llama3' lacks low_freq_factor, high_freq_factor, original_max",
        ),
        ({"hidden_size": None}, "hidden_size is None; it must be a whole number above 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a whole number"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        (MOE | {"decoder_sparse_step": 2}, "mlp_only_layers or decoder_sparse_step leaves layers"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers or decoder_sparse_step leaves layers"),
        (MOE | {"num_experts": 512}, "num_experts is 512; at most 256 are supported"),
        (MOE | {"num_experts": "8"}, "num_experts is '8'; it must be a whole number above 0"),
        (MOE | {"num_local_experts": 4}, "num_experts_per_tok is 8, and num_experts is 4"),
        (DEEPSEEK | {"topk_method": None}, "topk_method is None; only 'noaux_tc' is supported"),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave is False; only True is supported"),
        (DEEPSEEK | {"tie_word_embeddings": True}, "tie_word_embeddings is True; only False is"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1 is supported"),
        (DEEPSEEK | {"num_key_value_heads": 2}, "num_key_value_heads is 2: give num_attention_"),
        (DEEPSEEK | {"first_k_dense_replace": 2}, "first_k_dense_replace is 2: give a whole"),
        (DEEPSEEK | {"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be a whole number above 0"),
        (DEEPSEEK | {"q_lora_rank": "no"}, "q_lora_rank is 'no'; it must be a whole number"),
        (DEEPSEEK | {"n_group": 3}, "n_group is 3: give a divisor of the 256 experts"),
        (DEEPSEEK | {"n_group": 256}, "n_group is 256: give a divisor of the 256 experts, with 2"),
        (DEEPSEEK | {"topk_group": 9}, "topk_group is 9: give at most n_group (8)"),
        (DEEPSEEK | {"v_head_dim": 256}, "v_head_dim is 256: values longer than keys (192)"),
        (DEEPSEEK | {"qk_rope_head_dim": 63, "qk_nope_head_dim": 65}, "qk_rope_head_dim 63 is odd"),
        (DEEPSEEK | {"rope_parameters": YARN}, "rope_type 'yarn' lacks mscale, mscale_all_dim"),
        (
            DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
            "rope_type 'yarn' is supported only with equal mscale and mscale_all_dim",
        ),
        (
            DEEPSEEK | {"rope_parameters": {"type": "llama3"}},
            "rope_type 'llama3' is not supported; use default or yarn",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_one_line(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (error,) = architecture_errors(written(tmp_path, **changes))
    assert error.startswith(f"policy.checkpoint: {tmp_path / 'config.json'}: {reason}")


@pytest.mark.parametrize("text", ["{", "[]", "null", ""])
def test_a_file_that_is_no_configuration_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    (error,) = architecture_errors(tmp_path)
    assert error.startswith("policy.checkpoint: ")
    assert "\n" not in error


def test_a_run_with_such_a_model_is_refused_before_it_starts(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    config = with_value(TINY, "policy.checkpoint", str(written(policy, attention_bias=True)))
    config = with_value(replace(config, output_dir=tmp_path), "rollout.step_timeout_s", 4e3)
    with pytest.raises(ConfigError) as refused:
        prepare_run(config)
    first, second = refused.value.errors
    assert "attention_bias True is not supported" in first
    assert second.startswith("rollout.step_timeout_s is 4000")


@pytest.mark.parametrize("weights", ["cut off", "folder", "link"])
def test_weights_that_are_not_there_or_not_whole_are_one_line(tmp_path: Path, weights: str) -> None:
    policy = Path(shutil.copytree(TINY.policy.checkpoint, tmp_path / "policy"))
    file = policy / "model.safetensors"
    if weights == "cut off":  # such as a download that was interrupted
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
        file.mkdir() if weights == "folder" else file.symlink_to("gone")
    for is_trained in (True, False):
        with pytest.raises(ConfigError, match="no usable Hugging Face checkpoint") as refused:
            find_policy(str(policy), is_trained=is_trained)
        assert len(refused.value.errors) == 1


def test_mistral_has_a_sliding_window_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    assert architecture_errors(written(tmp_path, model_type="mistral", sliding_window=None)) == []
    said = {name: value for name, value in QWEN3.items() if name != "sliding_window"}
    (tmp_path / "config.json").write_text(json.dumps(said | {"model_type": "mistral"}))
    (error,) = architecture_errors(tmp_path)
    assert "sliding_window 4096 is not supported" in error


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_a_file_leaves_out_is_as_transformers_takes_it(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(family, sliding_window=None)
    theirs = whole.get_text_config()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes += ("vocab_size", "max_position_embeddings")
    written = {"model_type": family, **{name: getattr(theirs, name) for name in sizes}}
    if family == "deepseek_v3":  # of which vLLM has other defaults
        written |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if family == "qwen2_5_vl":
        vision = {"out_hidden_size": theirs.hidden_size}
        written |= {"vision_config": vision, "image_token_id": 1}
        written["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    (tmp_path / "config.json").write_text(json.dumps({**written, "sliding_window": None}))
    ours = read_architecture(tmp_path)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    if ours.latent is None:
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or ours.dim // ours.num_heads)
    else:
        assert ours.head_dim == theirs.qk_head_dim
        assert ours.latent.query_rank == theirs.q_lora_rank
        assert ours.latent.kv_rank == theirs.kv_lora_rank
        assert ours.latent.rope_dim == theirs.qk_rope_head_dim
        assert ours.latent.value_dim == theirs.v_head_dim
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.has_tied_embeddings == whole.tie_word_embeddings
    if ours.experts is not None:
        assert ours.hidden_dim == theirs.moe_intermediate_size
        assert ours.experts.number == theirs.num_local_experts
        assert ours.experts.per_token == theirs.num_experts_per_tok
        assert ours.experts.has_normalized_weights == theirs.norm_topk_prob
        assert ours.experts.num_groups == getattr(theirs, "n_group", 1)
        assert ours.experts.groups_per_token == getattr(theirs, "topk_group", 1)
        assert ours.experts.scale == getattr(theirs, "routed_scaling_factor", 1.0)
        assert ours.experts.num_shared == getattr(theirs, "n_shared_experts", 0)
        assert ours.experts.num_dense_layers == getattr(theirs, "first_k_dense_replace", 0)
