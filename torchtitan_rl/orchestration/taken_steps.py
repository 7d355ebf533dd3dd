"""Stores the batches of the steps since a checkpoint, so that a trainer that is started again takes
these steps again.

One file for each step, in a folder of the run. They are for this process only: a resumed run starts
with an empty folder. Nothing is synced to disk.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from torchtitan_rl.training.batch import Examples, StepLoss, TrainingBatch

MAX_BYTES = 8 << 30
"""Most bytes of batches in the folder; a step that does not fit is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenStep:
    """One step, from weights of ``version``. ``digest``: that of the weights after it (the metric
    ``weights_digest``); None if the trainer does not compute one."""

    version: int
    path: Path
    num_bytes: int
    loss: StepLoss | None
    digest: float | None = None

    def read(self) -> tuple[TrainingBatch, Examples]:
        """Return batch and examples. Raises OSError, msgspec.DecodeError: the file is gone or
        damaged."""
        return _DECODER.decode(self.path.read_bytes())


class TakenSteps:
    """The steps since the oldest checkpoint that may still be needed, in order. Empties ``folder``
    first. Raises OSError: the folder cannot be emptied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: dict[int, TakenStep] = {}
        if folder.exists():
            shutil.rmtree(folder)

    def write(
        self, version: int, batch: TrainingBatch, loss: StepLoss | None, examples: Examples
    ) -> TakenStep:
        """Write a step that begins with ``version``; `add` then makes it one of `since`. May run in
        another thread. Raises OSError: the disk fails, or the folder has `MAX_BYTES`."""
        data = _ENCODER.encode((batch, examples))
        held = sum(step.num_bytes for step in list(self._steps.values()))
        if held + len(data) > MAX_BYTES:
            raise OSError(f"the batches since the last checkpoint exceed {MAX_BYTES >> 30} GiB")
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{version:06d}.msgpack"
        try:
            path.write_bytes(data)
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # what was written fills the disk
            raise
        return TakenStep(version=version, path=path, num_bytes=len(data), loss=loss)

    def add(self, step: TakenStep) -> None:
        self._steps[step.version] = step

    def since(self, version: int, until: int) -> list[TakenStep]:
        """Return the steps from ``version`` to ``until``. Raises KeyError: a step is missing."""
        return [self._steps[taken] for taken in range(version, until)]

    def drop_before(self, version: int) -> None:
        """Forget the steps that began with an older version. Files that cannot be removed stay."""
        for old in [step for step in self._steps if step < version]:
            with suppress(OSError):  # `close` tries again
                self._steps.pop(old).path.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise TypeError(type(value).__name__)


def _decoded(_: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encoded)
_DECODER = msgspec.msgpack.Decoder(tuple[TrainingBatch, TrainingBatch | None], dec_hook=_decoded)
