"""The finished turns since a checkpoint, in files that are only appended to.

A line is a checksum and one turn, handed to the system whole before `append` returns: killing the
process (kill -9) loses none of them. Nothing is synced to disk, so that a power failure may lose
the last ones. Only the last line of a file may be torn, and is then dropped; any other damage is
an error. Appending a turn of 100 tokens takes 0.1 ms, one of 2,000 tokens behind 30,000 of prompt
7 ms, so it is done on the event loop. `journal_directory.py` says which files there are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.recorded import EnvState, RecordedRollout, with_turn
from torchtitan_rl.rollout.records import (
    FORMAT,
    env_state_from_json,
    env_state_to_json,
    require_format,
    turn_from_json,
    turn_to_json,
)
from torchtitan_rl.types import Turn


class JournalError(TorchtitanRLError):
    """A journal cannot be written, or is damaged; the message names the file, and the line."""


class Journal:
    """Appends to a file, which it makes anew."""

    def __init__(self, path: Path, *, lineage: int = 0) -> None:
        self.path = path
        self._last: dict[str, tuple[int, Turn]] = {}  # of each rollout in this file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = FileIO(path, "w")
        except OSError as error:
            raise JournalError(f"{path}: {error}") from error
        self._write({"format": FORMAT, "lineage": lineage})

    def append(
        self, rollout_id: str, turn_index: int, turn: Turn, env_state: EnvState | None
    ) -> None:
        """Write one turn.

        Raises:
            JournalError: it could not be written; nothing is taken from then on.
        """
        index, previous = self._last.get(rollout_id, (-2, None))
        if index != turn_index - 1:
            previous = None
        self._last[rollout_id] = (turn_index, turn)
        self._write(
            {
                "rollout_id": rollout_id,
                "index": turn_index,
                "turn": turn_to_json(turn, previous),
                "env_state": None if env_state is None else env_state_to_json(env_state, turn),
            }
        )

    def drop(self, rollout_id: str) -> None:
        """Write that what was known of a rollout up to here is gone.

        Raises:
            JournalError: it could not be written; nothing is taken from then on.
        """
        self._last.pop(rollout_id, None)
        self._write({"rollout_id": rollout_id, "index": 0, "turn": None})

    def renamed(self, path: Path) -> Journal:
        """Put the file at ``path``, in the place of what is there, and go on writing to it.

        Raises:
            JournalError: it cannot be renamed.
        """
        try:
            self.path.replace(path)
        except OSError as error:
            raise JournalError(f"{path}: {error}") from error
        self.path = path
        return self

    def close(self) -> None:
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file.closed:
            raise JournalError(f"{self.path}: the journal is closed")
        line = _line(row)
        try:
            while line:  # a disk that fills up takes a part first
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.close()  # half a line may be there: it has to stay the last one
            raise JournalError(f"{self.path}: {error}") from error


def read_journals(
    paths: Iterable[Path], base: Mapping[str, RecordedRollout] | None = None
) -> dict[str, RecordedRollout]:
    """The rollouts of a checkpoint (``base``) with the turns that came after it.

    ``paths`` are in the order they were written in. A turn that comes again replaces the one from
    before and all behind that: the rollout had begun anew. A rollout that was dropped is gone.
    Where two checkpoints of one step share a file, its first lines may be older than ``base``, and
    may be of rollouts that had ended before it.

    Raises:
        JournalError: a line other than a file's last is damaged, or a turn is missing.
    """
    base = base or {}
    rollouts = dict(base)
    dropped: set[str] = set()
    out_of_order: dict[str, JournalError] = {}  # unless the rollout begins anew behind it
    for path in paths:
        for number, row in enumerate(read_lines(path), start=1):
            if number == 1:
                continue
            rollout_id, index = row["rollout_id"], row["index"]
            if index == 0:
                out_of_order.pop(rollout_id, None)
            if row["turn"] is None:
                rollouts.pop(rollout_id, None)
                dropped.add(rollout_id)
                continue
            if index > 0 and rollout_id not in rollouts and rollout_id not in out_of_order:
                continue  # it ended before the checkpoint, which has no turns of it
            known = rollouts.get(rollout_id) or RecordedRollout(rollout_id=rollout_id)
            try:
                previous = known.turns[index - 1] if 0 < index <= len(known.turns) else None
                turn = turn_from_json(row["turn"], previous)
                state = row["env_state"]
                env_state = None if state is None else env_state_from_json(state, turn)
                rollouts[rollout_id] = with_turn(known, index, turn, env_state)
            except (KeyError, ValueError) as error:
                cause = JournalError(f"{path}, line {number}: {error!r}")
                cause.__cause__ = error
                out_of_order.setdefault(rollout_id, cause)
    for cause in out_of_order.values():
        raise cause
    for name, known in base.items():
        if name not in dropped and rollouts[name].turns == known.turns:
            rollouts[name] = known  # with what is known of its running turn, and of its end
    return rollouts


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file, the header first; nothing where not even that is whole.

    Raises:
        JournalError: a line other than the last is damaged, or another version wrote the file.
    """
    lines = path.read_bytes().split(b"\n")
    whole, torn = lines[:-1], lines[-1]
    for number, line in enumerate(whole, start=1):
        row = _row(line)
        if row is None:
            if number == len(whole) and not torn:
                return
            raise JournalError(f"{path}, line {number}: the line is damaged (wrong checksum)")
        if number == 1:
            try:
                require_format(row)
            except ValueError as error:
                raise JournalError(f"{path}: {error}") from error
        yield row


def _line(row: Mapping[str, Any]) -> bytes:
    body = json.dumps(row, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line without its end, None where the checksum does not fit."""
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    row: dict[str, Any] = json.loads(body)
    return row
