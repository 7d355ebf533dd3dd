"""The arithmetic that optimizer steps need, and the most that a device can do in a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.tools.utils import get_peak_flops

from torchtitan_rl.config.memory import expert_weights
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.training.trees import Microbatch

_A100_PEAK = 312e12


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """The sizes of a policy that determine its FLOPs. ``attention_width`` is layers x heads x head
    dimension (the mean of keys' and values'). ``frozen_parameters`` of the layers are not trained;
    if there are any, the head is not trained either."""

    layer_parameters: int
    head_parameters: int
    attention_width: int
    frozen_parameters: int = 0

    @staticmethod
    def of(
        architecture: PolicyArchitecture, *, layer_parameters: int, frozen_parameters: int = 0
    ) -> PolicySizes:
        """``layer_parameters``: number of weights of all layers. Those of experts that do not
        compute a token are subtracted."""
        a = architecture
        if a.experts is not None:
            share = 1 - a.experts.per_token / a.experts.number
            layer_parameters -= int(share * a.num_expert_layers * expert_weights(a))
        value_dim = a.head_dim if a.latent is None else a.latent.value_dim
        return PolicySizes(
            layer_parameters=layer_parameters,
            head_parameters=a.vocab_size * a.dim,
            attention_width=a.num_layers * a.num_heads * (a.head_dim + value_dim) // 2,
            frozen_parameters=frozen_parameters,
        )

    def step_flops(self, *, num_tokens: float, num_logits: float, num_pairs: float) -> float:
        """FLOPs that forward and backward passes need, in any implementation.

        Each token needs 6 FLOPs for each weight (Kaplan et al. 2020, 2001.08361), or 4 if the
        weight gets no gradient. For the weights of the head, only the ``num_logits`` tokens whose
        logits are read count. Attention's two products for each of the ``num_pairs`` query-key
        pairs count three times, because of the backward pass.
        """
        weights = num_tokens * self.layer_parameters + num_logits * self.head_parameters
        frozen = num_tokens * self.frozen_parameters
        frozen += num_logits * self.head_parameters if self.frozen_parameters else 0.0
        return 6.0 * weights - 2.0 * frozen + 12.0 * self.attention_width * num_pairs


def num_logits(parts: Sequence[Microbatch]) -> int:
    return sum(len(np.unique(part.predecessors_E)) for part in parts)


def num_visible_pairs(parts: Sequence[Microbatch]) -> int:
    """Number of query-key pairs that attention has to compute. A padding token counts as one."""
    return sum(
        int((part.subtree_end_T - np.arange(len(part.subtree_end_T))).sum()) for part in parts
    )


def peak_flops(device_name: str) -> float | None:
    """The peak of dense bfloat16 FLOPs per second of a device, by torchtitan's table; None if the
    device is not in it. For such a device torchtitan returns the peak of an A100."""
    peak = float(get_peak_flops(device_name))
    return None if peak == _A100_PEAK and "A100" not in device_name else peak
