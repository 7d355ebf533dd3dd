"""The interface of a trainer to the controller, wherever its ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import WeightHandle


class Trainer(Protocol):
    """All ranks of a policy trainer as one object. Calls come one after another; only
    `finish_checkpoint` and `wait_until_lost` may be awaited alongside another one."""

    async def wait_until_lost(self) -> None:
        """For ever, or until a process of the trainer died, whether a call runs or not.

        Raises:
            TrainerLostError: one died.
        """
        ...

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        """One optimizer step.

        Raises:
            DivergedError: loss or gradient is not finite; the weights are as before.
            TrainerLostError: a process of the trainer died (also from every other call).
        """
        ...

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        """Make the current weights readable by replicas, under the current version.

        The version published before and those in ``keep`` stay readable; all others are freed.

        Raises:
            WeightSyncError: there is no room. Versions that were not freed stay readable.
        """
        ...

    async def save_checkpoint(
        self,
        path: Path,
        state: dict[str, Any],
        attachments: Mapping[str, bytes] | None = None,
        *,
        version: int,
    ) -> None:
        """Copy model, optimizer, scheduler and RNG, and write the copy while training continues.

        Returns when the copy is taken. Waits for a checkpoint that is still being written.

        Args:
            state: the controller's state, JSON-able.
            attachments: file name to content; `load_attachment` reads them.
            version: the version that ``state`` belongs to.

        Raises:
            CheckpointError: the trainer holds another version (a step ended after its deadline), or
                the previous checkpoint failed and `finish_checkpoint` has not reported it yet.
                Nothing is written.
        """
        ...

    async def finish_checkpoint(self) -> None:
        """Return when the last saved checkpoint is on disk under its final name.

        Raises:
            CheckpointError: it could not be written; nothing of it is left.
        """
        ...

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore everything that `save_checkpoint` saved; returns the controller's state.

        Raises:
            CheckpointError: the checkpoint is torn or damaged; nothing was changed.
        """
        ...

    async def offload(self) -> None:
        """Move everything from device to host memory. Until `onload` only `finish_checkpoint`,
        `onload` and `close` may be called. A second call has no effect."""
        ...

    async def onload(self) -> None:
        """Move everything back to the devices. A second call has no effect."""
        ...

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None:
        """Finish the checkpoint that is being written, then end the trainer."""
        ...
