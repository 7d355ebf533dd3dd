"""The policy loss of a step: per microbatch, and its metrics over all microbatches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtitan_rl.backends.titan.forward import ForwardOutput, forward, to_device
from torchtitan_rl.backends.titan.hf import load_hf
from torchtitan_rl.backends.titan.model import PolicyModel, build_policy
from torchtitan_rl.backends.titan.setup import Layout
from torchtitan_rl.config.hf_model import PolicyArchitecture
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig, TrainerConfig
from torchtitan_rl.training.losses import (
    LossOutput,
    LossTokens,
    StepTotals,
    loss_metrics,
    policy_loss,
)
from torchtitan_rl.training.trees import Microbatch


def load_reference(
    source: Path,
    architecture: PolicyArchitecture,
    config: TrainerConfig,
    layout: Layout,
    *,
    dtype: str,
) -> PolicyModel | None:
    """The reference of the KL penalty: the initial policy as a second, frozen model of the same
    layout; None without a penalty. Collective."""
    if config.loss.kl_coefficient == 0.0:
        return None
    reference = build_policy(architecture, config, layout, dtype=dtype)
    load_hf(reference, source)
    return reference.requires_grad_(False)


class PolicyObjective:
    """The policy loss of one step, called with each microbatch.

    Args:
        selected_N: which tokens of the whole step are trained on.
        version: policy version of the weights before the step.
    """

    def __init__(
        self,
        config: LossConfig,
        batch: TrainingBatch,
        selected_N: npt.NDArray[np.bool_],
        *,
        version: int,
        reference: PolicyModel | None,
        layout: Layout,
    ) -> None:
        self._config = config
        self._batch = batch
        self._version = version
        self._reference = reference
        self._layout = layout
        self._episode_ids_N = batch.episode_ids
        self._totals = StepTotals(
            num_tokens=int(selected_N.sum()),
            num_sequences=len(np.unique(self._episode_ids_N[selected_N])),
        )

    def __call__(self, part: Microbatch, output: ForwardOutput) -> LossOutput:
        batch, sources_E = self._batch, output.sources_E
        reference_E = None
        if self._reference is not None:
            with torch.no_grad():
                reference_E = forward(self._reference, batch, part, self._layout).logprobs_E

        def of_entries(values: npt.NDArray[Any]) -> torch.Tensor:
            return to_device(values[sources_E], self._layout)

        _, sequences_E = np.unique(self._episode_ids_N[sources_E], return_inverse=True)
        tokens = LossTokens(
            logprobs_T=output.logprobs_E,
            behaviour_T=of_entries(batch.logprobs),
            advantages_T=of_entries(batch.advantages),
            trained_T=output.is_entry_E,
            ages_T=self._version - of_entries(batch.versions),
            sequences_T=to_device(sequences_E, self._layout),
            reference_T=reference_E,
        )
        return policy_loss(tokens, totals=self._totals, config=self._config)


class StepSums:
    """Sums and maxima of a step's microbatches, of any shapes; first of this rank, then of all."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}

    def add(self, output: LossOutput, entropy: torch.Tensor) -> None:
        """Add one microbatch; ``entropy`` is the sum over its trained tokens."""
        sums = {**output.sums, "loss": output.loss.detach(), "entropy": entropy}
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima.get(name, value), value)

    def metrics(self, num_trained: int, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Metrics of the whole step, over the data-parallel ranks of ``group``; values of
        tensor-parallel ranks are equal. Collective."""
        return loss_metrics(
            _reduced(self._sums, dist.ReduceOp.SUM, group),
            _reduced(self._maxima, dist.ReduceOp.MAX, group),
            num_trained=num_trained,
        )


def _reduced(
    values: dict[str, torch.Tensor], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """Reduce all values in one message; every rank has the same names and shapes."""
    if not values:
        return {}
    flat = torch.cat([value.double().flatten() for value in values.values()])
    if group is not None:
        dist.all_reduce(flat, op=op, group=group)
    parts = torch.split(flat.cpu(), [value.numel() for value in values.values()])
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }
