"""The checkpoints of a run on disk: ``step-000010/`` and so on under one root.

A checkpoint is written under a temporary name and renamed when its marker is in it (see
`checkpoint_files`). What is being written, or was when a process died, is never listed.

Invariants: `prune` keeps at least one complete checkpoint where there is one, and touches nothing
that may be in writing; a checkpoint that `newest` passed over (``.torn``), or that no run can go on
from (``.rejected``), is set aside, so that it can never count as one of those to keep; what is
being removed is no checkpoint any more (``.removed``).
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
_REJECTED_SUFFIX = ".rejected"
_REMOVED_SUFFIX = ".removed"
_SUFFIXES = (
    "",
    TEMPORARY_SUFFIX,
    REPLACED_SUFFIX,
    _TORN_SUFFIX,
    _REJECTED_SUFFIX,
    _REMOVED_SUFFIX,
)
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
        passed_over: list[str] = []
        path = next(self.candidates(passed_over, checksums=checksums), None)
        step = None if path is None else step_of(path)
        return NewestCheckpoint(path=path, step=step, passed_over=tuple(passed_over))

    def candidates(self, passed_over: list[str], *, checksums: bool = False) -> Iterator[Path]:
        """The complete checkpoints, newest first, each as it is asked for; for whoever can go on
        from some only, and then calls `reject` for those that are newer than the chosen one. As
        `newest`; adds to ``passed_over`` what is wrong with torn ones.

        Raises:
            CheckpointError: a torn one cannot be set aside.
        """
        check = check_contents if checksums else check_sizes
        self._clear_leftovers()
        for step in sorted((s for s, suffix, _ in self._entries() if not suffix), reverse=True):
            path = self.path(step)
            try:
                check(path)
            except CheckpointError as error:
                passed_over.append(str(error))
                _set_aside(path, _TORN_SUFFIX)
            else:
                yield path

    def reject(self, path: Path) -> Path:
        """Set a complete checkpoint aside that no run can go on from; returns its new place, where
        it stays until a newer one is complete.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        return _set_aside(path, _REJECTED_SUFFIX)

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest ``keep`` complete checkpoints, and what is torn and older than
        the newest. May run while another is being written. Returns the removed complete steps.

        Raises:
            ValueError: ``keep`` is below 1.
            CheckpointError: some could not be removed; all others are.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        complete = self.steps()
        if not complete:
            return []
        leaving: list[Path] = []
        for step, suffix, path in self._entries():
            match suffix:
                case "":
                    gone = step not in complete[-keep:] and step < complete[-1]
                case ".replaced":
                    gone = step in complete
                case _:
                    gone = step < complete[-1] or suffix in (_TORN_SUFFIX, _REMOVED_SUFFIX)
            if gone:
                leaving.append(path)
        mistakes = [mistake for path in leaving if (mistake := _remove(path))]
        if mistakes:
            raise CheckpointError("old checkpoints cannot be removed: " + "; ".join(mistakes))
        return complete[:-keep]

    def _clear_leftovers(self) -> None:
        for _, suffix, path in self._entries():
            final = path.with_suffix("")
            if suffix == REPLACED_SUFFIX and not final.exists():
                path.rename(final)  # killed between the two renames of `publish`
            elif suffix in (REPLACED_SUFFIX, TEMPORARY_SUFFIX, _REMOVED_SUFFIX):
                _remove(path)  # what stays is no checkpoint, and goes at the next occasion

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """(step, suffix, path) of everything under the root that is ours."""
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir() and (match["suffix"] or "") in _SUFFIXES:
                yield int(match["step"]), match["suffix"] or "", path


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step-"))


def _set_aside(path: Path, suffix: str) -> Path:
    aside = path.with_name(path.name + suffix)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        return path.rename(aside)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be set aside: {error}") from error


def _remove(path: Path) -> str | None:
    """Why it cannot be removed, or None. A name of a checkpoint is given up first, so that one
    that is half removed is not taken for one that was damaged."""
    try:
        if not path.suffix:
            removed = path.with_name(path.name + _REMOVED_SUFFIX)
            shutil.rmtree(removed, ignore_errors=True)
            path = path.rename(removed)
        shutil.rmtree(path)
    except OSError as error:
        return f"{path}: {error}"
    return None


def _is_complete(path: Path) -> bool:
    try:
        check_sizes(path)
    except CheckpointError:
        return False
    return True
