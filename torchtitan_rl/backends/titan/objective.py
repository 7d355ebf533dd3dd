"""The policy loss of an update: per microbatch, and its metrics over all microbatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
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
from torchtitan_rl.training.losses import LossOutput, LossTokens, StepTotals
from torchtitan_rl.training.losses.contract import LossFunction
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
    """The policy loss of one update, called with each microbatch.

    Args:
        function: `policy_loss`, or the user's.
        selected_N: which tokens the update is trained on.
        version: policy version of the weights before the step.
        before_N: logprobs under these weights, where earlier updates of the step changed them.
    """

    def __init__(
        self,
        function: LossFunction,
        config: LossConfig,
        batch: TrainingBatch,
        selected_N: npt.NDArray[np.bool_],
        *,
        version: int,
        before_N: npt.NDArray[np.float32] | None,
        reference: PolicyModel | None,
        layout: Layout,
    ) -> None:
        self._function = function
        self._config = config
        self._batch = batch
        self._version = version
        self._before_N = before_N
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
            before_T=None if self._before_N is None else of_entries(self._before_N),
        )
        return self._function(tokens, totals=self._totals, config=self._config)


@dataclass(slots=True)
class StepSums:
    """Sums and maxima of any shapes, of microbatches or of what they add up to."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, other: StepSums) -> None:
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def add_microbatch(self, output: LossOutput, entropy: torch.Tensor) -> None:
        """``entropy`` is the sum over its trained tokens."""
        sums = {**output.sums, "loss": output.loss.detach(), "entropy": entropy}
        self.add(StepSums(sums, output.maxima))

    def of_all_ranks(self, group: dist.ProcessGroup | None) -> StepSums:
        """Over the data-parallel ranks of ``group``; values of tensor-parallel ranks are equal.
        Collective."""
        return StepSums(
            _reduced(self.sums, dist.ReduceOp.SUM, group),
            _reduced(self.maxima, dist.ReduceOp.MAX, group),
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
