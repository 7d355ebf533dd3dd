"""A bare torchtitan training loop, without our episodes, policy loss, metrics, checks and
layers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl.backends.titan import setup as titan_setup

# isort: split
from torchtitan.models.common import CosSinRoPE, FeedForward
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.nn_modules import RMSNorm

from torchtitan_rl.backends.titan.flops import PolicySizes
from torchtitan_rl.backends.titan.hf import load_hf
from torchtitan_rl.backends.titan.model import build_model, policy_config
from torchtitan_rl.backends.titan.optim import PolicyOptimizer
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.training.config import TrainerConfig


class BareLoop:
    """The loop that a user of torchtitan writes to train on rows of tokens, with plain causal
    attention.

    ``sizes`` gives the FLOPs of a step.
    """

    def __init__(self, policy: Path, config: TrainerConfig) -> None:
        layout = titan_setup.set_up(config)
        dtype = "float32" if layout.device.type == "cpu" else "bfloat16"
        sizes = read_architecture(policy)
        self._device = layout.device
        self._vocab_size = sizes.vocab_size
        model_config = policy_config(sizes, config, layout, dtype)
        for layer in model_config.layers:
            attention = layer.attention
            attention.inner_attention = ScaledDotProductAttention.Config()
            attention.rope = _as(CosSinRoPE.Config, attention.rope)
            if attention.qk_norm is not None:
                attention.qk_norm = _as(RMSNorm.Config, attention.qk_norm)
            layer.attention_norm = _as(RMSNorm.Config, layer.attention_norm)
            layer.ffn_norm = _as(RMSNorm.Config, layer.ffn_norm)
            layer.feed_forward = _as(FeedForward.Config, layer.feed_forward)
        model_config.norm = _as(RMSNorm.Config, model_config.norm)
        self._model = build_model(model_config, config, layout, dtype)
        load_hf(self._model, policy)
        self._optimizer = PolicyOptimizer(self._model, config.optimizer, max_steps=1000)
        self.sizes = PolicySizes.of(
            sizes, layer_parameters=sum(p.numel() for p in self._model.layers.parameters())
        )

    def step(self, *, num_tokens: int, num_logits: int, row_len: int, max_tokens: int) -> None:
        """Take one optimizer step on ``num_tokens`` tokens. Rows have equal lengths of at most
        ``row_len``, and microbatches at most ``max_tokens`` tokens. Logits are computed for
        ``num_logits`` tokens.
        """
        num_rows = -(-num_tokens // row_len)
        row_len = round(num_tokens / num_rows)
        rows = max(1, max_tokens // row_len)
        logits_of_row = num_logits / num_rows
        for start in range(0, num_rows, rows):
            size = min(rows, num_rows - start)
            tokens_BL = torch.randint(0, self._vocab_size, (size, row_len), device=self._device)
            positions_BL = torch.arange(row_len, device=self._device).expand(size, -1)
            selected_S = torch.linspace(
                0, size * row_len - 1, round(size * logits_of_row), device=self._device
            ).long()
            logits_SV = self._model(tokens_BL, positions_BL, None, selected_S)[0]
            targets_S = tokens_BL.flatten()[selected_S]
            loss = torch.nn.functional.cross_entropy(logits_SV.float(), targets_S, reduction="sum")
            (loss / num_logits).backward()
        self._optimizer.clip()
        self._optimizer.step()


def _as(kind: Any, config: Any) -> Any:
    """Return torchtitan's configuration class ``kind`` with the values of ``config``."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(kind)})
