"""The checkpoints of a run on disk: ``step-000010/`` and so on under one root.

A checkpoint is written under a temporary name and renamed when its marker is in it (see
`checkpoint_files`). What is being written, or was when a process died, is never listed.

Invariants: `prune` keeps at least one complete checkpoint where there is one, and touches nothing
that may be in writing; a checkpoint that `newest` passed over is set aside, so that it can never
count as one of those to keep.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    check_contents,
    check_sizes,
    load_attachment,
    publish,
    temporary_path,
)

__all__ = [
    "MARKER",
    "CheckpointDirectory",
    "NewestCheckpoint",
    "load_attachment",
    "publish",
    "temporary_path",
]

_TORN_SUFFIX = ".torn"
_NAME = re.compile(r"step-(?P<step>\d{6,})(?P<suffix>\.\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """Where to go on from. ``path`` and ``step`` are None where there is no complete checkpoint;
    ``passed_over`` says of each newer one what is wrong with it."""

    path: Path | None = None
    step: int | None = None
    passed_over: tuple[str, ...] = ()


class CheckpointDirectory:
    """Names, finds and retires the checkpoints under ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints (all files there, of the right size), ascending."""
        return sorted(
            step
            for step, suffix, _ in self._entries()
            if not suffix and _is_complete(self.path(step))
        )

    def newest(self, *, checksums: bool = False) -> NewestCheckpoint:
        """The complete checkpoint of the highest step. Call it at start, while nothing is written:
        torn ones are set aside, and left-overs of a killed writer are cleared away.

        Args:
            checksums: read the data too, which finds damage that left the sizes alone (loading
                finds it as well, but then it is too late to fall back).
        """
        self._clear_leftovers()
        check = check_contents if checksums else check_sizes
        passed_over: list[str] = []
        for step in sorted((s for s, suffix, _ in self._entries() if not suffix), reverse=True):
            path = self.path(step)
            try:
                check(path)
            except CheckpointError as error:
                passed_over.append(str(error))
                aside = path.with_name(path.name + _TORN_SUFFIX)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
            else:
                return NewestCheckpoint(path=path, step=step, passed_over=tuple(passed_over))
        return NewestCheckpoint(passed_over=tuple(passed_over))

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest ``keep`` complete checkpoints, and what is torn and older than
        the newest. May run while another is being written. Returns the removed complete steps.

        Raises:
            ValueError: ``keep`` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        complete = self.steps()
        if not complete:
            return []
        for step, suffix, path in self._entries():
            match suffix:
                case "":
                    gone = step not in complete[-keep:] and step < complete[-1]
                case ".replaced":
                    gone = step in complete
                case _:
                    gone = step < complete[-1] or suffix == _TORN_SUFFIX
            if gone:
                shutil.rmtree(path)
        return complete[:-keep]

    def _clear_leftovers(self) -> None:
        for _, suffix, path in self._entries():
            final = path.with_suffix("")
            if suffix == REPLACED_SUFFIX and not final.exists():
                path.rename(final)  # killed between the two renames of `publish`
            elif suffix in (REPLACED_SUFFIX, TEMPORARY_SUFFIX):
                shutil.rmtree(path)

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """(step, suffix, path) of everything under the root that is ours."""
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            match = _NAME.fullmatch(path.name)
            known = ("", TEMPORARY_SUFFIX, REPLACED_SUFFIX, _TORN_SUFFIX)
            if match and path.is_dir() and (match["suffix"] or "") in known:
                yield int(match["step"]), match["suffix"] or "", path


def _is_complete(path: Path) -> bool:
    try:
        check_sizes(path)
    except CheckpointError:
        return False
    return True
