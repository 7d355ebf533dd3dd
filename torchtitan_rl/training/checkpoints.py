"""The checkpoints of a run on disk: ``step-000010/`` and so on under one root.

A checkpoint is written under a temporary name and renamed when its marker is in it (see
`checkpoint_files`). What is being written, or was when a process died, is never listed.

Invariants: `choose` changes nothing until it has found the one to go on from; `prune` keeps at
least one complete checkpoint where there is one, and touches nothing that may be in writing; a
checkpoint newer than the chosen one that is torn (``.torn``), or that no run can go on from
(``.rejected``), is set aside, so that it can never count as one of those to keep; what is being
removed is no checkpoint any more (``.removed``).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    CheckpointUnreadableError,
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
        """As `choose`, where a run can go on from any that is complete."""
        return self.choose(lambda path: None, checksums=checksums)

    def choose(
        self, why_not: Callable[[Path], str | None], *, checksums: bool = False
    ) -> NewestCheckpoint:
        """The newest complete checkpoint of which ``why_not`` says None. Call it at start, while
        nothing is written. Newer ones are set aside, and left-overs of a killed writer are cleared
        away. Empty where there was never a checkpoint.

        Args:
            checksums: read the data too, which finds damage that left the sizes alone (loading
                finds it as well, but then it is too late to fall back).

        Raises:
            CheckpointError: there are checkpoints, and none can be gone on from, or a newer one
                cannot be read, and may be whole: nothing is changed. Or one cannot be set aside.
        """
        torn: dict[Path, str] = {}
        rejected: dict[Path, str] = {}
        chosen: Path | None = None
        aside: list[str] = []
        try:
            for path in self._complete(torn, checksums=checksums):
                message = why_not(path)
                if message is None:
                    chosen = path
                    break
                rejected[path] = f"checkpoint {path} cannot be gone on from: {message}"
            aside = [
                f"{path} was set aside"
                for _, suffix, path in self._entries()
                if suffix in (_TORN_SUFFIX, _REJECTED_SUFFIX)
            ]
        except CheckpointUnreadableError as error:
            raise self._refusal([str(error), *torn.values(), *rejected.values()]) from error
        if chosen is not None:
            return self._go_on_from(chosen, torn, rejected)
        if found := [*torn.values(), *rejected.values(), *aside]:
            raise self._refusal(found)
        self._clear_leftovers()
        return NewestCheckpoint()

    def reject(self, path: Path) -> Path:
        """Set a complete checkpoint aside that no run can go on from; returns its new place, where
        it stays until a newer one is complete.

        Raises:
            CheckpointError: it cannot be renamed.
        """
        return self._set_aside(path, _REJECTED_SUFFIX)

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
        errors = [message for path in leaving if (message := _remove(path))]
        if errors:
            raise CheckpointError("old checkpoints cannot be removed: " + "; ".join(errors))
        return complete[:-keep]

    def _complete(self, torn: dict[Path, str], *, checksums: bool) -> Iterator[Path]:
        """Those that are whole, newest first, each as it is asked for; adds to ``torn`` what is
        wrong with others. Changes nothing. One that a killed writer had put out of the way of its
        successor comes after that."""
        check = check_contents if checksums else check_sizes
        found = [
            (s, suffix == "", path)
            for s, suffix, path in self._entries()
            if suffix in ("", REPLACED_SUFFIX)
        ]
        for _, _, path in sorted(found, reverse=True):
            try:
                check(path)
            except CheckpointUnreadableError:
                raise
            except CheckpointError as error:
                torn[path] = str(error)
            else:
                yield path

    def _go_on_from(
        self, chosen: Path, torn: dict[Path, str], rejected: dict[Path, str]
    ) -> NewestCheckpoint:
        """Set the newer ones aside, and clear up."""
        for path in reversed(torn):
            self._set_aside(path, _TORN_SUFFIX)
        places = [f"{why}; kept as {self.reject(path)}" for path, why in rejected.items()]
        self._clear_leftovers()
        step = step_of(chosen)
        return NewestCheckpoint(
            path=self.path(step), step=step, passed_over=(*torn.values(), *places)
        )

    def _refusal(self, errors: Iterable[str]) -> CheckpointError:
        return CheckpointError(
            f"no checkpoint in {self.root} can be gone on from: {'; '.join(errors)}; "
            "checkpoints, journal and metrics were not changed; repair a checkpoint, remove those "
            "named here to go on from an older one, remove the folder to start anew, or give "
            "another name"
        )

    def _set_aside(self, path: Path, suffix: str) -> Path:
        final = self.path(step_of(path))
        aside = final.with_name(final.name + suffix)
        shutil.rmtree(aside, ignore_errors=True)
        try:
            return path.rename(aside)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be set aside: {error}") from error

    def _clear_leftovers(self) -> None:
        for _, suffix, path in self._entries():
            final = path.with_suffix("")
            if suffix == REPLACED_SUFFIX and not final.exists():
                try:
                    path.rename(final)  # killed between the two renames of `publish`
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be renamed: {error}") from error
            elif suffix in (REPLACED_SUFFIX, TEMPORARY_SUFFIX, _REMOVED_SUFFIX):
                _remove(path)  # what stays is no checkpoint, and goes at the next occasion

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """(step, suffix, path) of everything under the root that is ours.

        Raises:
            CheckpointUnreadableError: the folder cannot be read.
        """
        try:
            paths = sorted(self.root.iterdir())
            folders = [path for path in paths if _NAME.fullmatch(path.name) and path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise CheckpointUnreadableError(f"{self.root} cannot be read: {error}") from error
        for path in folders:
            match = _NAME.fullmatch(path.name)
            if match and (match["suffix"] or "") in _SUFFIXES:
                yield int(match["step"]), match["suffix"] or "", path


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint, wherever it was put."""
    return int(path.name.removeprefix("step-").partition(".")[0])


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
