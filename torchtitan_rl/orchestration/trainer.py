"""What the controller needs of a trainer, wherever its ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import WeightHandle


class Trainer(Protocol):
    """All ranks of a policy trainer behind one object; calls come one after another, but for
    `finish_checkpoint`, which may be awaited alongside any other."""

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        """One optimizer step.

        Raises:
            DivergedError: loss or gradient is not finite; the weights are as before.
            TrainerLostError: a process of the trainer died (also from every other call).
        """
        ...

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        """Make the current weights readable by replicas, under the current version.

        Besides, the version published before and those in ``keep`` stay readable; all others are
        given up.

        Raises:
            WeightSyncError: there is no room; what was readable still is, but for what was given
                up.
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
        """Take a copy of model, optimizer, scheduler and RNG, with the controller's JSON-able
        state and ``attachments`` (file name to content; `load_attachment` reads them), and write it
        while training goes on. Returns when the copy is taken.

        Waits for a checkpoint that is still being written.

        Args:
            version: that the caller's state belongs to.

        Raises:
            CheckpointError: the trainer holds another version (a step ended after its deadline), or
                the checkpoint that was being written failed, and `finish_checkpoint` has not
                reported it yet. Nothing is written.
        """
        ...

    async def finish_checkpoint(self) -> None:
        """Return when the last saved checkpoint is completely on disk, under its name; at once
        where none is being written.

        Raises:
            CheckpointError: it could not be written; no trace of it will be found.
        """
        ...

    async def load_checkpoint(self, path: Path) -> dict[str, Any]:
        """Restore all of it; returns the controller's state.

        Raises:
            CheckpointError: it is torn or damaged; nothing was changed.
        """
        ...

    async def offload(self) -> None:
        """Give the devices' memory back; all that was in it waits in the host's. Until `onload`
        only `finish_checkpoint`, `onload` and `close` may be called. Again: no effect."""
        ...

    async def onload(self) -> None:
        """Take the memory back, with what was in it; where it is there already: no effect."""
        ...

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None:
        """Finish a checkpoint that is being written, then end the trainer."""
        ...
