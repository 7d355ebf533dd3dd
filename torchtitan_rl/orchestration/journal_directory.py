"""Which journal files there are, which of them a resuming run reads, and which may go.

One file a checkpoint step, ``step-000010.jsonl``: the turns that finished after the content of that
checkpoint was taken. Where checkpoint 10 turns out to be torn, those of 5 and of 10 together tell
what came after 5.

A run that resumes begins a new *lineage*: `restart` replaces the file of the restored step, in one
rename, by one with exactly the turns that the run goes on with; files are only read together with
others of their lineage. What was dropped once therefore never comes back.

The caller names the version of each checkpoint, so that turns of later versions are left out
(see `journal.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from torchtitan_rl.orchestration.journal import Journal, JournalError, read_journals, read_lines
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout
from torchtitan_rl.types import Turn

_NAME = re.compile(r"step-(\d{6,})\.jsonl")


class JournalDirectory:
    """The journal of one run. `begin` or `restart` comes before the first `append`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._journal: Journal | None = None
        self._lineage: int | None = None  # of what this process writes
        self._has_failed = False
        self.passed_over: list[str] = []

    def restore(
        self, step: int, base: Mapping[str, RecordedRollout], *, mark: int = 0
    ) -> dict[str, RecordedRollout]:
        """The unfinished rollouts of the checkpoint of ``step`` (``base``), with later turns, and
        those that began after it. A missing journal has none. A damaged file is left out, with
        those after it, and `passed_over` says why: their turns cost less than an older checkpoint.
        """
        self.passed_over = []
        files = self._files()
        try:
            lineage = _lineage(files[step]) if step in files else None
        except JournalError as error:
            self.passed_over.append(f"{error}; turns from there on are sampled again")
            lineage = None
        if lineage is None:
            return dict(base)
        paths: list[Path] = []
        found = dict(base)
        for path in (path for s, path in sorted(files.items()) if s >= step):
            try:
                if _lineage(path) == lineage:
                    found = read_journals([*paths, path], base, mark=mark)
                    paths.append(path)
            except JournalError as error:
                self.passed_over.append(f"{error}; turns from there on are sampled again")
                break
        return found

    def restart(
        self,
        step: int,
        rollouts: Mapping[str, RecordedRollout],
        base: Mapping[str, RecordedRollout],
        *,
        version: int | None = None,
        mark: int = 0,
    ) -> None:
        """Begin a new lineage behind the checkpoint of ``step``, which holds ``base``, with what
        is kept of the ``rollouts`` that `restore` gave. Later files of older lineages are deleted.

        Raises:
            JournalError: it cannot be written, or the system cannot read another file.
        """
        self.close()
        files = self._files()
        self._lineage = _next_lineage(files.values())
        final = self._file(step)
        journal = Journal(
            final.with_suffix(".tmp"), lineage=self._lineage, version=version, mark=mark
        )
        going_on = {name for name, known in base.items() if _continues(rollouts.get(name), known)}
        for name in base.keys() - going_on:
            journal.drop(name)
        for name, recorded in rollouts.items():
            num_known = len(base[name].turns) if name in going_on else 0
            for index in range(num_known, len(recorded.turns)):
                state = recorded.env_states.get(index + 1)
                journal.append(name, index, recorded.turns[index], state)
        self._journal = journal.renamed(final)
        for later in files:
            if later > step:
                with suppress(OSError):  # one that stays is of another lineage, and is not read
                    files[later].unlink()

    def begin(self, step: int, *, version: int | None = None) -> int:
        """From now on turns come after the checkpoint of ``step``, whose content is being taken
        and whose weights are ``version``.

        For a second checkpoint of one step the file goes on: the first may be all there is. The
        mark that is returned tells them apart, and is to be given again with the checkpoint.

        Raises:
            JournalError: it cannot be written, or the system cannot read another file.
        """
        if self._journal is not None and self._journal.path == self._file(step):
            return self._journal.next_mark()
        cut_off = self._journal.cut_off() if self._journal is not None else []
        if self._lineage is None:
            self._lineage = _next_lineage(self._files().values())
        journal = Journal(self._file(step), lineage=self._lineage, version=version, cut_off=cut_off)
        self.close()  # not before the new file is there: without it the old one goes on
        self._journal, self._has_failed = journal, False
        return journal.mark

    def append(
        self, rollout_id: str, turn_index: int, turn: Turn, env_state: EnvState | None
    ) -> None:
        """As `Journal.append`. After a failure, which is raised once, turns are not kept until a
        new file is begun.

        Raises:
            JournalError: it could not be written.
        """
        if self._journal is None:
            raise JournalError(f"{self.path}: no journal was begun")
        if not self._has_failed:
            try:
                self._journal.append(rollout_id, turn_index, turn, env_state)
            except JournalError:
                self._has_failed = True
                raise

    def forget(self, group_id: str) -> None:
        """As `Journal.forget`: the group has ended."""
        if self._journal is not None:
            self._journal.forget(group_id)

    def prune(self, oldest_step: int) -> None:
        """Delete the files of checkpoints before ``oldest_step``, the oldest one that is kept."""
        for step, path in self._files().items():
            if step < oldest_step:
                path.unlink()

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step:06d}.jsonl"

    def _files(self) -> dict[int, Path]:
        if not self.path.is_dir():
            return {}
        named = ((_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return {int(name[1]): path for name, path in named if name}


def _continues(recorded: RecordedRollout | None, known: RecordedRollout) -> bool:
    """Is it ``known``, whole, with or without later turns?"""
    if recorded is None:
        return False
    num_known = len(known.turns)
    if len(recorded.turns) == num_known:
        return (recorded.turns, recorded.partial, recorded.ended) == (
            known.turns,
            known.partial,
            known.ended,
        )
    return recorded.turns[:num_known] == known.turns


def _next_lineage(paths: Iterable[Path]) -> int:
    """One that no file has. A file with a damaged header has none, and is never read again.

    Raises:
        JournalError: the system cannot read a file, whose lineage may be the newest.
    """
    newest = -1
    for path in paths:
        try:
            lineage = _lineage(path)
        except JournalError:
            continue
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error}") from error
        newest = max(newest, -1 if lineage is None else lineage)
    return newest + 1


def _lineage(path: Path) -> int | None:
    """None where the file was cut off before its header was whole.

    Raises:
        JournalError: the header is damaged, or is none.
        OSError: the file cannot be read.
    """
    header = next(read_lines(path), None)
    if header is None:
        return None
    try:
        return int(header["lineage"])
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path}, line 1: no header ({error!r})") from error
