"""Rotary embeddings of Llama 3.1 in the layout that torchtitan lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.common import CosSinRoPE


class ScaledRoPE(CosSinRoPE):
    """Cosines and sines [max_seq_len, 2 * dim], also with ``scaling="llama"``.

    torchtitan has Llama's frequency scaling only for its other layout (adjacent pairs), which needs
    the permutation of weights that `PolicyModel` avoids.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            cache: torch.Tensor = super()._precompute_cache()
            return cache
        frequencies = config.theta ** -(torch.arange(0, config.dim, 2).float() / config.dim)
        # Llama 3.1 slows long wavelengths down by the factor and keeps short ones; in between it
        # interpolates by the number of rotations within the original context.
        rotations = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (rotations - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / config.scaling_factor)
        positions = torch.arange(config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
