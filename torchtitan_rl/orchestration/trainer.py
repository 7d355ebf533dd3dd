"""What the controller needs of a trainer, wherever its ranks run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import WeightHandle


class Trainer(Protocol):
    """All ranks of a policy trainer behind one object; calls come one after another."""

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        """One optimizer step.

        Raises:
            DivergedError: loss or gradient is not finite; the weights are as before.
            TrainerLostError: a process of the trainer died (also from every other call).
        """
        ...

    async def publish(self) -> WeightHandle:
        """Make the current weights readable by replicas, under the current version."""
        ...

    async def save_checkpoint(self, path: Path, state: dict[str, Any]) -> None:
        """Write model, optimizer, scheduler and RNG, with the controller's JSON-able state."""
        ...

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore all of it; returns the controller's state."""
        ...

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None: ...
