"""Stores the turns that finished since each checkpoint, in one SQLite file.

A turn is one row, committed before `append` returns: killing the process (kill -9) loses no turn,
and a turn is stored whole or not at all. Nothing is synced to disk, so a loss of power may damage
the file. Damaged rows are ignored, and their turns are sampled again.

The key of a row is the checkpoint before the turn (a step, and a mark that distinguishes those of
one step), the turn's rollout and the turn's number. A resumed run deletes the rows that it does not
use. If checkpoint 10 is found to be damaged, the rows of checkpoints 5 and 10 together contain all
turns after checkpoint 5.

Turns that no resumed run can use, because a token is newer than the checkpoint's version (see
`records.usable_turns`), are not written. Each row contains a fingerprint of the turn before it, so
a rollout that has lost a turn, or that began again, is never continued with the wrong turns.

On storage without file locks (some network file systems), a folder next to the file is the lock
during each transaction (SQLite's VFS "unix-dotfile", https://www.sqlite.org/vfs.html).

Appending blocks the event loop: 0.2 ms for a turn of 100 tokens, 1.2 ms for 2,000 tokens after a
new prompt of 30,000 tokens.
"""

from __future__ import annotations

import fcntl
import sqlite3
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.files import NO_FILE_LOCKS
from torchtitan_rl.rollout.records import (
    EnvState,
    RecordedRollout,
    completion_in,
    turn_from_bytes,
    turn_to_bytes,
    with_turn,
)
from torchtitan_rl.types import Completion, Turn, spans

JOURNAL = "journal.sqlite"
"""The file's name in the folder of a run."""

_FORMAT = 3  # older journals were files of JSON lines
_SCHEMA = """
CREATE TABLE IF NOT EXISTS turns (
    step INTEGER, mark INTEGER, rollout TEXT, turn INTEGER,
    previous INTEGER,  -- fingerprint of the turn before
    checksum INTEGER,
    body BLOB,
    PRIMARY KEY (step, mark, rollout, turn)
)"""
_OF_THE_SYSTEM = (  # any other read error means a damaged file
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_LOCKED),
    *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY),
)
_BUSY_TIMEOUT_S = 1.0  # while `prune` deletes, or an audit reads
_ROWS_AT_A_TIME = 64


class JournalError(TorchtitanRLError):
    """The journal cannot be written, or is damaged. The message names the file."""


class JournalUnreadableError(JournalError):
    """The operating system could not read the journal (EIO, EACCES). The journal may be
    undamaged."""


class Row(NamedTuple):
    """One turn, which finished after the checkpoint with this ``step`` and ``mark``."""

    step: int
    mark: int
    rollout_id: str
    number: int  # the turn's index in its rollout
    previous: int
    checksum: int
    body: bytes

    @property
    def is_intact(self) -> bool:
        # In a damaged file a column may have another type.
        kinds = (int, int, str, int, int, int, bytes)
        are_typed = all(map(isinstance, self, kinds))
        return are_typed and self.checksum == _checksum(self)

    @property
    def completion(self) -> Completion:
        """The turn's completion. Only for an intact row."""
        return completion_in(self.body)

    def turn(self, previous: Turn | None) -> tuple[Turn, EnvState | None]:
        """Decode the turn, and the environment's state after it. ``previous`` is the turn before.
        Raises JournalError: the row is damaged."""
        self.require_intact()
        try:
            return turn_from_bytes(self.body, previous)
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise JournalError(f"{self.rollout_id}, turn {self.number}: {error}") from error

    def require_intact(self) -> None:
        """Raise JournalError if the row is damaged."""
        if not self.is_intact:
            raise JournalError(f"{self.rollout_id}, turn {self.number}: wrong checksum")


class Journal:
    """The journal of one run. Call `start` before the first `begin` or `append`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed_over: list[str] = []
        self._db: sqlite3.Connection | None = None
        self._step, self._mark = 0, 0
        self._version: int | None = None  # the checkpoint's version; None: all turns are written
        self._is_damaged = self._has_failed = False

    def remove_stale_lock(self) -> None:
        """Remove the lock of an owner that was killed on storage without file locks. Only for the
        run's owner, before `restore`."""
        with suppress(OSError):
            self.path.with_name(f"{self.path.name}.lock").rmdir()

    def restore(
        self, step: int, base: Mapping[str, RecordedRollout], *, mark: int = 0
    ) -> dict[str, RecordedRollout]:
        """Return the checkpoint's unfinished rollouts (``base``) with their later turns, and the
        rollouts that began after the checkpoint; there are none if the file is missing.

        Changes nothing. Damaged rows are ignored and listed in `passed_over`, because sampling
        their turns again costs less than using an older checkpoint.

        Raises:
            JournalUnreadableError: the system cannot read the file.
        """
        self.passed_over, self._is_damaged = [], False
        rollouts = dict(base)
        try:
            rows = self.rows(step, mark)
        except JournalUnreadableError:
            raise
        except JournalError as error:
            self._is_damaged = True
            self.passed_over.append(f"{error}; its turns are sampled again")
            return rollouts
        for row in rows:
            try:
                row.require_intact()
                name = row.rollout_id
                recorded = rollouts.get(name) or RecordedRollout(rollout_id=name)
                previous = _turn_before(recorded, row.number)
                if row.previous != _fingerprint(previous) or (row.number and previous is None):
                    continue  # an earlier turn was not written, or is damaged
                turn, env_state = row.turn(previous)
            except JournalError as error:
                self.passed_over.append(f"{self.path}: {error}; it is sampled again")
            else:
                rollouts[name] = with_turn(recorded, row.number, turn, env_state)
        return rollouts

    def rows(self, step: int = 0, mark: int = 0) -> list[Row]:
        """Return all rows from the checkpoint with ``step`` and ``mark`` on. The rows of a rollout
        are in order.

        Raises:
            JournalUnreadableError: the system cannot read the file.
            JournalError: the file is damaged, or another version wrote it.
        """
        if not self.path.exists():
            return []
        db = self._db or self._open("rw")
        try:
            with self._errors(JournalUnreadableError):
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version not in (0, _FORMAT):
                    raise JournalError(f"{self.path}: format {version}, not {_FORMAT}")
                return _rows(db, step, mark) if version else []
        finally:
            if db is not self._db:
                db.close()

    def start(
        self,
        step: int,
        rollouts: Mapping[str, RecordedRollout],
        base: Mapping[str, RecordedRollout],
        *,
        version: int | None = None,
        mark: int = 0,
    ) -> None:
        """Continue after the checkpoint of ``step``, whose weights are ``version``.

        The run continues with ``rollouts``: in one transaction, their turns replace all rows after
        this checkpoint, except those of ``base``, the rollouts in the checkpoint. A damaged file is
        replaced.

        Raises:
            JournalError: the file cannot be written.
        """
        self.close()
        self._step, self._mark, self._version, self._has_failed = step, mark, version, False
        with self._errors(JournalError):
            if self._is_damaged:
                self.path.unlink(missing_ok=True)
                self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = self._open("rwc")
        with self._transaction() as db:
            db.execute(_SCHEMA)
            db.execute(f"PRAGMA user_version = {_FORMAT}")
            db.execute("DELETE FROM turns WHERE (step, mark) >= (?, ?)", (step, mark))
            for name, recorded in rollouts.items():
                saved = base[name].turns if name in base else ()
                is_longer = recorded.turns[: len(saved)] == saved
                self._insert(db, recorded, len(saved) if is_longer else 0)

    def begin(self, step: int, *, version: int | None = None) -> int:
        """Write later turns as turns after the checkpoint of ``step``, whose weights are
        ``version``.

        Returns a mark, to be saved with the checkpoint: a step can have several checkpoints, of
        which only the first may be complete.
        """
        self._mark = self._mark + 1 if step == self._step else 0
        self._step, self._version, self._has_failed = step, version, False
        return self._mark

    def append(self, recorded: RecordedRollout, first: int = -1) -> None:
        """Write the turns from index ``first`` on (default: the last turn), unless no resumed run
        can use them. After a failure, no turns are written until the next `begin`. Raises
        JournalError: the turn could not be written."""
        if self._has_failed:
            return
        try:
            with self._transaction() as db:
                self._insert(db, recorded, first)
        except JournalError:
            self._has_failed = True
            raise

    def prune(self, oldest_step: int) -> None:
        """Delete the turns of checkpoints older than ``oldest_step``. Any thread may call this: a
        simultaneous `append` waits only while a few rows are deleted. Raises JournalError: the
        turns cannot be deleted."""
        older = "SELECT rowid FROM turns WHERE step < ? LIMIT ?"
        with self._errors(JournalError), closing(self._open("rw")) as db:
            while db.execute(
                f"DELETE FROM turns WHERE rowid IN ({older})", (oldest_step, _ROWS_AT_A_TIME)
            ).rowcount:
                pass

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _insert(self, db: sqlite3.Connection, recorded: RecordedRollout, first: int) -> None:
        for index in range(len(recorded.turns))[first:]:
            turn = recorded.turns[index]
            if self._version is not None and newest_version(turn.completion) > self._version:
                continue
            previous = _turn_before(recorded, index)
            row = Row(
                step=self._step,
                mark=self._mark,
                rollout_id=recorded.rollout_id,
                number=index,
                previous=_fingerprint(previous),
                checksum=0,
                body=turn_to_bytes(turn, previous, recorded.env_states.get(index + 1)),
            )
            db.execute(
                "DELETE FROM turns WHERE (step, mark, rollout) = (?, ?, ?) AND turn >= ?", row[:4]
            )
            db.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?)",
                row._replace(checksum=_checksum(row)),
            )

    def _open(self, mode: str) -> sqlite3.Connection:
        with self._errors(JournalUnreadableError if mode == "rw" else JournalError):
            vfs = "unix" if _has_locks(self.path.parent) else "unix-dotfile"
            uri = f"{self.path.absolute().as_uri()}?mode={mode}&vfs={vfs}"
            db = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)
            db.execute("PRAGMA synchronous = OFF")
            return db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._db
        if db is None:
            raise JournalError(f"{self.path}: the journal is not started")
        with self._errors(JournalError):
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self, kind: type[JournalError]) -> Iterator[None]:
        """Raise ``kind`` for errors of the operating system, and `JournalError` for a damaged
        file."""
        try:
            yield
        except sqlite3.Error as error:
            primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            cause = kind if primary_code in _OF_THE_SYSTEM else JournalError
            raise cause(f"{self.path}: {error}") from error
        except UnicodeDecodeError as error:  # the message of sqlite3 quotes a damaged schema
            raise JournalError(f"{self.path}: {error}") from error
        except OSError as error:
            raise kind(f"{self.path}: {error}") from error


def _has_locks(folder: Path) -> bool:
    try:
        # Another file: closing any descriptor of the journal would release the locks of SQLite.
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_FILE_LOCKS
    return True


def _rows(db: sqlite3.Connection, step: int, mark: int) -> list[Row]:
    """Read rows in the order in which they were written. Few are read at a time, because a running
    writer has to wait for each query."""
    rows: list[Row] = []
    last = 0
    while True:
        found = db.execute(
            "SELECT rowid, step, mark, rollout, turn, previous, checksum, body FROM turns"
            " WHERE rowid > ? AND (step, mark) >= (?, ?) ORDER BY rowid LIMIT ?",
            (last, step, mark, _ROWS_AT_A_TIME),
        ).fetchall()
        rows += [Row(*columns) for _, *columns in found]
        if len(found) < _ROWS_AT_A_TIME:
            return rows
        last = found[-1][0]


def newest_version(completion: Completion) -> int:
    """Return the newest version of a completion's tokens; -1 without tokens."""
    found = spans(completion.version_runs, len(completion.token_ids))
    return max((version for start, end, version in found if end > start), default=-1)


def _turn_before(recorded: RecordedRollout, number: int) -> Turn | None:
    return recorded.turns[number - 1] if 0 < number <= len(recorded.turns) else None


def _fingerprint(turn: Turn | None) -> int:
    if turn is None:
        return 0
    sampled = turn.completion
    values = (len(turn.prompt_token_ids), *sampled.token_ids, *sampled.logprobs)
    return zlib.crc32(array("d", values).tobytes())


def _checksum(row: Row) -> int:
    return zlib.crc32(row.body, zlib.crc32(repr(row[:5]).encode()))
