"""A simulated trainer of a training run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoint_files import publish, seal, temporary_path
from torchtitan_rl.weights.distribution import SharedMemoryHandle
from torchtitan_rl.weights.shm import SharedMemoryPublisher


class StandInTrainer:
    """Implements `torchtitan_rl.orchestration.run_state.Trainer`."""

    def __init__(self, policy: Path, *, train_s: float, folder: Path) -> None:
        from safetensors.torch import load_file

        self._train_s = train_s
        self._weights: dict[str, Any] = {}
        for path in sorted(policy.glob("*.safetensors")):
            self._weights |= load_file(path)
        self._publisher = SharedMemoryPublisher("long-tail", folder)
        self._version = 0

    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()

    async def train_step(self, batch: TrainingBatch) -> StepOutput:
        await asyncio.sleep(self._train_s)
        self._version += 1
        return StepOutput(version=self._version)

    async def publish(self, keep: frozenset[int] = frozenset()) -> SharedMemoryHandle:
        return await asyncio.to_thread(
            self._publisher.publish, self._version, self._weights, keep=keep
        )

    async def save_checkpoint(
        self,
        path: Path,
        attachments: Mapping[str, bytes],
        *,
        version: int,
    ) -> None:
        """Called once, after the last step. The checkpoint is never read."""
        folder = temporary_path(path)
        folder.mkdir(parents=True)
        seal(folder, {}, {})
        publish(path)

    async def finish_checkpoint(self) -> None: ...

    async def load_checkpoint(self, path: Path) -> None:
        raise NotImplementedError("nothing is resumed here")

    async def export_hf(self, path: Path) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def close(self) -> None:
        self._publisher.close()
