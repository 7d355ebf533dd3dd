"""AdamW, its learning-rate schedule and the gradient norm, on torchtitan's containers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_

from torchtitan_rl.training.config import OptimizerConfig


class PolicyOptimizer:
    """For each update, call `clip`, then `step` or `discard`. After the last update of a training
    step, call `end_step`."""

    def __init__(
        self,
        model: Any,
        config: OptimizerConfig,
        *,
        max_steps: int,
        has_expert_parallel: bool = False,
    ) -> None:
        self._model = model
        self._has_expert_parallel = has_expert_parallel  # experts are on a mesh of their own
        self._max_grad_norm = config.max_grad_norm
        group = ParamGroupConfig(
            pattern=".*",
            optimizer_name="AdamW",
            optimizer_kwargs={
                "lr": config.learning_rate,
                "betas": config.betas,
                "eps": config.eps,
                "weight_decay": config.weight_decay,
            },
        )
        self.container = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[model])
        self._scheduler = LRSchedulersContainer(
            self.container, lambda step: config.learning_rate_factor(step, max_steps)
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of all updates in the next training step."""
        return float(self._scheduler.schedulers[0].get_last_lr()[0])

    def clip(self) -> float:
        """Clip gradients to the maximum norm, and return the global norm before clipping."""
        parameters, has_experts = self._model.parameters(), self._has_expert_parallel
        return float(clip_grad_norm_(parameters, self._max_grad_norm, ep_enabled=has_experts))

    def step(self) -> None:
        self.container.step()
        self.container.zero_grad()

    def end_step(self) -> None:
        self._scheduler.step()

    def tensors(self) -> Iterator[torch.Tensor]:
        for optimizer in self.container:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def forget_steps(self) -> None:
        for optimizer in self.container:
            for state in optimizer.state.values():
                state["step"].zero_()

    def discard(self) -> None:
        self.container.zero_grad()

    def restore_schedule(self, step: int) -> None:
        """Set the learning rate to its value after ``step`` training steps."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*get_last_lr.*")  # from torchtitan's call
            self._scheduler.load_state_dict({"last_epoch": step})
        for optimizer in self.container:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate
