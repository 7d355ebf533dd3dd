"""The `Trainer` of a run that only generates: the policy is the initial one throughout.

Its checkpoints hold only the attachments, with which the run can be resumed. `train_step`,
`logprobs` and `publish` are never called.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.orchestration.run_state import Trainer
from torchtitan_rl.training.batch import Examples, StepLoss, StepOutput, TrainingBatch
from torchtitan_rl.training.checkpoint_files import (
    check_contents,
    discard,
    fingerprint,
    list_files,
    publish,
    seal,
    temporary_path,
    write_attachments,
)
from torchtitan_rl.weights.distribution import WeightHandle


class FixedPolicy(Trainer):
    async def wait_until_lost(self) -> None:
        await asyncio.Event().wait()

    async def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None = None, *, examples: Examples = None
    ) -> StepOutput:
        raise NotImplementedError

    async def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        raise NotImplementedError

    async def publish(self, keep: frozenset[int] = frozenset()) -> WeightHandle:
        raise NotImplementedError

    async def save_checkpoint(
        self, path: Path, attachments: Mapping[str, bytes], *, version: int
    ) -> None:
        await asyncio.to_thread(_write, path, dict(attachments), version)

    async def load_checkpoint(self, path: Path) -> None:
        await asyncio.to_thread(check_contents, path)

    async def finish_checkpoint(self) -> None: ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def export_hf(self, path: Path) -> None: ...

    async def close(self) -> None: ...


def _write(path: Path, attachments: Mapping[str, bytes], version: int) -> None:
    temporary = temporary_path(path)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_attachments(temporary, attachments)
        files = {name: fingerprint(temporary / name) for name in list_files(temporary)}
        seal(temporary, {"version": version, "ranks": 0}, files)
        publish(path)
    except OSError as error:
        discard(path)
        raise CheckpointError(f"checkpoint {path} was not written: {error}") from error
