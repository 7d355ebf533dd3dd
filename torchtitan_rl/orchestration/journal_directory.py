"""Which journal files a run has, which of them a resumed run reads, and which can be deleted.

There is one file per checkpoint step, ``step-000010.jsonl``: the turns that finished after that
checkpoint was copied. If checkpoint 10 turns out to be torn, the files of 5 and of 10 together say
what came after 5.

A run that starts or resumes begins a new *lineage*: `start_lineage` replaces the file of the
restored step, in one rename, by one with exactly the turns that the run continues with. Only files
of one lineage are read together, so a turn that was dropped once never comes back.

The caller gives the version of each checkpoint, so that turns of later versions are left out (see
`journal.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.orchestration.journal import (
    Journal,
    JournalError,
    JournalUnreadableError,
    read_lines,
)
from torchtitan_rl.rollout.recorded import RecordedRollout, with_turn
from torchtitan_rl.rollout.records import env_state_from_json, turn_from_json

_NAME = re.compile(r"step-(\d{6,})\.jsonl")


class JournalDirectory:
    """The journal of one run. Call `start_lineage` before the first `begin` or `append`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal: Journal | None = None
        self.passed_over: list[str] = []

    def file(self, step: int) -> Path:
        return self.path / f"step-{step:06d}.jsonl"

    def restore(
        self, step: int, base: Mapping[str, RecordedRollout], *, mark: int = 0
    ) -> dict[str, RecordedRollout]:
        """The unfinished rollouts of the checkpoint of ``step`` (``base``) with later turns, and
        those that began after it. Changes nothing on disk.

        A missing file has no turns. A damaged file and those after it are ignored, and
        `passed_over` says why: sampling their turns again costs less than an older checkpoint.

        Raises:
            JournalUnreadableError: the system cannot read the folder or a file.
        """
        self.passed_over = []
        replay, files = Replay(base, mark=mark), self._files()
        try:
            lineage = _lineage(files[step]) if step in files else None
            for later, path in sorted(files.items()):
                if later >= step and lineage is not None and _lineage(path) == lineage:
                    replay.read(path)
        except JournalUnreadableError:
            raise
        except JournalError as error:
            self.passed_over.append(f"{error}; turns from there on are sampled again")
        return replay.rollouts

    def start_lineage(
        self,
        step: int,
        rollouts: Mapping[str, RecordedRollout],
        base: Mapping[str, RecordedRollout],
        *,
        version: int | None = None,
        mark: int = 0,
    ) -> None:
        """Begin a new lineage after the checkpoint of ``step``, and delete later files.

        Args:
            rollouts: what the run continues with.
            base: what of it the checkpoint holds.

        Raises:
            JournalError: it cannot be written, or the system cannot read another file.
        """
        self.close()
        files = self._files()
        lineage = _next_lineage(files.values())
        final = self.file(step)
        journal = Journal(final.with_suffix(".tmp"), lineage=lineage, version=version, mark=mark)
        kept = {name for name, saved in base.items() if _continues(rollouts.get(name), saved)}
        for name in base.keys() - kept:
            journal.drop(name)
        for name, recorded in rollouts.items():
            journal.append(recorded, len(base[name].turns) if name in kept else 0)
        self._journal = journal.renamed(final)
        for later in files:
            if later > step:
                with suppress(OSError):  # what remains is of another lineage and is not read
                    files[later].unlink()

    def begin(self, step: int, *, version: int | None = None) -> int:
        """Turns from now on come after the checkpoint of ``step``, whose weights are ``version``.

        A second checkpoint of one step shares the file, because the first may be the only complete
        one. The returned mark tells them apart; save it with the checkpoint.

        Raises:
            JournalError: it cannot be written.
        """
        old = self._current()
        if old.path == self.file(step):
            return old.next_mark()
        self._journal = Journal(
            self.file(step), lineage=old.lineage, version=version, cut_off=old.cut_off()
        )
        old.close()  # only now: if the new file cannot be created, the old one continues
        return self._journal.mark

    def append(self, recorded: RecordedRollout, first: int = -1) -> None:
        """As `Journal.append`. A failure is raised once; later turns are lost until a new file is
        begun.

        Raises:
            JournalError: it could not be written.
        """
        journal = self._current()
        if not journal.is_closed:
            journal.append(recorded, first)

    def forget(self, group_id: str) -> None:
        """As `Journal.forget`."""
        if self._journal is not None:
            self._journal.forget(group_id)

    def prune(self, oldest_step: int) -> None:
        """Delete the files of checkpoints older than ``oldest_step``, the oldest that is kept.

        Raises:
            JournalError: the folder cannot be read, or some could not be deleted; all others were.
        """
        errors = []
        for step, path in self._files().items():
            try:
                if step < oldest_step:
                    path.unlink()
            except OSError as error:
                errors.append(f"{path}: {error}")
        if errors:
            raise JournalError("old journals cannot be removed: " + "; ".join(errors))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _current(self) -> Journal:
        if self._journal is None:
            raise JournalError(f"{self.path}: no journal was begun")
        return self._journal

    def _files(self) -> dict[int, Path]:
        try:
            named = [(_NAME.fullmatch(path.name), path) for path in self.path.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise JournalUnreadableError(f"{self.path} cannot be read: {error}") from error
        return {int(name[1]): path for name, path in named if name}


class Replay:
    """The rollouts of a checkpoint (``base``) with the turns that came after it.

    - Files are read in the order in which they were written.
    - A turn that comes again replaces the earlier one and all turns after it, because the rollout
      began again. A rollout that was dropped is gone.
    - Lines of the first file before ``mark`` are older than ``base`` (which is then a later
      checkpoint of the same step) and ignored.
    - Where a file left turns of a rollout out, its turns in later files are ignored until it
      begins again.
    """

    def __init__(self, base: Mapping[str, RecordedRollout] | None = None, *, mark: int = 0) -> None:
        self._base = base or {}
        self._mark: int | None = mark  # None after the first file
        self._rollouts = dict(self._base)
        self._dropped: frozenset[str] = frozenset()
        self._cut_off: frozenset[str] = frozenset()

    @property
    def rollouts(self) -> dict[str, RecordedRollout]:
        """By id, after the files that were read."""
        unchanged = {  # with its running turn and its end, which no line has
            name: saved
            for name, saved in self._base.items()
            if name not in self._dropped and self._rollouts[name].turns == saved.turns
        }
        return self._rollouts | unchanged

    def read(self, path: Path) -> None:
        """Read the next file.

        Raises:
            JournalError: a line other than the last is damaged, or a turn is missing; nothing of
                the file counts.
            JournalUnreadableError: the system reports an error.
        """
        rollouts, dropped, cut_off = dict(self._rollouts), set(self._dropped), set(self._cut_off)
        missing: dict[str, JournalError] = {}  # forgotten if the rollout begins again later
        position = 0
        for number, row in enumerate(read_lines(path), start=1):
            if number == 1 and self._mark is None:
                cut_off |= set(row.get("cut_off", ()))
            if "rollout_id" not in row:
                position = row.get("mark", 0)
                continue
            if self._mark is not None and position < self._mark:
                continue
            rollout_id, index = row["rollout_id"], row["index"]
            if index == 0:
                missing.pop(rollout_id, None)
                cut_off.discard(rollout_id)
            if row["turn"] is None:
                rollouts.pop(rollout_id, None)
                dropped.add(rollout_id)
                continue
            if index > 0 and rollout_id not in rollouts and rollout_id not in missing:
                continue  # it ended before the checkpoint, which has no turns of it
            if rollout_id in cut_off:
                continue
            recorded = rollouts.get(rollout_id) or RecordedRollout(rollout_id=rollout_id)
            try:
                rollouts[rollout_id] = _with_row(recorded, row)
            except (KeyError, ValueError) as error:
                cause = JournalError(f"{path}, line {number}: {error!r}")
                cause.__cause__ = error
                missing.setdefault(rollout_id, cause)
        for cause in missing.values():
            raise cause
        self._rollouts, self._mark = rollouts, None
        self._dropped, self._cut_off = frozenset(dropped), frozenset(cut_off)


def _with_row(recorded: RecordedRollout, row: Mapping[str, Any]) -> RecordedRollout:
    index, state = row["index"], row["env_state"]
    previous = recorded.turns[index - 1] if 0 < index <= len(recorded.turns) else None
    turn = turn_from_json(row["turn"], previous)
    env_state = None if state is None else env_state_from_json(state, turn)
    return with_turn(recorded, index, turn, env_state)


def _continues(recorded: RecordedRollout | None, saved: RecordedRollout) -> bool:
    """Whether ``recorded`` is all of ``saved``, with or without later turns."""
    if recorded is None:
        return False
    if len(recorded.turns) > len(saved.turns):
        return recorded.turns[: len(saved.turns)] == saved.turns
    ours = (recorded.turns, recorded.partial, recorded.ended)
    return ours == (saved.turns, saved.partial, saved.ended)


def _next_lineage(paths: Iterable[Path]) -> int:
    """A number that no file has. Files with a damaged header have none and are never read again.

    Raises:
        JournalUnreadableError: the system cannot read a file, and its lineage may be the newest.
    """
    newest = -1
    for path in paths:
        try:
            lineage = _lineage(path)
        except JournalUnreadableError:
            raise
        except JournalError:
            continue
        newest = max(newest, -1 if lineage is None else lineage)
    return newest + 1


def _lineage(path: Path) -> int | None:
    """The lineage in a file's header; None if the header is torn.

    Raises:
        JournalError: the header is damaged, or the file cannot be read.
    """
    header = next(read_lines(path), None)
    if header is None:
        return None
    try:
        return int(header["lineage"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}, line 1: no header ({error!r})") from error
