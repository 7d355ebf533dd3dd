"""Profiles chosen optimizer steps of a trainer rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from torchtitan_rl.training.config import ProfileConfig

logger = logging.getLogger(__name__)


class StepProfiler:
    """Writes ``step5-rank0.json.gz``, a trace, into ``folder`` for each chosen step of a chosen
    rank; where the rank has a CUDA device, also ``step5-rank0-memory.pickle``, for
    https://pytorch.org/memory_viz. A file that cannot be written does not end the run."""

    def __init__(self, config: ProfileConfig, folder: Path, rank: int) -> None:
        self._steps = frozenset(config.steps if rank in config.ranks else ())
        self._folder = folder
        self._rank = rank

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number not in self._steps:
            yield
            return
        has_memory = torch.cuda.is_available()
        if has_memory:
            torch.cuda.memory._record_memory_history()
        try:
            with (
                profile(record_shapes=True) as profiler,
                record_function(f"optimizer step {number}"),
            ):
                yield
            self._write(profiler, f"step{number}-rank{self._rank}", has_memory=has_memory)
        finally:
            if has_memory:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile, name: str, *, has_memory: bool) -> None:
        path = self._folder / name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(f"{path}.json.gz")
            if has_memory:
                dump = torch.cuda.memory._dump_snapshot
                dump(f"{path}-memory.pickle")  # type: ignore[no-untyped-call]
        except OSError as error:
            logger.warning("the profile %s is not written: %s", path, error)
