"""The checkpoints of a run on disk: ``step-000010/`` and so on under one root.

A folder's suffix shows its state (`checkpoint_files` describes how a checkpoint is written):

| name | content |
|---|---|
| `step-000010` | a published checkpoint; complete if its marker and its files are complete |
| `step-000010.writing` | being written or removed, or left by a killed process |
| `step-000010.replaced` | the earlier checkpoint of a step while a new one is published |
| `step-000010.rejected` | newer than the chosen checkpoint, but damaged or not resumable |

Invariants: `choose` changes nothing before it has found a checkpoint to resume from. `prune` keeps
at least one complete checkpoint if there is one, and does not touch files that another call may be
writing. Rejected checkpoints never count as kept checkpoints, and stay until a newer checkpoint is
complete.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import (
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    CheckpointUnreadableError,
    check_contents,
    check_sizes,
    temporary_path,
)

_REJECTED_SUFFIX = ".rejected"
_SUFFIXES = ("", TEMPORARY_SUFFIX, REPLACED_SUFFIX, _REJECTED_SUFFIX)
_NAME = re.compile(r"step-(?P<step>\d{6,})(?P<suffix>\.\w+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestCheckpoint:
    """The checkpoint to resume from, if there is one; ``passed_over`` has one message for each
    newer, unusable checkpoint."""

    path: Path | None = None
    step: int | None = None
    passed_over: tuple[str, ...] = ()


class CheckpointDirectory:
    """Names, finds and removes the checkpoints under ``root``, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints (every file has its size), ascending."""
        return sorted(
            step for step, suffix, path in self._entries() if not suffix and _is_complete(path)
        )

    def choose(
        self, why_not: Callable[[Path], str | None], *, checksums: bool = False
    ) -> NewestCheckpoint:
        """Choose the newest complete checkpoint for which ``why_not`` returns None.

        Newer checkpoints are set aside, and files left by a killed writer are removed. The result
        is empty if no checkpoint was ever written. Call this at start, before anything is written.
        ``checksums``: also read the data, to find damage that does not change sizes; loading would
        find it too late to use an older checkpoint.

        Raises:
            CheckpointError: no checkpoint is usable; or a newer one is unreadable and might be
                complete (then nothing is changed); or a rejected one could not be renamed.
        """
        check = check_contents if checksums else check_sizes
        rejected: dict[Path, str] = {}  # the reasons
        chosen: Path | None = None
        try:
            entries = list(self._entries())
            candidates = [  # within a step, the replaced checkpoint comes last
                (step, suffix == "", path)
                for step, suffix, path in entries
                if suffix in ("", REPLACED_SUFFIX)
            ]
            for _, _, path in sorted(candidates, reverse=True):
                try:
                    check(path)
                except CheckpointUnreadableError:
                    raise
                except CheckpointError as error:
                    rejected[path] = str(error)
                    continue
                reason = why_not(path)
                if reason is None:
                    chosen = path
                    break
                rejected[path] = f"checkpoint {path} cannot be resumed from: {reason}"
        except CheckpointUnreadableError as error:
            raise self._refusal([str(error), *rejected.values()]) from error
        if chosen is None:
            aside = [f"{path} was set aside" for _, end, path in entries if end == _REJECTED_SUFFIX]
            if errors := [*rejected.values(), *aside]:
                raise self._refusal(errors)
            self._clear_leftovers()
            return NewestCheckpoint()
        passed_over = [
            f"{rejected[path]}; kept as {self._set_aside(path)}" for path in reversed(rejected)
        ]
        self._clear_leftovers()
        step = step_of(chosen)
        return NewestCheckpoint(path=self.path(step), step=step, passed_over=tuple(passed_over))

    def prune(self, keep: int) -> list[int]:
        """Remove all complete checkpoints but the newest ``keep`` (at least 1), and all other
        folders that are older than the newest. May run while another checkpoint is written. Returns
        the removed steps.

        Raises:
            CheckpointError: some folders could not be removed. All others were removed.
        """
        complete = self.steps()
        if not complete:
            return []
        leaving: list[Path] = []
        for step, suffix, path in self._entries():
            is_older = step < complete[-1]
            if suffix == "":
                is_leaving = is_older and step not in complete[-keep:]
            elif suffix == REPLACED_SUFFIX:
                is_leaving = step in complete
            else:
                is_leaving = is_older
            if is_leaving:
                leaving.append(path)
        errors = [message for path in leaving if (message := _remove(path))]
        if errors:
            raise CheckpointError("old checkpoints cannot be removed: " + "; ".join(errors))
        return complete[:-keep]

    def _refusal(self, errors: list[str]) -> CheckpointError:
        return CheckpointError(
            f"no checkpoint in {self.root} can be resumed from: {'; '.join(errors)}; "
            "checkpoints, journal and metrics were not changed; repair a checkpoint, remove those "
            "named here to resume from an older one, remove the folder to start from the "
            "beginning, or give another name"
        )

    def _set_aside(self, path: Path) -> Path:
        final = self.path(step_of(path))
        aside = final.with_name(final.name + _REJECTED_SUFFIX)
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
            elif suffix in (REPLACED_SUFFIX, TEMPORARY_SUFFIX):
                _remove(path)  # remaining files are not a checkpoint, and are removed later

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        """Yield (step, suffix, path) for each folder with one of the names above. Raises
        CheckpointUnreadableError: the root cannot be read."""
        try:
            paths = [path for path in sorted(self.root.iterdir()) if _NAME.fullmatch(path.name)]
            folders = [path for path in paths if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise CheckpointUnreadableError(f"{self.root} cannot be read: {error}") from error
        for path in folders:
            match = _NAME.fullmatch(path.name)
            if match and (match["suffix"] or "") in _SUFFIXES:
                yield int(match["step"]), match["suffix"] or "", path


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _remove(path: Path) -> str | None:
    """Remove a folder; returns an error message or None. A checkpoint is renamed first, so that a
    partly removed checkpoint is not treated as a damaged one."""
    try:
        if not path.suffix:
            removed = temporary_path(path)
            shutil.rmtree(removed, ignore_errors=True)
            path = path.rename(removed)
        shutil.rmtree(path)
    except FileNotFoundError:  # it was removed with its step's checkpoint
        return None
    except OSError as error:
        return f"{path}: {error}"
    return None


def _is_complete(path: Path) -> bool:
    try:
        check_sizes(path)
    except CheckpointError:
        return False
    return True
