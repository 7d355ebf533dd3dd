"""A Qwen3 in float64, straight from its safetensors: what float32 implementations are judged by.

Two float32 implementations differ by the roundings of both. This says how far each is from the
model that the weights define. (`transformers` is no such reference: its norms are float32 always.)

Shapes: L tokens, N heads, H elements of a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

if TYPE_CHECKING:
    from torchtitan_rl.training.batch import TrainingBatch


def float64_logprobs(checkpoint: Path, batch: TrainingBatch) -> np.ndarray:
    """[N]: of each token but the first of an episode; each episode alone."""
    config = json.loads((checkpoint / "config.json").read_text())
    weights = {k: v.double() for k, v in load_file(checkpoint / "model.safetensors").items()}
    result = np.zeros(batch.num_tokens)
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        tokens_L = torch.from_numpy(batch.token_ids[start : start + length])
        logits_LV = _logits(config, weights, tokens_L) / batch.temperature
        chosen_L1 = logits_LV.log_softmax(-1)[:-1].gather(1, tokens_L[1:, None])
        result[start + 1 : start + length] = chosen_L1[:, 0].numpy()
    return result


def _logits(
    config: dict[str, Any], weights: dict[str, torch.Tensor], tokens_L: torch.Tensor
) -> torch.Tensor:
    eps, head_dim = config["rms_norm_eps"], config["head_dim"]
    rotation = _rotation(len(tokens_L), head_dim, config["rope_parameters"]["rope_theta"])
    embedding = weights["model.embed_tokens.weight"]
    h_LD = embedding[tokens_L]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        x_LD = norm(h_LD, f"{layer}.input_layernorm")
        q, k, v = (
            linear(x_LD, f"{layer}.self_attn.{kind}_proj").unflatten(-1, (-1, head_dim))
            for kind in "qkv"
        )
        q, k = (
            _rotated(norm(x, f"{layer}.self_attn.{kind}_norm"), rotation)
            for kind, x in (("q", q), ("k", k))
        )
        out_LNH = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        h_LD = h_LD + linear(out_LNH.flatten(1), f"{layer}.self_attn.o_proj")
        x_LD = norm(h_LD, f"{layer}.post_attention_layernorm")
        gate = F.silu(linear(x_LD, f"{layer}.mlp.gate_proj"))
        h_LD = h_LD + linear(gate * linear(x_LD, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    return F.linear(norm(h_LD, "model.norm"), weights.get("lm_head.weight", embedding))


def _rotation(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [L, 1, H] of float32 angles: those are part of the model's definition."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)[:, None]
    return angles.cos().double(), angles.sin().double()


def _rotated(x_LNH: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotation
    first, second = x_LNH.chunk(2, dim=-1)
    return x_LNH * cosine + torch.cat([-second, first], dim=-1) * sine
