"""The checkpoints of a run on disk: ``step-000010/`` and so on under one root.

A checkpoint is written under a temporary name and renamed, its marker file last, so that what
`steps` lists is complete. Names of what is being written, or was when a process died, are never
listed, and `prune` removes them.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MARKER = "trainer.json"
TEMPORARY_SUFFIX = ".writing"
REPLACED_SUFFIX = ".replaced"
_NAME = re.compile(r"step-(\d{6,})")


class CheckpointDirectory:
    """Names, finds and retires the checkpoints under ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in ascending order."""
        if not self.root.is_dir():
            return []
        return sorted(
            int(match[1])
            for entry in self.root.iterdir()
            if (match := _NAME.fullmatch(entry.name)) and (entry / MARKER).is_file()
        )

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest ``keep`` checkpoints, and left-overs of torn ones. Call it only
        while none is being written. Returns the removed steps.

        Raises:
            ValueError: ``keep`` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        if not self.root.is_dir():
            return []
        removed = self.steps()[:-keep]
        kept = {self.path(step).name for step in self.steps()[-keep:]}
        for entry in list(self.root.iterdir()):
            if entry.name.startswith("step-") and entry.name not in kept:
                shutil.rmtree(entry)
        return removed


def temporary_path(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def publish(path: Path) -> None:
    """Give the finished `temporary_path` its name, in place of what may be there."""
    replaced = path.with_name(path.name + REPLACED_SUFFIX)
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    temporary_path(path).rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
